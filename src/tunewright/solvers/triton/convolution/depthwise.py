"""Convolutions with few channels per group, mainly depthwise ones, where tensor cores have nothing to multiply.

A program computes a block of pixels times channels of the result, with channels last, and loops over the taps. Each tap
is one shifted load of the block times one row of weights. Neighbouring pixels share their inputs in the L1 cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tunewright.devices.base import Target
from tunewright.devices.cuda.device import CudaDevice, CudaQueue
from tunewright.ir.types import NHWC, PLAIN, DType, Layout, TensorType
from tunewright.search.space import Scalar, Space
from tunewright.solvers.base import Config, Packing, Problem
from tunewright.solvers.triton.source.cuda_kernel import Call, CudaSolver

from ..elementwise.elementwise import why_not_layouts
from ..product.product_shape import BY_TAP, ProductShape, conv_shape, why_not_size
from ..source.text import HEAD, NAMES, chain, load, why_not_chain

_FLOATS = frozenset({DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32})
#: With more channels per group, tensor cores have work.
MOST_CHANNELS = 8
#: The default accepts this ratio of lanes to filters.
IDLE = 1.125
#: summands of an element that are unrolled
UNROLLED = 32


class Depthwise(CudaSolver):
    """Convolutions with two spatial axes, channels last, several groups."""

    id = "triton.depthwise"
    ops = frozenset({"Conv"})
    dtypes = _FLOATS | {DType.BOOL, DType.INT32, DType.INT64}
    layouts = frozenset({PLAIN.name, "nhwc"})
    rank = 35

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x, w, out = problem.input(0), problem.input(1), problem.outputs[0]
        assert isinstance(x, TensorType) and isinstance(w, TensorType) and isinstance(out, TensorType)
        if len(x.dims) != 4:
            return "takes two spatial axes"
        if int(problem.attrs.get("group", 1)) == 1:
            return "takes several groups"
        if w.dims[1] > MOST_CHANNELS:
            return f"takes up to {MOST_CHANNELS} channels per group, not {w.dims[1]}"
        if x.layout != NHWC or out.layout != NHWC:
            return "takes channels last"
        if x.dtype not in _FLOATS or w.dtype is not x.dtype:
            return f"does not multiply {x.dtype} and {w.dtype}"
        if not problem.constant[1]:
            return "its weights are not constant"
        if problem.epilogue:
            reason = why_not_chain(problem, main=False) or why_not_layouts(problem, len(problem.main_inputs))
            if reason is not None:
                return reason
        return why_not_size(problem)

    def preferred(self, problem: Problem, target: Target) -> tuple[Layout, Layout] | None:
        x = problem.input(0)
        return (NHWC, NHWC) if isinstance(x, TensorType) and len(x.dims) == 4 else None

    def packings(self, problem: Problem, config: Config) -> Mapping[int, Packing]:
        return {1: BY_TAP}

    def space(self, problem: Problem, target: Target) -> Space:
        shape = conv_shape(problem)

        def useful(config: Mapping[str, Any]) -> bool:
            pixels, channels, threads = (int(config[k]) for k in ("pixels", "channels", "warps"))
            if pixels >= 2 * max(shape.rows, 2) or channels >= 2 * max(shape.filters, 16):
                return False
            return 1 <= pixels * channels / (32 * threads) <= 32  # elements per thread

        params: dict[str, Sequence[Scalar]] = {
            "pixels": (1, 2, 4, 8, 16, 32, 64, 128), "channels": (16, 32, 64, 128, 256), "warps": (1, 2, 4, 8),
        }  # fmt: skip
        return Space(params, useful, version="1")

    def default(self, problem: Problem, target: Target) -> Config:
        """A cache line of channels, fewer where much of the last line would be idle (96, 144). The default takes as
        many pixels as still give every multiprocessor two programs."""
        shape, units = conv_shape(problem), max(target.units, 1)
        channels = max(16, min(64, 1 << (shape.filters - 1).bit_length()))
        while channels > 16 and -(-shape.filters // channels) * channels > IDLE * shape.filters:
            channels //= 2
        across = -(-shape.filters // channels)
        least = max(1, 32 // channels)
        fits = [p for p in (1, 2, 4, 8, 16, 32) if p >= least and (p == least or p < 2 * shape.rows)]
        pixels = max((p for p in fits if -(-shape.rows // p) * across >= 2 * units), default=fits[0])
        return {"pixels": pixels, "channels": channels, "warps": max(1, min(4, pixels * channels // 128))}

    def source(self, problem: Problem, config: Config, target: Target) -> str:
        return text(problem, conv_shape(problem), config)

    def call(self, problem: Problem, config: Config, device: CudaDevice) -> Call:
        shape = conv_shape(problem)
        kernel, warps, first = load(text(problem, shape, config)), int(config["warps"]), len(problem.main_inputs)
        down, across = -(-shape.rows // int(config["pixels"])), -(-shape.filters // int(config["channels"]))
        with_bias = problem.input(2) is not None

        def call(queue: CudaQueue, inputs: Any, outputs: Any) -> None:
            given = [inputs[0], inputs[1], *([inputs[2]] if with_bias else []), *inputs[first:], outputs[0]]
            kernel[down * across,](*given, num_warps=warps)

        return call


def text(problem: Problem, shape: ProductShape, config: Mapping[str, Any]) -> str:
    """The text of the kernel for a shape."""
    pixels, channels = int(config["pixels"]), int(config["channels"])
    out, bias = problem.outputs[0], problem.input(2) is not None
    assert isinstance(out, TensorType)
    rows, columns, depth = shape.rows, shape.filters, shape.channels
    across, area = -(-columns // channels), shape.out_height * shape.out_width
    each, made = depth // shape.groups, columns // shape.groups  # channels and filters of a group
    operands = [f"p{i}" for i in range(len(problem.main_inputs), len(problem.inputs))]
    pointers = ["x", "w", *(["bias"] if bias else []), *operands, "out"]
    lines = [
        "@triton.jit",
        f"def kernel({', '.join(pointers)}):",
        "    tile = tl.program_id(0)",
        f"    m = tile // {across} * {pixels} + tl.arange(0, {pixels})",
        f"    n = tile % {across} * {channels} + tl.arange(0, {channels})",
        f"    top = m % {area} // {shape.out_width} * {shape.stride[0]} - {shape.head[0]}",
        f"    left = m % {shape.out_width} * {shape.stride[1]} - {shape.head[1]}",
        f"    pixel = ((m // {area} * {shape.height} + top) * {shape.width} + left) * {depth}",
        "    top = wide(top)",
        "    left = wide(left)",
        f"    valid = (m < {rows})[:, None] & (n < {columns})[None, :]",
        f"    here = x + pixel[:, None] + {_channel(each, made)}[None, :]",
        f"    acc = tl.zeros(({pixels}, {channels}), tl.float32)",
    ]

    def tap(dy: str, dx: str, inner: str, row: str, indent: str) -> list[str]:
        """Statements for one summand: the offset in rows and columns, the channel of the group, the row of weights."""
        tests = ["valid"]
        if shape.padded:
            tests.append(f"((top + {dy} >= 0) & (top + {dy} < {shape.height}))[:, None]")
            tests.append(f"((left + {dx} >= 0) & (left + {dx} < {shape.width}))[:, None]")
        move = f"({dy} * {shape.width} + {dx}) * {depth} + {inner}"
        return [
            f"{indent}a = tl.load(here + ({move}), mask={' & '.join(tests)}, other=0.0)",
            f"{indent}b = tl.load(w + {row} * {columns} + n, mask=n < {columns}, other=0.0)",
            f"{indent}acc += a.to(tl.float32) * b.to(tl.float32)[None, :]",
        ]

    taps = shape.kernel[0] * shape.kernel[1]
    if taps * each <= UNROLLED:
        for number in range(taps * each):
            y, z = divmod(number // each, shape.kernel[1])
            moved = str(y * shape.dilation[0]), str(z * shape.dilation[1])
            lines += tap(*moved, str(number % each), str(number), " " * 4)
    else:
        lines += [
            f"    for number in range(0, {taps * each}):",
            f"        dy = number // {each * shape.kernel[1]} * {shape.dilation[0]}",
            f"        dx = number // {each} % {shape.kernel[1]} * {shape.dilation[1]}",
            *tap("dy", "dx", f"number % {each}", "number", " " * 8),
        ]
    if bias:
        lines.append(f"    acc += tl.load(bias + n, mask=n < {columns}, other=0.0).to(tl.float32)[None, :]")
    lines.append(f"    spot = m[:, None] * {columns} + n[None, :]")
    body, last = chain(problem, "acc", "spot", "valid", last="(n[None, :] + m[:, None] * 0)")
    lines += [*body, f"    tl.store(out + spot, {last}.to({NAMES[out.dtype]}), mask=valid)"]
    return HEAD + "\n".join(lines) + "\n"


def _channel(each: int, made: int) -> str:
    """The first channel that filter ``n`` reads, as an expression."""
    group = "n" if made == 1 else f"(n // {made})"
    return group if each == 1 else f"({group} * {each})"


SOLVERS = (Depthwise(),)
