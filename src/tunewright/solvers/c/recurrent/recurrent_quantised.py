"""DynamicQuantizeLSTM: the input is quantised over its range and projected once; the hidden state, before each step.

The first launches compute the range of parts of the input (where it is long), and its rows as centred 16-bit numbers.
The next one computes their exact products with the weights of all gates. The last launch loops over all steps. The
range of the hidden state is that of the whole batch; therefore a work-item of the recurrence handles a direction. Zero
points of weights are subtracted through the sums of rows: sum(x * (w - zero)) = sum(x * w) - zero * sum(x). Every other
step reads the weights backwards, and so begins with those that are still in the cache of the core.

`recurrent_bytes` does the same with four products per instruction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater, lesser
from tunewright.ir.types import DType, TensorType
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Packing, Problem, tensor

from ..quantised.integer_product import BYTES, DEEPEST, LEAST_WORK, MS, Sums, Weights, packed, present, tile_of
from ..quantised.quantize import RANGE, TO_INTEGER, chunk_of
from ..source.base import MOST_ELEMENTS, CSolver, both
from ..source.emit import STORAGE, EmittedLaunch, In, Out, Scratch, Source
from . import recurrent_cell as cells

#: inputs: sequence lengths; scale and zero point of the weights of the input, and of the recurrent weights
LENGTHS, PARAMETERS = 4, {1: (8, 9), 2: (10, 11)}


class QuantisedLSTM(CSolver):
    family = "recurrent_quantised"
    version = "1.1"
    ops = frozenset({MS + "DynamicQuantizeLSTM"})
    dtypes = BYTES | {DType.FLOAT32, DType.INT32}
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if problem.epilogue:
            return "takes no epilogue"
        for i, type in enumerate(problem.inputs):
            wanted = BYTES if i in (1, 2, 9, 11) else {DType.INT32 if i == LENGTHS else DType.FLOAT32}
            if isinstance(type, TensorType) and type.dtype not in wanted:
                return f"input {i} is {type.dtype}"
        reason = cells.why_not(problem)
        if reason is not None or not problem.is_static:
            return reason
        x, w, r = (tensor(problem.inputs[i]) for i in range(3))
        if w.dims[0] != cells.directions(problem)[0]:
            return f"weights {w} for {cells.directions(problem)[0]} directions"
        for i in (i for pair in PARAMETERS.values() for i in pair):
            if tensor(problem.inputs[i]).size not in (w.dims[0], w.dims[0] * w.dims[2]):
                return f"{problem.inputs[i]} is neither one number per direction nor one per gate and hidden unit"
        if greater(w.dims[1], r.dims[1]) > DEEPEST:
            return f"sums of {greater(w.dims[1], r.dims[1])} products may not fit into 32 bits"
        if x.dims[0] * x.dims[1] * w.dims[0] * w.dims[2] > MOST_ELEMENTS:
            return "the gates of all steps are too many"
        return None

    def default(self, problem: Problem, target: Target) -> Config:
        batch = tensor(problem.inputs[0]).dims[1]
        return {"rows": 1, "blocks": 4} if batch == 1 else {"rows": 2 if batch == 2 else 4, "blocks": 2}

    def space(self, problem: Problem, target: Target) -> Space:
        return Space(
            {"rows": [1, 2, 3, 4, 6], "blocks": [1, 2, 3, 4]},
            lambda c: int(str(c["rows"])) * int(str(c["blocks"])) + int(str(c["blocks"])) < target.registers,
        )

    def writer(self, problem: Problem, config: Config, target: Target) -> QuantisedRecurrentWriter:
        return QuantisedRecurrentWriter(problem, config, target, self.specialise)

    def packings(self, problem: Problem, config: Config, target: Target) -> Mapping[int, Packing]:
        writer = self.writer(problem, config, target)
        return {i: writer.packing(i) for i in (1, 2) if problem.constant[i]}

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        writer = self.writer(problem, config, target)
        if not writer.batch or not writer.hidden:
            return []
        calls = [writer.pack(i) for i in (1, 2) if not problem.constant[i]]
        if writer.steps:
            calls += [*writer.quantise(), writer.project()]
        return [*calls, writer.recur()]


@dataclass(frozen=True)
class QuantisedRecurrentWriter:
    """Writes the launches of one static problem."""

    problem: Problem
    config: Config
    target: Target
    specialise: bool

    @property
    def kind(self) -> DType:
        """The type of quantised numbers."""
        return DType.INT16

    def pitch(self, size: int) -> int:
        """The number of elements of a row, filled up."""
        return _even(size)

    def centring(self) -> str:
        """The C text of `centre`, which quantises floats to this type."""
        return _CENTRE

    def packing(self, i: int) -> Packing:
        width, blocks = self.target.vector_bytes // 4, self.tile(i)[1]
        return Packing(f"integer columns {width} {blocks}", partial(packed, width=width, blocks=blocks))

    def _rows(self) -> Scratch:
        """The memory of the quantised input."""
        return Scratch("rows", self.kind.itemsize * self.steps * self.batch * self.pitch(self.features))

    @property
    def steps(self) -> int:
        return tensor(self.problem.inputs[0]).dims[0]

    @property
    def batch(self) -> int:
        return tensor(self.problem.inputs[0]).dims[1]

    @property
    def features(self) -> int:
        return tensor(self.problem.inputs[0]).dims[2]

    @property
    def hidden(self) -> int:
        return tensor(self.problem.inputs[2]).dims[1]

    @property
    def directions(self) -> int:
        return tensor(self.problem.inputs[2]).dims[0]

    def tile(self, i: int) -> tuple[int, int]:
        """The rows, and vectors of columns, of a register tile with weights i."""
        if i == 2:
            return int(self.config["rows"]), int(self.config["blocks"])
        return tile_of(self.steps * self.batch, 4 * self.hidden, self.target)

    def _tiles(self, i: int) -> int:
        """The number of tiles of columns in a direction."""
        return -(-4 * self.hidden // (self.tile(i)[1] * (self.target.vector_bytes // 4)))

    def _weights(self, i: int) -> In | Scratch:
        if self.problem.constant[i]:
            return In(i)
        columns = self._tiles(i) * self.tile(i)[1] * (self.target.vector_bytes // 4)
        depth = tensor(self.problem.inputs[i]).dims[1]
        return Scratch(f"columns_{i}", self.directions * columns * (depth + depth % 2))

    def pack(self, i: int) -> EmittedLaunch:
        """The launch that arranges weights which are not constant, as `packed` arranges constants."""
        weights = tensor(self.problem.inputs[i])
        source = Source("pack", self.specialise)
        source.buffer("w", weights.dtype, In(i))
        source.buffer("columns", weights.dtype, self._weights(i))
        source.fixed(TILE=self.tile(i)[1] * (self.target.vector_bytes // 4))
        source.dims(DEPTH=weights.dims[1], PITCH=_even(weights.dims[1]), WIDE=weights.dims[2], TILES=self._tiles(i))
        source.add("""int d = GID(0) / TILES, left = GID(0) % TILES * TILE, to = GID(0) * PITCH * TILE;
for (int k = 0; k < PITCH; k++)
  for (int j = 0; j < TILE; j++) {
    bool there = k < DEPTH && left + j < WIDE;
    columns[to + (k >> 1) * TILE * 2 + j * 2 + (k & 1)] = there ? w[(d * DEPTH + k) * WIDE + left + j] : 0;
  }""")
        return source.call([self.directions * self._tiles(i)])

    def _longest(self, source: Source) -> str:
        """The expression of the number of steps until the last sequence has ended."""
        if present(self.problem, LENGTHS) is None:
            return "STEPS"
        source.buffer("lengths", DType.INT32, In(LENGTHS))
        source.function(_LONGEST)
        return "longest(lengths, BATCH, STEPS)"

    def _check_lengths(self) -> str:
        """Statements that report a length which the sequences cannot have."""
        if present(self.problem, LENGTHS) is None:
            return ""
        return """for (int m = 0; m < BATCH; m++)
  if (lengths[m] < 0 || lengths[m] > STEPS) wrong(report, WRONG_LENGTH, lengths[m], STEPS);
"""

    # -- the input's part --------------------------------------------------------------------------------------------
    def quantise(self) -> list[EmittedLaunch]:
        """The launches that write the input's rows as centred numbers, their sums, and the scale of the input."""
        rows, size = self.steps * self.batch, self.steps * self.batch * self.features
        chunk = chunk_of(size, self.target)
        parts = greater(1, -(-size // chunk))
        calls = []
        ranges = Scratch("ranges", 8 * parts)
        if parts > 1:
            source = self._quantising("range_of_part")
            source.buffer("ranges", DType.FLOAT32, ranges)
            source.dims(BATCH=self.batch, FEATURES=self.features, STEPS=self.steps, CHUNK=chunk)
            source.add(f"""int size = {self._longest(source)} * BATCH * FEATURES, begin = GID(0) * CHUNK;
f32 low, high;
range_of(x + begin, size - begin < CHUNK ? size - begin : CHUNK, &low, &high);
ranges[2 * GID(0)] = low; ranges[2 * GID(0) + 1] = high;""")
            calls.append(source.call([parts]))
        source = self._quantising("quantise_rows")
        source.buffer("centred", self.kind, self._rows())
        source.buffer("row_sums", DType.INT32, Scratch("row_sums", 4 * rows))
        source.buffer("step", DType.FLOAT32, Scratch("step", 8))
        source.dims(BATCH=self.batch, FEATURES=self.features, STEPS=self.steps, PITCH=self.pitch(self.features))
        source.add("f32 low = 0.0f, high = 0.0f;")
        if parts > 1:
            source.buffer("ranges", DType.FLOAT32, ranges)
            source.dims(PARTS=parts)
            source.add("for (int k = 0; k < PARTS; k++) join_range(ranges[2 * k], ranges[2 * k + 1], &low, &high);")
        else:
            source.add(f"range_of(x, {self._longest(source)} * BATCH * FEATURES, &low, &high);")
        each = greater(1, -(-rows // parts))
        source.dims(EACH=each)
        source.add("""low = low == low ? low : 0.0f; high = high == high ? high : 0.0f;
f32 s = step_of(low, high, 1.0f), zero = zero_of(low, s);
if (GID(0) == 0) { step[0] = s; step[1] = zero; }
int begin = GID(0) * EACH, end = STEPS * BATCH - begin < EACH ? STEPS * BATCH : begin + EACH;
for (int row = begin; row < end; row++)
  row_sums[row] = centre(x + row * FEATURES, centred + row * PITCH, FEATURES, s, zero);""")
        return [*calls, source.call([-(-rows // each)])]

    def _quantising(self, name: str) -> Source:
        source = Source(name, self.specialise)
        source.buffer("x", DType.FLOAT32, In(0))
        source.fixed(WIDTH=self.target.vector_bytes // 4)
        for text in (TO_INTEGER, RANGE, _JOIN, self.centring()):
            source.function(text)
        return source

    def project(self) -> EmittedLaunch:
        """The launch of [rows of the input] x [columns of all directions]; a work-item has some of both."""
        rows, wide = self.steps * self.batch, 4 * self.hidden
        source = Source("project", self.specialise)
        source.buffer("centred", self.kind, self._rows())
        source.buffer("row_sums", DType.INT32, Scratch("row_sums", 4 * rows))
        source.buffer("step", DType.FLOAT32, Scratch("step", 8))
        source.buffer("products", DType.FLOAT32, self._projected())
        product = self._product(source, 1)
        tiles = self.directions * self._tiles(1)
        items = lesser(greater(1, rows * self.directions * wide * self.features // LEAST_WORK), 8 * self.target.units)
        columns = -(-tiles // lesser(items, tiles))
        # columns should stay in the cache
        high = -(-rows // greater(1, lesser(items * columns // tiles, -(-rows // 16))))
        source.dims(N_ROWS=rows, WIDE=wide, DEPTH=self.features, TILES=self._tiles(1), ALL_TILES=tiles)
        source.dims(EACH=columns, HIGH=high)
        source.add(f"""int last = ALL_TILES - GID(0) * EACH < EACH ? ALL_TILES : (GID(0) + 1) * EACH;
int first_row = GID(1) * HIGH, end_row = N_ROWS - first_row < HIGH ? N_ROWS : first_row + HIGH;
f32 s = step[0], x_zero UNUSED = step[1];
for (int at = GID(0) * EACH; at < last; at++) {{
  int d = at / TILES, tile = at % TILES;
  GLOBAL f32* to = products + d * N_ROWS * WIDE;
  {product}
}}""")
        return source.call([-(-tiles // columns), -(-rows // high)])

    def _projected(self) -> Scratch:
        return Scratch("projected", 16 * self.directions * self.steps * self.batch * self.hidden)

    def _product(self, source: Source, i: int) -> str:
        """Statements that multiply rows first_row to end_row with a tile of direction d's weights i.

        The rows are quantised with scale s and zero point x_zero.
        """
        dtype = tensor(self.problem.inputs[i]).dtype
        source.buffer("weights", dtype, self._weights(i))
        for name, at in zip(("scale", "zero"), PARAMETERS[i], strict=True):
            source.buffer(name, tensor(self.problem.inputs[at]).dtype, In(at))
        scale, zero = (
            "d" if tensor(self.problem.inputs[at]).size == self.directions else "d * WIDE + column"
            for at in PARAMETERS[i]
        )
        Sums(source, Weights(dtype, None, True, True), *self.tile(i), self.target)
        source.function("typedef i32 pair_of_i16 __attribute__((may_alias));")
        return f"""int left = tile * COLUMNS, right = WIDE - left < COLUMNS ? WIDE - left : COLUMNS;
int pairs = (DEPTH + 1) / 2;
for (int top = first_row; top < end_row; top += ROWS) {{
  GLOBAL const pair_of_i16* pair[ROWS];
  for (int u = 0; u < ROWS; u++)
    pair[u] = (GLOBAL const pair_of_i16*)centred + (top + u < end_row ? top + u : end_row - 1) * pairs;
  {Sums.begin}
  GLOBAL const WEIGHT* w = weights + (d * TILES + tile) * pairs * COLUMNS * 2;
  for (int k = 0; k < pairs; k++) {{
    {Sums.step("pair[u][k]")}
  }}
  {Sums.end}
  int bottom = end_row - top < ROWS ? end_row - top : ROWS;
  for (int u = 0; u < bottom; u++) {{
    i32 row_sum = row_sums[top + u];
    for (int j = 0; j < right; j++) {{
      int column = left + j;
      to[(top + u) * WIDE + column] = (f32)(sums[u * COLUMNS + j] - zero[{zero}] * row_sum) * (s * scale[{scale}]);
    }}
  }}
}}"""

    # -- the recurrence ----------------------------------------------------------------------------------------------
    def recur(self) -> EmittedLaunch:
        problem, states = self.problem, self.directions * self.batch * self.hidden
        source = Source("recur", self.specialise)
        source.fixed(REAL=STORAGE[DType.FLOAT32], WIDTH=self.target.vector_bytes // 4)
        for text in (TO_INTEGER, RANGE, self.centring(), cells.functions(problem, STORAGE[DType.FLOAT32])):
            source.function(text)
        source.buffer("projected", DType.FLOAT32, self._projected())
        for name, dtype, size in (
            ("gates", DType.FLOAT32, 4 * states), ("hiddens", DType.FLOAT32, states), ("cells", DType.FLOAT32, states),
            ("centreds", self.kind, self.directions * self.batch * self.pitch(self.hidden)),
            ("all_row_sums", DType.INT32, self.directions * self.batch),
        ):  # fmt: skip
            source.buffer(name, dtype, Scratch(name, dtype.itemsize * size))
        source.dims(STEPS=self.steps, BATCH=self.batch, HIDDEN=self.hidden, DEPTH=self.hidden, WIDE=4 * self.hidden)
        source.dims(PITCH=self.pitch(self.hidden), TILES=self._tiles(2), BACKWARDS=cells.directions(problem)[1])
        source.dims(COUNT=self.directions)
        source.function(self._inputs(source))
        source.buffer("y", DType.FLOAT32, Out())
        length = "STEPS" if present(problem, LENGTHS) is None else "within(lengths[m], STEPS)"
        source.add(f"""int d = GID(0), first_row = 0, end_row = BATCH, longest_of_all = {self._longest(source)};
{self._check_lengths()}GLOBAL f32* hidden_all = hiddens + d * BATCH * HIDDEN;
GLOBAL f32* cell_all = cells + d * BATCH * HIDDEN;
GLOBAL {STORAGE[self.kind]}* centred = centreds + d * BATCH * PITCH;
GLOBAL i32* row_sums = all_row_sums + d * BATCH;
GLOBAL f32* to = gates + d * BATCH * WIDE;
{self._initial(source)}
for (int t = 0; t < STEPS; t++) {{
  if (t < longest_of_all) {{
    f32 low, high;
    range_of(hidden_all, BATCH * HIDDEN, &low, &high);
    low = low == low ? low : 0.0f; high = high == high ? high : 0.0f;
    f32 s = step_of(low, high, 1.0f), x_zero = zero_of(low, s);
    for (int m = 0; m < BATCH; m++)
      row_sums[m] = centre(hidden_all + m * HIDDEN, centred + m * PITCH, HIDDEN, s, x_zero);
    for (int k = 0; k < TILES; k++) {{
      int tile = t & 1 ? TILES - 1 - k : k;
      {self._product(source, 2)}
    }}
  }}
  for (int m = 0; m < BATCH; m++) {{
    int length = {length}, time = t < length && (BACKWARDS >> d & 1) ? length - 1 - t : t;
    GLOBAL f32* hidden = hidden_all + m * HIDDEN;
    GLOBAL f32* cell = cell_all + m * HIDDEN;
    GLOBAL const f32* mine = to + m * WIDE;
    GLOBAL const f32* in = projected + ((d * STEPS + time) * BATCH + m) * WIDE;
    GLOBAL f32* out = y + ((time * COUNT + d) * BATCH + m) * HIDDEN;
    if (t < length) for (int j = 0; j < HIDDEN; j++) {{
      {self._cell(source)}
      hidden[j] = out[j] = value;
    }}
    else for (int j = 0; j < HIDDEN; j++) hidden[j] = out[j] = 0;
    {self._last(source, "if (t + 1 == length)", "hidden[j]", "cell[j]")}
  }}
}}""")
        return source.call([self.directions])

    def _initial(self, source: Source) -> str:
        """Statements that set the states before the first step.

        The last states are zero, unless a sequence ends at some step.
        """
        lines = []
        for i, name in ((5, "hidden"), (6, "cell")):
            value = "0"
            if present(self.problem, i) is not None:
                source.buffer(f"initial_{name}", DType.FLOAT32, In(i))
                value = f"initial_{name}[d * BATCH * HIDDEN + j]"
            lines.append(f"for (int j = 0; j < BATCH * HIDDEN; j++) {name}_all[j] = {value};")
        return "\n".join([*lines, "for (int m = 0; m < BATCH; m++)", "{", self._last(source, "", "0", "0"), "}"])

    def _last(self, source: Source, condition: str, *values: str) -> str:
        """Statements that store the states after the last step of sequence m, where they are outputs."""
        lines = []
        for i, value in enumerate(values[: len(self.problem.outputs) - 1], start=1):
            source.buffer(f"last_{i}", DType.FLOAT32, Out(i))
            at = "(d * BATCH + m) * HIDDEN + j"
            lines.append(f"{condition} for (int j = 0; j < HIDDEN; j++) last_{i}[{at}] = {value};")
        return "\n".join(lines)

    def _inputs(self, source: Source) -> str:
        """Macros for the contribution of the input and the biases to the gates."""
        bias = ""
        if present(self.problem, 3) is not None:
            source.buffer("b", DType.FLOAT32, In(3))
            bias = " + (b[(d * 8 + g) * HIDDEN + j] + b[(d * 8 + 4 + g) * HIDDEN + j])"
        return f"""#define gate(g) mine[g * HIDDEN + j]
#define input(g) (in[g * HIDDEN + j]{bias})"""

    def _cell(self, source: Source) -> str:
        peephole = []
        if present(self.problem, 7) is not None:
            source.buffer("p", DType.FLOAT32, In(7))
            peephole = [f"p[(d * 3 + {k}) * HIDDEN + j]" for k in range(3)]
        return cells.lstm(bool(self.problem.attrs.get("input_forget", 0)), peephole)


def _even(size: int) -> int:
    return size + size % 2


_LONGEST = """
INLINE int within(i32 length, int steps) { return length < 0 ? 0 : length < steps ? length : steps; }
INLINE int longest(GLOBAL const i32* lengths, int batch, int steps) {
  int most = 0;
  for (int m = 0; m < batch; m++) most = within(lengths[m], steps) > most ? within(lengths[m], steps) : most;
  return most;
}
"""

_JOIN = """
/* a range grows by another; one that is none makes it none */
INLINE void join_range(f32 a, f32 b, f32* low, f32* high) {
  *low = ((a < *low) | (a != a)) ? a : *low; *high = ((b > *high) | (b != b)) ? b : *high;
}
"""

_CENTRE = """
/* floats on a grid, minus its zero point, an even number of them; returns their sum */
INLINE i32 centre(GLOBAL const f32* x, GLOBAL i16* to, int size, f32 step, f32 zero) {
  i32 sum = 0, shift = (i32)zero;
  for (int k = 0; k < size; k++) {
    i32 value = (u8)to_integer(x[k] / step, zero, 0.0f, 255.0f) - shift;
    to[k] = (i16)value;
    sum += value;
  }
  if (size & 1) to[size] = 0;
  return sum;
}
"""

SOLVERS = both(QuantisedLSTM)
