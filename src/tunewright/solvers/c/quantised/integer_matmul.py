"""Matrix products of 8-bit integers, exact in 32 bits, with the steps that may follow: requantisation, scales, bias.

There are at most three launches. Rows are widened to 16 bits and centred (`_widen`); columns are packed, unless they
are constant (`_pack`); then `_multiply` computes register tiles. A single row is widened inside `_multiply`, which
saves a launch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import numpy as np

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater
from tunewright.ir.types import DType
from tunewright.search.space import Space
from tunewright.solvers.base import Array, Config, Packing, Problem, tensor

from ..source import epilogue
from ..source.base import CSolver, both
from ..source.emit import ConstantTable, EmittedLaunch, In, Scratch, Source
from .integer_product import (
    BYTES,
    DEEPEST,
    LEAST_WORK,
    MS,
    ROLES,
    Finish,
    Roles,
    Sums,
    Weights,
    packed,
    present,
    tile_of,
    tile_space,
)
from .quantize import LEAST, dynamic_quantize

DYNAMIC, GEMM, SHORT = MS + "DynamicQuantizeMatMul", MS + "QGemm", MS + "MatMulInteger16"


class IntegerMatMul(CSolver):
    """MatMulInteger and related operations, which multiply integers and may scale the sums."""

    family = "integer_matmul"
    ops = frozenset({"MatMulInteger", "QLinearMatMul", MS + "MatMulIntegerToFloat", DYNAMIC, GEMM, SHORT})
    dtypes = BYTES | {DType.INT16, DType.INT32, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16}
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        roles = ROLES[problem.op]
        a, b = tensor(problem.inputs[roles.a]), tensor(problem.inputs[roles.b])
        wanted = {DType.INT16} if problem.op == SHORT else BYTES
        if (a.dtype not in wanted and problem.op != DYNAMIC) or b.dtype not in wanted:
            return f"does not multiply {a.dtype} and {b.dtype}"
        if problem.epilogue and roles.y_scale is not None:
            return "takes no epilogue behind quantised results"
        reason = epilogue.why_not(problem, -1)
        if reason is not None or not problem.is_static:
            return reason
        shape = IntegerMatmulShape(problem)
        if roles.b_scale is not None and shape.depth > DEEPEST:
            return f"sums of {shape.depth} products may not fit into 32 bits"
        columns = {"b_zero": roles.b_zero, "b_scale": roles.b_scale, "addend": roles.addend, "shift": roles.shift}
        for name, i in columns.items():
            type = present(problem, i)
            if type is not None and type.size not in (1, shape.columns):
                return f"{name} {type} is neither one number nor one per column"
            if type is not None and type.size > 1 and (type.dims[-1] != shape.columns):
                return f"{name} {type} does not lie along the columns"
        for i in (roles.a_zero, roles.a_scale, roles.y_scale, roles.y_zero):
            type = present(problem, i)
            if type is not None and type.size > 1 and (type.size != shape.rows or problem.op.startswith(MS)):
                return f"{type} is neither one number nor one per row"
            if type is not None and type.size > 1 and shape.batches > 1:
                return f"{type} is not one number"
        return None

    def space(self, problem: Problem, target: Target) -> Space:
        return tile_space(target)

    def default(self, problem: Problem, target: Target) -> Config:
        if not problem.is_static:
            return {"rows": 6, "blocks": 2, "run": 1}
        shape = IntegerMatmulShape(problem)
        rows, blocks = tile_of(shape.rows, shape.columns, target)
        width = blocks * (target.vector_bytes // 4)
        tile, run = rows * width * greater(shape.depth, 1), 1
        tiles = shape.batches * -(-shape.rows // rows) * -(-shape.columns // width)
        while run < 32 and tile * run < LEAST_WORK and tiles >= 4 * target.units * run:
            run *= 2
        return {"rows": rows, "blocks": blocks, "run": run}

    def packings(self, problem: Problem, config: Config, target: Target) -> Mapping[int, Packing]:
        roles = ROLES[problem.op]
        weights = Weights.of(problem, roles)
        if not weights.constant:
            return {}
        width, blocks = target.vector_bytes // 4, int(config["blocks"])
        turned = bool(problem.attrs.get("transB", 0))
        zero = "" if weights.zero is None else f" - {weights.zero.tolist()}"
        key = f"integer columns{zero} {weights.dtype} {width} {blocks} {turned}"
        return {roles.b: Packing(key, partial(_packed, weights=weights, width=width, blocks=blocks, turned=turned))}

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        roles, shape = ROLES[problem.op], IntegerMatmulShape(problem)
        weights = Weights.of(problem, roles)
        width, blocks = target.vector_bytes // 4, int(config["blocks"])
        if not math.prod((shape.rows, shape.columns, shape.batches)):
            return []
        calls: list[EmittedLaunch] = []
        a: In | Scratch = In(roles.a)
        zero: In | Scratch | None = None if present(problem, roles.a_zero) is None else In(roles.a_zero or 0)
        dtype, scale = tensor(problem.inputs[roles.a]).dtype, None
        if problem.op == DYNAMIC:
            size = tensor(problem.inputs[0]).size
            a, scale, zero = Scratch("quantised", size), Scratch("a_scale", 4), Scratch("a_zero", 1)
            dtype = DType.UINT8
            calls += dynamic_quantize(size, LEAST, target, self.specialise, (a, scale, zero), flat=1.0)
        if shape.rows > 1 or shape.batches > 1 or dtype is DType.INT16:
            calls.append(self._widen(problem, shape, a, zero, dtype, weights))
            a, dtype = Scratch("rows", 2 * shape.a_batches * shape.rows * shape.pitch), DType.INT16
        b: In | Scratch = In(roles.b)
        if not weights.constant:
            tiles = shape.b_batches * -(-shape.columns // (width * blocks))
            b = Scratch("columns", tiles * (shape.pitch // 2) * blocks * width * 2 * weights.dtype.itemsize)
            calls.append(self._pack(problem, shape, roles, weights, b, width, blocks))
        calls.append(self._multiply(problem, shape, weights, (a, dtype, zero), b, scale, config, target))
        return calls

    def _widen(
        self,
        problem: Problem,
        shape: IntegerMatmulShape,
        a: In | Scratch,
        zero: In | Scratch | None,
        dtype: DType,
        weights: Weights,
    ) -> EmittedLaunch:
        """The launch that writes rows as 16-bit numbers minus their zero point, in even number, and their sums."""
        source = Source("widen", self.specialise)
        source.buffer("a", dtype, a)
        by_row = "0"
        if zero is not None:
            source.buffer("zero", dtype, zero)
            type = present(problem, ROLES[problem.op].a_zero)
            by_row = "row" if type is not None and type.size > 1 else "0"
        rows = shape.a_batches * shape.rows
        source.buffer("rows", DType.INT16, Scratch("rows", 2 * rows * shape.pitch))
        if weights.pending:
            source.buffer("row_sums", DType.INT32, Scratch("row_sums", 4 * rows))
        turned = bool(problem.attrs.get("transA", 0))
        least = greater(1, LEAST // greater(shape.depth, 1))
        source.dims(HEIGHT=rows, DEPTH=shape.depth, PITCH=shape.pitch, LEAST=least)
        source.add(f"""
int begin = GID(0) * LEAST, end = begin + LEAST < HEIGHT ? begin + LEAST : HEIGHT;
for (int row = begin; row < end; row++) {{
  GLOBAL i16* out = rows + row * PITCH;
  i32 z = {"0" if zero is None else f"zero[{by_row}]"}, sum UNUSED = 0;
  for (int k = 0; k < DEPTH; k++) {{
    i32 value = a[{"k * HEIGHT + row" if turned else "row * DEPTH + k"}] - z;
    out[k] = (i16)value;
    sum += value;
  }}
  if (DEPTH < PITCH) out[DEPTH] = 0;
  {"row_sums[row] = sum;" if weights.pending else ""}
}}""")
        return source.call([-(-rows // least)])

    def _pack(
        self,
        problem: Problem,
        shape: IntegerMatmulShape,
        roles: Roles,
        weights: Weights,
        b: Scratch,
        width: int,
        blocks: int,
    ) -> EmittedLaunch:
        """The launch that packs columns in tiles of [steps][columns][2], minus their zero points."""
        source = Source("pack", self.specialise)
        source.buffer("b", tensor(problem.inputs[roles.b]).dtype, In(roles.b))
        zero, at = present(problem, roles.b_zero), "0"
        if zero is not None:
            source.buffer("zero", zero.dtype, In(roles.b_zero or 0))
            at = "column" if zero.size > 1 else "0"
        source.buffer("out", weights.dtype, b)
        tiles = -(-shape.columns // (width * blocks))
        source.fixed(TILE=width * blocks)
        source.dims(DEPTH=shape.depth, STEPS=shape.pitch // 2, WIDTH=shape.columns, TILES=tiles)
        index = "column * DEPTH + k" if problem.attrs.get("transB", 0) else "k * WIDTH + column"
        source.add(f"""
int tile = GID(0), first = GID(1) * DEPTH * WIDTH, to = (GID(1) * TILES + tile) * STEPS * TILE * 2;
for (int k = 0; k < 2 * STEPS; k++)
  for (int j = 0; j < TILE; j++) {{
    int column = tile * TILE + j;
    bool there = k < DEPTH && column < WIDTH;
    i32 value = there ? b[first + {index}]{f" - zero[{at}]" if zero is not None else ""} : 0;
    out[to + ((k >> 1) * TILE + j) * 2 + (k & 1)] = value;
  }}""")
        return source.call([tiles, shape.b_batches])

    def _multiply(
        self, problem: Problem, shape: IntegerMatmulShape, weights: Weights,
        rows: tuple[In | Scratch, DType, In | Scratch | None], b: In | Scratch, scale: Scratch | None,
        config: Config, target: Target,
    ) -> EmittedLaunch:  # fmt: skip
        roles = ROLES[problem.op]
        source = Source("integer_matmul", self.specialise)
        a, dtype, zero = rows
        source.buffer("a", dtype, a)
        source.buffer("b", weights.dtype, b)
        direct = dtype is not DType.INT16
        if direct and zero is not None:
            source.buffer("a_zero", dtype, zero)
        if weights.pending and not direct:
            source.buffer("row_sums", DType.INT32, Scratch("row_sums", 4 * shape.a_batches * shape.rows))
        finish = Finish(source, problem, roles, weights, scale)
        height, count, run = int(config["rows"]), int(config["blocks"]), int(config["run"])
        Sums(source, weights, height, count, target)
        tile = count * (target.vector_bytes // 4)
        row_tiles, column_tiles = -(-shape.rows // height), -(-shape.columns // tile)
        # A work-item computes several tiles of rows, or of columns where there are few rows.
        tall = row_tiles >= run
        run = greater(run, -(-(row_tiles if tall else column_tiles) // 16384))
        source.dims(HEIGHT=shape.rows, WIDE=shape.columns, DEPTH=shape.depth, STEPS=shape.pitch // 2, RUN=run)
        source.dims(ROW_TILES=row_tiles, COLUMN_TILES=column_tiles)
        batched = shape.batches > 1
        if batched:
            for name, matrices in zip(("a_batch", "b_batch"), shape.indices, strict=True):
                source.buffer(name, DType.INT32, ConstantTable(matrices))
        body = _direct(zero is not None, weights.pending) if direct else _widened(batched)
        sum_of = "row_sum" if direct else f"row_sums[{'a_batch[GID(2)] * HEIGHT + ' if batched else ''}row]"
        index = f"{'GID(2) * HEIGHT * WIDE + ' if batched else ''}row * WIDE + column"
        grid = [-(-row_tiles // run) if tall else row_tiles, column_tiles if tall else -(-column_tiles // run)]
        source.add(f"""
for (int run = 0; run < RUN; run++) {{
int row_tile = GID(0){" * RUN + run" if tall else ""}, column_tile = GID(1){"" if tall else " * RUN + run"};
if (row_tile >= ROW_TILES || column_tile >= COLUMN_TILES) break;
int top = row_tile * ROWS, left = column_tile * COLUMNS;
int packed = {"b_batch[GID(2)] * COLUMN_TILES + " if batched else ""}column_tile;
GLOBAL const WEIGHT* w = b + packed * STEPS * COLUMNS * 2;
{Sums.begin}
{body}
{Sums.end}
int bottom = HEIGHT - top < ROWS ? HEIGHT - top : ROWS, right = WIDE - left < COLUMNS ? WIDE - left : COLUMNS;
for (int u = 0; u < bottom; u++) {{
  int row = top + u;
  for (int j = 0; j < right; j++) {{
    int column = left + j;
    {finish.store("sums[u * COLUMNS + j]", index, sum_of)}
  }}
}}
}}""")
        return source.call([*grid, *([shape.batches] if batched else [])])


def _widened(batched: bool) -> str:
    first = "a_batch[GID(2)] * HEIGHT * STEPS" if batched else "0"
    return f"""
GLOBAL const i32* pairs[ROWS];
for (int u = 0; u < ROWS; u++)
  pairs[u] = (GLOBAL const i32*)a + {first} + (top + u < HEIGHT ? top + u : HEIGHT - 1) * STEPS;
for (int s = 0; s < STEPS; s++) {{
  {Sums.step("pairs[u][s]")}
}}"""


def _direct(zero: bool, sum: bool) -> str:
    """Statements for a single row: they centre and pair its numbers as they read them."""
    count = "row_sum += low + high;" if sum else ""
    return f"""
i32 z = {"*a_zero" if zero else "0"}, row_sum UNUSED = 0;
for (int s = 0; s < DEPTH / 2; s++) {{
  i32 low = a[2 * s] - z, high = a[2 * s + 1] - z, pair = (low & 0xffff) | (i32)((u32)high << 16);
  {count}
  {Sums.step("pair")}
}}
if (DEPTH % 2) {{
  i32 low = a[DEPTH - 1] - z, high UNUSED = 0, pair = low & 0xffff;
  {count}
  {Sums.step("pair")}
}}"""


def _packed(b: Array, weights: Weights, width: int, blocks: int, turned: bool) -> Array:
    b = b.T if turned else b
    if weights.zero is not None:
        b = b.astype(np.int32) - weights.zero.astype(np.int32)
    return packed(b.astype(weights.dtype.numpy), width, blocks)


class IntegerMatmulShape:
    """The sizes of a static problem. Rows of several matrices against the same columns count as rows of one matrix."""

    def __init__(self, problem: Problem) -> None:
        roles = ROLES[problem.op]
        a, b, out = tensor(problem.inputs[roles.a]), tensor(problem.inputs[roles.b]), tensor(problem.outputs[0])
        left = a.dims if len(a.dims) > 1 else (1, *a.dims)
        right = b.dims if len(b.dims) > 1 else (*b.dims, 1)
        left = left[::-1] if problem.attrs.get("transA", 0) else left
        right = right[::-1] if problem.attrs.get("transB", 0) else right
        self.depth, self.columns = left[-1], right[-1]
        self.pitch = self.depth + self.depth % 2
        self._leads = left[:-2], right[:-2]
        self.a_batches, self.b_batches = map(math.prod, self._leads)
        is_shared = self.b_batches == 1 and len(right) <= len(left)  # else numpy asks for plain numbers
        self._lead = left[:-2] if is_shared else np.broadcast_shapes(*self._leads)
        self.batches, self.rows = math.prod(self._lead), left[-2]
        if self.b_batches == 1:
            self.rows, self.a_batches, self.batches = self.rows * self.batches, 1, 1
        assert self.batches * self.rows * self.columns == out.size

    @property
    def indices(self) -> list[Array]:
        """For each matrix of the result, which one of a and which one of b it is made of."""
        numbered = [np.arange(math.prod(dims), dtype=np.int32).reshape(dims) for dims in self._leads]
        return [np.ascontiguousarray(np.broadcast_to(one, self._lead).reshape(-1)) for one in numbered]


SOLVERS = both(IntegerMatMul)
