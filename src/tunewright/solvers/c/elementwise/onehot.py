"""OneHot: fills everything with one value, then sets single elements to the other."""

from __future__ import annotations

import math
from typing import ClassVar

from tunewright.devices.base import Target
from tunewright.ir.types import DType
from tunewright.ops.shapes import axis_of
from tunewright.solvers.base import Config, Problem, tensor

from ..source.base import CSolver, both
from ..source.element_words import word
from ..source.emit import STORAGE, EmittedLaunch, In, Out, Source
from ..source.indices import ONE_WORD, Shares, unfit

_TEXT = """
int begin = GID(0) * SHARE, end = begin + SHARE < OUTER ? begin + SHARE : OUTER;
int first = GID(1) * PIECE, count = INNER - first < PIECE ? INNER - first : PIECE;
for (int r = begin; r < end; r++) {
  for (int d = 0; d < DEPTH; d++) {
    i64 line = (r * DEPTH + d) * INNER + first;
    for (int j = 0; j < count; j++) y[line + j] = values[0];
  }
  for (int j = 0; j < count; j++) {
    I index = INDEX;
    index = index < 0 ? index + DEPTH : index;
    if (!(index >= 0 && index < DEPTH)) continue;
    int d = (int)index;
    if (d == index) y[(r * DEPTH + d) * INNER + first + j] = values[1];
  }
}
"""


class OneHot(CSolver):
    """Takes indices of any type. An index that is not a whole number from -depth to depth - 1 sets nothing.

    The depth is the length of the result's axis.
    """

    family = "one_hot"
    ops = frozenset({"OneHot"})
    dtypes: ClassVar[frozenset[DType]] = ONE_WORD
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        reason = unfit(problem, 3)
        if reason is not None:
            return reason
        indices = tensor(problem.inputs[0])
        if indices.dtype not in STORAGE:
            return f"does not take indices of {indices.dtype}"
        return None

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        indices, values, y = tensor(problem.inputs[0]), tensor(problem.inputs[2]), tensor(problem.outputs[0])
        if not y.size:
            return []
        axis = axis_of(int(problem.attrs.get("axis", -1)), len(y.dims))
        depth, inner = y.dims[axis], math.prod(y.dims[axis + 1 :])
        outer = math.prod(y.dims[:axis])
        shares = Shares.of(outer, inner, depth * y.dtype.itemsize, target)
        source = Source("one_hot", self.specialise)
        source.buffer("indices", indices.dtype, In(0))
        source.buffer("values", word(values.dtype), In(2))
        source.buffer("y", word(y.dtype), Out())
        wide = {"f32": "f32", "f64": "f64"}.get(source.compute("indices"), "i64")
        source.fixed(I=wide)
        source.dims(OUTER=outer, DEPTH=depth, INNER=inner, SHARE=shares.rows, PIECE=shares.columns)
        source.add(_TEXT.replace("INDEX", source.load("indices", "r * INNER + first + j")))
        return [source.call(shares.grid)]


SOLVERS = both(OneHot)
