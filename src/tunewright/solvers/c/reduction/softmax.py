"""Softmax, LogSoftmax and Hardmax along any axis: rows along the innermost one, else columns side by side.

Rows of f32 use explicit vectors, the last of which is filled up. A compiler's loop would handle the remainder of a row
one by one, and most of a short row is remainder.
"""

from __future__ import annotations

from tunewright.devices.base import Target
from tunewright.ir.types import DType
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Problem, tensor

from ..selection import arg
from ..source import fold
from ..source.base import CSolver, both
from ..source.emit import COMPUTE, EmittedLaunch, In, Out, Source
from ..source.fold import Fold

#: elements of a softmax that are worth a separate work-item
_GRAIN = 8192


class Softmax(CSolver):
    """Stores exponentials in the output until their sum is known."""

    family = "softmax"
    ops = frozenset({"Softmax", "LogSoftmax", "Hardmax"})
    dtypes = frozenset({DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16})
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        return "takes no epilogue" if problem.epilogue else None

    def default(self, problem: Problem, target: Target) -> Config:
        x = tensor(problem.inputs[0])
        size = x.dims[int(problem.attrs.get("axis", -1))] if x.is_static and x.shape else 0
        return {"lanes": fold.lanes_for(size), "slab": 256, "grain": _GRAIN}

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({"lanes": [16, 32, 64], "slab": [64, 256, 1024], "grain": [2048, _GRAIN, 32768]})

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x = tensor(problem.inputs[0])
        outer, size, inner = fold.around(x.dims, int(problem.attrs.get("axis", -1))) if x.dims else (1, 1, 1)
        slab = int(config["slab"])
        source = Source(problem.op.lower(), self.specialise)
        source.buffer("x", x.dtype, In(0))
        source.buffer("y", x.dtype, Out())
        vectors = inner == 1 and x.dtype is DType.FLOAT32 and problem.op != "Hardmax"
        if not vectors:
            source.fixed(LANES=int(config["lanes"]), SLAB=slab)
        tiles = outer * (1 if inner == 1 else -(-inner // slab))
        each, grid = fold.split(tiles, fold.work_items(x.size, target.units, int(config["grain"])))
        source.dims(TILES=tiles, TILES_EACH=each, SIZE=size, INNER=inner)
        if vectors:
            tile = _vectors(source, problem.op, target.vector_bytes // 4)
        else:
            tile = (_row if inner == 1 else _columns)(source, problem.op, x.dtype)
        source.add(f"""
const int stop = (GID(0) + 1) * TILES_EACH < TILES ? (GID(0) + 1) * TILES_EACH : TILES;
for (int tile = GID(0) * TILES_EACH; tile < stop; tile++) {{
{tile}
}}""")
        return [source.call([grid] if x.size else [0])]


#: Exponentials of numbers that are not positive, for which f32_exp does more than needed. They take a number or lanes,
#: and are accurate to four units in the last place. NaN stays NaN; -88 and below become 2^-127, whose bits are those of
#: 0.
_EXP = """
INLINE {V} exp_below({V} x) {{
  const {V} c = x < -88.0f ? -88.0f : x;
  const {V} t = c * 1.44269504089f + F32_ROUNDER, n = t - F32_ROUNDER, r = c - n * F32_LN2;
  {V} p = 8.2902722061e-3f;
  p = p * r + 4.1898161173e-2f; p = p * r + 1.6667638719e-1f; p = p * r + 4.9999147654e-1f;
  p = p * r + 9.9999970198e-1f; p = p * r + 1.0f;
  return p * CAST_BITS((CAST_BITS(t, {U}) << 23) + (127u << 23), {V});
}}
"""
#: rounds a sum to the element type
_ROUNDED = {DType.FLOAT16: "f16_load(f16_store({}))", DType.BFLOAT16: "bf16_load(bf16_store({}))"}


def _highest(op: str, dtype: DType) -> Fold:
    """The fold for the maximum. It may skip NaN, because a NaN makes the sum of exponentials NaN."""
    return fold.extremum(dtype, largest=True, nan=op == "Hardmax")


def _exp(source: Source, dtype: DType) -> str:
    """Adds the function for exponentials of numbers that are not positive, and returns its name."""
    if COMPUTE[dtype] == "f64":
        return "f64_exp"
    source.function(_EXP.format(V="f32", U="u32"))
    return "exp_below"


def _across(name: str, join: str, width: int) -> str:
    """A C function that reduces a vector to one number by halving it; ``join`` combines ``a`` and ``b``."""
    lines = [f"V{width} v{width} = v;"]
    while width > 1:
        width //= 2
        kind = f"V{width}" if width > 1 else "f32"
        lines.append(f"{kind} a{width} = v{2 * width}.lo, b{width} = v{2 * width}.hi;")
        lines.append(f"{kind} v{width} = {join.format(a=f'a{width}', b=f'b{width}')};")
    return f"INLINE f32 {name}(V v) {{ {' '.join(lines)} return v1; }}"


def _vectors(source: Source, op: str, width: int) -> str:
    """Statements for a row of f32; lanes beyond its end are minus infinity, whose exponential is 0."""
    source.fixed(WIDTH=width)
    sizes = [width >> i for i in range(width.bit_length() - 1)]
    source.function(" ".join(f"vector_of(f32, {size}, V{size});" for size in sizes))
    source.function(f"typedef V{width} V; typedef V VU __attribute__((aligned(4))); vector_of(u32, {width}, VBITS);")
    source.function(_across("highest", "{a} > {b} ? {a} : {b}", width))
    source.function(_across("total", "{a} + {b}", width))
    source.function(_EXP.format(V="V", U="VBITS"))
    keep, factor, result, rest = "STOREV(to + i, e);", "1.0f / total(sum)", "LOADV(to + i) * factor", "last * factor"
    if op == "LogSoftmax":
        keep, factor, result, rest = "", "f32_log(total(sum))", "LOADV(from + i) - top - factor", "given - top - factor"
    return f"""
GLOBAL const f32* from = x + tile * SIZE;
GLOBAL f32* to = y + tile * SIZE;
const int rest = SIZE % WIDTH, whole = SIZE - rest;
V given = -F32_INFINITY, even = given, odd = given;
for (int l = 0; l < rest; l++) given[l] = from[whole + l];
int i = 0;
for (; i + WIDTH < whole; i += 2 * WIDTH) {{
  V a = LOADV(from + i), b = LOADV(from + i + WIDTH);
  even = a > even ? a : even; odd = b > odd ? b : odd;
}}
if (i < whole) {{ V a = LOADV(from + i); even = a > even ? a : even; }}
odd = given > odd ? given : odd;
const f32 top = highest(odd > even ? odd : even);
V sum = 0.0f, last = 0.0f;
for (i = 0; i < whole; i += WIDTH) {{
  V e = exp_below(LOADV(from + i) - top);
  sum += e;
  {keep}
}}
if (rest) {{ last = exp_below(given - top); sum += last; }}
const f32 factor = {factor};
for (i = 0; i < whole; i += WIDTH) STOREV(to + i, {result});
if (rest) {{
  last = {rest};
  for (int l = 0; l < rest; l++) to[whole + l] = last[l];
}}"""


def _row(source: Source, op: str, dtype: DType) -> str:
    kind, rounded = COMPUTE[dtype], _ROUNDED.get(dtype, "{}")
    how, exp = _highest(op, dtype), _exp(source, dtype)
    how.define(source, kind)
    top = f"const int begin = 0, end = SIZE, row = tile * SIZE;\n{fold.rows(source, how, 'x', 'row')}"
    x, y = source.load("x", "row + i"), source.load("y", "row + i")
    if op == "Hardmax":
        return f"""
{top}
{arg.find(source, last=False)}
for (int i = 0; i < SIZE; i++) {{ {source.store("y", "row + i", "0")} }}
{source.store("y", "row + where", "1")}"""
    if op == "LogSoftmax":
        return f"""
{top}
{kind} sum = 0;
{{ REASSOCIATE
  for (int i = 0; i < SIZE; i++) sum += {exp}({x} - rest);
}}
const {kind} shift = {kind}_log(sum);
for (int i = 0; i < SIZE; i++) {{ {source.store("y", "row + i", f"{x} - rest - shift")} }}"""
    return f"""
{top}
{kind} sum = 0;
{{ REASSOCIATE
  for (int i = 0; i < SIZE; i++) {{
    {source.store("y", "row + i", f"{exp}({x} - rest)")}
    sum += {y};
  }}
}}
const {kind} scale = 1 / {rounded.format("sum")};
for (int i = 0; i < SIZE; i++) {{ {source.store("y", "row + i", f"{y} * scale")} }}"""


def _columns(source: Source, op: str, dtype: DType) -> str:
    kind, rounded = COMPUTE[dtype], _ROUNDED.get(dtype, "{}")
    at = "base + i * INNER + l"
    x, y = source.load("x", at), source.load("y", at)
    if op == "Hardmax":
        return f"""
{arg.columns(source, dtype, largest=True, last=False)}
for (int i = 0; i < SIZE; i++)
  for (int l = 0; l < width; l++) {{ {source.store("y", at, "where[l] == i ? 1 : 0")} }}"""
    exp = _exp(source, dtype)
    _highest(op, dtype).define(source, kind)
    log = op == "LogSoftmax"
    if log:
        one = f"sum[l] += {exp}({x} - top[l]);"
        last, result = f"{kind}_log(sum[l])", f"{x} - top[l] - sum[l]"
    else:
        one = f"{source.store('y', at, f'{exp}({x} - top[l])')} sum[l] += {y};"
        last, result = f"1 / {rounded.format('sum[l]')}", f"{y} * sum[l]"
    return f"""
const int slabs = (INNER + SLAB - 1) / SLAB, outer = tile / slabs, column = tile % slabs * SLAB;
const int width = column + SLAB < INNER ? SLAB : INNER - column, base = outer * SIZE * INNER + column;
{kind} top[SLAB], sum[SLAB];
for (int l = 0; l < width; l++) {{ top[l] = fold_start(); sum[l] = 0; }}
for (int i = 0; i < SIZE; i++)
  for (int l = 0; l < width; l++) top[l] = fold_join(top[l], {x});
for (int i = 0; i < SIZE; i++)
  for (int l = 0; l < width; l++) {{ {one} }}
for (int l = 0; l < width; l++) sum[l] = {last};
for (int i = 0; i < SIZE; i++)
  for (int l = 0; l < width; l++) {{ {source.store("y", at, result)} }}"""


SOLVERS = both(Softmax)
