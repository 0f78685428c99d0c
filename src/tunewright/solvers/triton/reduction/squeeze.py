"""Squeeze and excite in two launches, each with one program per part of the data.

Averages and the first product are linear. So a program that has summed some channels over some pixels multiplies the
sums with its rows of the weights. It writes its part of all hidden values to scratch memory. Each program of the second
launch adds these parts in order, computes the factors of its channels, and multiplies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunewright.devices.base import Target
from tunewright.devices.cuda.device import CudaDevice, CudaQueue
from tunewright.ir.types import NHWC, PLAIN, DType, Layout
from tunewright.ops.internal.squeeze_excite import EXCITE, SIDES, activation
from tunewright.search.space import Scalar, Space
from tunewright.solvers.base import Array, Config, Packing, Problem
from tunewright.solvers.triton.source.cuda_kernel import Call, CudaSolver

from ..elementwise.elementwise import why_not_layouts
from ..source import expr, rows
from ..source.rows import cdiv, power, tensor
from ..source.text import NAMES, chain, load, why_not_chain

_FLOATS = frozenset({DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32})
#: The default accepts this ratio of lanes to channels.
IDLE = 1.125
#: most hidden values, all of which every program holds; most parts of them that it adds
MOST_HIDDEN, MOST_PARTS = 256, 256


@dataclass(frozen=True)
class SqueezeShape:
    images: int
    pixels: int
    channels: int
    hidden: int

    def across(self, block: int) -> int:
        return cdiv(self.channels, block)


def shape_of(problem: Problem) -> SqueezeShape:
    x, w = tensor(problem.input(0)), tensor(problem.input(1))
    return SqueezeShape(x.dims[0], x.size // max(1, x.dims[0] * x.dims[1]), x.dims[1], w.dims[0])


class Squeeze(CudaSolver):
    """Squeeze and excite with constant weights, plain or, preferably, with channels last."""

    id = "triton.squeeze"
    ops = frozenset({EXCITE})
    dtypes = _FLOATS | {DType.BOOL, DType.INT32, DType.INT64}
    layouts = frozenset({PLAIN.name, "nhwc"})
    rank = 35

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x, out = tensor(problem.input(0)), tensor(problem.outputs[0])
        if x.layout != out.layout:
            return "input and output differ in layout"
        weights = [tensor(problem.input(i)) for i in (1, 3)]
        if x.dtype not in _FLOATS or any(w.dtype is not x.dtype for w in weights):
            return f"does not multiply {x.dtype} and {weights[0].dtype}"
        if not problem.constant[1] or not problem.constant[3]:
            return "its weights are not constant"
        shape = shape_of(problem)
        if not x.size or shape.hidden > MOST_HIDDEN:
            return f"takes 1 to {MOST_HIDDEN} hidden numbers, and data"
        for side in SIDES:
            if reason := expr.why_not(activation(problem.attrs, side)[0], [DType.FLOAT32], DType.FLOAT32):
                return reason
        if problem.epilogue:
            reason = why_not_chain(problem, main=False) or why_not_layouts(problem, len(problem.main_inputs))
            if reason is not None:
                return reason
        return rows.why_not_size(problem)

    def preferred(self, problem: Problem, target: Target) -> tuple[Layout, Layout] | None:
        return NHWC, NHWC

    def packings(self, problem: Problem, config: Config) -> Mapping[int, Packing]:
        return {1: TURNED, 3: TURNED}

    def space(self, problem: Problem, target: Target) -> Space:
        shape = shape_of(problem)

        def useful(config: Mapping[str, Any]) -> bool:
            channels, summed, made, parts = (int(config[k]) for k in ("channels", "summed", "made", "parts"))
            if channels >= 2 * max(shape.channels, 16) or channels * power(shape.hidden) > 16384:
                return False
            if max(summed, made) >= 2 * max(shape.pixels, 8) or parts > cdiv(shape.pixels, summed):
                return False
            if parts * shape.across(channels) > max(MOST_PARTS, shape.across(channels)):
                return False
            least, most = 32 * int(config["warps"]), 64 * 32 * int(config["warps"])
            return min(summed, made) * channels >= least and max(summed, made) * channels <= most

        params: dict[str, Sequence[Scalar]] = {
            "channels": [16, 32, 64, 128, 256], "summed": [4, 8, 16, 32, 64, 128], "made": [4, 8, 16, 32, 64, 128],
            "parts": [1, 2, 4, 8, 16, 32, 64, 128], "warps": [2, 4, 8],
        }  # fmt: skip
        return Space(params, useful, version="1")

    def default(self, problem: Problem, target: Target) -> Config:
        """A cache line of channels. The pixels are split into enough parts for every multiprocessor to have work."""
        shape, units = shape_of(problem), max(target.units, 1)
        channels = max(16, min(64, power(shape.channels)))
        while channels > 16 and shape.across(channels) * channels > IDLE * shape.channels:
            channels //= 2
        while channels * power(shape.hidden) > 16384:
            channels //= 2
        across = shape.across(channels) * shape.images
        summed = max(128 // channels, min(32, power(max(shape.pixels, 8))))
        parts = 1
        while (2 * parts * across <= units and 2 * parts <= cdiv(shape.pixels, summed)
               and 2 * parts * shape.across(channels) <= MOST_PARTS):  # fmt: skip
            parts *= 2
        made = summed
        while made > max(4, 128 // channels) and cdiv(shape.pixels, made) * across < 2 * units:
            made //= 2
        return {"channels": channels, "summed": summed, "made": made, "parts": parts, "warps": 4}

    def source(self, problem: Problem, config: Config, target: Target) -> str:
        return "".join(_texts(problem, shape_of(problem), config))

    def call(self, problem: Problem, config: Config, device: CudaDevice) -> Call:
        shape, first = shape_of(problem), len(problem.main_inputs)
        squeeze, excite = (load(text) for text in _texts(problem, shape, config))
        across, parts, warps = shape.across(int(config["channels"])), int(config["parts"]), int(config["warps"])
        count, chunks = shape.images * across * parts * power(shape.hidden), cdiv(shape.pixels, int(config["made"]))
        used = [i for i in (2, 3, 4) if problem.input(i) is not None]

        def call(queue: CudaQueue, inputs: Any, outputs: Any) -> None:
            found = rows.scratch(queue, count, "tl.float32")
            squeeze[across * parts, shape.images](inputs[0], inputs[1], found, num_warps=warps)
            given = [inputs[0], found, *(inputs[i] for i in used), *inputs[first:], outputs[0]]
            excite[across * chunks, shape.images](*given, num_warps=warps)

        return call


def _turned(weights: Array) -> Array:
    return np.ascontiguousarray(weights.reshape(weights.shape[:2]).T)


TURNED = Packing("inputs, outputs of a pointwise convolution", _turned)


def _texts(problem: Problem, shape: SqueezeShape, config: Mapping[str, Any]) -> tuple[str, str]:
    """The kernel texts of both launches."""
    return _squeeze(problem, shape, config), _excite(problem, shape, config)


def _place(problem: Problem, shape: SqueezeShape, pixel: str) -> str:
    """The offset of an element in an image, pixels down and channels across, as an expression."""
    far, near = (shape.channels, 1) if tensor(problem.input(0)).layout == NHWC else (1, shape.pixels)
    return f"image * {shape.channels * shape.pixels} + {pixel}[:, None] * {far} + c[None, :] * {near}"


def _squeeze(problem: Problem, shape: SqueezeShape, config: Mapping[str, Any]) -> str:
    channels, block, parts = (int(config[k]) for k in ("channels", "summed", "parts"))
    hidden, each = power(shape.hidden), cdiv(cdiv(shape.pixels, block), parts) * block
    return rows.kernel(["x", "w", "found"], [
        "number = tl.program_id(0)", "image = tl.program_id(1)",
        f"c = number // {parts} * {channels} + tl.arange(0, {channels})", f"begin = number % {parts} * {each}",
        f"total = tl.zeros(({block}, {channels}), tl.float32)",
        f"for at in range(0, {each}, {block}):",
        f"    m = begin + at + tl.arange(0, {block})",
        f"    ok = (m < {shape.pixels})[:, None] & (c < {shape.channels})[None, :]",
        f"    total += tl.load(x + ({_place(problem, shape, 'm')}), mask=ok, other=0.0).to(tl.float32)",
        f"average = tl.sum(total, axis=0) / {rows.real_text(shape.pixels)}",
        f"h = tl.arange(0, {hidden})", f"ok = (c < {shape.channels})[:, None] & (h < {shape.hidden})[None, :]",
        f"b = tl.load(w + c[:, None] * {shape.hidden} + h[None, :], mask=ok, other=0.0).to(tl.float32)",
        f"here = found + (image * {shape.across(channels) * parts} + number) * {hidden} + h",
        "tl.store(here, tl.sum(average[:, None] * b, axis=0))",
    ])  # fmt: skip


def _excite(problem: Problem, shape: SqueezeShape, config: Mapping[str, Any]) -> str:
    channels, block, parts = (int(config[k]) for k in ("channels", "made", "parts"))
    hidden, many, chunks = power(shape.hidden), shape.across(channels) * parts, cdiv(shape.pixels, block)
    out = tensor(problem.outputs[0])
    biases = [i for i in (2, 4) if problem.input(i) is not None]
    lines = [
        "number = tl.program_id(0)", "image = tl.program_id(1)", f"h = tl.arange(0, {hidden})",
        f"k = tl.arange(0, {power(many)})", f"ok = (k < {many})[:, None] & (h < {shape.hidden})[None, :]",
        f"part = tl.load(found + (image * {many} + k[:, None]) * {hidden} + h[None, :], mask=ok, other=0.0)",
        "v = tl.sum(part, axis=0)",
    ]  # fmt: skip
    if 2 in biases:
        lines.append(f"v += tl.load(b2 + h, mask=h < {shape.hidden}, other=0.0).to(tl.float32)")
    lines += [
        _activated("inner", problem, "v"),
        f"v = tl.where(h < {shape.hidden}, v, 0.0)",
        f"c = number // {chunks} * {channels} + tl.arange(0, {channels})",
        f"ok = (h < {shape.hidden})[:, None] & (c < {shape.channels})[None, :]",
        f"b = tl.load(w + h[:, None] * {shape.channels} + c[None, :], mask=ok, other=0.0).to(tl.float32)",
        "s = tl.sum(v[:, None] * b, axis=0)",
    ]
    if 4 in biases:
        lines.append(f"s += tl.load(b4 + c, mask=c < {shape.channels}, other=0.0).to(tl.float32)")
    lines += [
        _activated("outer", problem, "s"),
        f"m = number % {chunks} * {block} + tl.arange(0, {block})",
        f"inside = (m < {shape.pixels})[:, None] & (c < {shape.channels})[None, :]",
        f"spot = {_place(problem, shape, 'm')}",
        "made = tl.load(x + spot, mask=inside, other=0.0).to(tl.float32) * s[None, :]",
    ]
    last = "(c[None, :] + m[:, None] * 0)" if out.layout == NHWC else ""
    body, result = chain(problem, "made", "spot", "inside", last=last, indent="")
    lines += [*body, f"tl.store(out + spot, ({result}).to({NAMES[out.dtype]}), mask=inside)"]
    operands = [f"p{i}" for i in range(len(problem.main_inputs), len(problem.inputs))]
    bias = {2: "b2", 4: "b4"}
    given = ["x", "found", *(bias[i] for i in biases if i == 2), "w", *(bias[i] for i in biases if i == 4)]
    return rows.kernel([*given, *operands, "out"], lines)


def _activated(side: str, problem: Problem, name: str) -> str:
    op, attrs = activation(problem.attrs, side)
    return f"{name} = {expr.expression(op, [name], DType.FLOAT32, attrs)}"


SOLVERS = (Squeeze(),)
