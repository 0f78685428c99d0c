"""Products and convolutions on tensor cores: one kernel text for both, the convolution as an implicit product.

Rows are pixels of the result (images, heights, widths), columns its channels; the sum goes over taps and channels of
the input, whose channels lie last. Groups of a convolution are products of their own. With ``split`` above one several
programs share a tile: each writes its part of the sum to scratch memory, and the one that comes last adds them up in
order and goes on. So each run has the same result.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...devices.base import Device, Target
from ...devices.cuda import CudaDevice, CudaQueue
from ...ir.types import NHWC, PLAIN, DType, Layout, TensorType
from ...ops.windows import windows
from ...search.space import Scalar, Space
from ..base import Array, Config, Kernel, Packing, Problem
from ..cuda import Call, CudaSolver
from . import multiply
from .elementwise import why_not_layouts
from .text import HEAD, NAMES, chain, load, why_not_chain

_FLOATS = frozenset({DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32})
#: places are counted in 32 bits
MOST_ELEMENTS = 1 << 31
#: sums of a thread, which has 255 registers for everything: with more it takes a minute to compile and is slow
MOST_SUMS = 128
#: multiplications that are written out for a thread, where no tensor core does them
MOST_UNROLLED = 2048


@dataclass(frozen=True)
class Shape:
    """Everything that the kernel is made for. A product is a convolution of one tap over one row of pixels."""

    images: int
    height: int
    width: int
    channels: int
    out_height: int
    out_width: int
    filters: int
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    head: tuple[int, int] = (0, 0)
    padded: bool = False
    groups: int = 1

    @property
    def depth(self) -> int:
        """Channels that are summed over: those of a group."""
        return self.channels // self.groups

    @property
    def columns(self) -> int:
        """Filters of a group."""
        return self.filters // self.groups

    def tiles(self, bm: int, bn: int) -> int:
        """Tiles of all groups."""
        return -(-self.rows // bm) * -(-self.columns // bn) * self.groups

    @property
    def rows(self) -> int:
        return self.images * self.out_height * self.out_width

    @property
    def dense(self) -> bool:
        """Row m of the result needs row m of the input alone."""
        return self.kernel == (1, 1) and self.stride == (1, 1) and not self.padded

    def steps(self, bk: int) -> int:
        """Steps of the sum."""
        return self.kernel[0] * self.kernel[1] * -(-self.depth // bk)


class Product(CudaSolver):
    """What `Conv` and `MatMul` share."""

    dtypes = frozenset({DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.BOOL, DType.INT32, DType.INT64})
    rank = 45

    @abstractmethod
    def shape(self, problem: Problem) -> Shape:
        """What a static problem asks for."""

    def bias(self, problem: Problem) -> bool:
        """Input 2 is added, one number per column."""
        return False

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x, w = problem.input(0), problem.input(1)
        assert isinstance(x, TensorType) and isinstance(w, TensorType)
        if x.dtype not in _FLOATS or w.dtype is not x.dtype:
            return f"does not multiply {x.dtype} and {w.dtype}"
        if not problem.constant[1]:
            return "its weights are not constant"
        first = len(problem.main_inputs)
        reason = why_not_chain(problem, main=False) or why_not_layouts(problem, first) if problem.epilogue else None
        return reason or why_not_size(problem)

    def inexact(self, problem: Problem, config: Config) -> str | None:
        return multiply.inexact(config)

    def compile(self, problem: Problem, config: Config, device: Device) -> Kernel:
        return multiply.marked(super().compile(problem, config, device), config)

    def space(self, problem: Problem, target: Target) -> Space:
        shape, units, dtype = self.shape(problem), max(target.units, 1), _dtype(problem)
        least = 16

        def useful(config: Mapping[str, Any]) -> bool:
            bm, bn, bk, split = (int(config[k]) for k in ("bm", "bn", "bk", "split"))
            shared = (bm + bn) * bk * int(config["stages"]) * dtype.itemsize
            if bm * bn > 128 * 256 or bm * bn < 256 or shared > 200 << 10:
                return False
            if bm * bn > int(config["warps"]) * 32 * MOST_SUMS:
                return False
            if config.get("precision") == "ieee" and bm * bn * bk > int(config["warps"]) * 32 * MOST_UNROLLED:
                return False
            sizes = (bm, shape.rows), (bn, shape.columns), (bk, shape.depth)
            if any(block >= 2 * max(size, least) for block, size in sizes):
                return False
            return split == 1 or (split <= shape.steps(bk) and shape.tiles(bm, bn) * split <= 6 * units)

        params: dict[str, Sequence[Scalar]] = {
            "bm": [16, 32, 64, 128, 256], "bn": [16, 32, 64, 128, 256], "bk": [16, 32, 64, 128],
            "split": [1, 2, 3, 4, 6, 8, 12, 16], "warps": [1, 2, 4, 8], "stages": [1, 2, 3, 4, 5],
            "group": [1, 4, 8],
        }  # fmt: skip
        return Space(params | multiply.params(dtype), useful, version="2")

    def default(self, problem: Problem, target: Target) -> Config:
        """Large tiles where they fill the device; else small ones, and the sum split until they do."""
        shape, units = self.shape(problem), max(target.units, 1)
        bk = 64 if shape.depth >= 64 else 32 if shape.depth > 16 else 16
        sizes = [(128, 128), (64, 128), (64, 64), (32, 64), (16, 64)]
        if _dtype(problem) is DType.FLOAT32:  # no tensor core multiplies them: each thread has a tile of its own
            bk, sizes = 16, sizes[2:]
        for high, wide in sizes:
            bm, bn = _fit(high, shape.rows), _fit(wide, shape.columns)
            tiles = shape.tiles(bm, bn)
            if tiles >= units:
                break
        split = max(s for s in (1, 2, 3, 4, 6, 8) if s == 1 or (s <= shape.steps(bk) // 2 and tiles * s <= 2 * units))
        if bm * bn < 256:
            bn = 256 // bm
        warps = 8 if bm * bn >= 128 * 128 else 4
        config = {"bm": bm, "bn": bn, "bk": bk, "split": split, "warps": warps, "stages": 3, "group": 4}
        return config | multiply.default(_dtype(problem))

    def source(self, problem: Problem, config: Config, target: Target) -> str:
        return text(problem, self.shape(problem), config, self.bias(problem))

    def call(self, problem: Problem, config: Config, device: CudaDevice) -> Call:
        shape, split, bm, bn = self.shape(problem), *(int(config[k]) for k in ("split", "bm", "bn"))
        kernel = load(text(problem, shape, config, self.bias(problem)))
        tiles = shape.tiles(bm, bn)
        options = {"num_warps": int(config["warps"]), "num_stages": int(config["stages"])}
        scratch = tiles * bm * bn * split * 4 if split > 1 else 0
        first, grid = len(problem.main_inputs), (tiles, split)
        with_bias = self.bias(problem)

        def call(queue: CudaQueue, inputs: Any, outputs: Any) -> None:
            given = [inputs[0], inputs[1], *([inputs[2]] if with_bias else []), *inputs[first:], outputs[0]]
            if split > 1:
                given += [queue.scratch(scratch).view(multiply.float32()), queue.zeros(tiles)]
            kernel[grid](*given, **options)

        return call


def _dtype(problem: Problem) -> DType:
    x = problem.inputs[0]
    assert isinstance(x, TensorType)
    return x.dtype


def why_not_size(problem: Problem) -> str | None:
    """What speaks against the sizes of a static problem."""
    sizes = [t.size for t in (*problem.inputs, *problem.outputs) if isinstance(t, TensorType)]
    return "is empty" if min(sizes) < 1 else "is too large" if max(sizes) >= MOST_ELEMENTS else None


def _fit(block: int, size: int) -> int:
    """No larger than needed, and no smaller than tensor cores take."""
    return max(16, min(block, 1 << max(0, (size - 1).bit_length())))


class Conv(Product):
    """Two spatial axes, channels last."""

    id = "triton.conv"
    ops = frozenset({"Conv"})
    layouts = frozenset({PLAIN.name, "nhwc"})

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x, out = problem.input(0), problem.outputs[0]
        assert isinstance(x, TensorType) and isinstance(out, TensorType)
        if len(x.dims) != 4:
            return "takes two spatial axes"
        if x.layout != NHWC or out.layout != NHWC:
            return "takes channels last"
        return super().refuse(problem, target)

    def preferred(self, problem: Problem, target: Target) -> tuple[Layout, Layout] | None:
        x = problem.input(0)
        return (NHWC, NHWC) if isinstance(x, TensorType) and len(x.dims) == 4 else None

    def bias(self, problem: Problem) -> bool:
        return problem.input(2) is not None

    def packings(self, problem: Problem, config: Config) -> Mapping[int, Packing]:
        return {1: BY_TAP}

    def shape(self, problem: Problem) -> Shape:
        return conv_shape(problem)


class MatMul(Product):
    """Rows times constant weights of two dimensions."""

    id = "triton.matmul"
    ops = frozenset({"MatMul"})

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x, w = problem.input(0), problem.input(1)
        assert isinstance(x, TensorType) and isinstance(w, TensorType)
        if len(w.dims) != 2 or len(x.dims) < 2:
            return "takes weights of two dimensions"
        return super().refuse(problem, target)

    def shape(self, problem: Problem) -> Shape:
        x, w = problem.input(0), problem.input(1)
        assert isinstance(x, TensorType) and isinstance(w, TensorType)
        rows = x.size // max(1, x.dims[-1])
        return Shape(1, 1, rows, x.dims[-1], 1, rows, w.dims[1])


def conv_shape(problem: Problem) -> Shape:
    """What a static convolution over two spatial axes asks for."""
    x, w, out = problem.input(0), problem.input(1), problem.outputs[0]
    assert isinstance(x, TensorType) and isinstance(w, TensorType) and isinstance(out, TensorType)
    win = windows(x.dims[2:], w.dims[2:], problem.attrs)
    pads = win.pads(x.dims[2:])
    return Shape(
        x.dims[0], x.dims[2], x.dims[3], x.dims[1], out.dims[2], out.dims[3], w.dims[0], _two(win.kernel),
        _two(win.strides), _two(win.dilations), _two(win.head), any(p > 0 for pair in pads for p in pair),
        int(problem.attrs.get("group", 1)),
    )  # fmt: skip


def _two(values: tuple[int, ...]) -> tuple[int, int]:
    return values[0], values[1]


def _by_tap(weights: Array) -> Array:
    return np.ascontiguousarray(weights.transpose(2, 3, 1, 0))


BY_TAP = Packing("taps, channels, filters", _by_tap)


def text(problem: Problem, shape: Shape, config: Mapping[str, Any], bias: bool) -> str:
    """The kernel for a shape."""
    bm, bn, bk, split, group = (int(config[k]) for k in ("bm", "bn", "bk", "split", "group"))
    out = problem.outputs[0]
    assert isinstance(out, TensorType)
    # of a group; and of all of them, which is how far rows lie apart
    rows, columns, depth = shape.rows, shape.columns, shape.depth
    all_columns, all_depth = shape.filters, shape.channels
    down, across = -(-rows // bm), -(-columns // bn)
    chunks = -(-depth // bk)
    operands = [f"p{i}" for i in range(len(problem.main_inputs), len(problem.inputs))]
    pointers = ["x", "w", *(["bias"] if bias else []), *operands, "out", *(["parts", "counters"] if split > 1 else [])]
    ragged = depth % bk != 0
    whole_columns, whole_rows = columns % bn == 0, rows % bm == 0
    lines = ["@triton.jit", f"def kernel({', '.join(pointers)}):"]

    def emit(*more: str) -> None:
        lines.extend("    " + line for line in more)

    emit("tile = tl.program_id(0)")
    read, written = "x", "n[None, :]"
    if shape.groups > 1:
        emit("number_of_tile = tile", f"part_of = tile // {down * across}", f"tile = tile % {down * across}")
        read, written = f"x + part_of * {depth}", f"(part_of * {columns} + n)[None, :]"
    if group > 1 and down > 1 and across > 1:  # tiles that share inputs run at the same time
        emit(
            f"first = tile // {group * across} * {group}", f"high = min({down} - first, {group})",
            f"inner = tile % {group * across}", "row = first + inner % high", "column = inner // high",
        )  # fmt: skip
    else:
        emit(f"row = tile % {down}", f"column = tile // {down}")
    emit(f"m = row * {bm} + tl.arange(0, {bm})", f"n = column * {bn} + tl.arange(0, {bn})", f"k = tl.arange(0, {bk})")
    if shape.dense:
        emit(f"rows = {read} + m[:, None] * {all_depth}")
    else:
        area = shape.out_height * shape.out_width
        emit(
            f"image = m // {area}", f"top = m % {area} // {shape.out_width} * {shape.stride[0]} - {shape.head[0]}",
            f"left = m % {shape.out_width} * {shape.stride[1]} - {shape.head[1]}",
            f"rows = {read} + (((image * {shape.height} + top) * {shape.width} + left) * {all_depth})[:, None]",
        )  # fmt: skip
    steps = shape.steps(bk)
    emit(f"acc = tl.zeros(({bm}, {bn}), tl.float32)")
    each = -(-steps // split)  # the last parts may have fewer, or none: what is beyond the end is masked
    beyond = each * split > steps
    if split > 1:
        emit("part = tl.program_id(1)", f"for number in range(0, {each}):", f"    step = part * {each} + number")
    else:
        emit(f"for step in range(0, {steps}):")

    def loop(*more: str) -> None:
        lines.extend("        " + line for line in more)

    short = f"((at + k) < {depth})" if not beyond else f"(((at + k) < {depth}) & (step < {steps}))"
    ragged = ragged or beyond
    if shape.dense:
        loop(f"at = step * {bk}", "b_rows = at + k")
        move = "at + k[None, :]"
        tests = [] if whole_rows else [f"(m < {rows})"]
    else:
        loop(
            f"tap = step // {chunks}", f"at = step % {chunks} * {bk}", f"b_rows = tap * {depth} + at + k",
            f"dy = tap // {shape.kernel[1]} * {shape.dilation[0]}",
            f"dx = tap % {shape.kernel[1]} * {shape.dilation[1]}",
        )  # fmt: skip
        move = f"(dy * {shape.width} + dx) * {all_depth} + at + k[None, :]"
        tests = [] if whole_rows else [f"(m < {rows})"]
        if shape.padded:
            tests.append(f"(top + dy >= 0) & (top + dy < {shape.height})")
            tests.append(f"(left + dx >= 0) & (left + dx < {shape.width})")
    terms = ([f"({' & '.join(tests)})[:, None]"] if tests else []) + ([f"{short}[None, :]"] if ragged else [])
    mask = f", mask={' & '.join(terms)}, other=0.0" if terms else ""
    loop(f"a = tl.load(rows + ({move}){mask})")
    terms = ([f"{short}[:, None]"] if ragged else []) + ([] if whole_columns else [f"(n < {columns})[None, :]"])
    mask = f", mask={' & '.join(terms)}, other=0.0" if terms else ""
    how = multiply.option(_dtype(problem), config)
    loop(f"b = tl.load(w + b_rows[:, None] * {all_columns} + {written}{mask})", f"acc = tl.dot(a, b, acc{how})")
    indent = "    "
    if shape.groups > 1:
        emit("tile = number_of_tile")
    if split > 1:
        emit(
            f"inner_at = tl.arange(0, {bm})[:, None] * {bn} + tl.arange(0, {bn})[None, :]",
            f"here = parts + tile * {split * bm * bn} + inner_at",
            f"tl.store(here + part * {bm * bn}, acc)", "tl.debug_barrier()",
            "arrived = tl.atomic_add(counters + tile, 1, sem=\"acq_rel\")", f"if arrived == {split - 1}:",
        )  # fmt: skip
        indent = "        "
        lines += [indent + "tl.store(counters + tile, 0)", indent + f"acc = tl.zeros(({bm}, {bn}), tl.float32)",
                  indent + f"for part in range(0, {split}):",
                  indent + f"    acc += tl.load(here + part * {bm * bn}, cache_modifier=\".cg\")"]  # fmt: skip
    lines += [indent + f"valid = (m < {rows})[:, None] & (n < {columns})[None, :]",
              indent + f"spot = m[:, None] * {all_columns} + {written}"]  # fmt: skip
    if bias:
        at = "n" if shape.groups == 1 else f"part_of * {columns} + n"
        lines.append(indent + f"acc += tl.load(bias + {at}, mask=n < {columns}, other=0.0).to(tl.float32)[None, :]")
    body, last = chain(problem, "acc", "spot", "valid", last=f"({written} + m[:, None] * 0)", indent=indent)
    lines += body
    lines.append(indent + f"tl.store(out + spot, {last}.to({NAMES[out.dtype]}), mask=valid)")
    return HEAD + "\n".join(lines) + "\n"


SOLVERS = (Conv(), MatMul())
