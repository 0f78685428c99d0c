"""CumSum and CumProd: running values along one axis, side by side for the elements behind it."""

from __future__ import annotations

from tunewright.devices.base import Target
from tunewright.ir.types import DType
from tunewright.solvers.base import Config, Missing, Problem, tensor

from ..source import fold
from ..source.base import CSolver, both
from ..source.emit import COMPUTE, EmittedLaunch, In, Out, Source

#: the most columns that are computed side by side
_SLAB = 256


class RunningSum(CSolver):
    """One work-item handles some rows, or up to _SLAB columns."""

    family = "scan"
    ops = frozenset({"CumSum", "CumProd"})
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if problem.epilogue:
            return "takes no epilogue"
        if problem.value(1) is None:
            return Missing("the axis is not constant")
        if tensor(problem.inputs[0]).dtype is DType.BOOL:
            return f"{problem.op} of bool"
        return None

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x, axis = tensor(problem.inputs[0]), problem.value(1)
        assert axis is not None
        outer, size, inner = fold.around(x.dims, int(axis.reshape(-1)[0])) if x.dims else (1, 1, 1)
        how = fold.total(x.dtype) if problem.op == "CumSum" else fold.product(x.dtype)
        slabs = -(-inner // _SLAB)
        each, grid = fold.split(outer * slabs, fold.work_items(x.size, target.units))
        source = Source(problem.op.lower(), self.specialise)
        source.buffer("x", x.dtype, In(0))
        source.buffer("y", x.dtype, Out())
        source.fixed(SLAB=_SLAB if inner > 1 else 1)
        source.dims(TILES=outer * slabs, TILES_EACH=each, SIZE=size, INNER=inner)
        how.define(source, COMPUTE[x.dtype])
        step = f"const {how.type} next = fold_join(run[l], {source.load('x', 'at + l')});"
        kept = source.store("y", "at + l", "run[l]" if problem.attrs.get("exclusive", 0) else "next")
        place = "SIZE - 1 - i" if problem.attrs.get("reverse", 0) else "i"
        source.add(f"""
const int slabs = (INNER + SLAB - 1) / SLAB;
const int stop = (GID(0) + 1) * TILES_EACH < TILES ? (GID(0) + 1) * TILES_EACH : TILES;
for (int tile = GID(0) * TILES_EACH; tile < stop; tile++) {{
  const int column = tile % slabs * SLAB, base = tile / slabs * SIZE * INNER + column;
  const int width = SLAB == 1 || column + SLAB < INNER ? SLAB : INNER - column;
  {how.type} run[SLAB];
  for (int l = 0; l < width; l++) run[l] = fold_start();
  for (int i = 0; i < SIZE; i++) {{
    const int at = base + ({place}) * INNER;
    for (int l = 0; l < width; l++) {{ {step} {kept} run[l] = next; }}
  }}
}}""")
        return [source.call([grid if x.size else 0])]


SOLVERS = both(RunningSum)
