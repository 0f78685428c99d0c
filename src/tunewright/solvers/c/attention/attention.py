"""Attention in one kernel: for some rows of queries, scores, softmax and weighted sum, without leaving the cache.

Keys are packed into panels of their transpose, as a matrix product reads them, and values into panels. Each work-item
packs them for its current head (``own``); where heads are too large for that, separate launches pack them first. Before
that, past keys and values are put in front of the new ones. All arithmetic is in float32 (float64 for float64).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater, hint, lesser
from tunewright.ir.types import DType, TensorType
from tunewright.ops.internal.strided_attention import STRIDED
from tunewright.search.space import Scalar, Space
from tunewright.solvers import attention_form
from tunewright.solvers.attention_form import AttentionForm, Heads, form
from tunewright.solvers.base import Config, Problem, tensor

from ..product import matmul_pack
from ..product.matmul_pack import PackedOperand
from ..product.matmul_product import SUM, Matrix
from ..product.matmul_tile import VECTORS, tile
from ..source.base import CSolver, both
from ..source.emit import COMPUTE, EmittedLaunch, In, Out, Scratch, Source
from .attention_dots import dots

#: the least work of a work-item
LEAST_FLOPS = 100_000
#: Keys and values of one head that a work-item packs take at most half of a usual second-level cache.
NEAR_BYTES = 512 * 1024
#: Up to this many queries are multiplied with keys in place, without packing.
FEW_QUERIES = 2
#: the least number of elements that one work-item of the joining launch copies
SLICE = 16384


def vectors(f: AttentionForm, dtype: DType, target: Target) -> int:
    """The number of vectors of the default tile. Wide tiles load less, but keys and values should fill them."""
    if target.registers <= 16:
        return 2
    lanes = target.vector_bytes // dtype.itemsize
    if f.queries <= FEW_QUERIES:  # One panel of values in place: packing them would take longer.
        return max(n for n in (1, 2, 3, 4) if n == 1 or (n * lanes <= f.width))
    return min((4, 3, 2), key=lambda n: sum(-(-size // (n * lanes)) * n for size in (f.total, f.width)))


class Attention(CSolver):
    """Computes softmax(q k' * scale + mask) v in blocks of query rows."""

    family = "attention"
    ops = attention_form.ANYWHERE
    dtypes = attention_form.FLOATS | {DType.BOOL, DType.INT64, DType.INT32}
    rank = 50
    version = "2.2"

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if problem.epilogue:
            return "takes no epilogue"
        reason = attention_form.why_not(problem)
        return _why_not_apart(problem) if reason is None and problem.op == STRIDED else reason

    def default(self, problem: Problem, target: Target) -> Config:
        f = form(problem)
        rows = 1 if f.queries == 1 else 2 if f.queries == 2 else 4 if f.queries <= 4 else 6
        dtype = SUM[tensor(problem.inputs[0]).dtype]
        near = f.total * (f.size + f.width) * dtype.itemsize <= NEAR_BYTES
        return {"rows": rows, "vectors": vectors(f, dtype, target), "split": 8, "own": near}

    def space(self, problem: Problem, target: Target) -> Space:
        def fits(config: Mapping[str, Any]) -> bool:
            return bool((config["rows"] + 1) * config["vectors"] < target.registers)

        params: dict[str, Sequence[Scalar]] = {
            "rows": (1, 2, 3, 4, 5, 6, 8), "vectors": (1, 2, 3, 4), "split": (1, 2, 4, 8, 16), "own": (False, True),
        }  # fmt: skip
        return Space(params, fits, version=f"{target.registers} registers")

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        f = form(problem)
        given = [tensor(problem.inputs[i]).dtype for i in f.sources]
        dtype = SUM[given[0]]
        lanes = target.vector_bytes // dtype.itemsize
        width = config["vectors"] * lanes
        source = Source("attention", self.specialise)
        source.fixed(ROWS=config["rows"], VECTORS=config["vectors"], LANES=lanes, T=COMPUTE[dtype])
        source.fixed(MULTIPLY=f"multiply_{config['rows']}")
        source.buffer("q", given[0], In(f.sources[0]))
        keys, calls = self._joined(problem, f, 1, f.k, f.size)
        values, more = self._joined(problem, f, 2, f.v, f.width)
        calls += more
        k, v = _where(f, f.k, f.size, keys), _where(f, f.v, f.width, values)
        few = f.queries <= FEW_QUERIES
        own = bool(config["own"]) and not few
        if few or own:
            source.buffer("k", given[1], keys or In(f.sources[1]))
            source.dims(K_BATCH=k.batch, K_HEAD=k.head, K_ROW=k.row)
        else:
            packed = PackedOperand(
                Matrix(f.sources[1], 1, k.row), f.size, f.total, ((f.batch, k.batch), (f.groups, k.head))
            )
            calls.append(matmul_pack.launch(packed, width, given[1], dtype, "k", self.specialise, keys))
            source.buffer("k", dtype, packed.scratch(width, dtype, "k"))
            step = packed.packed_size(width)
            source.dims(K_BATCH=f.groups * step, K_HEAD=step)
        if own:
            source.buffer("v", given[2], values or In(f.sources[2]))
            source.dims(V_BATCH=v.batch, V_HEAD=v.head, V_ROW=v.row, V_ACROSS=f.total, V_LAST=f.width)
            source.fixed(V_STEP=width)
        elif given[2] is dtype and f.width >= width:  # The last panel begins earlier, to end where the row does.
            source.buffer("v", dtype, values or In(f.sources[2]))
            source.dims(V_BATCH=v.batch, V_HEAD=v.head, V_STEP=v.row, V_ACROSS=1, V_LAST=f.width - width)
        else:
            packed = PackedOperand(
                Matrix(f.sources[2], v.row, 1), f.total, f.width, ((f.batch, v.batch), (f.groups, v.head))
            )
            calls.append(matmul_pack.launch(packed, width, given[2], dtype, "v", self.specialise, values))
            source.buffer("v", dtype, packed.scratch(width, dtype, "v"))
            step = packed.packed_size(width)
            source.dims(V_BATCH=f.groups * step, V_HEAD=step, V_STEP=width, V_ACROSS=f.total, V_LAST=f.width)
        source.buffer("y", tensor(problem.outputs[0]).dtype, Out(0))
        _number(source, dtype, SCALE=f.scale)
        source.dims(
            MATRICES=f.batch * f.heads, HEADS=f.heads, SHARING=f.heads // greater(f.groups, 1), QUERIES=f.queries,
            KEYS=f.total, SIZE=f.size, VALUES=f.width, PAST=f.past, LEFT=f.left, RIGHT=f.right,
            Q_BATCH=f.q.batch, Q_HEAD=f.q.head, Q_ROW=f.q.row, Q_START=f.q.start,
            Y_BATCH=f.y.batch, Y_HEAD=f.y.head, Y_ROW=f.y.row,
        )  # fmt: skip
        grid = split(source, f, config["rows"], width, own, config["split"] * target.units, target.units, dtype)
        source.function(VECTORS)
        source.function(tile(config["rows"]))
        source.add(_body(source, problem, f, own, target))
        return [*calls, source.call(grid)]

    def _joined(
        self, problem: Problem, f: AttentionForm, i: int, heads: Heads, size: int
    ) -> tuple[Out | Scratch | None, list[EmittedLaunch]]:
        """Where all keys (i = 1) or values (i = 2) lie as [batch, groups, length, size], with the launches that copy
        them there.

        The place is None if the input alone holds them.
        """
        wanted = len(problem.outputs) > i and problem.outputs[i] is not None
        if not wanted and not f.past:
            return None, []
        given = tensor(problem.inputs[i])
        where: Out | Scratch = Out(i)
        if not wanted:
            nbytes = f.batch * f.groups * f.total * size * given.dtype.itemsize
            where = Scratch(f"joined{i}", greater(nbytes, 1))
        source = Source("join", self.specialise)
        raw = {2: DType.UINT16, 4: DType.UINT32, 8: DType.UINT64}[given.dtype.itemsize]
        source.buffer("x", raw, In(i))
        source.buffer("past", raw, In(i + 3 if f.past else i))
        source.buffer("y", raw, where)
        rows = f.batch * f.groups * f.total
        share = greater(1, SLICE // greater(size, 1), -(-rows // matmul_pack.MOST_ITEMS))
        source.dims(BATCH=heads.batch, HEAD=heads.head, ROW=heads.row, GROUPS=f.groups, PAST=f.past, TOTAL=f.total)
        source.dims(SIZE=size, ROWS=rows, SHARE=share)
        source.add(JOIN)
        return where, [source.call([-(-rows // share)])]


JOIN = """
for (int row = GID(0) * SHARE; row < (GID(0) + 1) * SHARE && row < ROWS; row++) {
  int matrix = row / TOTAL, at = row % TOTAL;
  int old = (matrix * PAST + at) * SIZE;
  int new = matrix / GROUPS * BATCH + matrix % GROUPS * HEAD + (at - PAST) * ROW;
  if (at < PAST)
    for (int i = 0; i < SIZE; i++) y[row * SIZE + i] = past[old + i];
  else
    for (int i = 0; i < SIZE; i++) y[row * SIZE + i] = x[new + i];
}"""


def _why_not_apart(problem: Problem) -> str | None:
    """Why the kernel cannot read queries, keys and values inside other tensors: it does so only for caches that can
    grow."""
    if not problem.is_static:
        return "shapes are not known"
    f = form(problem)
    if f.queries > FEW_QUERIES:
        return "reads keys where they lie for one or two queries only"
    # With one head of keys, the next sequence begins behind the room.
    steps = [heads.head if f.groups > 1 else heads.batch for heads in (f.k, f.v)]
    rooms = [step > f.total * heads.row and not heads.start for step, heads in zip(steps, (f.k, f.v), strict=True)]
    return None if all(rooms) else "keys and values have no room to grow"


def _number(source: Source, dtype: DType, **values: float) -> None:
    """Adds an argument in float32; for float64 it is a literal in the text, which loses no digits."""
    if dtype is DType.FLOAT64:
        source.fixed(**{name: repr(value) for name, value in values.items()})
    else:
        source.numbers(**values)


def _where(f: AttentionForm, heads: Heads, size: int, joined: Out | Scratch | None) -> Heads:
    """The strides of all keys or values."""
    return heads if joined is None else Heads(f.groups * f.total * size, f.total * size, size)


def split(
    source: Source,
    f: AttentionForm,
    rows: int,
    width: int,
    own: bool,
    items: int,
    units: int,
    dtype: DType,
    more: int = 0,
) -> tuple[int, int]:
    """Decides how many heads and tiles of rows a work-item takes, and gives each work-item separate memory.

    ``more`` is the number of elements besides scores, results and the packed operands.
    """
    # The number of work-items is chosen for the sizes at hand; any division gives correct results.
    matrices, tiles = hint(f.batch * f.heads), -(-hint(f.queries) // rows)
    if f.queries > FEW_QUERIES:
        items = greater(1, lesser(items, int(hint(f.flops) / LEAST_FLOPS), matrices * tiles))
    # The number of keys grows from token to token, and the runtime, which runs the items, knows how long they take.
    else:
        items = greater(1, matrices * tiles)
    heads = greater(1, matrices // items)
    # Few heads: their rows are divided among twice as many items as there are units, which gives them about equal work.
    parts = lesser(tiles, 1 if matrices >= units else -(-lesser(items, 2 * units) // greater(matrices, 1)))
    share = greater(1, -(-tiles // greater(parts, 1)))
    span, out = (-(-n // width) * width for n in (f.total, f.width))
    slot = rows * (span + out + f.size) + (span * f.size + f.total * out if own else 0) + more
    source.dims(SHARE_HEADS=heads, SHARE_ROWS=share * rows, SPAN=span, OUT_SPAN=out, SLOT=slot)
    x, y = -(-(f.batch * f.heads) // heads), -(-f.queries // (rows * share))
    source.dims(ITEMS=x)
    source.buffer("memory", dtype, Scratch("memory", greater(1, x * y * slot * dtype.itemsize)))
    return x, y


def _body(source: Source, problem: Problem, f: AttentionForm, own: bool, target: Target) -> str:
    """The loop over tiles of rows, with the steps that this attention applies to scores."""
    kind = COMPUTE[SUM[tensor(problem.inputs[0]).dtype]]
    source.fixed(EXP="falling_exp" if kind == "f32" else f"{kind}_exp")
    if kind == "f32":
        source.function(FALLING_EXP)
    shown = len(problem.outputs) > 3 and isinstance(problem.outputs[3], TensorType)
    if shown:
        source.buffer("shown", tensor(problem.outputs[3]).dtype, Out(3))
    show = source.store("shown", "shown_at + t", "scores[t]") if shown else ""
    steps = [(show, f.shown == 0 or (f.shown == 1 and f.softcap <= 0))]
    if f.softcap > 0:
        _number(source, SUM[tensor(problem.inputs[0]).dtype], CAP=f.softcap)
        steps += [(f"scores[t] = {kind}_tanh(scores[t] / CAP) * CAP;", True), (show, f.shown == 1)]
    bias, valid = "0", "KEYS"
    if f.mask is not None:
        type = tensor(problem.inputs[f.mask.index])
        source.buffer("mask", type.dtype, In(f.mask.index))
        source.dims(MASK_BATCH=f.mask.batch, MASK_HEAD=f.mask.head, MASK_ROW=f.mask.row, MASK_COLUMNS=f.mask.columns)
        bias = source.load("mask", "mask_at + t")
        bias = f"({bias} ? 0 : -INFINITY)" if type.dtype is DType.BOOL else bias
    else:
        source.fixed(MASK_BATCH=0, MASK_HEAD=0, MASK_ROW=0, MASK_COLUMNS="KEYS")
    if f.valid is not None:
        source.buffer("valid", DType.INT64, In(f.valid))
        valid = "seen_keys"
    rounded = f"{f.rounding}_load({f.rounding}_store({{}}))" if f.rounding else "{}"
    later = [(show, f.shown == 2), (f"scores[t] = {rounded.format('scores[t]')};", bool(f.rounding))]
    weights = [(f"scores[t] = {rounded.format('scores[t] * part')};", True), (show, True)]
    # if rounding is set, or the weights are an output, the weights are divided; else the result is
    keep = not f.rounding and not (shown and f.shown == 3)
    return BODY.format(
        check="" if f.valid is None else SEEN,
        query=source.load("q", "Q_START + q_at + i"),
        pack=PACK.format(key=source.load("k", "k_at + i"), value=source.load("v", "v_at + i")) if own else THERE,
        products=_products(source, f, SUM[tensor(problem.inputs[0]).dtype], target),
        valid=valid,
        offset="PAST" if f.valid is None else f"{valid} - QUERIES",
        before=_loops(steps),
        mask="" if f.mask is None else f"for (int t = begin; t < end; t++) scores[t] += {bias};",
        after=_loops(later),
        forgive=FORGIVE.format(bias=bias) if f.forgiving else "",
        weights="" if keep else _loops(weights) + "\n    part = 1;",
        store=source.store("y", "y_at + i", "out[r * OUT_SPAN + i] * parts[r]"),
    )


def _products(source: Source, f: AttentionForm, dtype: DType, target: Target) -> str:
    """Statements that compute the scores of some rows of queries."""
    if f.queries > FEW_QUERIES:
        return PANELS
    if source.dtype("k") is not dtype:
        return DOTS.format(key=source.load("k", "k_at + i"))
    source.function(dots(target.vector_bytes // dtype.itemsize))
    return NEAR_DOTS


def _loops(steps: list[tuple[str, bool]]) -> str:
    """A loop over all keys for each of the steps that is wanted."""
    return "\n    ".join(f"for (int t = 0; t < KEYS; t++) {text}" for text, wanted in steps if text and wanted)


#: exp of a score minus the highest one: never above zero, perhaps NaN or infinite. It is 2^f by a polynomial, for f
#: from -1/2 to 1/2, times 2^n. Far below zero it is less accurate than `f32_exp`, but such terms are negligible beside
#: the highest.
FALLING_EXP = """
INLINE f32 falling_exp(f32 x) {
  f32 c = x < -87.0f ? -87.0f : x;
  f32 t = c * 1.44269504089f + F32_ROUNDER, f = c * 1.44269504089f - (t - F32_ROUNDER);
  f32 p = 1.5353361891e-4f;
  p = p * f + 1.3398874422e-3f; p = p * f + 9.6184373578e-3f; p = p * f + 5.5503324711e-2f;
  p = p * f + 2.4022647914e-1f; p = p * f + 6.9314720286e-1f; p = p * f + 1.0f;
  f32 v = p * as_f32((as_u32(t) << 23) + (127u << 23));
  return x < -87.0f ? 0.0f : v;
}"""

#: the number of keys of a sequence of the batch
SEEN = """i64 given = valid[batch];
  if (given < 0 || given > KEYS) {
    wrong(report, WRONG_LENGTH, given, KEYS);
    given = given < 0 ? 0 : KEYS;
  }
  int seen_keys = (int)given;
  """

PANELS = """
  for (int n = 0; n < KEYS; n += WIDTH)
    MULTIPLY(query, keys + n * SIZE, score + n, SPAN, 0, rows, SIZE, SIZE, 1, WIDTH, 0, 0, 0);"""

#: Keys and values already have the order that the products read.
THERE = """
  GLOBAL const T* keys UNUSED = (GLOBAL const T*)k + batch * K_BATCH + head / SHARING * K_HEAD;
  GLOBAL const T* values = v + batch * V_BATCH + head / SHARING * V_HEAD;"""

#: Lanes beyond the last key hold any values: their scores are not read, and neither are columns beyond the last one.
PACK = """
  GLOBAL T* keys = out + ROWS * OUT_SPAN;
  GLOBAL T* values = keys + SPAN * SIZE;
  if (matrix == first_matrix || head % SHARING == 0) {{
    for (int n = 0; n < KEYS; n += WIDTH)
      for (int j = 0; j < WIDTH; j++) {{
        int t = n + j < KEYS ? n + j : KEYS - 1;
        int k_at = batch * K_BATCH + head / SHARING * K_HEAD + t * K_ROW;
        for (int i = 0; i < SIZE; i++) keys[n * SIZE + i * WIDTH + j] = {key};
      }}
    for (int n = 0; n < VALUES; n += WIDTH)
      for (int t = 0; t < KEYS; t++) {{
        int v_at = batch * V_BATCH + head / SHARING * V_HEAD + t * V_ROW + n, width = VALUES - n;
        if (width >= WIDTH)
          for (int i = 0; i < WIDTH; i++) values[n * KEYS + t * WIDTH + i] = {value};
        else
          for (int i = 0; i < width; i++) values[n * KEYS + t * WIDTH + i] = {value};
      }}
  }}"""

#: For few queries, packing the keys would take longer than multiplying with them in place.
NEAR_DOTS = """
  for (int r = 0; r < rows; r++)
    dots(query + r * SIZE, keys, score + r * SPAN, KEYS, SIZE, K_ROW);"""

#: the same for keys of another element type
DOTS = """
  for (int r = 0; r < rows; r++)
    for (int t = 0; t < KEYS; t++) {{
      REASSOCIATE
      int k_at = batch * K_BATCH + head / SHARING * K_HEAD + t * K_ROW;
      T sum = 0;
      for (int i = 0; i < SIZE; i++) sum += query[r * SIZE + i] * {key};
      score[r * SPAN + t] = sum;
    }}"""

#: A row whose mask hides all keys is zero, whatever the scores are. The kernel checks that only where no score is
#: finite.
FORGIVE = """
    if (top == -INFINITY) {{
      int seen = 0;
      for (int t = begin; t < end; t++) seen |= {bias} != -INFINITY;
      if (!seen) for (int t = 0; t < KEYS; t++) scores[t] = -INFINITY;
      top = 0;
    }}"""

BODY = """
GLOBAL T* query = memory + (GID(1) * ITEMS + GID(0)) * SLOT;
GLOBAL T* score = query + ROWS * SIZE;
GLOBAL T* out = score + ROWS * SPAN;
int first_matrix = GID(0) * SHARE_HEADS, m_end = (GID(1) + 1) * SHARE_ROWS;
m_end = m_end < QUERIES ? m_end : QUERIES;
for (int matrix = first_matrix; matrix < first_matrix + SHARE_HEADS && matrix < MATRICES; matrix++) {{
  int batch = matrix / HEADS, head = matrix % HEADS;
  {check}{pack}
for (int m = GID(1) * SHARE_ROWS; m < m_end; m += ROWS) {{
  int rows = m_end - m < ROWS ? m_end - m : ROWS;
  for (int r = 0; r < rows; r++) {{
    int q_at = batch * Q_BATCH + head * Q_HEAD + (m + r) * Q_ROW;
    for (int i = 0; i < SIZE; i++) query[r * SIZE + i] = {query} * SCALE;
  }}
  {products}
  T parts[ROWS];
  for (int r = 0; r < rows; r++) {{
    GLOBAL T* scores = score + r * SPAN;
    int shown_at UNUSED = ((batch * HEADS + head) * QUERIES + m + r) * KEYS;
    int mask_at UNUSED = batch * MASK_BATCH + head * MASK_HEAD + (m + r) * MASK_ROW;
    int place = m + r + {offset}, begin = place - LEFT, end = place + RIGHT + 1;
    begin = begin > 0 ? begin : 0;
    end = end < {valid} ? end : {valid};
    end = end < MASK_COLUMNS ? end : MASK_COLUMNS;
    end = end > begin ? end : begin;
    {before}
    {mask}
    for (int t = 0; t < begin && t < KEYS; t++) scores[t] = -INFINITY;
    for (int t = end; t < SPAN; t++) scores[t] = -INFINITY;
    {after}
    V tops[VECTORS];
    UNROLL for (int i = 0; i < VECTORS; i++) tops[i] = (V)(-INFINITY);
    for (int t = 0; t < SPAN; t += WIDTH)
      UNROLL for (int i = 0; i < VECTORS; i++) {{
        V s = LOADV(scores + t + i * LANES);
        tops[i] = s > tops[i] ? s : tops[i];
      }}
    T top = -INFINITY, total = 0;
    for (int i = 0; i < VECTORS; i++)
      for (int j = 0; j < LANES; j++) top = tops[i][j] > top ? tops[i][j] : top;
    {forgive}
    {{
      REASSOCIATE
      for (int t = 0; t < SPAN; t++) {{
        T s = EXP(scores[t] - top);
        scores[t] = s;
        total += s;
      }}
    }}
    T part = 1 / (total == 0 ? 1 : total);
    {weights}
    parts[r] = part;
  }}
  for (int n = 0; n < VALUES; n += WIDTH) {{
    int first = n < V_LAST ? n : V_LAST;
    MULTIPLY(score, values + first * V_ACROSS, out + first, OUT_SPAN, 0, rows, KEYS, SPAN, 1, V_STEP, 0, 0, 0);
  }}
  for (int r = 0; r < rows; r++) {{
    int y_at = batch * Y_BATCH + head * Y_HEAD + (m + r) * Y_ROW;
    for (int i = 0; i < VALUES; i++) {store}
  }}
}}
}}"""


SOLVERS = both(Attention)
