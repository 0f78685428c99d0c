"""QuantizeLinear and DequantizeLinear, per tensor, per axis and in blocks, and DynamicQuantizeLinear.

Both conversions are element-wise, in memory order. They differ in where an element finds its scale and zero point.
Either these are equal along a run of consecutive elements (`_runs`), or they are adjacent like the elements (`_lanes`).
In a blocked layout they belong to the channels inside the blocks (`_blocks`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater, lesser
from tunewright.ir.types import PLAIN, DType, TensorType
from tunewright.ops import shapes
from tunewright.ops.numeric import limits
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Problem, tensor

from ..source.base import CSolver, both
from ..source.emit import COMPUTE, EmittedLaunch, In, Out, Scratch, Source

MS = "com.microsoft::"
INTEGERS = frozenset({DType.INT8, DType.UINT8, DType.INT16, DType.UINT16})
FLOATS = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})
#: Numbers of fewer than eight bits take a byte each, whose upper bits are ignored.
NARROW = {DType.INT4: (DType.INT8, 4), DType.UINT4: (DType.UINT8, 4), DType.INT2: (DType.INT8, 2),
          DType.UINT2: (DType.UINT8, 2)}  # fmt: skip
_ROUND = {DType.FLOAT16: "f16_load(f16_store({}))", DType.BFLOAT16: "bf16_load(bf16_store({}))"}
#: The least number of elements of a work-item; fewer do not pay for its launch.
LEAST = 1 << 14

#: Round, ties to even, shift and saturate. NaN becomes 0, as in the reference. Processors convert NaN to the lowest
#: 32-bit number, of which a narrower type keeps the lower bits.
TO_INTEGER = """
INLINE i32 to_integer(f32 value, f32 zero, f32 low, f32 high) {
  f32 v = __builtin_rintf(value) + zero;
  v = low > v ? low : v;
  v = high < v ? high : v;
  return v == v ? (i32)v : 0;
}
INLINE f32 or_lowest(f32 value, f32 low) { return value != value ? low : value; }
"""


def to_integer(value: str, zero: str, dtype: DType, lowest: bool = False) -> str:
    """The expression of a float as an integer type; needs `TO_INTEGER`.

    NaN becomes 0, or with ``lowest`` the result of the lowest number.
    """
    low, high = (f"{float(limit)}f" for limit in limits(dtype.numpy))
    return f"to_integer({f'or_lowest({value}, {low})' if lowest else value}, {zero}, {low}, {high})"


def chunk_of(size: int, target: Target, least: int = LEAST) -> int:
    """The number of elements of a work-item: a few work-items per unit, none of them too small."""
    return greater(least, -(-size // (4 * target.units * 64)) * 64)


@dataclass(frozen=True)
class Spread:
    """The position of parameters relative to elements, which form rows of ``run`` elements.

    Row r begins at parameter (r / rows) * outer + (r % rows) / block * inner. Along a row parameters stay the same, or
    follow the elements, with ``share`` elements per parameter.
    """

    run: int
    follows: bool = False
    rows: int = 1
    block: int = 1
    outer: int = 0
    inner: int = 0
    share: int = 1


def spread_of(x: TensorType, parameters: TensorType, axis: int, block: int) -> Spread:
    """The spread of parameters over static types: one number, one per index of an axis, or one per block along it."""
    dims = x.dims
    if parameters.size == 1:
        return Spread(greater(x.size, 1))
    axis %= len(dims)
    size, inner = dims[axis], math.prod(dims[axis + 1 :])
    if not block:
        return Spread(inner, rows=size, inner=1) if inner > 1 else Spread(size, follows=True)
    blocks = -(-size // block)
    if inner > 1:
        return Spread(inner, True, size, block, blocks * inner, inner)
    if size % block:
        return Spread(size, True, 1, 1, blocks, 0, block)
    return Spread(block, False, blocks, 1, blocks, 1)


class Quantize(CSolver):
    """Converts between floats and small integers."""

    family = "quantize"
    ops = frozenset({"QuantizeLinear", "DequantizeLinear", MS + "QuantizeLinear", MS + "DequantizeLinear"})
    dtypes = INTEGERS | FLOATS | {DType.INT32} | frozenset(NARROW)
    layouts = frozenset({"plain", "blocked"})
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x, scale, y = tensor(problem.inputs[0]), tensor(problem.inputs[1]), tensor(problem.outputs[0])
        if problem.epilogue:
            return "takes no epilogue"
        if scale.dtype not in FLOATS:
            return f"does not take scales of {scale.dtype}"
        if _quantizes(problem):
            if y.dtype not in INTEGERS and y.dtype not in NARROW:
                return f"does not quantise to {y.dtype}"
            if x.dtype not in FLOATS | {DType.INT32}:
                return f"does not quantise {x.dtype}"
            if problem.attrs.get("precision") and _precision(problem) not in FLOATS:
                return f"does not divide in {_precision(problem)}"
        elif y.dtype not in FLOATS:
            return f"does not dequantise to {y.dtype}"
        if x.layout != y.layout:
            return "input and output have different layouts"
        if any(tensor(t).layout != PLAIN for t in problem.inputs[1:] if t is not None):
            return "its scales and zero points are plain"
        if scale.shape not in ((), (1,)) and x.rank:
            axis = shapes.axis_of(int(problem.attrs.get("axis", 1)), x.rank)
            if x.layout != PLAIN and (problem.attrs.get("block_size", 0) or axis != 1):
                return f"in the layout {x.layout} parameters belong to channels"
        return None

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({"least": [1 << 12, LEAST, 1 << 16]})

    def default(self, problem: Problem, target: Target) -> Config:
        return {"least": LEAST}

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x, scale = tensor(problem.inputs[0]), tensor(problem.inputs[1])
        source = Source("quantize" if _quantizes(problem) else "dequantize", self.specialise)
        convert = _Conversion(source, problem)
        if x.layout != PLAIN and scale.size > 1:
            return _blocks(source, convert, x, int(config["least"]), target)
        size = math.prod(x.physical)
        axis, block = int(problem.attrs.get("axis", 1)), int(problem.attrs.get("block_size", 0))
        spread = Spread(greater(size, 1)) if scale.size == 1 else spread_of(x, scale, axis, block)
        emit = _lanes if spread.follows else _runs
        return emit(source, convert, spread, size, chunk_of(size, target, int(config["least"])))


def _quantizes(problem: Problem) -> bool:
    return problem.op.removeprefix(MS) == "QuantizeLinear"


def _precision(problem: Problem) -> DType:
    """The type to which the quotient is rounded."""
    if problem.op.startswith(MS):
        return DType.FLOAT32
    code = problem.attrs.get("precision")
    return DType.of_onnx(int(code)) if code else tensor(problem.inputs[1]).dtype


class _Conversion:
    """Declares the buffers of a conversion, and writes its statements: first the parameters, then an element."""

    def __init__(self, source: Source, problem: Problem) -> None:
        self.source, self.problem = source, problem
        self.quantizes = _quantizes(problem)
        x, y = tensor(problem.inputs[0]), tensor(problem.outputs[0])
        self.x, self.y = x.dtype, y.dtype
        self.zero = tensor(problem.input(2)).dtype if problem.input(2) is not None else None
        source.buffer("x", _byte(x.dtype), In(0))
        source.buffer("scale", tensor(problem.inputs[1]).dtype, In(1))
        if self.zero is not None:
            source.buffer("zero", _byte(self.zero), In(2))
        source.buffer("y", _byte(y.dtype), Out())
        source.function(TO_INTEGER)
        #: the type of a zero point
        self.type = "f32" if self.quantizes or x.dtype is not DType.INT32 else "i32"

    def parameters(self, scale: str, zero: str, at: str) -> str:
        """Statements that assign the parameters at an index."""
        value = self.source.load("scale", at)
        precision = _precision(self.problem)
        if self.quantizes and precision is not tensor(self.problem.inputs[1]).dtype:
            value = _ROUND.get(precision, "{}").format(value)
        shift = "0" if self.zero is None else f"({self.type}){_integer(self.zero, f'zero[{at}]')}"
        return f"{scale} = {value}; {zero} = {shift};"

    def element(self, at: str, scale: str, zero: str) -> str:
        """The statement that converts an element."""
        if not self.quantizes:
            x = _integer(self.x, f"x[{at}]")
            moved = f"(f32)(i32)((u32){x} - (u32){zero})"  # 32-bit numbers wrap around
            value = f"{moved} * {scale}" if self.type == "i32" else f"((f32){x} - {zero}) * {scale}"
            return self.source.store("y", at, value)
        rounded = _ROUND.get(_precision(self.problem), "{}")
        x = f"(f32){self.source.load('x', at)}"
        if self.x is not _precision(self.problem):
            x = rounded.format(x)
        value = to_integer(rounded.format(f"{x} / {scale}"), zero, self.y, self.problem.op.startswith(MS))
        bits = f" & {(1 << NARROW[self.y][1]) - 1}" if self.y in NARROW else ""
        return f"y[{at}] = {value}{bits};"


def _byte(dtype: DType) -> DType:
    return NARROW[dtype][0] if dtype in NARROW else dtype


def _integer(dtype: DType, value: str) -> str:
    """An integer element. For a narrow type, shifts remove the upper bits and extend the sign."""
    if dtype not in NARROW:
        return value
    kind, bits = NARROW[dtype]
    return f"(({COMPUTE[kind]})((u32){value} << {8 - bits}) >> {8 - bits})"


def _runs(source: Source, convert: _Conversion, spread: Spread, size: int, chunk: int) -> list[EmittedLaunch]:
    """The launch for parameters that are equal along a row: one loop over it, in which they are scalars."""
    source.dims(SIZE=size, CHUNK=chunk, RUN=spread.run, ROWS=spread.rows, OUTER=spread.outer)
    source.add(f"""
int begin = GID(0) * CHUNK, stop = begin + CHUNK < SIZE ? begin + CHUNK : SIZE;
while (begin < stop) {{
  int row = begin / RUN, left = (row + 1) * RUN - begin;
  int end = left < stop - begin ? begin + left : stop;
  int at = row / ROWS * OUTER + row % ROWS;
  f32 s; {convert.type} z;
  {convert.parameters("s", "z", "at")}
  for (int i = begin; i < end; i++)
    {convert.element("i", "s", "z")}
  begin = end;
}}""")
    return [source.call([-(-size // chunk)])]


def _lanes(source: Source, convert: _Conversion, spread: Spread, size: int, chunk: int) -> list[EmittedLaunch]:
    """The launch for parameters that follow the elements of a row."""
    rows = size // spread.run if spread.run else 0
    least = greater(1, chunk // greater(spread.run, 1))
    source.dims(RUN=spread.run, ROWS=spread.rows, BLOCK=spread.block, OUTER=spread.outer, INNER=spread.inner)
    source.dims(HEIGHT=rows, LEAST=least)
    share = ""
    if spread.share > 1:
        source.dims(SHARE=spread.share)
        share = " / SHARE"
    source.add(f"""
int begin = GID(0) * LEAST, end = begin + LEAST < HEIGHT ? begin + LEAST : HEIGHT;
for (int row = begin; row < end; row++) {{
  int first = row / ROWS * OUTER + row % ROWS / BLOCK * INNER;
  for (int k = 0; k < RUN; k++) {{
    f32 s; {convert.type} z;
    int at = first + k{share}, i = row * RUN + k;
    {convert.parameters("s", "z", "at")}
    {convert.element("i", "s", "z")}
  }}
}}""")
    return [source.call([-(-rows // least)])]


def _blocks(source: Source, convert: _Conversion, x: TensorType, least: int, target: Target) -> list[EmittedLaunch]:
    """The launch whose rows are blocks of channels of an image; parameters are kept side by side, like the lanes."""
    batch, blocks, *space, lanes = x.physical
    pixels, chunk = math.prod(space), chunk_of(math.prod(x.physical), target, least)
    count = greater(1, lesser(chunk // lanes, pixels))
    rows = greater(1, chunk // greater(count * lanes, 1))
    source.fixed(LANES=lanes)
    source.dims(CHANNELS=x.dims[1], BLOCKS=blocks, HEIGHT=batch * blocks, ROWS=rows, PIXELS=pixels, COUNT=count)
    source.add(f"""
int top = GID(1) * ROWS, bottom = top + ROWS < HEIGHT ? top + ROWS : HEIGHT;
int begin = GID(0) * COUNT, end = begin + COUNT < PIXELS ? begin + COUNT : PIXELS;
for (int row = top; row < bottom; row++) {{
  f32 s[LANES]; {convert.type} z[LANES];
  for (int k = 0; k < LANES; k++) {{
    int channel = row % BLOCKS * LANES + k, at = channel < CHANNELS ? channel : CHANNELS - 1;
    {convert.parameters("s[k]", "z[k]", "at")}
  }}
  for (int pixel = begin; pixel < end; pixel++)
    for (int k = 0; k < LANES; k++) {{
      int i = (row * PIXELS + pixel) * LANES + k;
      {convert.element("i", "s[k]", "z[k]")}
    }}
}}""")
    return [source.call([-(-pixels // count), -(-(batch * blocks) // rows)])]


class DynamicQuantize(CSolver):
    """DynamicQuantizeLinear: work-items find the ranges of their parts, then quantise these with the range of all."""

    family = "dynamic_quantize"
    ops = frozenset({"DynamicQuantizeLinear"})
    dtypes = frozenset({DType.FLOAT32, DType.UINT8})
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        return "takes no epilogue" if problem.epilogue else None

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({"least": [1 << 12, LEAST, 1 << 16]})

    def default(self, problem: Problem, target: Target) -> Config:
        return {"least": LEAST}

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        size = tensor(problem.inputs[0]).size
        spare = (Scratch("y", size), Scratch("scale", 4), Scratch("zero", 1))  # outputs that the model does not use
        count = len(problem.outputs)
        made: list[Out | Scratch] = [*(Out(i) for i in range(count)), *spare[count:]]
        return dynamic_quantize(size, int(config["least"]), target, self.specialise, made)


#: The range of floats, and the step and zero point of eight bits over it. WIDTH: floats of a vector.
RANGE = """
vector_of(f32, WIDTH, VF);
typedef VF VFU __attribute__((aligned(4)));
/* the smallest and largest of 0 and consecutive numbers; none if one of them is none */
INLINE void range_of(GLOBAL const f32* x, int size, f32* low, f32* high) {
  VF least = 0.0f, most = 0.0f, none = 0.0f;
  int i = 0;
  for (; i + WIDTH <= size; i += WIDTH) {
    VF v = *(GLOBAL const VFU*)(x + i);
    least = v < least ? v : least; most = v > most ? v : most; none = v == v ? none : v;
  }
  f32 a = 0.0f, b = 0.0f, n = 0.0f;
  for (int k = 0; k < WIDTH; k++) {
    a = least[k] < a ? least[k] : a; b = most[k] > b ? most[k] : b; n = none[k] == none[k] ? n : none[k];
  }
  for (; i < size; i++) {
    a = x[i] < a ? x[i] : a; b = x[i] > b ? x[i] : b; n = x[i] == x[i] ? n : x[i];
  }
  *low = n == n ? a : n; *high = n == n ? b : n;
}
/* flat: the step of a range that is nothing but 0 */
INLINE f32 step_of(f32 low, f32 high, f32 flat) { return high == low ? flat : (high - low) / 255.0f; }
INLINE f32 zero_of(f32 low, f32 step) { return (u8)to_integer(-low / step, 0.0f, 0.0f, 255.0f); }
"""


def dynamic_quantize(
    size: int, least: int, target: Target, specialise: bool, made: Sequence[Out | Scratch], flat: float = 255.0
) -> list[EmittedLaunch]:
    """The launches that write input 0 as uint8, its scale and its zero point to the three places in ``made``.

    The scale of an input of zeros is 1 / ``flat``.
    """
    chunk = chunk_of(size, target, least)
    parts = greater(1, -(-size // chunk))
    calls = []
    if parts > 1:
        source = Source("range_of_part", specialise)
        source.buffer("x", DType.FLOAT32, In(0))
        source.buffer("ranges", DType.FLOAT32, Scratch("ranges", 8 * parts))
        source.dims(SIZE=size, CHUNK=chunk)
        source.fixed(WIDTH=target.vector_bytes // 4)
        source.function(TO_INTEGER)
        source.function(RANGE)
        source.add("""
int begin = GID(0) * CHUNK, end = begin + CHUNK < SIZE ? begin + CHUNK : SIZE;
f32 low, high;
range_of(x + begin, end - begin, &low, &high);
ranges[2 * GID(0)] = low; ranges[2 * GID(0) + 1] = high;""")
        calls.append(source.call([parts]))
    source = Source("dynamic_quantize", specialise)
    source.buffer("x", DType.FLOAT32, In(0))
    for name, dtype, arg in zip(("y", "scale", "zero"), (DType.UINT8, DType.FLOAT32, DType.UINT8), made, strict=True):
        source.buffer(name, dtype, arg)
    source.dims(SIZE=size, CHUNK=chunk)
    source.fixed(WIDTH=target.vector_bytes // 4, FLAT=flat)
    source.function(TO_INTEGER)
    source.function(RANGE)
    source.add("f32 low = 0.0f, high = 0.0f;")
    if parts > 1:
        source.buffer("ranges", DType.FLOAT32, Scratch("ranges", 8 * parts))
        source.dims(PARTS=parts)
        source.add("""
bool none = false;
for (int k = 0; k < PARTS; k++) {
  f32 a = ranges[2 * k], b = ranges[2 * k + 1];
  low = a < low ? a : low; high = b > high ? b : high; none = none || a != a;
}
low = none ? 0.0f : low; high = none ? 0.0f : high;""")
    else:
        source.add("range_of(x, SIZE, &low, &high);\nif (low != low) low = high = 0.0f;")
    source.add(f"""
int begin = GID(0) * CHUNK, end = begin + CHUNK < SIZE ? begin + CHUNK : SIZE;
f32 s = step_of(low, high, 1.0f / FLAT), z = zero_of(low, s);
if (begin == 0) {{
  *scale = s; *zero = (u8)z;
}}
for (int i = begin; i < end; i++)
  y[i] = {to_integer("x[i] / s", "z", DType.UINT8)};""")
    return [*calls, source.call([parts])]


SOLVERS = (*both(Quantize), *both(DynamicQuantize))
