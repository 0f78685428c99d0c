"""Products of a matrix of bytes with a constant one, four products per instruction (see `dot`).

There are two launches. The first writes rows as unsigned bytes, in whole quads, and sums them. The second computes
register tiles of UR rows and NB vectors of columns. x' and w' are the multiplied values, m is the number by which
unsigned weights were moved, and z' the zero point of the rows::

    sum (x - z) w = sum x' w' - z' sum w' + m sum (x - z)

Zero points of columns are subtracted with the sums of rows; then scales, bias and the other steps follow
(`integer_product.Finish`). While a slab of columns is multiplied with the first tiles of rows, the next slab is
prefetched (``ahead``): in a network weights come from memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater, lesser
from tunewright.ir.types import DType
from tunewright.search.space import Scalar, Space
from tunewright.solvers.base import Array, Config, Packing, Problem, tensor

from ..quantised.integer_matmul import GEMM, IntegerMatMul, IntegerMatmulShape
from ..quantised.integer_product import BYTES, LEAST_WORK, MS, ROLES, Finish, Weights, present
from ..quantised.quantize import LEAST
from ..source import dot
from ..source.base import CSolver, both
from ..source.byte_slabs import pack_columns
from ..source.emit import EmittedLaunch, In, Scratch, Source

#: the numbers of slabs of columns of a work-item
STAYS = (1, 2, 4, 8, 16, 32)
#: the most tiles of rows over which the prefetch of the next slab is spread
FETCHING = 4


class MatMulBytes(CSolver):
    """MatMulInteger and related operations with constant columns."""

    family = "matmul_bytes"
    version = "1.1"
    ops = frozenset({"MatMulInteger", "QLinearMatMul", MS + "MatMulIntegerToFloat", GEMM})
    dtypes = BYTES | {DType.INT32, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16}
    rank = 45

    def refuse(self, problem: Problem, target: Target) -> str | None:
        roles = ROLES[problem.op]
        if not dot.has_dot4(target):
            return "without an instruction for sums of four products pairs are faster"
        reason = _PLAIN.refuse(problem, target)
        if reason is not None:
            return reason
        if not problem.constant[roles.b] or problem.attrs.get("transA", 0):
            return "its columns are constant, and its rows lie in rows"
        zero = present(problem, roles.a_zero)
        if zero is not None and zero.size != 1:
            return "rows have one zero point"
        b = tensor(problem.inputs[roles.b])
        if b.rank != 2:
            return "takes one matrix of columns"
        return None

    def space(self, problem: Problem, target: Target) -> Space:
        shape, tiling = IntegerMatmulShape(problem), _tiling(problem, target)

        def allow(c: Mapping[str, Scalar]) -> bool:
            nb, ur, stay = (int(str(c[name])) for name in ("nb", "ur", "stay"))
            slab = nb * (target.vector_bytes // 4)
            return tiling.fits(nb, ur) and stay // 2 < greater(1, -(-shape.columns // slab))

        return Space({"nb": dot.BLOCKS, "ur": dot.ROWS, "stay": STAYS, "ahead": [0, 1]}, allow)

    def default(self, problem: Problem, target: Target) -> Config:
        if not problem.is_static:
            return {"nb": 2, "ur": 6, "stay": 1, "ahead": 1}
        shape = IntegerMatmulShape(problem)
        nb, ur = _tiling(problem, target).best()
        slab, stay = nb * (target.vector_bytes // 4), 1
        slabs = -(-shape.columns // slab)
        work = slab * greater(shape.depth * shape.rows, 1)
        while stay < STAYS[-1] and stay * work < LEAST_WORK and slabs >= 8 * stay * target.units:
            stay *= 2
        # With one tile of rows weights are streamed, which the processor prefetches without help.
        return {"nb": nb, "ur": ur, "stay": stay, "ahead": int(shape.rows > ur)}

    def packings(self, problem: Problem, config: Config, target: Target) -> Mapping[int, Packing]:
        slab, turned = int(config["nb"]) * (target.vector_bytes // 4), bool(problem.attrs.get("transB", 0))
        return {ROLES[problem.op].b: Packing(f"matmul bytes {slab} {turned}", partial(pack, slab=slab, turned=turned))}

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        roles, shape = ROLES[problem.op], IntegerMatmulShape(problem)
        if not math.prod((shape.rows, shape.columns)):
            return []
        quads = -(-shape.depth // 4)
        rows, sums = Scratch("rows", 4 * shape.rows * greater(quads, 1)), Scratch("row_sums", 4 * shape.rows)
        return [
            self._regroup(problem, shape, quads, rows, sums),
            self._multiply(problem, shape, quads, rows, sums, config, target, roles.b),
        ]

    def _regroup(
        self, problem: Problem, shape: IntegerMatmulShape, quads: int, rows: Scratch, sums: Scratch
    ) -> EmittedLaunch:
        roles = ROLES[problem.op]
        source = Source("matmul_bytes_regroup", self.specialise)
        type, zero = tensor(problem.inputs[roles.a]), present(problem, roles.a_zero)
        source.buffer("a", DType.UINT8, In(roles.a))
        if zero is not None:
            source.buffer("zero", DType.UINT8, In(roles.a_zero or 0))
        source.buffer("rows", DType.UINT8, rows)
        source.buffer("sums", DType.INT32, sums)
        least = greater(1, LEAST // greater(shape.depth, 1))
        source.fixed(FLIP=128 if type.dtype is DType.INT8 else 0)
        source.dims(HEIGHT=shape.rows, DEPTH=shape.depth, PITCH=4 * quads, LEAST=least)
        source.add(f"""
int begin = GID(0) * LEAST, end = begin + LEAST < HEIGHT ? begin + LEAST : HEIGHT;
i32 z = {"0" if zero is None else "*zero"} ^ FLIP;
for (int row = begin; row < end; row++) {{
  GLOBAL u8* out = rows + row * PITCH;
  i32 sum = 0;
  for (int k = 0; k < DEPTH; k++) {{
    u8 value = a[row * DEPTH + k] ^ FLIP;
    out[k] = value;
    sum += value;
  }}
  for (int k = DEPTH; k < PITCH; k++) out[k] = 0;
  sums[row] = sum - DEPTH * z;
}}""")
        return source.call([-(-shape.rows // least)])

    def _multiply(
        self, problem: Problem, shape: IntegerMatmulShape, quads: int, rows: Scratch, sums: Scratch,
        config: Config, target: Target, b: int,
    ) -> EmittedLaunch:  # fmt: skip
        roles = ROLES[problem.op]
        nb, ur, stay = (int(config[name]) for name in ("nb", "ur", "stay"))
        width, weights = target.vector_bytes // 4, tensor(problem.inputs[b])
        source = Source("matmul_bytes", self.specialise)
        source.buffer("a", DType.UINT8, rows)
        source.buffer("b", DType.INT8, In(b))
        source.buffer("row_sums", DType.INT32, sums)
        zero = present(problem, roles.a_zero)
        if zero is not None:
            source.buffer("a_zero", zero.dtype, In(roles.a_zero or 0))
        pending = present(problem, roles.b_zero) is not None
        finish = Finish(source, problem, roles, Weights(weights.dtype, None, pending, True))
        slabs = -(-shape.columns // (nb * width))
        stay = greater(stay, -(-slabs // 16384))
        source.fixed(NB=nb, UR=ur, MOVED=128 if tensor(problem.inputs[roles.a]).dtype is DType.INT8 else 0)
        source.fixed(WMOVED=128 if weights.dtype is DType.UINT8 else 0)
        fetching = lesser(FETCHING, -(-shape.rows // ur)) if config["ahead"] else 0
        source.dims(HEIGHT=shape.rows, WIDE=shape.columns, QUADS=quads, SLABS=slabs, STAY=stay)
        source.dims(FETCHED=fetching * ur, AHEAD=-(-4 * nb * width // fetching) if fetching else 0)
        source.fixed(FETCH=int(fetching > 0))
        source.function(dot.PREFETCH)
        dot.add(source, target)
        source.function("typedef i32 QUAD __attribute__((aligned(1)));")
        source.add(f"i32 z = {'0' if zero is None else '*a_zero'} + MOVED;")
        text, value = finish.value("sum", "at", "row_sums[row]")
        source.add(_MULTIPLY.replace("FINISH;", f"{text}\n{source.store('y', 'at', value)}"))
        return source.call([-(-slabs // stay)])


_PLAIN = IntegerMatMul()


def _tiling(problem: Problem, target: Target) -> dot.Tiling:
    shape = IntegerMatmulShape(problem)
    blocks = -(-shape.columns // (target.vector_bytes // 4))
    return dot.Tiling(greater(blocks, 1), greater(shape.rows, 1), target.registers)


def pack(b: Array, slab: int, turned: bool) -> Array:
    """Packs K N, or N K if ``turned``, in slabs of columns."""
    return pack_columns([b.T if turned else b], slab)


# Rows beyond the last repeat it and are not stored.
_MULTIPLY = """
int s_end = (GID(0) + 1) * STAY < SLABS ? (GID(0) + 1) * STAY : SLABS;
for (int slab = GID(0) * STAY; slab < s_end; slab++) {
int left = slab * NB * WIDTH, right = WIDE - left < NB * WIDTH ? WIDE - left : NB * WIDTH;
GLOBAL const i32* weights = (GLOBAL const i32*)(b + SLABS * QUADS * 4 * NB * WIDTH) + left;
GLOBAL const i8* next = b + (slab + 1 < SLABS ? slab + 1 : slab) * QUADS * 4 * NB * WIDTH;
for (int top = 0; top < HEIGHT; top += UR) {
  int ahead = top < FETCHED ? AHEAD : 0;
  GLOBAL const i8* wp = b + slab * QUADS * 4 * NB * WIDTH;
  GLOBAL const u8* ap[UR];
  UNROLL for (int u = 0; u < UR; u++) ap[u] = a + (top + u < HEIGHT ? top + u : HEIGHT - 1) * (QUADS * 4);
  V acc[NB][UR];
  UNROLL for (int v = 0; v < NB; v++) UNROLL for (int u = 0; u < UR; u++) acc[v][u] = 0;
  for (int q = 0; q < QUADS; q++) {
    PREFETCH(next);
    next += ahead;
    V wv[NB];
    UNROLL for (int v = 0; v < NB; v++) wv[v] = LOADV(wp + v * WIDTH * 4);
    UNROLL for (int u = 0; u < UR; u++) {
      V xv = (V)(*(GLOBAL const QUAD*)(ap[u] + 4 * q));
      UNROLL for (int v = 0; v < NB; v++) acc[v][u] = dot4(acc[v][u], xv, wv[v]);
    }
    wp += NB * WIDTH * 4;
  }
  V kept[UR][NB];
  UNROLL for (int u = 0; u < UR; u++) UNROLL for (int v = 0; v < NB; v++) kept[u][v] = acc[v][u];
  int bottom = HEIGHT - top < UR ? HEIGHT - top : UR;
  for (int u = 0; u < bottom; u++) {
    const i32* line = (const i32*)kept[u];
    int row = top + u;
    u32 moved = (u32)(WMOVED * row_sums[row]);
    for (int j = 0; j < right; j++) {
      int column = left + j, at = row * WIDE + column;
      i32 sum = (i32)((u32)line[j] - (u32)z * (u32)weights[j] + moved);
      FINISH;
    }
  }
}
}
"""

SOLVERS = both(MatMulBytes)
