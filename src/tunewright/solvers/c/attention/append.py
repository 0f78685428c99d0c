"""Append: writes rows behind those of a buffer; rows of the past that are not in the buffer yet are copied first."""

from __future__ import annotations

import math

from tunewright.devices.base import Target
from tunewright.ops.internal.append import APPEND
from tunewright.search.space import Config as Point
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Problem, tensor

from ..movement.move import slices
from ..source.base import CSolver
from ..source.element_words import MOVABLE, word
from ..source.emit import STORAGE, EmittedLaunch, In, Out, Source
from ..source.indices import no_indices

#: Arguments that each inference sets: whether the past is copied, and the distance of its outer rows. They are written
#: into a table, therefore the past is copied from a tensor without gaps.
COPY, PAST_STEP = "COPY", "PAST_STEP"

_BODY = """
int begin = GID(0) * EACH, end = begin + EACH < OUTER ? begin + EACH : OUTER;
for (int o = begin; o < end; o++) {
  GLOBAL W* to = y + o * CAPACITY;
  int first = PAST;
  SEQUENCE
  if (COPY) for (int i = 0; i < PAST; i++) to[i] = past[o * PAST_STEP + i];
  for (int i = 0; i < NEW; i++) to[first + i] = x[o * NEW + i];
}"""

#: Handles a sequence that ends earlier than others. Where its new rows have no place, they are not written.
_SEQUENCE = """i64 place = ends[o / SEQUENCES] - NEW_ROWS;
  if (place < 0 || place > ROWS - NEW_ROWS) {
    wrong(report, WRONG_ROW, place, ROWS - NEW_ROWS + 1);
    continue;
  }
  first = (int)place * INNER;
  for (int i = PAST; i < ROWS * INNER; i++) to[i] = 0;"""


class Append(CSolver):
    family = "append"
    ops = frozenset({APPEND})
    dtypes = MOVABLE
    rank = 60

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if problem.epilogue:
            return "has no epilogue"
        ends = problem.input(2)
        return None if ends is None else no_indices(ends)

    def default(self, problem: Problem, target: Target) -> Config:
        return Point()

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({})

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        past, new, out = tensor(problem.inputs[0]), tensor(problem.inputs[1]), tensor(problem.outputs[0])
        axis, kind = int(problem.attrs["axis"]), word(out.dtype)
        outer, inner = math.prod(out.dims[:axis]), math.prod(out.dims[axis + 1 :])
        source = Source("append", self.specialise)
        source.buffer("past", kind, In(0))
        source.buffer("x", kind, In(1))
        source.buffer("y", kind, Out())
        source.fixed(W=STORAGE[kind])
        each = -(-outer // slices(past.nbytes, target))
        source.dims(OUTER=outer, EACH=each, CAPACITY=out.dims[axis] * inner, PAST=past.dims[axis] * inner)
        source.dims(NEW=new.dims[axis] * inner, PAST_STEP=past.dims[axis] * inner, COPY=1)
        ends = problem.input(2)
        if ends is not None:
            source.buffer("ends", tensor(ends).dtype, In(2))
            rows = {"ROWS": problem.attrs["rows"], "NEW_ROWS": new.dims[axis], "INNER": inner}
            source.dims(SEQUENCES=outer // out.dims[0], **rows)
        source.add(_BODY.replace("SEQUENCE", "" if ends is None else _SEQUENCE))
        return [source.call([-(-outer // each)])]


SOLVERS = (Append(),)
