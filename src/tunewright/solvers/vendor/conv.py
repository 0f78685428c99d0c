"""Convolution by cuDNN."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...devices.base import Target
from ...ir.types import NHWC, PLAIN, DType, Layout, TensorType
from ...ops.windows import windows
from ..base import Array, Config, Packing, Problem
from .base import VendorSolver


class Conv(VendorSolver):
    """One to three spatial axes; channels last where it may choose, as tensor cores want them."""

    id = "vendor.conv"
    ops = frozenset({"Conv"})
    dtypes = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})
    layouts = frozenset({PLAIN.name, "nhwc"})
    rank = 40
    multiplies = True
    version = "1.1"

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x, w = problem.input(0), problem.input(1)
        assert isinstance(x, TensorType) and isinstance(w, TensorType)
        if not 3 <= len(x.dims) <= 5:
            return f"takes one to three spatial axes, not {len(x.dims) - 2}"
        return super().refuse(problem, target)

    def preferred(self, problem: Problem, target: Target) -> tuple[Layout, Layout] | None:
        x = problem.input(0)
        return (NHWC, NHWC) if isinstance(x, TensorType) and len(x.dims) == 4 else None

    def packings(self, problem: Problem, config: Config) -> Mapping[int, Packing]:
        x = problem.input(0)
        assert isinstance(x, TensorType)
        last = x.layout.name == "nhwc" and problem.constant[1]
        return {1: Packing("channels last", _channels_last)} if last else {}

    def operation(self, problem: Problem) -> Callable[[Sequence[Any], Sequence[Any] | None], Any]:
        import torch

        x, w = problem.input(0), problem.input(1)
        assert isinstance(x, TensorType) and isinstance(w, TensorType)
        rank = len(x.dims) - 2
        win = windows(x.dims[2:], w.dims[2:], problem.attrs)
        pads = [p for pair in reversed(list(zip(win.head, win.tail, strict=True))) for p in pair]
        even = win.head == win.tail and min(win.head) >= 0
        group, packed = int(problem.attrs.get("group", 1)), bool(self.packings(problem, {}))
        convolve = (torch.conv1d, torch.conv2d, torch.conv3d)[rank - 1]

        def run(inputs: Sequence[Any], outputs: Sequence[Any] | None) -> Any:
            data, weights, bias = (*inputs, None)[:3]
            if packed:
                weights = weights.permute(0, rank + 1, *range(1, rank + 1))
            if not even:
                data = torch.nn.functional.pad(data, pads)
            padding = win.head if even else (0,) * rank
            return convolve(data, weights, bias, win.strides, padding, win.dilations, group)

        return run


def _channels_last(weights: Array) -> Array:
    return np.ascontiguousarray(np.moveaxis(weights, 1, -1))


SOLVERS = (Conv(),)
