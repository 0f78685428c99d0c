"""QuantizeLinear and DequantizeLinear, with one scale or one scale per index of an axis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tunewright.devices.base import Target
from tunewright.devices.cuda.device import CudaDevice, CudaQueue
from tunewright.ir.types import PLAIN, DType, TensorType
from tunewright.ops.numeric import limits
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Problem
from tunewright.solvers.triton.source.cuda_kernel import Call, CudaSolver

from ..source import expr, rows
from ..source.rows import cdiv, tensor
from ..source.text import NAMES, chain, load, physical_order, why_not_chain
from .elementwise import default_block, why_not_layouts

_FLOATS = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})
_NARROW = frozenset({DType.INT8, DType.UINT8, DType.INT16, DType.UINT16})


class TritonQuantize(CudaSolver):
    """Quantises to integers of 8 and 16 bits, and dequantises these and integers of 32 bits."""

    id = "triton.quantize"
    ops = frozenset({"QuantizeLinear", "DequantizeLinear"})
    layouts = frozenset({PLAIN.name, "nhwc"})
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x, scale, out = tensor(problem.input(0)), tensor(problem.input(1)), tensor(problem.outputs[0])
        zero, attrs = problem.input(2), problem.attrs
        if x.layout != out.layout:
            return "input and output differ in layout"
        if attrs.get("block_size", 0):
            return "has no blocks"
        for type in (scale, zero):
            if isinstance(type, TensorType) and type.size != 1 and type.dims != (x.dims[_axis(problem)],):
                return f"{type} is not one number, or one for each index of the axis"
        if problem.op == "QuantizeLinear":
            # the quotient is rounded to the type of the scale
            if x.dtype not in _FLOATS or scale.dtype is not DType.FLOAT32 or out.dtype not in _NARROW:
                return f"does not quantise {x.dtype} by {scale.dtype} to {out.dtype}"
            if attrs.get("precision", 0) not in (0, DType.FLOAT32.onnx_code):
                return "computes in float32"
        elif x.dtype not in _NARROW | {DType.INT32} or not {scale.dtype, _real(problem)} <= _FLOATS:
            return f"does not make {out.dtype} of {x.dtype}"
        if problem.epilogue:
            reason = why_not_chain(problem, main=False) or why_not_layouts(problem, len(problem.main_inputs))
            if reason is not None:
                return reason
        return "is empty" if not x.size else rows.why_not_size(problem)

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({"block": [128, 256, 512, 1024, 2048, 4096], "warps": [1, 2, 4, 8]})

    def default(self, problem: Problem, target: Target) -> Config:
        return default_block(problem, target)

    def source(self, problem: Problem, config: Config, target: Target) -> str:
        return _text(problem, config)

    def call(self, problem: Problem, config: Config, device: CudaDevice) -> Call:
        kernel, warps = load(_text(problem, config)), int(config["warps"])
        grid = (cdiv(tensor(problem.outputs[0]).size, int(config["block"])),)

        def call(queue: CudaQueue, inputs: Any, outputs: Any) -> None:
            kernel[grid](*(x for x in inputs if x is not None), outputs[0], num_warps=warps)

        return call


def _real(problem: Problem) -> DType:
    """The result type of a DequantizeLinear, without its epilogue."""
    declared = problem.attrs.get("output_dtype", 0)
    return DType.of_onnx(declared) if declared else tensor(problem.input(1)).dtype


def _axis(problem: Problem) -> int:
    return int(problem.attrs.get("axis", 1)) % max(1, len(tensor(problem.input(0)).dims))


def _text(problem: Problem, config: Mapping[str, Any]) -> str:
    x, scale, out = tensor(problem.input(0)), tensor(problem.input(1)), tensor(problem.outputs[0])
    zero, block = problem.input(2), int(config["block"])
    order = physical_order(x, len(x.dims))
    lines = [f"at = tl.program_id(0) * {block} + tl.arange(0, {block})", f"inside = at < {out.size}"]
    index = "at * 0"
    if any(isinstance(t, TensorType) and t.size > 1 for t in (scale, zero)):
        inner = math.prod(x.dims[a] for a in order[order.index(_axis(problem)) + 1 :])
        index = f"(at // {inner} % {x.dims[_axis(problem)]})"

    def constant(i: int, type: TensorType) -> str:
        return f"tl.load(p{i} + {index}, mask=inside, other=1)" if type.size > 1 else f"tl.load(p{i})"

    lines += ["v = tl.load(p0 + at, mask=inside, other=0)", f"s = {constant(1, scale)}.to(tl.float32)"]
    if problem.op == "QuantizeLinear":
        low, high = limits(_stored(problem).numpy)
        rounded = expr.expression("Round", ["q"], DType.FLOAT32, {})
        lines += ["q = tl.div_rn(v.to(tl.float32), s + tl.zeros_like(v).to(tl.float32))", f"q = {rounded}"]
        if isinstance(zero, TensorType):
            lines.append(f"q += {constant(2, zero)}.to(tl.float32)")
        lines.append(f"made = tl.minimum(tl.maximum(q, {float(low)}), {float(high)}).to({NAMES[_stored(problem)]})")
    else:
        real = "tl.int32" if x.dtype is DType.INT32 else "tl.float32"
        lines.append(f"v = v.to({real})")
        if isinstance(zero, TensorType):
            lines.append(f"v -= {constant(2, zero)}.to({real})")
        lines.append("made = v.to(tl.float32) * s")
    body, last = chain(problem, "made", "at", "inside", indent="")
    lines += [*body, f"tl.store(out + at, ({last}).to({NAMES[out.dtype]}), mask=inside)"]
    pointers = [f"p{i}" for i, type in enumerate(problem.inputs) if type is not None]
    return rows.kernel([*pointers, "out"], lines)


def _stored(problem: Problem) -> DType:
    """The result type of a QuantizeLinear, without its epilogue."""
    zero = problem.input(2)
    declared = problem.attrs.get("output_dtype", 0)
    return zero.dtype if isinstance(zero, TensorType) else DType.of_onnx(declared) if declared else DType.UINT8


SOLVERS = (TritonQuantize(),)
