"""The parts that integer convolutions and matrix products share: a register tile of exact sums, packed weights, and the
final steps.

The sum runs over *steps* of two. A step takes two neighbouring 16-bit numbers of each row and two numbers of each
column. It multiplies them in pairs and adds the two products to a 32-bit sum, in one instruction where the processor
has one (`PAIRS`). Columns lie in the lanes of vectors. The zero points of rows are subtracted when rows are widened to
16 bits. Those of columns are subtracted when columns are packed, or, if not known then, through the sums of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tunewright.devices.base import Target
from tunewright.ir.types import DType, TensorType
from tunewright.search.space import Space
from tunewright.solvers.base import Array, Problem, tensor

from ..source import dot, epilogue
from ..source.emit import STORAGE, In, Out, Scratch, Source
from .quantize import TO_INTEGER, to_integer

MS = "com.microsoft::"
BYTES = frozenset({DType.INT8, DType.UINT8})
#: The most products of bytes whose sum always fits into 32 bits (sums that are scaled must not wrap).
DEEPEST = (2**31 - 1) // 255**2
#: the least number of multiplications of a work-item
LEAST_WORK = 1 << 18

#: B: the bytes (or shorts) of a vector of pairs in packed weights
PAIRS = """
vector_of(WEIGHT, 2 * WIDTH, B);
typedef B BU __attribute__((aligned(1)));
INLINE P both_of(i32 pair) { V v = pair; return CAST_BITS(v, P); }
INLINE P weights_at(GLOBAL const WEIGHT* w) { return __builtin_convertvector(*(GLOBAL const BU*)w, P); }
"""


@dataclass(frozen=True)
class Roles:
    """The role of each input. ``a`` has the rows and is widened, ``b`` has the columns and is packed."""

    a: int
    b: int
    a_zero: int | None = None
    b_zero: int | None = None
    a_scale: int | None = None
    b_scale: int | None = None
    y_scale: int | None = None
    y_zero: int | None = None
    #: integers added to the sums, one per column
    addend: int | None = None
    #: floats added to the scaled sums, one per column
    shift: int | None = None


ROLES = {
    "MatMulInteger": Roles(0, 1, 2, 3),
    "ConvInteger": Roles(0, 1, 2, 3),
    "QLinearMatMul": Roles(0, 3, 2, 5, 1, 4, 6, 7),
    "QLinearConv": Roles(0, 3, 2, 5, 1, 4, 6, 7, 8),
    MS + "QLinearConv": Roles(0, 3, 2, 5, 1, 4, 6, 7, 8),
    MS + "MatMulIntegerToFloat": Roles(0, 1, 4, 5, 2, 3, shift=6),
    MS + "DynamicQuantizeMatMul": Roles(0, 1, None, 3, None, 2, shift=4),
    MS + "QGemm": Roles(0, 3, 2, 5, 1, 4, 7, 8, 6),
    MS + "MatMulInteger16": Roles(0, 1),
}


def present(problem: Problem, i: int | None) -> TensorType | None:
    """The type of an input, or None if it is absent."""
    return None if i is None or problem.input(i) is None else tensor(problem.input(i))


@dataclass(frozen=True)
class Weights:
    """How the columns are packed: their element type, and whether their zero points are subtracted already."""

    dtype: DType
    #: zero points that are known, and are subtracted when packing
    zero: Array | None
    #: whether zero points are still to be subtracted when the kernel runs
    pending: bool
    #: whether the host packs the columns, once
    constant: bool

    @staticmethod
    def of(problem: Problem, roles: Roles) -> Weights:
        b = tensor(problem.inputs[roles.b])
        zero = None if present(problem, roles.b_zero) is None else roles.b_zero
        if not problem.constant[roles.b]:  # The packing kernel subtracts the zero points.
            return Weights(b.dtype if zero is None else DType.INT16, None, False, False)
        if zero is None:
            return Weights(b.dtype, None, False, True)
        value = problem.value(zero)
        if value is None:
            return Weights(b.dtype, None, True, True)
        if not value.any():
            return Weights(b.dtype, None, False, True)
        fits = b.dtype is DType.UINT8 and bool((value == 128).all())
        return Weights(DType.INT8 if fits else DType.INT16, value, False, True)


def packed(b: Array, width: int, blocks: int) -> Array:
    """Columns [..., steps * 2, N] as [..., tiles, steps, blocks, width, 2], filled up with zeros."""
    *lead, depth, columns = b.shape
    tile = width * blocks
    b = np.pad(b, [*((0, 0) for _ in lead), (0, depth % 2), (0, -columns % tile)])
    b = b.reshape(*lead, -1, 2, b.shape[-1] // tile, blocks, width)
    return np.ascontiguousarray(np.moveaxis(np.moveaxis(b, -3, len(lead)), -3, -1))


def tile_space(target: Target) -> Space:
    """The rows and vectors of columns of a register tile, and the tiles of a work-item."""
    most = target.registers
    return Space(
        {"rows": [1, 2, 3, 4, 5, 6, 8, 12], "blocks": [1, 2, 3, 4], "run": [1, 2, 4, 8, 16, 32]},
        lambda c: int(str(c["rows"])) * int(str(c["blocks"])) + int(str(c["blocks"])) < most,
    )


def tile_of(rows: int, columns: int, target: Target) -> tuple[int, int]:
    """Rows and blocks of the default tile. There are few different tiles, so that few kernels are compiled."""
    width = target.vector_bytes // 4
    if rows == 1:
        return 1, 4
    if columns <= width:
        return 6, 1
    return 6, 4 if target.registers >= 32 and columns > 2 * width else 2


class Sums:
    """The register tile: declares the sums, adds a step, and leaves them in memory, `sums[row * COLUMNS + column]`."""

    def __init__(self, source: Source, weights: Weights, rows: int, blocks: int, target: Target) -> None:
        width = target.vector_bytes // 4
        source.fixed(ROWS=rows, BLOCKS=blocks, COLUMNS=width * blocks, WEIGHT=STORAGE[weights.dtype])
        dot.add_pairs(source, target)
        source.function(PAIRS)

    begin = """
V acc[ROWS][BLOCKS];
for (int u = 0; u < ROWS; u++)
  for (int v = 0; v < BLOCKS; v++) acc[u][v] = 0;"""

    @staticmethod
    def step(pair: str) -> str:
        """Statements that add the products of one step.

        ``pair`` is the expression of row u's two numbers; w points at the weights.
        """
        return f"""
P b[BLOCKS];
UNROLL for (int v = 0; v < BLOCKS; v++) b[v] = weights_at(w + v * 2 * WIDTH);
UNROLL for (int u = 0; u < ROWS; u++) {{
  P a = both_of({pair});
  UNROLL for (int v = 0; v < BLOCKS; v++) acc[u][v] += dot2(a, b[v]);
}}
w += COLUMNS * 2;"""

    end = """
V kept[ROWS][BLOCKS];  /* a copy, so that the sums themselves stay in registers */
UNROLL for (int u = 0; u < ROWS; u++)
  UNROLL for (int v = 0; v < BLOCKS; v++) kept[u][v] = acc[u][v];
const i32* sums = (const i32*)kept;"""


class Finish:
    """The final steps of a sum: the epilogue, a conversion to float, or quantisation."""

    def __init__(self, source: Source, problem: Problem, roles: Roles, weights: Weights, scale: Scratch | None = None):
        """``scale`` holds the scale of ``a`` where that is not an input."""
        self.source, self.problem, self.roles = source, problem, roles
        self.axis = 1 if "Conv" in problem.op else -1
        self.out = tensor(problem.outputs[0])
        self.epilogue = epilogue.Epilogue(source, problem, self.axis)
        self.names: dict[str, tuple[str, bool]] = {}
        for name in ("a_scale", "b_scale", "y_scale", "y_zero", "addend", "shift"):
            self._operand(name, getattr(roles, name))
        if weights.pending:
            self._operand("b_zero", roles.b_zero)
        if scale is not None:
            source.buffer("a_scale", DType.FLOAT32, scale)
            self.names["a_scale"] = ("0", False)
        source.buffer("y", self.out.dtype, Out())
        source.function(TO_INTEGER)

    def _operand(self, name: str, i: int | None) -> None:
        type = present(self.problem, i)
        if type is None or i is None:
            return
        self.source.buffer(name, type.dtype, In(i))
        by_row = name.startswith(("a_", "y_")) and self.axis == -1
        self.names[name] = ("0" if type.size == 1 else "row" if by_row else "column", type.size > 1)

    def _load(self, name: str) -> str:
        return self.source.load(name, self.names[name][0])

    def store(self, sum: str, offset: str, row_sum: str = "") -> str:
        """Statements that finish one sum and write it; the arguments are those of `value`."""
        text, value = self.value(sum, offset, row_sum)
        return f"{text}\n{self.source.store('y', offset, value)}"

    def value(self, sum: str, offset: str, row_sum: str = "") -> tuple[str, str]:
        """Statements that finish one sum, and the expression of the result, in the type that it is computed in.

        The text calls the indices ``row`` and ``column``. ``row_sum`` is the sum of the row's numbers, where zero
        points of columns are still pending.
        """
        total = sum
        if "b_zero" in self.names:
            total += f" - {self._load('b_zero')} * {row_sum}"
        if "addend" in self.names:
            total += f" + {self._load('addend')}"
        lines = [f"i32 total = {total};"]
        if "a_scale" not in self.names:
            text, value = self.epilogue.apply("total", "column", offset)
            return "\n".join([*lines, text]), value
        contrib = self.problem.op.startswith(MS)
        alpha = "ALPHA * " if "alpha" in self.problem.attrs else ""
        if alpha:
            self.source.numbers(ALPHA=float(self.problem.attrs["alpha"]))
        lines.append(f"f32 factor = {alpha}{self._load('a_scale')} * {self._load('b_scale')};")
        if "y_scale" not in self.names:
            lines.append("f32 value = (f32)total * factor;")
            if "shift" in self.names:
                lines.append(f"value += {self._load('shift')};")
            text, value = self.epilogue.apply("value", "column", offset)
            return "\n".join([*lines, text]), value
        lines.append(f"factor = factor / {self._load('y_scale')};")
        zero = f"(f32){self._load('y_zero')}" if "y_zero" in self.names else "0.0f"
        return "\n".join(lines), to_integer("(f32)total * factor", zero, self.out.dtype, contrib)
