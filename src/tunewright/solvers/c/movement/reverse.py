"""ReverseSequence: reverses the first elements of each sequence of a batch; their number is known at run time."""

from __future__ import annotations

import math

from tunewright.devices.base import Target
from tunewright.solvers.base import Config, Problem, tensor

from ..source.base import CSolver, both
from ..source.element_words import MOVABLE, word, words
from ..source.emit import STORAGE, EmittedLaunch, In, Out, Source
from .move import COPY_ROW, slices


class ReverseSequence(CSolver):
    family = "reverse"
    ops = frozenset({"ReverseSequence"})
    dtypes = MOVABLE
    rank = 60

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if problem.epilogue:
            return "has no epilogue"
        return None if _axes(problem) in ((0, 1), (1, 0)) else "time and batch are not the first two axes"

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x = tensor(problem.inputs[0])
        if not x.size:
            return []
        time, _ = _axes(problem)
        dtype, inner = word(x.dtype), math.prod(x.dims[2:]) * words(x.dtype)
        rows = x.dims[0] * x.dims[1]
        per_item = -(-rows // slices(x.nbytes, target))
        source, c = Source("reverse", self.specialise), STORAGE[dtype]
        source.buffer("x", dtype, In(0))
        source.buffer("lengths", tensor(problem.inputs[1]).dtype, In(1))
        source.buffer("y", dtype, Out())
        source.dims(ROWS=rows, FAST=x.dims[1], TIME=x.dims[time], INNER=inner, ITEM=per_item)
        source.dims(STEP=x.dims[1] if time == 0 else 1, TIME_FIRST=int(time == 0))
        source.function(COPY_ROW.replace("WORD", c))
        source.add("""
int first = GID(0) * ITEM, last = first + ITEM < ROWS ? first + ITEM : ROWS;
for (int row = first; row < last; row++) {
  int time = TIME_FIRST ? row / FAST : row % FAST, batch = TIME_FIRST ? row % FAST : row / FAST;
  i64 given = lengths[batch];
  if (given < 0 || given > TIME) {
    wrong(report, WRONG_LENGTH, given, TIME);
    given = 0;
  }
  int length = (int)given;
  int from = time < length ? row + (length - 1 - 2 * time) * STEP : row;
  copy_row(x + from * INNER, y + row * INNER, INNER);
}""")
        return [source.call([-(-rows // per_item)])]


def _axes(problem: Problem) -> tuple[int, int]:
    return int(problem.attrs.get("time_axis", 0)), int(problem.attrs.get("batch_axis", 1))


SOLVERS = both(ReverseSequence)
