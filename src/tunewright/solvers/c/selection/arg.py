"""ArgMax and ArgMin: find the extremum first, as a reduction would, then its position."""

from __future__ import annotations

from tunewright.devices.base import Target
from tunewright.ir.types import DType
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Problem, tensor

from ..source import fold
from ..source.base import CSolver, both
from ..source.emit import COMPUTE, EmittedLaunch, In, Out, Source

#: the number of columns whose extrema are found side by side
SLAB = 256


class Arg(CSolver):
    """Searches rows along the innermost axis, or columns side by side."""

    family = "arg"
    ops = frozenset({"ArgMax", "ArgMin"})
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x = tensor(problem.inputs[0])
        if problem.epilogue:
            return "takes no epilogue"
        if x.is_static and x.shape and not x.dims[int(problem.attrs.get("axis", 0))]:
            return "no element stands anywhere"
        return None

    def default(self, problem: Problem, target: Target) -> Config:
        return {"lanes": 32, "grain": fold.GRAIN}

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({"lanes": [16, 32, 64], "grain": [4096, fold.GRAIN]})

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x, last = tensor(problem.inputs[0]), bool(problem.attrs.get("select_last_index", 0))
        outer, size, inner = fold.around(x.dims, int(problem.attrs.get("axis", 0))) if x.dims else (1, 1, 1)
        source = Source("arg", self.specialise)
        source.buffer("x", x.dtype, In(0))
        source.buffer("y", DType.INT64, Out())
        source.fixed(LANES=int(config["lanes"]), SLAB=SLAB)
        largest = problem.op == "ArgMax"
        tiles = outer * (1 if inner == 1 else -(-inner // SLAB))
        each, grid = fold.split(tiles, fold.work_items(x.size, target.units, int(config["grain"])))
        source.dims(TILES=tiles, TILES_EACH=each, SIZE=size, INNER=inner)
        if inner == 1:
            how = fold.extremum(x.dtype, largest)
            how.define(source, COMPUTE[x.dtype])
            body = f"""
const int begin = 0, end = SIZE, row = tile * SIZE;
{fold.rows(source, how, "x", "row")}
{find(source, last)}
y[tile] = where;"""
        else:
            body = f"""
{columns(source, x.dtype, largest, last)}
for (int l = 0; l < width; l++) y[outer * INNER + column + l] = where[l];"""
        source.add(f"""
const int stop = (GID(0) + 1) * TILES_EACH < TILES ? (GID(0) + 1) * TILES_EACH : TILES;
for (int tile = GID(0) * TILES_EACH; tile < stop; tile++) {{
{body}
}}""")
        return [source.call([grid])]


def find(source: Source, last: bool) -> str:
    """Statements that set ``where`` to the first or last position of the value ``rest`` in x[row].

    The row has SIZE elements. One NaN equals another.
    """
    same = _same(source, "row + i")
    if last:
        return f"int where = SIZE - 1;\nfor (int i = where; i >= 0; i--) if ({same}) {{ where = i; break; }}"
    return f"""
int from = 0, where = 0;
for (; from + LANES <= SIZE; from += LANES) {{
  int hits = 0;
  for (int l = 0; l < LANES; l++) hits |= {_same(source, "row + from + l")};
  if (hits) break;
}}
for (int i = from; i < SIZE; i++) if ({same}) {{ where = i; break; }}"""


def _same(source: Source, at: str) -> str:
    """The condition that an element of x equals ``rest``, or that both are NaN."""
    value, dtype = source.load("x", at), source.dtype("x")
    if not fold.is_float(dtype):
        return f"{value} == rest"
    return f"((int)({value} == rest) | ((int)({value} != {value}) & (rest != rest)))"


def columns(source: Source, dtype: DType, largest: bool, last: bool) -> str:
    """Statements that set ``where[l]`` to the positions of the extrema of up to SLAB columns.

    The columns have SIZE rows of INNER elements. The statements declare ``outer``, ``column`` (the first one),
    ``width`` and ``base``, the offset of the first element.
    """
    sign = (">" if largest else "<") + ("=" if last else "")
    take = f"v {sign} best[l]"
    if fold.is_float(dtype):
        take = f"({take}) | (v != v)" if last else f"({take}) | ((v != v) & (best[l] == best[l]))"
    kind = COMPUTE[dtype]
    return f"""
const int slabs = (INNER + SLAB - 1) / SLAB, outer = tile / slabs, column = tile % slabs * SLAB;
const int width = column + SLAB < INNER ? SLAB : INNER - column, base = outer * SIZE * INNER + column;
{kind} best[SLAB];
int where[SLAB];
for (int l = 0; l < width; l++) {{ best[l] = {source.load("x", "base + l")}; where[l] = 0; }}
for (int i = 1; i < SIZE; i++)
  for (int l = 0; l < width; l++) {{
    {kind} v = {source.load("x", "base + i * INNER + l")};
    int taken = {take};
    best[l] = taken ? v : best[l];
    where[l] = taken ? i : where[l];
  }}"""


SOLVERS = both(Arg)
