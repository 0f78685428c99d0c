"""Element-wise operations and broadcast chains of them, generated as one kernel.

The result's dimensions are merged into as few as the operands' broadcasting allows. The innermost dimension is a loop
over contiguous memory, in which an operand is either also contiguous or one value. The other dimensions are rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tunewright.devices.base import Target
from tunewright.ir.symbolic import WHOLE, greater
from tunewright.ir.types import PLAIN, Layout, TensorType
from tunewright.ops.internal.reorder import from_plain
from tunewright.search.space import Space
from tunewright.solvers.base import Array, Config, Packing, Problem, tensor
from tunewright.solvers.epilogue_types import main_type, step_dtypes

from ..source import epilogue, expr
from ..source.base import CSolver, both, layout_of
from ..source.emit import COMPUTE, EmittedLaunch, In, Out, Source

#: the numbers of elements of a work-item among which tuning chooses
CHUNKS = [1 << n for n in range(9, 18)]
#: The least elements of a work-item that is worth its launch: for cheap operations, which move bytes, and for costly
#: ones.
LEAST, LEAST_COSTLY = 1 << 14, 1 << 12
_CHEAP = frozenset({
    "Abs", "Add", "And", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "CastLike", "Ceil", "Clip",
    "Equal", "Floor", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "IsInf", "IsNaN", "LeakyRelu", "Less",
    "LessOrEqual", "Max", "Min", "Mul", "Neg", "Not", "Or", "PRelu", "Relu", "Round", "Sign", "Sub", "Sum", "Where",
    "Xor",
})  # fmt: skip
#: The most work-items in a dimension of the grid (a larger grid is compiled again).
MOST_ITEMS = 65535


class Elementwise(CSolver):
    """Element-wise operations on shapes that broadcast. In a blocked layout the physical shapes broadcast."""

    family = "elementwise"
    ops = frozenset(expr.EXPRESSIONS)
    layouts = frozenset({PLAIN.name, "blocked"})
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if problem.inputs[0] is None:
            return "the first input is absent"
        main = main_type(problem).dtype
        reason = expr.why_not(problem.op, _dtypes(problem), main, problem.attrs) or epilogue.why_not_steps(problem)
        if reason is None and layout_of(problem.outputs[0]) != PLAIN:
            reason = epilogue.divides(problem)
        return reason or next((r for i in _operands(problem) if (r := _misfit(problem, i))), None)

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({"chunk": CHUNKS, "interleave": [0, 1, 2, 4]})

    def default(self, problem: Problem, target: Target) -> Config:
        """Four work-items for each unit, as long as each has enough elements."""
        ops = [problem.op, *(step.op for step in problem.epilogue)]
        least = LEAST if all(op in _CHEAP for op in ops) else LEAST_COSTLY
        wanted = greater(math.prod(tensor(problem.outputs[0]).physical) // (4 * target.units), least)
        return {"chunk": max(c for c in CHUNKS if c <= wanted), "interleave": 0}

    def packings(self, problem: Problem, config: Config, target: Target) -> Mapping[int, Packing]:
        """Fills constants per channel up to whole blocks."""
        out = tensor(problem.outputs[0])
        pack = partial(_in_blocks, layout=out.layout, rank=len(out.dims))
        key = f"elementwise.{out.layout}.{len(out.dims)}"
        return {i: Packing(key, pack) for i in _operands(problem) if _incomplete(problem, i)}

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        source = Source("elementwise", self.specialise)
        walk = Walk.of(problem)
        operands = [BroadcastOperand(source, problem, i, strides) for i, strides in walk.strides.items()]
        out = tensor(problem.outputs[0])
        source.buffer("y", out.dtype, Out())
        for operand in operands:
            if operand.fixed:
                source.add(operand.read("0"))
        body = _body(source, problem, {o.index: o for o in operands})
        exponent = next((o for i in _exponents(problem) for o in operands if o.index == i and o.fixed), None)
        loop = InnerLoop(body, int(config["interleave"]), out.layout.block == walk.dims[-1], exponent)
        grid = (_flat if len(walk.dims) == 1 else _rows)(source, walk, int(config["chunk"]), operands, loop)
        return [source.call(grid)]


# -- shapes -----------------------------------------------------------------------------------------------------------
def _operands(problem: Problem) -> list[int]:
    """The inputs whose elements the kernel reads."""
    count = len(problem.main_inputs)
    read = set(expr.used(problem.op, range(count)))
    for step in problem.epilogue:
        read.update(i for i in expr.used(step.op, step.args) if i >= 0)
    return [i for i in sorted(read) if problem.inputs[i] is not None]


def _exponents(problem: Problem) -> list[int]:
    """The inputs that are exponents of Pow."""
    steps = [(problem.op, range(len(problem.main_inputs))), *((step.op, step.args) for step in problem.epilogue)]
    return [args[1] for op, args in steps if op == "Pow" and args[1] >= 0]


def _dtypes(problem: Problem) -> expr.Types:
    return [None if t is None else tensor(t).dtype for t in problem.main_inputs]


def _misfit(problem: Problem, i: int) -> str | None:
    """Why operand i cannot be read along with the result's memory, else None."""
    type, out = tensor(problem.inputs[i]), tensor(problem.outputs[0])
    if type.shape is None or out.shape is None:
        return None if type.layout == out.layout else f"the layout of {type} is not that of the result"
    if all(d == 1 for d in type.shape):
        return None
    padded = _padded(type, len(out.shape))
    if len(padded) != len(out.shape) or (
        type.is_static and out.is_static and any(d not in (1, n) for d, n in zip(padded, out.shape, strict=True))
    ):
        return f"{type} does not broadcast to {out}"
    if out.layout == PLAIN:
        return None if type.layout == PLAIN else f"the layout of {type} is not that of the result"
    if type.layout == out.layout:
        same = len(type.shape) == len(out.shape) and type.shape[1] == out.shape[1]
        return None if same else f"{type} has other channels than {out}"
    if type.layout != PLAIN:
        return f"the layout of {type} is not that of the result"
    channels = padded[1]
    if channels == 1:
        return None
    if any(d != 1 for d in padded[2:]):
        return f"{type} varies over channels and positions, but not in the layout of the result"
    if isinstance(channels, WHOLE) and channels % out.layout.block and not problem.constant[i]:
        return f"the channels of {type} are no whole blocks"
    return None


def _padded(type: TensorType, rank: int) -> tuple[int | str | None, ...]:
    """The shape with leading ones up to a rank, or without surplus leading ones."""
    shape = tuple(type.shape or ())
    while len(shape) > rank and shape[0] == 1:
        shape = shape[1:]
    return (1,) * (rank - len(shape)) + shape


def _incomplete(problem: Problem, i: int) -> bool:
    """Whether input i is a plain operand per channel of a blocked result whose last block is not full."""
    type, out = tensor(problem.inputs[i]), tensor(problem.outputs[0])
    if type.layout == out.layout or type.size == 1:
        return False
    channels = _padded(type, len(out.dims))[1]
    return isinstance(channels, WHOLE) and channels != 1 and channels % out.layout.block != 0


def _in_blocks(array: Array, layout: Layout, rank: int) -> Array:
    array = array.reshape((1,) * (rank - array.ndim) + array.shape)
    blocks: Array = from_plain(array, TensorType(TensorType.of(array).dtype, array.shape, layout))
    return blocks


def _view(problem: Problem, i: int) -> tuple[int, ...]:
    """The shape in which an operand's memory broadcasts to the result's physical shape."""
    type, out = tensor(problem.inputs[i]), tensor(problem.outputs[0])
    if type.size == 1:
        return (1,) * len(out.physical)
    if type.layout == out.layout != PLAIN:
        return type.physical
    padded = tuple(d for d in _padded(type, len(out.dims)) if isinstance(d, WHOLE))
    if out.layout == PLAIN:
        return padded
    return (*padded, 1) if padded[1] == 1 else out.layout.physical(padded)


@dataclass(frozen=True)
class Walk:
    """How a kernel loops over the elements: merged dimensions, and each operand's strides (0: it is repeated)."""

    dims: tuple[int, ...]
    strides: Mapping[int, tuple[int, ...]]

    @staticmethod
    def of(problem: Problem) -> Walk:
        shape = tensor(problem.outputs[0]).physical
        indices = _operands(problem)
        strides = [_strides(_view(problem, i)) for i in indices]
        merged: list[tuple[int, list[int]]] = []
        for n, *steps in zip(shape, *strides, strict=True):
            if n == 1:
                continue
            if merged and all(above == n * step for above, step in zip(merged[-1][1], steps, strict=True)):
                merged[-1] = (merged[-1][0] * n, steps)
            else:
                merged.append((n, steps))
        if not merged:
            merged.append((1, [0] * len(indices)))
        if len(merged) == 2:
            merged.insert(0, (1, [0] * len(indices)))  # Two and three dimensions share one text.
        return Walk(
            tuple(n for n, _ in merged), {i: tuple(steps[k] for _, steps in merged) for k, i in enumerate(indices)}
        )


def _strides(shape: Sequence[int]) -> list[int]:
    """Strides of contiguous memory, with 0 for dimensions of size one."""
    return [0 if n == 1 else math.prod(shape[k + 1 :]) for k, n in enumerate(shape)]


# -- text -------------------------------------------------------------------------------------------------------------
class BroadcastOperand:
    """How the kernel reads one operand. In the text, ``o`` + index is where its row begins, ``s`` + index a fixed
    value."""

    def __init__(self, source: Source, problem: Problem, index: int, strides: Sequence[int]) -> None:
        self.source, self.index, self.strides = source, index, strides
        self.dtype = tensor(problem.inputs[index]).dtype
        #: fixed: one value for all elements; repeated: one value for all elements of a row
        self.fixed = not any(strides)
        self.repeated = strides[-1] == 0
        source.buffer(f"x{index}", self.dtype, In(index))

    def read(self, at: str) -> str:
        """The statement that reads a value which stays fixed."""
        return f"{COMPUTE[self.dtype]} s{self.index} = {self.source.load(f'x{self.index}', at)};"

    def declare(self, at: str) -> str:
        """The statement in front of a row that begins at ``at``."""
        return self.read(at) if self.repeated else f"int o{self.index} = {at};"

    def load(self, flat: bool) -> str:
        """The expression of the element in the innermost loop."""
        if self.repeated:
            return f"s{self.index}"
        return self.source.load(f"x{self.index}", "i" if flat else f"o{self.index} + i")


def _body(source: Source, problem: Problem, operands: Mapping[int, BroadcastOperand]) -> str:
    """The statements for one element."""
    dtypes = step_dtypes(problem)
    assert not isinstance(dtypes, str), dtypes
    flat = all(len(o.strides) == 1 for o in operands.values())
    lines: list[str] = []
    args: list[str | None] = []
    for i in expr.used(problem.op, range(len(problem.main_inputs))):
        if i in operands:
            lines.append(f"{COMPUTE[operands[i].dtype]} a{i} = {operands[i].load(flat)};")
        args.append(f"a{i}" if i in operands else None)
    main = expr.expression(problem.op, args, _dtypes(problem), dtypes[0], problem.attrs)
    lines.append(f"{COMPUTE[dtypes[0]]} v = {main};")
    steps, result = epilogue.chain(problem, dtypes, "v", lambda i: operands[i].load(flat))
    lines += [steps, source.store("y", "i" if flat else "o + i", result)]
    return "\n".join(line for line in lines if line)


@dataclass(frozen=True)
class InnerLoop:
    """The innermost loop. ``block``: it covers one block of channels, a vector. ``exponent``: the operand of all powers
    whose exponent is one value for all elements, if any."""

    body: str
    interleave: int
    block: bool
    exponent: BroadcastOperand | None

    def text(self, begin: str, end: str) -> str:
        hint = f"interleave_count({self.interleave})" if self.interleave else ""
        if self.block:
            hint = "vectorize(enable) unroll(disable)"
        pragma = f'_Pragma("clang loop {hint}")\n' if hint else ""
        loop = f"{pragma}for (int i = {begin}; i < {end}; i++) {{\n{self.body}\n}}"
        if self.exponent is None:
            return loop
        # Squares and roots get separate loops, in which the exponent is a constant.
        name, kind = f"s{self.exponent.index}", COMPUTE[self.exponent.dtype]
        known = [v for v in ("2", "0.5f") if kind.startswith("f") or v.isdigit()]
        return "".join(f"if ({name} == {v}) {{\nconst {kind} {name} = {v};\n{loop}\n}} else " for v in known) + loop


def _flat(source: Source, walk: Walk, chunk: int, operands: Sequence[BroadcastOperand], loop: InnerLoop) -> list[int]:
    """Writes a kernel in which all elements are one row."""
    size = walk.dims[0]
    chunk = greater(chunk, -(-size // MOST_ITEMS))
    source.dims(N=size, CHUNK=chunk)
    source.add("int begin = GID(0) * CHUNK, end = N - begin > CHUNK ? begin + CHUNK : N;")
    source.add(loop.text("begin", "end"))
    return [-(-size // chunk)]


def _rows(source: Source, walk: Walk, chunk: int, operands: Sequence[BroadcastOperand], loop: InnerLoop) -> list[int]:
    """Writes a kernel in which a work-item computes a part of the innermost dimension in several rows."""
    *outer, middle, inner = walk.dims
    rows = math.prod(outer) * middle
    part = chunk if inner >= 2 * chunk else inner
    part = greater(part, -(-inner // MOST_ITEMS))
    count = greater(chunk // greater(part, 1), 1, -(-rows // MOST_ITEMS))
    source.dims(ROWS=rows, COUNT=count, M=middle)
    if loop.block:
        source.fixed(N=inner)
    else:
        source.dims(N=inner, PART=part)
        source.add("int begin = GID(0) * PART, end = N - begin > PART ? begin + PART : N;")
    for k, n in enumerate(outer):
        source.dims(**{f"D{k}": n})
    for operand in operands:
        source.dims(**{f"S{operand.index}_{k}": s for k, s in enumerate(operand.strides[:-1]) if not operand.fixed})
    source.add("int row = GID(1) * COUNT, last = ROWS - row > COUNT ? row + COUNT : ROWS;")
    source.add("while (row < last) {")
    source.add("int m = row % M, rest = row / M, stop = M - m < last - row ? M : m + last - row, o = row * N;")
    source.add("row += stop - m;")
    for k in reversed(range(1, len(outer))):
        source.add(f"int i{k} = rest % D{k}; rest /= D{k};")
    source.add("int i0 = rest;")
    moving = [operand for operand in operands if not operand.fixed]
    for operand in moving:
        at = " + ".join(f"i{k} * S{operand.index}_{k}" for k in range(len(outer)))
        source.add(f"int b{operand.index} = {at};")
    source.add("for (; m < stop; m++, o += N) {")
    for operand in moving:
        source.add(operand.declare(f"b{operand.index} + m * S{operand.index}_{len(outer)}"))
    source.add(loop.text("0", "N") if loop.block else loop.text("begin", "end"))
    source.add("}\n}")
    return [-(-inner // part) if part else 0, -(-rows // count)]


SOLVERS = both(Elementwise)
