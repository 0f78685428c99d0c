"""The Reorder operator of the IR: it moves a tensor from one layout into another.

References only see plain arrays, so the reference of a Reorder changes nothing. A caller of references converts
physical arrays with `to_plain` and results with `from_plain`. Those two functions define the layouts.
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
    """The logical (NC...) array of a physical one."""
    if not isinstance(type, TensorType) or type.layout == PLAIN or array is None:
        return array
    if type.layout.name == "nhwc":
        return np.ascontiguousarray(np.moveaxis(array, -1, 1))
    # N, C/b, spatial..., b -> N, C/b, b, spatial...; the padding of the last block is dropped
    channels = np.moveaxis(array, -1, 2)
    whole = channels.reshape(array.shape[0], array.shape[1] * array.shape[-1], *array.shape[2:-1])
    return np.ascontiguousarray(whole[:, : type.dims[1]])


def from_plain(array: Any, type: Type | None) -> Any:
    """The physical array of a logical one, in the layout of ``type``. A last block is padded with zeros."""
    if not isinstance(type, TensorType) or type.layout == PLAIN:
        return array
    if type.layout.name == "nhwc":
        return np.ascontiguousarray(np.moveaxis(array, 1, -1))
    block = type.layout.block
    padding = [(0, 0), (0, -array.shape[1] % block), *[(0, 0)] * (array.ndim - 2)]
    blocks = -(-array.shape[1] // block)  # computed, because reshape cannot infer -1 for an empty tensor
    split = np.pad(array, padding).reshape(array.shape[0], blocks, block, *array.shape[2:])
    return np.ascontiguousarray(np.moveaxis(split, 2, -1))


def moves_nothing(x: TensorType, y: TensorType) -> bool:
    """Whether a Reorder of static types keeps the bytes, so that the result starts at the first byte of the input. This
    holds for a single pixel, and for a single channel without blocks."""
    if x.dims[1:2] == (1,) and not x.layout.block and not y.layout.block:
        return True
    if math.prod(x.dims[2:]) != 1:
        return False
    # Padding of channels to a block separates the batches, and a plain input has no padding.
    return x.nbytes == y.nbytes or (y.layout == PLAIN and x.dims[0] == 1)


def _reference(arrays: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    return [arrays[0]]


def _infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    source = tensor(operands, 0)
    return [TensorType(source.dtype, source.shape, Layout.parse(attrs["layout"]))]


OPS = (OpSpec(REORDER, _reference, _infer),)
