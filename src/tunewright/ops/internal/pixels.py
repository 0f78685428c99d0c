"""An operator that passes make: planes of a picture as pixels, with channels last, another float type and zero padding.

A pixel of three half floats starts at a multiple of six bytes, where wide loads are impossible. A fourth channel of
zeros puts every pixel at a multiple of eight. With the padding written too, readers need not check for the border.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import NHWC, DType, TensorType, Type

from ..base import Attrs, Operands, OpSpec, Sample
from ..samples.base import Rng, normal
from ..shapes import tensor

PIXELS = "tunewright::Pixels"


def _pads(attrs: Attrs) -> list[tuple[int, int]]:
    """The padding in front of and behind each of two spatial axes."""
    top, left, bottom, right = (int(n) for n in attrs["pads"])
    return [(top, bottom), (left, right)]


def _reference(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    x = inputs[0].astype(DType.of_onnx(attrs["dtype"]).numpy)
    return [np.pad(x, [(0, 0), (0, int(attrs["channels"]) - x.shape[1]), *_pads(attrs)])]


def _infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, dtype = tensor(operands, 0), DType.of_onnx(attrs["dtype"])
    if x.shape is None:
        return [TensorType(dtype, None)]
    sizes = [d + sum(p) if isinstance(d, WHOLE) else None for d, p in zip(x.shape[2:], _pads(attrs), strict=True)]
    return [TensorType(dtype, (x.shape[0], int(attrs["channels"]), *sizes), NHWC)]


def _samples(rng: Rng) -> list[Sample]:
    attrs = {"channels": 4, "dtype": DType.FLOAT16.onnx_code, "pads": (1, 2, 0, 3)}
    return [Sample([normal(rng, 2, 3, 4, 5)], attrs)]


OPS = (OpSpec(PIXELS, _reference, _infer, samples=_samples),)
