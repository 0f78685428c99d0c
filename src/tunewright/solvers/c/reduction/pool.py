"""MaxPool, AveragePool and LpPool over one to three axes, plain and blocked."""

from __future__ import annotations

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater
from tunewright.ir.types import PLAIN, DType
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Problem, tensor
from tunewright.solvers.epilogue_types import main_type

from ..source import epilogue, fold, window
from ..source.base import CSolver, both, layout_of
from ..source.emit import COMPUTE, EmittedLaunch, In, Out, Source
from ..source.fold import Fold
from ..source.window import Window

#: The elements of a row that are folded over the window's rows before they are folded along the row.
_LINE = 1024
#: Up to this number of taps of a blocked tensor are folded directly, by bytes of a vector. For AVX-512 the compiler
#: emits gathers where it folds along a line.
_FEW_TAPS = {64: 81, 0: 9}
#: The most unrolled taps along an axis; more would take the compiler long.
_UNROLLED_TAPS = 16
_AXES = "DHW"
#: For loops of few elements: vectors, but at most one per iteration.
_SHORT_LOOP = '_Pragma("clang loop interleave_count(1)")'


def pool_fold(op: str, dtype: DType, p: int) -> Fold:
    """How a pooling folds elements; an average is divided afterwards."""
    if op.endswith("MaxPool"):
        return fold.extremum(dtype, largest=True)
    if op.endswith("AveragePool"):
        return fold.total(dtype)
    kind = COMPUTE[dtype]
    if p == 1:
        return fold.total(dtype, f"{kind}_fabs(v)")
    if p == 2:
        return fold.total(dtype, "v * v").finished(f"{kind}_sqrt(a)")
    power, root = f"{kind}_pow({kind}_fabs(v), {float(p)!r}f)", f"{kind}_pow(a, 1.0f / {float(p)!r}f)"
    if kind == "f64":
        power, root = power.replace("f)", ")"), root.replace("f)", ")").replace("1.0f", "1.0")
    return fold.total(dtype, power).finished(root)


def takes(op: str, dtype: DType) -> bool:
    """Whether an operation is defined for a type: for integers only maxima are."""
    return op.endswith("MaxPool") or fold.is_float(dtype)


class Pool(CSolver):
    """Sliding windows. With the output Indices, a scalar kernel reads every tap in order."""

    family = "pool"
    ops = frozenset({"MaxPool", "AveragePool", "LpPool"})
    layouts = frozenset({"plain", "blocked"})
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x, reason = tensor(problem.inputs[0]), window.why_not(problem)
        if reason is not None:
            return reason
        if not takes(problem.op, x.dtype):
            return f"{problem.op} of {x.dtype}"
        if layout_of(x) != layout_of(problem.outputs[0]):
            return "input and output differ in layout"
        if len(problem.outputs) > 1 and layout_of(x) != PLAIN:
            return "indices count elements of the plain layout"
        if len(problem.outputs) > 1 and problem.epilogue:
            return "takes no epilogue with indices"
        if problem.is_static and _line(Window.of(problem)) > 16 * _LINE:
            return "the window is too wide"
        return epilogue.why_not(problem)

    def default(self, problem: Problem, target: Target) -> Config:
        most = next(taps for size, taps in _FEW_TAPS.items() if target.vector_bytes >= size)
        few = problem.is_static and Window.of(problem).taps <= most
        return {"direct": few and layout_of(problem.inputs[0]) != PLAIN, "grain": fold.GRAIN}

    def space(self, problem: Problem, target: Target) -> Space:
        direct = [False] if layout_of(problem.inputs[0]) == PLAIN else [True, False]
        return Space({"direct": direct, "grain": [4096, fold.GRAIN, 65536]})

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x, y, win = tensor(problem.inputs[0]), tensor(problem.outputs[0]), Window.of(problem)
        if not y.size:
            return []
        main = main_type(problem).dtype
        how = pool_fold(problem.op, x.dtype, int(problem.attrs.get("p", 2)))
        source = Source("pool", self.specialise)
        source.buffer("x", x.dtype, In(0))
        source.buffer("y", y.dtype, Out())
        how.define(source, COMPUTE[x.dtype], COMPUTE[main])
        block = x.layout.block or 1
        planes = x.dims[0] * -(-x.dims[1] // block)
        rows = planes * win.output[0] * win.output[1]
        each, grid = fold.split(rows, fold.work_items(greater(x.size, y.size), target.units, int(config["grain"])))
        source.dims(ROWS=rows, ROWS_EACH=each, CHANNELS=x.dims[1], CHANNEL_BLOCKS=-(-x.dims[1] // block))
        source.fixed(BLOCK=block, UNROLL_TAPS="UNROLL" if max(win.kernel) <= _UNROLLED_TAPS else "")
        for i, axis in enumerate(_AXES):
            source.dims(**{axis: win.input[i], f"O{axis}": win.output[i], f"HEAD_{axis}": win.head[i]})
            source.dims(**{f"TAIL_{axis}": win.tail[i]})
            source.fixed(**{f"K{axis}": win.kernel[i], f"S{axis}": win.stride[i], f"DIL_{axis}": win.dilation[i]})
        source.function(_RANGE)
        if len(problem.outputs) > 1:
            source.buffer("indices", DType.INT64, Out(1))
            source.add(_with_indices(source, how, int(problem.attrs.get("storage_order", 0))))
            return [source.call([grid])]
        steps = epilogue.Epilogue(source, problem)
        # One element needs no averaging (`passes/fusion/early_strides.py` makes such windows to drop elements).
        average = problem.op == "AveragePool" and (win.taps > 1 or any((*win.head, *win.tail)))
        include = bool(problem.attrs.get("count_include_pad", 0))
        value = f"fold_finish(sum, 1, 0){' / (rows_counted * counted)' if average else ''}"
        counts = _counts(COMPUTE[main], include) if average else ("", "")
        if config["direct"]:
            body = _direct_row(source, how, steps, value, counts)
        else:
            source.fixed(LINE=_line(win), STRIP=target.vector_bytes // how.acc.itemsize, SHORT_LOOP=_SHORT_LOOP)
            body = _line_row(source, how, steps, value, counts)
        source.add(f"""
{_ROWS}
  const int top = oh * SH - HEAD_H, front = od * SD - HEAD_D;
  const int h0 = first_tap(top, DIL_H, 0), h1 = last_tap(top, DIL_H, KH, H);
  const int d0 = first_tap(front, DIL_D, 0), d1 = last_tap(front, DIL_D, KD, D);
  {counts[0]}
  {body}
}}""")
        return [source.call([grid])]


#: The loop over a work-item's rows of results, without its closing brace.
_ROWS = """
const int stop = (GID(0) + 1) * ROWS_EACH < ROWS ? (GID(0) + 1) * ROWS_EACH : ROWS;
int row = GID(0) * ROWS_EACH, oh = row % OH - 1, od = row / OH % OD, plane = row / OH / OD;
for (; row < stop; row++) {
  oh++;
  if (oh == OH) { oh = 0; od++; }
  if (od == OD) { od = 0; plane++; }"""

#: The taps [first, last) of a window that begins at ``from``, restricted to [low, high).
_RANGE = """
INLINE int first_tap(int from, int dilation, int low) {
  return from < low ? (low - from + dilation - 1) / dilation : 0;
}
INLINE int last_tap(int from, int dilation, int taps, int high) {
  const int end = from < high ? (high - from + dilation - 1) / dilation : 0;
  return end < taps ? end : taps;
}
INLINE int tap_count(int from, int dilation, int taps, int low, int high) {
  const int count = last_tap(from, dilation, taps, high) - first_tap(from, dilation, low);
  return count > 0 ? count : 0;
}
"""


def _counts(kind: str, include: bool) -> tuple[str, str]:
    """Statements for the number of elements that an average counts: over the window's rows, and along a row."""

    def count(start: str, axis: str) -> str:
        low, high = (f"-HEAD_{axis}", f"{axis} + TAIL_{axis}") if include else ("0", axis)
        return f"tap_count({start}, DIL_{axis}, K{axis}, {low}, {high})"

    rows = f"const {kind} rows_counted = {count('top', 'H')} * {count('front', 'D')};"
    return rows, f"const {kind} counted = {count('ow * SW - HEAD_W', 'W')};"


def _line(win: Window) -> int:
    """The number of elements of a line: at least enough for one output."""
    reach = (win.kernel[2] - 1) * win.dilation[2] + 1
    size = _LINE
    while size < 2 * reach + win.stride[2]:
        size *= 2
    return size


def _line_row(source: Source, how: Fold, steps: epilogue.Epilogue, value: str, counts: tuple[str, str]) -> str:
    """Statements that fold elements over the window's rows into a line, and then along the line.

    Positions outside of the input contribute nothing. In a blocked tensor, an element is a block of channels. Loops run
    over whole vectors of STRIP elements: the last one of a row is moved back over finished elements, and the line has
    room for results that are not kept.
    """
    lines, result = steps.apply("v", "(channel + l < CHANNELS ? channel + l : CHANNELS - 1)", "out + l")

    def element(row: str) -> str:
        return f"fold_each({source.load('x', f'at + {row} * DIL_H * W * BLOCK + i')}, 0)"

    return f"""
  const int channel UNUSED = plane % CHANNEL_BLOCKS * BLOCK;
  const int reach = (KW - 1) * DIL_W + 1, most = (LINE - reach) / SW + 1;
  for (int start = 0; start < OW; start += most) {{
    const int columns = OW - start < most ? OW - start : most, span = (columns - 1) * SW + reach;
    const int left = start * SW - HEAD_W, inside = W - left < span ? W - left : span;
    const int begin = (left < 0 ? -left : 0) * BLOCK, end = inside < 0 ? 0 : inside * BLOCK;
    {how.type} line[(LINE + STRIP * SW) * BLOCK], sums[(LINE + STRIP) * BLOCK];
    for (int i = 0; i < begin; i++) line[i] = fold_start();
    for (int i = end; i < (span + STRIP * SW) * BLOCK; i++) line[i] = fold_start();
    if (KD == 1 && d1 == 1 && h0 == 0 && h1 == KH) {{
      const int at = (((plane * D + front) * H + top) * W + left) * BLOCK;
      int from = begin, to = end - begin < STRIP ? end : end - (end - begin) % STRIP;
      for (;;) {{
        SHORT_LOOP for (int i = from; i < to; i++) {{
          {how.type} sum = {element("0")};
          UNROLL_TAPS for (int k = 1; k < KH; k++) sum = fold_join(sum, {element("k")});
          line[i] = sum;
        }}
        if (to >= end) break;
        from = end - STRIP;
        to = end;
      }}
    }} else {{
      for (int i = begin; i < end; i++) line[i] = fold_start();
      for (int kd = d0; kd < d1; kd++)
        for (int kh = h0; kh < h1; kh++) {{
          const int at = (((plane * D + front + kd * DIL_D) * H + top) * W + left) * BLOCK;
          SHORT_LOOP for (int i = begin; i < end; i++) line[i] = fold_join(line[i], {element("kh")});
        }}
    }}
    SHORT_LOOP for (int j = 0; j < (columns + STRIP - 1) / STRIP * STRIP; j++)
      UNROLL for (int l = 0; l < BLOCK; l++) {{
        {how.type} sum = line[j * SW * BLOCK + l];
        UNROLL_TAPS for (int k = 1; k < KW; k++) sum = fold_join(sum, line[(j * SW + k * DIL_W) * BLOCK + l]);
        sums[j * BLOCK + l] = sum;
      }}
    SHORT_LOOP for (int j = 0; j < columns; j++) {{
      const int ow = start + j, out = (row * OW + ow) * BLOCK;
      {counts[1]}
      UNROLL for (int l = 0; l < BLOCK; l++) {{
        const {how.type} sum = sums[j * BLOCK + l];
        {COMPUTE[steps.dtypes[0]]} v = {value};
        {lines}
        {source.store("y", "out + l", result)}
      }}
    }}
  }}"""


def _direct_row(source: Source, how: Fold, steps: epilogue.Epilogue, value: str, counts: tuple[str, str]) -> str:
    """Statements that fold each block of channels over all taps.

    Windows that lie wholly inside a row have a constant number of taps along it.
    """
    lines, result = steps.apply("v", "(channel + l < CHANNELS ? channel + l : CHANNELS - 1)", "out + l")

    def taps(first: str, last: str, unroll: str) -> str:
        return f"""
    for (int kd = d0; kd < d1; kd++)
      for (int kh = h0; kh < h1; kh++) {{
        const int at = ((plane * D + front + kd * DIL_D) * H + top + kh * DIL_H) * W + left;
        {unroll} for (int kw = {first}; kw < {last}; kw++)
          for (int l = 0; l < BLOCK; l++)
            sums[l] = fold_join(sums[l], fold_each({source.load("x", "(at + kw * DIL_W) * BLOCK + l")}, 0));
      }}"""

    return f"""
  const int channel UNUSED = plane % CHANNEL_BLOCKS * BLOCK;
  for (int ow = 0; ow < OW; ow++) {{
    const int left = ow * SW - HEAD_W, out = (row * OW + ow) * BLOCK;
    {how.type} sums[BLOCK];
    for (int l = 0; l < BLOCK; l++) sums[l] = fold_start();
    if (left >= 0 && left + (KW - 1) * DIL_W < W) {{
      {taps("0", "KW", "UNROLL_TAPS")}
    }} else {{
      const int w0 = first_tap(left, DIL_W, 0), w1 = last_tap(left, DIL_W, KW, W);
      {taps("w0", "w1", "")}
    }}
    {counts[1]}
    for (int l = 0; l < BLOCK; l++) {{
      const {how.type} sum = sums[l];
      {COMPUTE[steps.dtypes[0]]} v = {value};
      {lines}
      {source.store("y", "out + l", result)}
    }}
  }}"""


def _with_indices(source: Source, how: Fold, order: int) -> str:
    """Statements that find the first of equal maxima in row-major order of the window; NaN is never larger.

    Padding counts as an element.
    """
    place = "(d * H + h) * W + w" if order == 0 else "(w * H + h) * D + d"
    return f"""
{_ROWS}
  for (int ow = 0; ow < OW; ow++) {{
    {how.type} best = fold_start();
    int chosen = 0, first = 1;
    for (int kd = 0; kd < KD; kd++)
      for (int kh = 0; kh < KH; kh++)
        for (int kw = 0; kw < KW; kw++) {{
          const int d = od * SD - HEAD_D + kd * DIL_D, h = oh * SH - HEAD_H + kh * DIL_H;
          const int w = ow * SW - HEAD_W + kw * DIL_W;
          const int inside = (d >= 0) & (d < D) & (h >= 0) & (h < H) & (w >= 0) & (w < W);
          {how.type} v = fold_start();
          if (inside) v = {source.load("x", "((plane * D + d) * H + h) * W + w")};
          if (first | (v > best)) {{ best = v; chosen = {place}; }}
          first = 0;
        }}
    {source.store("y", "row * OW + ow", "best")}
    indices[row * OW + ow] = (i64)plane * D * H * W + chosen;
  }}
}}"""


SOLVERS = both(Pool)
