"""Operations that only the IR has: moving a tensor from one layout into another.

References always see plain arrays, so the reference of a Reorder changes nothing: who runs references takes physical
arrays out of their layout with `to_plain` and puts results into theirs with `from_plain`. Those two define the layouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.types import PLAIN, Layout, TensorType, Type

from ..base import Attrs, Operands, OpSpec
from ..shapes import tensor

REORDER = "tunewright::Reorder"


def to_plain(array: Any, type: Type | None) -> Any:
    """The logical (NC...) array that a physical one holds."""
    if not isinstance(type, TensorType) or type.layout == PLAIN or array is None:
        return array
    if type.layout.name == "nhwc":
        return np.ascontiguousarray(np.moveaxis(array, -1, 1))
    # N, C/b, spatial..., b -> N, C/b, b, spatial...; the padding of the last block is dropped
    channels = np.moveaxis(array, -1, 2)
    whole = channels.reshape(array.shape[0], array.shape[1] * array.shape[-1], *array.shape[2:-1])
    return np.ascontiguousarray(whole[:, : type.dims[1]])


def from_plain(array: Any, type: Type | None) -> Any:
    """A logical array as the type's layout holds it; a last block is filled up with zeros."""
    if not isinstance(type, TensorType) or type.layout == PLAIN:
        return array
    if type.layout.name == "nhwc":
        return np.ascontiguousarray(np.moveaxis(array, 1, -1))
    block = type.layout.block
    padding = [(0, 0), (0, -array.shape[1] % block), *[(0, 0)] * (array.ndim - 2)]
    blocks = -(-array.shape[1] // block)  # named, not -1: a tensor may be empty
    split = np.pad(array, padding).reshape(array.shape[0], blocks, block, *array.shape[2:])
    return np.ascontiguousarray(np.moveaxis(split, 2, -1))


def moves_nothing(x: TensorType, y: TensorType) -> bool:
    """A Reorder of static types finds its result in the bytes of its input, from the first one on: a single pixel, or
    a single channel without blocks."""
    if x.dims[1:2] == (1,) and not x.layout.block and not y.layout.block:
        return True
    if math.prod(x.dims[2:]) != 1:
        return False
    # where channels are filled up to a block, other batches follow behind the filling, and a plain input lacks it
    return x.nbytes == y.nbytes or (y.layout == PLAIN and x.dims[0] == 1)


def _reference(arrays: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    return [arrays[0]]


def _infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    source = tensor(operands, 0)
    return [TensorType(source.dtype, source.shape, Layout.parse(attrs["layout"]))]


OPS = (OpSpec(REORDER, _reference, _infer),)
