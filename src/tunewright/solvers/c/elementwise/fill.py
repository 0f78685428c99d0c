"""Tensors that hold one value: ConstantOfShape, and EyeLike with a second value on a diagonal."""

from __future__ import annotations

import numpy as np

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater, lesser
from tunewright.ir.types import TensorType
from tunewright.solvers.base import Array, Config, Problem, tensor

from ..movement.move import slices
from ..source.base import CSolver, both
from ..source.element_words import SINGLE, word
from ..source.emit import ConstantTable, EmittedLaunch, Out, Source


class Fill(CSolver):
    family = "fill"
    ops = frozenset({"ConstantOfShape", "EyeLike"})
    dtypes = SINGLE
    rank = 60

    def refuse(self, problem: Problem, target: Target) -> str | None:
        return "has no epilogue" if problem.epilogue else None

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        y = tensor(problem.outputs[0])
        if not y.size:
            return []
        dtype = word(y.dtype)
        # A row has one element of the diagonal, or none where the diagonal is outside of it.
        width = y.dims[1] if problem.op == "EyeLike" else y.size
        rows = y.size // width
        items = slices(y.nbytes, target)
        per_item, part = -(-rows // items), -(-width // greater(1, items // rows))
        source = Source("fill", self.specialise)
        source.buffer("y", dtype, Out())
        source.buffer("values", dtype, ConstantTable(_values(problem, y).view(dtype.numpy)))
        shift = int(problem.attrs.get("k", 0)) if problem.op == "EyeLike" else width
        source.dims(ROWS=rows, WIDTH=width, ITEM=per_item, PART=part, SHIFT=greater(-rows, lesser(width, shift)))
        source.add("""
int first = GID(0) * ITEM, last = first + ITEM < ROWS ? first + ITEM : ROWS;
int begin = GID(1) * PART, end = begin + PART < WIDTH ? begin + PART : WIDTH;
for (int row = first; row < last; row++) {
  for (int i = begin; i < end; i++) y[row * WIDTH + i] = values[0];
  int own = row + SHIFT;
  if (own >= begin && own < end) y[row * WIDTH + own] = values[1];
}""")
        return [source.call([-(-rows // per_item), -(-width // part)])]


def _values(problem: Problem, type: TensorType) -> Array:
    """The value, and the value of the diagonal."""
    if problem.op == "EyeLike":
        return np.array([0, 1]).astype(type.dtype.numpy)
    value = problem.attrs.get("value")
    return np.resize(np.zeros(1, np.float32) if value is None else value, 2)


SOLVERS = both(Fill)
