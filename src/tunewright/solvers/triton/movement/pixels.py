"""Conversion of planes to pixels. The kernel reads each plane along its rows and writes all channels of a pixel at
once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunewright.devices.base import Target
from tunewright.devices.cuda.device import CudaDevice, CudaQueue
from tunewright.ir.types import NHWC, PLAIN, DType
from tunewright.ops.internal.pixels import PIXELS
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Problem
from tunewright.solvers.triton.source.cuda_kernel import Call, CudaSolver

from ..source import rows
from ..source.rows import cdiv, filling, power, tensor
from ..source.text import NAMES, load

_FLOATS = frozenset({DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32})


class TritonPixels(CudaSolver):
    """Converts plain pictures to channels last."""

    id = "triton.pixels"
    ops = frozenset({PIXELS})
    layouts = frozenset({PLAIN.name, "nhwc"})
    dtypes = _FLOATS
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x, out = tensor(problem.input(0)), tensor(problem.outputs[0])
        if problem.epilogue:
            return "has no epilogue"
        if x.layout != PLAIN or out.layout != NHWC:
            return "makes pixels of planes"
        return "is empty" if not x.size else rows.why_not_size(problem)

    def space(self, problem: Problem, target: Target) -> Space:
        channels = power(tensor(problem.outputs[0]).dims[1])

        def useful(config: Mapping[str, Any]) -> bool:
            return 1 <= int(config["block"]) * channels / (32 * int(config["warps"])) <= 64

        return Space({"block": [64, 128, 256, 512, 1024], "warps": [1, 2, 4, 8]}, useful, version="1")

    def default(self, problem: Problem, target: Target) -> Config:
        """Four pixels per thread, fewer where they would not occupy every multiprocessor."""
        out = tensor(problem.outputs[0])
        block = filling(out.size // out.dims[1], target.units)
        return {"block": block, "warps": max(1, min(8, block // 128))}

    def source(self, problem: Problem, config: Config, target: Target) -> str:
        return _text(problem, config)

    def call(self, problem: Problem, config: Config, device: CudaDevice) -> Call:
        out = tensor(problem.outputs[0])
        kernel, warps = load(_text(problem, config)), int(config["warps"])
        grid = (cdiv(out.size // out.dims[1], int(config["block"])),)

        def call(queue: CudaQueue, inputs: Any, outputs: Any) -> None:
            kernel[grid](inputs[0], outputs[0], num_warps=warps)

        return call


def _text(problem: Problem, config: Mapping[str, Any]) -> str:
    x, out, block = tensor(problem.input(0)), tensor(problem.outputs[0]), int(config["block"])
    (images, planes, high, wide), channels, (below, across) = x.dims, out.dims[1], out.dims[2:]
    top, left, *_ = (int(n) for n in problem.attrs["pads"])
    area, number = high * wide, images * below * across
    inside, place = f"(p < {number})", f"p // {area} * {planes * area} + p % {area}"
    lines = [f"p = tl.program_id(0) * {block} + tl.arange(0, {block})", f"c = tl.arange(0, {power(channels)})"]
    there = inside
    if (below, across) != (high, wide):
        lines += [f"y = wide(p // {across} % {below} - {top})", f"z = wide(p % {across} - {left})"]
        there = f"{inside} & (y >= 0) & (y < {high}) & (z >= 0) & (z < {wide})"
        place = f"p // {below * across} * {planes * area} + y * {wide} + z"
    lines += [
        f"place = {place}",
        f"v = tl.load(x + (place[:, None] + c[None, :] * {area}), "
        f"mask=({there})[:, None] & (c < {planes})[None, :], other=0.0)",
        f"tl.store(out + (p[:, None] * {channels} + c[None, :]), v.to({NAMES[out.dtype]}), "
        f"mask={inside}[:, None] & (c < {channels})[None, :])",
    ]
    return rows.kernel(["x", "out"], lines)


SOLVERS = (TritonPixels(),)
