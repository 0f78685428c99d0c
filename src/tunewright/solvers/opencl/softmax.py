"""Softmax, LogSoftmax and Hardmax along any axis: rows along the innermost one, else columns side by side."""

from __future__ import annotations

from ...devices.base import Target
from ...ir.types import DType
from ...search.space import Space
from ..base import Config, Problem
from . import arg, fold
from .base import CSolver, both, tensor
from .emit import COMPUTE, Call, In, Out, Source
from .fold import Fold

#: of a softmax, elements that are worth a work-item of their own
_GRAIN = 8192


class Softmax(CSolver):
    """Exponentials are kept in the output until their sum is known."""

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

    def calls(self, problem: Problem, config: Config, target: Target) -> list[Call]:
        x = tensor(problem.inputs[0])
        outer, size, inner = fold.around(x.dims, int(problem.attrs.get("axis", -1))) if x.dims else (1, 1, 1)
        slab = int(config["slab"])
        source = Source(problem.op.lower(), self.specialise)
        source.buffer("x", x.dtype, In(0))
        source.buffer("y", x.dtype, Out())
        source.fixed(LANES=int(config["lanes"]), SLAB=slab)
        tiles = outer * (1 if inner == 1 else -(-inner // slab))
        each, grid = fold.split(tiles, fold.work_items(x.size, target.units, int(config["grain"])))
        source.dims(TILES=tiles, TILES_EACH=each, SIZE=size, INNER=inner)
        source.add(f"""
const int stop = (GID(0) + 1) * TILES_EACH < TILES ? (GID(0) + 1) * TILES_EACH : TILES;
for (int tile = GID(0) * TILES_EACH; tile < stop; tile++) {{
{(_row if inner == 1 else _columns)(source, problem.op, x.dtype)}
}}""")
        return [source.call([grid] if x.size else [0])]


#: Exponentials of what is not positive, where f32_exp does more than is needed. NaN stays what it is.
_EXP = """
INLINE f32 exp_below(f32 x) {
  const f32 v = f32_exp_near(x < -87.0f ? -87.0f : x);
  return x < -87.0f ? 0.0f : v;
}
"""
#: a sum as the element type holds it
_ROUNDED = {DType.FLOAT16: "f16_load(f16_store({}))", DType.BFLOAT16: "bf16_load(bf16_store({}))"}


def _highest(op: str, dtype: DType) -> Fold:
    """A NaN makes the sum of exponentials NaN; the maximum need not tell."""
    return fold.extremum(dtype, largest=True, nan=op == "Hardmax")


def _exp(source: Source, dtype: DType) -> str:
    """The function for exponentials of what is not positive."""
    if COMPUTE[dtype] == "f64":
        return "f64_exp"
    source.function(_EXP)
    return "exp_below"


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
