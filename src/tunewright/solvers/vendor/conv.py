"""Convolutions and transposed convolutions by cuDNN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tunewright.devices.base import Target
from tunewright.ir.types import NHWC, PLAIN, DType, Layout, TensorType
from tunewright.ops.onnx.conv import transposed_size
from tunewright.ops.windows import spread, windows

from ..base import Array, Config, Packing, Problem
from .base import Operation, VendorSolver


class VendorConv(VendorSolver):
    """Convolutions with one to three spatial axes. They prefer channels last, as tensor cores do."""

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

    def operation(self, problem: Problem) -> Operation:
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


class VendorConvTranspose(VendorSolver):
    """Transposed convolutions with one to three spatial axes and any number of groups."""

    id = "vendor.conv_transpose"
    ops = frozenset({"ConvTranspose"})
    dtypes = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})
    layouts = frozenset({PLAIN.name, "nhwc"})
    rank = 40
    multiplies = True

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x, out = problem.input(0), problem.outputs[0]
        assert isinstance(x, TensorType) and isinstance(out, TensorType)
        if not 3 <= len(x.dims) <= 5:
            return f"takes one to three spatial axes, not {len(x.dims) - 2}"
        return "is empty" if not x.size or not out.size else super().refuse(problem, target)

    def operation(self, problem: Problem) -> Operation:
        import torch

        x, w, out = problem.input(0), problem.input(1), problem.outputs[0]
        assert isinstance(x, TensorType) and isinstance(w, TensorType) and isinstance(out, TensorType)
        rank, attrs = len(x.dims) - 2, problem.attrs
        strides, dilations = spread(attrs, "strides", rank), spread(attrs, "dilations", rank)
        sizes = [transposed_size(x.dims[k + 2], w.dims[k + 2], attrs, rank, k) for k in range(rank)]
        full = [(x.dims[k + 2] - 1) * strides[k] + (w.dims[k + 2] - 1) * dilations[k] + 1 for k in range(rank)]
        cuts = [cut for _, cut in sizes]
        more = [size + 2 * cut - whole for (size, cut), whole in zip(sizes, full, strict=True)]
        # cuDNN takes equal padding on both sides, and an output padding below the stride or dilation.
        steps = [max(pair) for pair in zip(strides, dilations, strict=True)]
        even = min(cuts) >= 0 and all(0 <= extra < step for extra, step in zip(more, steps, strict=True))
        pads = [p for k in reversed(range(rank)) for p in (-cuts[k], sizes[k][0] + cuts[k] - full[k])]
        group = int(attrs.get("group", 1))
        convolve = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)[rank - 1]

        def run(inputs: Sequence[Any], outputs: Sequence[Any] | None) -> Any:
            data, weights, bias = (*inputs, None)[:3]
            if even:
                return convolve(data, weights, bias, strides, cuts, more, group, dilations)
            made = convolve(data, weights, None, strides, 0, 0, group, dilations)
            made = torch.nn.functional.pad(made, pads)
            return made if bias is None else made + bias.reshape(-1, *(1,) * rank)

        return run


def _channels_last(weights: Array) -> Array:
    return np.ascontiguousarray(np.moveaxis(weights, 1, -1))


SOLVERS = (VendorConv(), VendorConvTranspose())
