"""Transposed convolutions on tensor cores: one product per phase of the stride, all in one launch.

The *phase* of a result is the remainder of its position, counted from the padding, divided by the stride. All results
of a phase are sums over the same taps. A phase is thus a convolution of the whole input with every stride-th tap. A
program computes a tile of pixels times filters of one phase and stores the pixels at their positions. In U-Nets the
kernel is as large as the stride, so a phase has one tap. The whole is then a product with columns spread over pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunewright.devices.base import Device, Target
from tunewright.devices.cuda.device import CudaDevice, CudaQueue
from tunewright.ir.types import NHWC, PLAIN, DType, Layout, TensorType
from tunewright.ops.onnx.conv import transposed_size
from tunewright.ops.windows import spread
from tunewright.search.space import Scalar, Space
from tunewright.solvers.base import Array, Config, Kernel, Packing, Problem
from tunewright.solvers.triton.source.cuda_kernel import Call, CudaSolver

from ..elementwise.elementwise import why_not_layouts
from ..product import precision
from ..source import rows
from ..source.rows import cdiv, power, tensor
from ..source.text import NAMES, chain, load, why_not_chain

_FLOATS = frozenset({DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32})
#: The default wants at least this many tiles per multiprocessor.
ENOUGH = 0.9
#: sums of a thread, which has 255 registers in total
MOST_SUMS = 128
#: multiplications unrolled per thread where tensor cores are not used
MOST_UNROLLED = 2048


@dataclass(frozen=True)
class TransposedAxis:
    """One spatial axis. Tap k adds input element ``(o + cut - k * dilation) / stride`` to result ``o``."""

    size: int
    out: int
    kernel: int
    stride: int
    dilation: int
    cut: int

    @property
    def steps(self) -> int:
        """Number of pixels of a phase. In some phases the first and last ones lie outside."""
        return cdiv(self.out + self.cut, self.stride)

    @property
    def taps(self) -> int:
        """The largest number of taps of a phase."""
        return cdiv(self.kernel, self.stride)


@dataclass(frozen=True)
class TransposedShape:
    images: int
    channels: int
    filters: int
    axes: tuple[TransposedAxis, TransposedAxis]

    @property
    def rows(self) -> int:
        """Number of pixels of a phase, over all images."""
        return self.images * self.axes[0].steps * self.axes[1].steps

    @property
    def phases(self) -> int:
        return self.axes[0].stride * self.axes[1].stride

    @property
    def taps(self) -> int:
        return self.axes[0].taps * self.axes[1].taps


def shape_of(problem: Problem) -> TransposedShape:
    x, w, out = tensor(problem.input(0)), tensor(problem.input(1)), tensor(problem.outputs[0])
    strides, dilations = (spread(problem.attrs, name, 2) for name in ("strides", "dilations"))
    axes = []
    for k in range(2):
        kernel = w.dims[k + 2]
        cut = transposed_size(x.dims[k + 2], kernel, problem.attrs, 2, k)[1]
        axes.append(TransposedAxis(x.dims[k + 2], out.dims[k + 2], kernel, strides[k], dilations[k], cut))
    return TransposedShape(x.dims[0], x.dims[1], out.dims[1], (axes[0], axes[1]))


class TritonConvTranspose(CudaSolver):
    """Transposed convolutions with two spatial axes, channels last, one group."""

    id = "triton.conv_transpose"
    ops = frozenset({"ConvTranspose"})
    dtypes = _FLOATS | {DType.BOOL, DType.INT32, DType.INT64}
    layouts = frozenset({PLAIN.name, "nhwc"})
    # One launch with the epilogue inside; the library needs several launches.
    rank = 35

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x, w, out = tensor(problem.input(0)), tensor(problem.input(1)), tensor(problem.outputs[0])
        if len(x.dims) != 4:
            return "takes two spatial axes"
        if x.layout != NHWC or out.layout != NHWC:
            return "takes channels last"
        if int(problem.attrs.get("group", 1)) != 1:
            return "takes one group"
        if x.dtype not in _FLOATS or w.dtype is not x.dtype:
            return f"does not multiply {x.dtype} and {w.dtype}"
        if not problem.constant[1]:
            return "its weights are not constant"
        if not x.size or not out.size or not w.size:
            return "is empty"
        shape = shape_of(problem)
        if any(axis.stride > 1 and axis.dilation > 1 for axis in shape.axes):
            return "takes no dilation with a stride"
        if any(axis.cut < 0 for axis in shape.axes):
            return "takes no negative padding"
        if problem.epilogue:
            reason = why_not_chain(problem, main=False) or why_not_layouts(problem, len(problem.main_inputs))
            if reason is not None:
                return reason
        return rows.why_not_size(problem)

    def preferred(self, problem: Problem, target: Target) -> tuple[Layout, Layout] | None:
        x = problem.input(0)
        return (NHWC, NHWC) if isinstance(x, TensorType) and len(x.dims) == 4 else None

    def inexact(self, problem: Problem, config: Config) -> str | None:
        return precision.inexact(config)

    def compile(self, problem: Problem, config: Config, device: Device) -> Kernel:
        return precision.marked(super().compile(problem, config, device), config)

    def packings(self, problem: Problem, config: Config) -> Mapping[int, Packing]:
        return {1: BY_TAP}

    def space(self, problem: Problem, target: Target) -> Space:
        shape, dtype = shape_of(problem), tensor(problem.input(0)).dtype

        def useful(config: Mapping[str, Any]) -> bool:
            bm, bn, bk, warps = (int(config[k]) for k in ("bm", "bn", "bk", "warps"))
            if bm * bn < 256 or bm * bn > warps * 32 * MOST_SUMS:
                return False
            if (bm + bn) * bk * int(config["stages"]) * dtype.itemsize > 200 << 10:
                return False
            if config.get("precision") == "ieee" and bm * bn * bk > warps * 32 * MOST_UNROLLED:
                return False
            sizes = (bm, shape.rows), (bn, shape.filters), (bk, shape.channels)
            return all(block < 2 * max(size, 16) for block, size in sizes)

        params: dict[str, Sequence[Scalar]] = {
            "bm": [16, 32, 64, 128, 256], "bn": [16, 32, 64, 128], "bk": [16, 32, 64, 128], "warps": [1, 2, 4, 8],
            "stages": [1, 2, 3, 4],
        }  # fmt: skip
        return Space(params | precision.params(dtype), useful, version="1")

    def default(self, problem: Problem, target: Target) -> Config:
        """The largest tiles that still occupy every multiprocessor, else the smallest tiles."""
        shape, units, dtype = shape_of(problem), max(target.units, 1), tensor(problem.input(0)).dtype
        bk = 64 if shape.channels >= 64 else 32 if shape.channels > 16 else 16
        sizes = [(128, 128), (128, 64), (64, 64), (32, 64), (32, 32), (16, 32)]
        if dtype is DType.FLOAT32:
            bk, sizes = 16, sizes[2:]
        for high, wide in sizes:
            bm, bn = (max(16, min(block, power(size))) for block, size in ((high, shape.rows), (wide, shape.filters)))
            if cdiv(shape.rows, bm) * cdiv(shape.filters, bn) * shape.phases >= ENOUGH * units:
                break
        warps = 8 if bm * bn >= 128 * 128 else 4 if bm * bn >= 32 * 64 else 2
        stages = 3 if shape.taps * cdiv(shape.channels, bk) > 2 else 2
        return {"bm": bm, "bn": bn, "bk": bk, "warps": warps, "stages": stages} | precision.default(dtype)

    def source(self, problem: Problem, config: Config, target: Target) -> str:
        return text(problem, shape_of(problem), config)

    def call(self, problem: Problem, config: Config, device: CudaDevice) -> Call:
        shape = shape_of(problem)
        kernel, first = load(text(problem, shape, config)), len(problem.main_inputs)
        across, down = cdiv(shape.filters, int(config["bn"])), cdiv(shape.rows, int(config["bm"]))
        grid, with_bias = (across * down, shape.phases), problem.input(2) is not None
        options = {"num_warps": int(config["warps"]), "num_stages": int(config["stages"])}

        def call(queue: CudaQueue, inputs: Any, outputs: Any) -> None:
            given = [inputs[0], inputs[1], *([inputs[2]] if with_bias else []), *inputs[first:], outputs[0]]
            kernel[grid](*given, **options)

        return call


def _by_tap(weights: Array) -> Array:
    return np.ascontiguousarray(weights.transpose(2, 3, 0, 1))


BY_TAP = Packing("taps, channels, filters of a transposed convolution", _by_tap)


def text(problem: Problem, shape: TransposedShape, config: Mapping[str, Any]) -> str:
    """The text of the kernel for a shape."""
    bm, bn, bk = (int(config[k]) for k in ("bm", "bn", "bk"))
    x, out, bias = tensor(problem.input(0)), tensor(problem.outputs[0]), problem.input(2) is not None
    (high, wide), filters, depth = shape.axes, shape.filters, shape.channels
    across, chunks, area = cdiv(filters, bn), cdiv(depth, bk), high.steps * wide.steps
    lines = [
        "tile = tl.program_id(0)", "phase = tl.program_id(1)",
        f"py = phase // {wide.stride}", f"px = phase % {wide.stride}",
        f"m = tile // {across} * {bm} + tl.arange(0, {bm})", f"n = tile % {across} * {bn} + tl.arange(0, {bn})",
        f"k = tl.arange(0, {bk})",
        f"y = m % {area} // {wide.steps}", f"z = m % {wide.steps}",
        f"image = m // {area}",
        f"oy = y * {high.stride} + py - {high.cut}", f"ox = z * {wide.stride} + px - {wide.cut}",
        f"there = (m < {shape.rows}) & (oy >= 0) & (oy < {high.out}) & (ox >= 0) & (ox < {wide.out})",
        f"read = x + (((image * {high.size} + y) * {wide.size} + z) * {depth})[:, None]",
        "y = wide(y)", "z = wide(z)",
        f"acc = tl.zeros(({bm}, {bn}), tl.float32)",
        f"for step in range(0, {shape.taps * chunks}):",
        f"    tap = step // {chunks}", f"    at = step % {chunks} * {bk} + k",
        f"    ty = tap // {wide.taps}", f"    tx = tap % {wide.taps}",
    ]  # fmt: skip
    # Where a stride does not divide the kernel, some phases have one tap less.
    last_taps = [f"(k{name} < {axis.kernel})" for name, axis in zip("yx", shape.axes, strict=True)
                 if axis.kernel % axis.stride]  # fmt: skip
    inner = [
        # Tap t of a phase is tap phase + t * stride of the kernel. With a stride of 1 it is t.
        f"ky = py + ty * {high.stride}", f"kx = px + tx * {wide.stride}",
        f"iy = y - ty * {high.dilation}", f"ix = z - tx * {wide.dilation}",
        " & ".join([f"ok = there & (iy >= 0) & (iy < {high.size}) & (ix >= 0) & (ix < {wide.size})", *last_taps]),
        f"far = (ty * {high.dilation * wide.size} + tx * {wide.dilation}) * {depth}",
    ]  # fmt: skip
    ragged = [f"(at < {depth})"] if depth % bk else []
    a_mask = " & ".join(["ok[:, None]", *(f"{test}[None, :]" for test in ragged)])
    terms = [f"({' & '.join([*(ragged or ['(at >= 0)']), *last_taps])})[:, None]"] if ragged or last_taps else []
    terms += [f"(n < {filters})[None, :]"] if filters % bn else []
    b_mask = f", mask={' & '.join(terms)}, other=0.0" if terms else ""
    inner += [
        f"a = tl.load(read + (at[None, :] - far), mask={a_mask}, other=0.0)",
        f"b = tl.load(w + ((ky * {wide.kernel} + kx) * {depth} + at)[:, None] * {filters} + n[None, :]{b_mask})",
        f"acc = tl.dot(a, b, acc{precision.option(x.dtype, config)})",
    ]
    lines += rows.indented(inner)
    if bias:
        lines.append(f"acc += tl.load(bias + n, mask=n < {filters}, other=0.0).to(tl.float32)[None, :]")
    lines += [
        f"valid = there[:, None] & (n < {filters})[None, :]",
        f"spot = ((image * {high.out} + oy) * {wide.out} + ox)[:, None] * {filters} + n[None, :]",
    ]
    body, last = chain(problem, "acc", "spot", "valid", last="(n[None, :] + m[:, None] * 0)", indent="")
    lines += [*body, f"tl.store(out + spot, ({last}).to({NAMES[out.dtype]}), mask=valid)"]
    operands = [f"p{i}" for i in range(len(problem.main_inputs), len(problem.inputs))]
    return rows.kernel(["x", "w", *(["bias"] if bias else []), *operands, "out"], lines)


SOLVERS = (TritonConvTranspose(),)
