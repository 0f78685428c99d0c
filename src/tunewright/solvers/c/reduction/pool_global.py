"""Poolings over all spatial axes, plain and blocked, and the equal reductions in the blocked layout."""

from __future__ import annotations

import math

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater
from tunewright.ir.types import PLAIN
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Problem, tensor
from tunewright.solvers.epilogue_types import main_type

from ..source import epilogue, fold
from ..source.base import CSolver, both, layout_of
from ..source.emit import COMPUTE, EmittedLaunch, In, Out, Source
from ..source.fold import Fold
from .pool import pool_fold, takes
from .reduce import axes_of, fold_of

_REDUCTIONS = frozenset({"ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2"})


class GlobalPool(CSolver):
    """Folds one row of elements for each channel, or for each block of channels."""

    family = "pool_global"
    ops = frozenset({"GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool"}) | _REDUCTIONS
    layouts = frozenset({"plain", "blocked"})
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x = tensor(problem.inputs[0])
        if layout_of(x) != layout_of(problem.outputs[0]):
            return "input and output differ in layout"
        if not (fold.is_float(x.dtype) if problem.op in _REDUCTIONS else takes(problem.op, x.dtype)):
            return f"{problem.op} of {x.dtype}"
        if problem.op in _REDUCTIONS:
            if layout_of(x) == PLAIN:
                return "reductions of plain tensors have a solver of their own"
            if axes_of(problem) != tuple(range(2, x.rank or 0)) or not problem.attrs.get("keepdims", 1):
                return "only the spatial axes can be reduced in this layout, and they have to stay"
        if problem.op == "GlobalMaxPool" and x.is_static and not math.prod(x.dims[2:]):
            return "nothing has no maximum"
        return epilogue.why_not(problem)

    def default(self, problem: Problem, target: Target) -> Config:
        x = tensor(problem.inputs[0])
        size = math.prod(x.dims[2:]) if x.is_static else 0
        return {"lanes": fold.lanes_for(size * greater(1, x.layout.block)), "grain": fold.GRAIN}

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({"lanes": [16, 32, 64], "grain": [4096, fold.GRAIN, 65536]})

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x, y = tensor(problem.inputs[0]), tensor(problem.outputs[0])
        main, how = main_type(problem).dtype, _fold(problem)
        block = x.layout.block or 1
        blocks, size = -(-x.dims[1] // block), math.prod(x.dims[2:])
        rows = x.dims[0] * blocks
        source = Source("pool_global", self.specialise)
        source.buffer("x", x.dtype, In(0))
        source.buffer("y", y.dtype, Out())
        steps = epilogue.Epilogue(source, problem)
        how.define(source, COMPUTE[x.dtype], COMPUTE[main])
        each, grid = fold.split(rows, fold.work_items(x.size, target.units, int(config["grain"])))
        source.dims(ROWS=rows, ROWS_EACH=each, SIZE=size, CHANNELS=x.dims[1], CHANNEL_BLOCKS=blocks)
        source.fixed(LANES=greater(block, int(config["lanes"])), BLOCK=block)
        source.add(f"""
const int stop = (GID(0) + 1) * ROWS_EACH < ROWS ? (GID(0) + 1) * ROWS_EACH : ROWS;
for (int row = GID(0) * ROWS_EACH; row < stop; row++) {{
  {(_blocked if block > 1 else _plain)(source, how, steps)}
}}""")
        return [source.call([grid])]


def _fold(problem: Problem) -> Fold:
    dtype = tensor(problem.inputs[0]).dtype
    if problem.op in _REDUCTIONS:
        return fold_of(problem.op, dtype)
    how = pool_fold(problem.op, dtype, int(problem.attrs.get("p", 2)))
    return how.finished("a / N") if problem.op == "GlobalAveragePool" else how


def _plain(source: Source, how: Fold, steps: epilogue.Epilogue) -> str:
    lines, result = steps.apply("v", "row % CHANNELS", "row")
    return f"""
  const int begin = 0, end = SIZE;
  {fold.rows(source, how, "x", "row * SIZE")}
  {COMPUTE[steps.dtypes[0]]} v = fold_finish(rest, SIZE, 0);
  {lines}
  {source.store("y", "row", result)}"""


def _blocked(source: Source, how: Fold, steps: epilogue.Epilogue) -> str:
    """Statements for a block of channels. LANES spans several blocks, whose partial results are joined at the end."""
    lines, result = steps.apply("v", "(channel + l < CHANNELS ? channel + l : CHANNELS - 1)", "row * BLOCK + l")
    element = f"fold_each({source.load('x', 'row * SIZE * BLOCK + i + l')}, 0)"
    return f"""
  const int channel UNUSED = row % CHANNEL_BLOCKS * BLOCK, end = SIZE * BLOCK;
  {how.type} lane[LANES];
  for (int l = 0; l < LANES; l++) lane[l] = fold_start();
  int i = 0;
  for (; i + LANES <= end; i += LANES)
    for (int l = 0; l < LANES; l++) lane[l] = fold_join(lane[l], {element});
  for (; i < end; i += BLOCK)
    for (int l = 0; l < BLOCK; l++) lane[l] = fold_join(lane[l], {element});
  UNROLL for (int h = LANES / 2; h >= BLOCK; h /= 2)
    UNROLL for (int l = 0; l < h; l++) lane[l] = fold_join(lane[l], lane[l + h]);
  for (int l = 0; l < BLOCK; l++) {{
    {COMPUTE[steps.dtypes[0]]} v = fold_finish(lane[l], SIZE, 0);
    {lines}
    {source.store("y", "row * BLOCK + l", result)}
  }}"""


SOLVERS = both(GlobalPool)
