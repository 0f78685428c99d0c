"""Products of few rows with constant weights. Memory bandwidth bounds them, as tensor cores have too little work.

The weights are stored as one contiguous row per result column. A program processes some of these rows from start to
end, so all its reads are contiguous. Each thread multiplies and adds on its own; the sums are added at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tunewright.devices.base import Target
from tunewright.devices.cuda.device import CudaDevice, CudaQueue
from tunewright.ir.symbolic import always_divides
from tunewright.ir.types import NHWC, PLAIN, DType, Layout, TensorType
from tunewright.search.space import Scalar, Space
from tunewright.solvers.base import Config, Packing, Problem
from tunewright.solvers.triton.source.cuda_kernel import Call, CudaSolver

from ..elementwise.elementwise import why_not_layouts
from ..source.text import HEAD, NAMES, chain, load, why_not_chain
from .product import FLOATS, TURNED, gemm_addend, gemm_shape
from .product_shape import ProductShape, conv_shape, product_shape, why_not_size
from .product_text import Addend

#: With more rows, tensor cores pay off.
MOST_ROWS = 4
#: weight elements that a thread holds at once
LEAST_HELD, MOST_HELD = 1, 64


class TritonGemv(CudaSolver):
    """MatMul, Gemm and convolutions over one pixel, with few rows."""

    id = "triton.gemv"
    ops = frozenset({"MatMul", "Gemm", "Conv"})
    dtypes = FLOATS | {DType.BOOL, DType.INT32, DType.INT64}
    layouts = frozenset({PLAIN.name, "nhwc"})
    rank = 34

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x, w, out = problem.input(0), problem.input(1), problem.outputs[0]
        assert isinstance(x, TensorType) and isinstance(w, TensorType) and isinstance(out, TensorType)
        if problem.op == "Conv" and (len(x.dims) != 4 or x.layout != NHWC or out.layout != NHWC):
            return "takes two spatial axes, channels last"
        if problem.op == "MatMul" and (len(x.dims) < 2 or len(w.dims) != 2):
            return "takes weights of two dimensions"
        if x.dtype not in FLOATS or w.dtype is not x.dtype:
            return f"does not multiply {x.dtype} and {w.dtype}"
        if not problem.constant[1]:
            return "its weights are not constant"
        reason = why_not_size(problem)
        if reason is not None:
            return reason
        if problem.op == "Gemm" and problem.attrs.get("transA", 0) and x.dims[1] > 1 and x.dims[0] > 1:
            return "takes rows of the first matrix"
        shape = _shape(problem)
        if shape.rows > MOST_ROWS:
            return f"takes up to {MOST_ROWS} rows, not {shape.rows}"
        if shape.groups > 1 or not shape.dense:
            return "takes windows of one pixel, and one group"
        if problem.epilogue:
            return why_not_chain(problem, main=False) or why_not_layouts(problem, len(problem.main_inputs))
        return None

    def preferred(self, problem: Problem, target: Target) -> tuple[Layout, Layout] | None:
        return (NHWC, NHWC) if problem.op == "Conv" else None

    def packings(self, problem: Problem, config: Config) -> Mapping[int, Packing]:
        rows = problem.op == "Conv" or (problem.op == "Gemm" and problem.attrs.get("transB", 0))
        return {} if rows else {1: TURNED}

    def space(self, problem: Problem, target: Target) -> Space:
        shape = _shape(problem)

        def useful(config: Mapping[str, Any]) -> bool:
            bn, bk, warps = (int(config[k]) for k in ("bn", "bk", "warps"))
            if bn >= 2 * shape.columns or bk >= 2 * max(shape.depth, 32):
                return False
            if int(config["stages"]) > max(1, -(-shape.depth // bk)):
                return False
            return LEAST_HELD <= bn * bk / (32 * warps) <= MOST_HELD // (1 + (shape.rows > 1))

        params: dict[str, Sequence[Scalar]] = {
            "bn": (1, 2, 4, 8, 16, 32), "bk": (32, 64, 128, 256, 512, 1024, 2048), "warps": (1, 2, 4, 8),
            "stages": (1, 2, 3, 4),
        }  # fmt: skip
        return Space(params, useful, version="1")

    def default(self, problem: Problem, target: Target) -> Config:
        """The default: at least two programs per multiprocessor, then as many columns per program as remain, and 16
        loads each."""
        shape, units = _shape(problem), max(target.units, 1)
        bn = max((n for n in (1, 2, 4, 8) if n < 2 * shape.columns and -(-shape.columns // n) >= 2 * units), default=1)
        fits = [k for k in (32, 64, 128, 256, 512, 1024) if k < 2 * max(shape.depth, 32)]
        bk = max((k for k in fits if bn * k <= 4096 // (1 + (shape.rows > 1))), default=fits[0])
        warps = max((w for w in (1, 2, 4) if bn * bk >= 32 * w * 16), default=1)
        return {"bn": bn, "bk": bk, "warps": warps, "stages": 1}

    def source(self, problem: Problem, config: Config, target: Target) -> str:
        return text(problem, _shape(problem), config, _addend(problem))

    def call(self, problem: Problem, config: Config, device: CudaDevice) -> Call:
        shape, addend = _shape(problem), _addend(problem)
        kernel, warps = load(text(problem, shape, config, addend)), int(config["warps"])
        first, grid = len(problem.main_inputs), (-(-shape.columns // int(config["bn"])),)

        def call(queue: CudaQueue, inputs: Any, outputs: Any) -> None:
            given = [inputs[0], inputs[1], *([inputs[2]] if addend.given else []), *inputs[first:], outputs[0]]
            kernel[grid](*given, num_warps=warps)

        return call


def _shape(problem: Problem) -> ProductShape:
    of = {"Conv": conv_shape, "MatMul": product_shape, "Gemm": gemm_shape}
    return of[problem.op](problem)


def _addend(problem: Problem) -> Addend:
    return gemm_addend(problem) if problem.op == "Gemm" else Addend(given=problem.input(2) is not None)


def text(problem: Problem, shape: ProductShape, config: Mapping[str, Any], addend: Addend) -> str:
    """The text of the kernel for a shape."""
    bn, bk, stages = (int(config[k]) for k in ("bn", "bk", "stages"))
    out = problem.outputs[0]
    assert isinstance(out, TensorType)
    columns, depth, rows = shape.columns, shape.depth, range(shape.rows)
    operands = [f"p{i}" for i in range(len(problem.main_inputs), len(problem.inputs))]
    pointers = ["x", "w", *(["bias"] if addend.given else []), *operands, "out"]
    whole = always_divides(bn, columns)
    lines = [
        "@triton.jit", f"def kernel({', '.join(pointers)}):",
        f"    n = tl.program_id(0) * {bn} + tl.arange(0, {bn})",
        f"    k = tl.arange(0, {bk})",
        *(f"    acc{r} = tl.zeros(({bn}, {bk}), tl.float32)" for r in rows),
        f"    for at in tl.range(0, {depth}, {bk}, num_stages={stages}):",
    ]  # fmt: skip
    inside = [] if always_divides(bk, depth) else [f"(at + k < {depth})"]
    given = f", mask={inside[0]}, other=0.0" if inside else ""
    terms = [f"{term}[None, :]" for term in inside] + ([] if whole else [f"(n < {columns})[:, None]"])
    mask = f", mask={' & '.join(terms)}, other=0.0" if terms else ""
    lines.append(f"        weights = tl.load(w + n[:, None] * {depth} + (at + k)[None, :]{mask}).to(tl.float32)")
    for r in rows:
        lines.append(f"        acc{r} += weights * tl.load(x + {r * depth} + at + k{given}).to(tl.float32)[None, :]")
    lines.append(f"    valid = n < {columns}")
    for r in rows:
        lines += [f"    spot = {r * columns} + n", f"    acc = tl.sum(acc{r}, 1)"]
        if addend.alpha != 1.0:
            lines.append(f"    acc = acc * {addend.alpha!r}")
        if addend.given:
            times = "" if addend.beta == 1.0 else f" * {addend.beta!r}"
            place = f"bias + {r * addend.rows} + n * {addend.columns}"
            lines.append(f"    acc += tl.load({place}, mask=valid, other=0.0).to(tl.float32){times}")
        body, last = chain(problem, "acc", "spot", "valid", last="n")
        lines += [*body, f"    tl.store(out + spot, {last}.to({NAMES[out.dtype]}), mask=valid)"]
    return HEAD + "\n".join(lines) + "\n"


SOLVERS = (TritonGemv(),)
