"""Operations that only move elements, each as one launch: Transpose, Reorder, Concat, Split, Slice, Expand, Tile, Pad,
DepthToSpace and similar ones.

Each operation consists of *parts*. A part is a box of elements that is read with some strides and written with others.
The parts of a Concat or Split share a launch. Where the contiguous axes of reading and writing differ, the kernel moves
tiles of both axes. Both sides then access memory in contiguous lines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunewright.devices.base import Target
from tunewright.devices.cuda.device import CudaDevice, CudaQueue
from tunewright.ir.symbolic import greater, lesser
from tunewright.ir.types import PLAIN, TensorType
from tunewright.ops.internal.reorder import REORDER
from tunewright.ops.onnx.tensors.slicing import limits
from tunewright.ops.shapes import whole
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Missing, Problem
from tunewright.solvers.triton.source.cuda_kernel import Call, CudaSolver

from ..elementwise.elementwise import why_not_layouts
from ..source import expr, rows
from ..source.rows import cdiv, filling, indented, tensor
from ..source.text import NAMES, chain, computed, load, offset, physical_order, why_not_chain

#: parts of one launch; each part adds its own kernel text
MOST_PARTS = 32


@dataclass(frozen=True)
class BoxAxis:
    """One axis of a box: its size, and its strides in the input and in the output."""

    size: int
    read: int
    write: int
    #: elements from ``low`` to below ``high`` exist, all others are padding
    low: int = 0
    high: int = -1

    @property
    def padded(self) -> bool:
        return not isinstance(self.high, int) or self.high >= 0


@dataclass(frozen=True)
class MovedBox:
    """A box, its axes in the order of writing."""

    axes: tuple[BoxAxis, ...]
    #: numbers of the input and of the output
    source: int = 0
    result: int = 0
    #: first elements in the input and in the output
    read: int = 0
    write: int = 0

    @property
    def size(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    def merged(self) -> list[BoxAxis]:
        """The axes, with neighbours merged where both sides can treat them as one axis."""
        found: list[BoxAxis] = []
        for axis in self.axes:
            if axis.size == 1 and not axis.padded:
                continue
            last = found[-1] if found else None
            if (last is not None and not last.padded and not axis.padded and last.read == axis.read * axis.size
                    and last.write == axis.write * axis.size):  # fmt: skip
                found[-1] = BoxAxis(last.size * axis.size, axis.read, axis.write)
            else:
                found.append(axis)
        return found


def _steps(type: TensorType) -> list[int]:
    """The stride of each logical axis in memory."""
    found, step = [0] * len(type.dims), 1
    for axis in reversed(physical_order(type, len(type.dims))):
        found[axis] = step
        step *= type.dims[axis]
    return found


def _box(out: TensorType, sizes: Sequence[int], steps: Sequence[int], **more: int) -> MovedBox:
    """A box of the given sizes along the result's axes, read with the given strides."""
    write = _steps(out)
    order = physical_order(out, len(out.dims))
    return MovedBox(tuple(BoxAxis(sizes[a], steps[a], write[a]) for a in order), **more)


def parts(problem: Problem) -> list[MovedBox] | str:
    """The parts that a static problem moves, or the reason why they are unknown."""
    op, x, out, attrs = problem.op, tensor(problem.input(0)), tensor(problem.outputs[0]), problem.attrs
    rank, steps = len(x.dims), _steps(x)
    if op in (REORDER, "Identity"):
        return [_box(out, x.dims, steps)]
    if op == "Transpose":
        perm = [int(p) for p in attrs.get("perm") or reversed(range(rank))]
        return [_box(out, out.dims, [steps[p] for p in perm])]
    if op == "Concat":
        axis, at, found = int(attrs["axis"]) % rank, 0, []
        for i in range(len(problem.main_inputs)):
            one = tensor(problem.input(i))
            found.append(_box(out, one.dims, _steps(one), source=i, write=at * _steps(out)[axis]))
            at += one.dims[axis]
        return [part for part in found if part.size]
    if op == "Split":
        axis, at, found = int(attrs.get("axis", 0)) % rank, 0, []
        for i, type in enumerate(problem.outputs):
            one = tensor(type)
            found.append(_box(one, one.dims, steps, result=i, read=at * steps[axis]))
            at += one.dims[axis]
        return [part for part in found if part.size]
    if op == "Expand":
        dims = (1,) * (len(out.dims) - rank) + x.dims
        spread = [0] * (len(out.dims) - rank) + steps
        return [_box(out, out.dims, [0 if d == 1 else s for d, s in zip(dims, spread, strict=True)])]
    if op in _FACTORED:
        return [_factored(out, _FACTORED[op](x, steps, attrs))]
    given = [_numbers(problem, i) for i in range(1, len(problem.main_inputs))]
    needed = given[:1] + given[2:] if op == "Pad" else given  # the padding value may be computed
    if any(isinstance(one, str) for one in needed):
        return next(one for one in needed if isinstance(one, str))
    numbers = [None if one is None or isinstance(one, str) else one for one in given]
    return {"Slice": _slice, "Tile": _tile, "Pad": _pad}[op](x, out, steps, numbers)


def _numbers(problem: Problem, i: int) -> list[int] | str | None:
    """A constant input as a list of integers. None when it is absent, the reason when it is not constant."""
    if problem.input(i) is None:
        return None
    value = problem.value(i)
    return Missing(f"input {i} is not constant") if value is None else [whole(v) for v in value.reshape(-1)]


def _slice(x: TensorType, out: TensorType, steps: list[int], given: Sequence[list[int] | None]) -> list[MovedBox]:
    starts, ends, axes, strides = (*given, None, None)[:4]
    assert starts is not None and ends is not None
    steps, first = list(steps), 0
    chosen = axes if axes is not None else range(len(starts))
    for axis, start, end, stride in zip(chosen, starts, ends, strides or [1] * len(starts), strict=True):
        axis %= len(x.dims)
        low = limits(start, end, stride, x.dims[axis])[0]
        first += low * steps[axis]
        steps[axis] *= stride
    return [_box(out, out.dims, steps, read=first)]


def _tile(x: TensorType, out: TensorType, steps: list[int], given: Sequence[list[int] | None]) -> list[MovedBox]:
    write = _steps(out)
    found = []
    for axis in physical_order(out, len(out.dims)):
        size = x.dims[axis]
        found.append(BoxAxis(out.dims[axis] // greater(size, 1), 0, write[axis] * size))
        found.append(BoxAxis(size, steps[axis], write[axis]))
    return [MovedBox(tuple(found))]


def _pad(x: TensorType, out: TensorType, steps: list[int], given: Sequence[list[int] | None]) -> list[MovedBox]:
    pads, axes = given[0], given[2] if len(given) > 2 else None
    assert pads is not None
    chosen = [a % len(x.dims) for a in axes] if axes is not None else list(range(len(x.dims)))
    heads = dict(zip(chosen, pads[: len(chosen)], strict=True))
    write, found, first = _steps(out), [], 0
    for axis in physical_order(out, len(out.dims)):
        head, size = heads.get(axis, 0), x.dims[axis]
        first -= head * steps[axis]
        padded = head > 0 or out.dims[axis] > size + head
        low, high = (greater(head, 0), greater(0, lesser(out.dims[axis], size + head))) if padded else (0, -1)
        found.append(BoxAxis(out.dims[axis], steps[axis], write[axis], low, high))
    return [MovedBox(tuple(found), read=first)]


def _factored(out: TensorType, factors: Sequence[Sequence[tuple[int, int]]]) -> MovedBox:
    """A box whose axes are read in factors of (size, stride), the fastest one last."""
    write, found = _steps(out), []
    for axis in physical_order(out, len(out.dims)):
        step = write[axis]
        mine: list[BoxAxis] = []
        for size, read in reversed(factors[axis]):
            mine.insert(0, BoxAxis(size, read, step))
            step *= size
        found += mine
    return MovedBox(tuple(found))


def _depth_to_space(x: TensorType, steps: list[int], attrs: Mapping[str, Any]) -> list[list[tuple[int, int]]]:
    (batch, channels, high, wide), b = x.dims, int(attrs["blocksize"])
    kept = channels // (b * b)
    # strides of the block's elements and of the kept channels
    inner, outer = (1, b * b) if attrs.get("mode", "DCR") == "CRD" else (kept, 1)
    step = steps[1]
    return [
        [(batch, steps[0])], [(kept, outer * step)], [(high, steps[2]), (b, b * inner * step)],
        [(wide, steps[3]), (b, inner * step)],
    ]  # fmt: skip


def _space_to_depth(x: TensorType, steps: list[int], attrs: Mapping[str, Any]) -> list[list[tuple[int, int]]]:
    (batch, channels, high, wide), b = x.dims, int(attrs["blocksize"])
    blocks, kept = [(b, steps[2]), (b, steps[3])], [(channels, steps[1])]
    depth = [*kept, *blocks] if attrs.get("mode", "DCR") == "CRD" else [*blocks, *kept]
    return [[(batch, steps[0])], depth, [(high // b, b * steps[2])], [(wide // b, b * steps[3])]]


def _shuffled(x: TensorType, steps: list[int], attrs: Mapping[str, Any]) -> list[list[tuple[int, int]]]:
    axis, group = int(attrs.get("axis", 1)) % len(x.dims), int(attrs.get("group", 1))
    found, each = [[(size, step)] for size, step in zip(x.dims, steps, strict=True)], x.dims[axis] // group
    found[axis] = [(each, steps[axis]), (group, each * steps[axis])]
    return found


_FACTORED = {
    "DepthToSpace": _depth_to_space, "SpaceToDepth": _space_to_depth,
    "org.openvinotoolkit::ShuffleChannels": _shuffled,
}  # fmt: skip


class TritonMove(CudaSolver):
    """Moves between any two layouts, with an epilogue where there is one result."""

    id = "triton.move"
    ops = frozenset({REORDER, "Identity", "Transpose", "Concat", "Split", "Expand", "Slice", "Tile", "Pad", *_FACTORED})
    layouts = frozenset({PLAIN.name, "nhwc"})
    # One launch; the library's functions make a result and then copy it.
    rank = 55

    def refuse(self, problem: Problem, target: Target) -> str | None:
        out = tensor(problem.outputs[0])
        if problem.op == "Pad" and problem.attrs.get("mode", "constant") != "constant":
            return "pads with a constant"
        if problem.epilogue:
            if len(problem.outputs) != 1:
                return "takes no epilogue with several results"
            first = len(problem.main_inputs)
            if reason := why_not_chain(problem, main=False) or why_not_layouts(problem, first):
                return reason
        found = parts(problem)
        if isinstance(found, str):
            return found
        if len(found) > MOST_PARTS:
            return f"moves {MOST_PARTS} parts at most, not {len(found)}"
        return rows.why_not_size(problem) or (None if out.dtype in NAMES else f"does not move {out.dtype}")

    def space(self, problem: Problem, target: Target) -> Space:
        tiled = _is_tiled(problem)
        sizes = {"rows": [8, 16, 32, 64, 128]} if tiled else {}

        def useful(config: Mapping[str, Any]) -> bool:
            elements = int(config["block"]) * int(config.get("rows", 1))
            return 32 * int(config["warps"]) <= elements <= 64 * 32 * int(config["warps"])

        blocks = [8, 16, 32, 64, 128] if tiled else [64, 128, 256, 512, 1024, 2048, 4096]
        return Space({**sizes, "block": blocks, "warps": [1, 2, 4, 8]}, useful, version="1")

    def default(self, problem: Problem, target: Target) -> Config:
        """Eight elements per thread, fewer where they would not occupy every multiprocessor."""
        found, units = parts(problem), max(target.units, 1)
        assert not isinstance(found, str)
        size = sum(part.size for part in found)
        if _is_tiled(problem):
            side = 64 if size >= 64 * 64 * 2 * units else 32
            return {"rows": side, "block": side, "warps": 8 if side == 64 else 4}
        block = filling(size, units)
        return {"block": block, "warps": 4 if block > 256 else block // 64}

    def source(self, problem: Problem, config: Config, target: Target) -> str:
        return _text(problem, config)[0]

    def call(self, problem: Problem, config: Config, device: CudaDevice) -> Call:
        text, programs = _text(problem, config)
        kernel, warps = load(text), int(config["warps"])
        used = [i for i in _used(problem) if problem.inputs[i] is not None]

        def call(queue: CudaQueue, inputs: Any, outputs: Any) -> None:
            if programs:
                kernel[programs,](*(inputs[i] for i in used), *outputs, num_warps=warps)

        return call


def _used(problem: Problem) -> list[int]:
    """The inputs that the kernel reads."""
    first = len(problem.main_inputs)
    mains = range(first) if problem.op == "Concat" else [0, *([2] if problem.op == "Pad" and first > 2 else [])]
    return [*mains, *range(first, len(problem.inputs))]


def _turned(part: MovedBox) -> int | None:
    """The axis along which the input is contiguous, where the output is contiguous along another one."""
    axes = part.merged()
    if not axes or axes[-1].read in (0, 1) or axes[-1].size < 4:
        return None
    return next((k for k, axis in enumerate(axes[:-1]) if abs(axis.read) == 1 and axis.size >= 4), None)


def _is_tiled(problem: Problem) -> bool:
    found = parts(problem)
    return not isinstance(found, str) and len(found) == 1 and _turned(found[0]) is not None


def _text(problem: Problem, config: Mapping[str, Any]) -> tuple[str, int]:
    """The text of the kernel, and the number of programs."""
    found = parts(problem)
    assert not isinstance(found, str), found
    block = int(config["block"])
    lines = ["tile = tl.program_id(0)"]
    first = 0
    for part in found:
        if "rows" in config:
            count, body = _tiled(problem, part, int(config["rows"]), block)
        else:
            count, body = cdiv(part.size, block), _flat(problem, part, block, first)
        many = len(found) > 1
        if many:
            lines.append(f"if (tile >= {first}) & (tile < {first + count}):")
        lines += indented(body) if many else body
        first += count
    outs = [f"o{i}" for i in range(len(problem.outputs))]
    pointers = [f"p{i}" for i in _used(problem) if problem.inputs[i] is not None]
    return rows.kernel([*pointers, *outs], lines), first


def _flat(problem: Problem, part: MovedBox, block: int, first: int) -> list[str]:
    """Statements for a run of the box's elements, in the order of writing."""
    axes = part.merged()
    start = f"(tile - {first})" if first else "tile"
    read, write = (offset([(a.size, getattr(a, side)) for a in axes], "at") for side in ("read", "write"))
    tests, inner = [f"at < {part.size}"], part.size
    for axis in axes:
        inner //= axis.size
        if axis.padded:
            index = f"(at // {inner} % {axis.size})"
            tests.append(f"({index} >= {axis.low}) & ({index} < {axis.high})")
    return [
        f"at = {start} * {block} + tl.arange(0, {block})", f"inside = {tests[0]}",
        f"there = {' & '.join(['inside', *tests[1:]])}",
        *_moved(problem, part, read, write),
    ]  # fmt: skip


def _tiled(problem: Problem, part: MovedBox, rows_: int, block: int) -> tuple[int, list[str]]:
    """Statements for a tile of the input's contiguous axis (``r``) and the output's contiguous axis (``c``)."""
    axes, turned = part.merged(), _turned(part)
    assert turned is not None
    tall, wide = axes[turned], axes[-1]
    rest = [axis for k, axis in enumerate(axes[:-1]) if k != turned]
    down, across = cdiv(tall.size, rows_), cdiv(wide.size, block)
    lines = [
        f"r = (tile // {across} % {down} * {rows_} + tl.arange(0, {rows_}))[:, None]",
        f"c = (tile % {across} * {block} + tl.arange(0, {block}))[None, :]", f"other = tile // {across * down}",
        f"inside = (r < {tall.size}) & (c < {wide.size})",
    ]  # fmt: skip
    tests, inner = ["inside"], math.prod(axis.size for axis in rest)
    for axis in rest:
        inner //= axis.size
        if axis.padded:
            lines.append(f"far{inner} = other // {inner} % {axis.size}")
            tests.append(f"(far{inner} >= {axis.low}) & (far{inner} < {axis.high})")
    both = (("r", tall), ("c", wide))
    tests += [f"({name} >= {axis.low}) & ({name} < {axis.high})" for name, axis in both if axis.padded]
    lines.append(f"there = {' & '.join(tests)}")
    read, write = (
        f"{offset([(a.size, getattr(a, side)) for a in rest], 'other')} + r * {getattr(tall, side)} + "
        f"c * {getattr(wide, side)}"
        for side in ("read", "write")
    )
    programs = down * across * math.prod(axis.size for axis in rest)
    return programs, [*lines, *_moved(problem, part, read, write)]


def _moved(problem: Problem, part: MovedBox, read: str, write: str) -> list[str]:
    """Statements that load, apply the epilogue and store."""
    x, out = tensor(problem.input(part.source)), tensor(problem.outputs[part.result])
    lines = [f"made = tl.load(p{part.source} + ({read} + {part.read}), mask=there)"]
    if any(axis.padded for axis in part.axes):
        filling = problem.input(2)
        value = f"tl.load(p2).to({NAMES[x.dtype]})" if filling is not None else (
            expr.number(0.0) if x.dtype.is_float else "0"
        )  # fmt: skip
        lines.append(f"made = tl.where(there, made, {value}).to({NAMES[x.dtype]})")
    lines.append(f"spot = {write} + {part.write}")
    last = "made"
    if problem.epilogue:
        lines.append(f"made = made.to({computed(x.dtype)})")
        body, name = chain(problem, "made", "spot", "inside", indent="")
        lines += body
        last = f"({name}).to({NAMES[out.dtype]})"
    return [*lines, f"tl.store(o{part.result} + spot, {last}, mask=inside)"]


SOLVERS = (TritonMove(),)
