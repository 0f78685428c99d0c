"""Range: equally spaced numbers."""

from __future__ import annotations

import numpy as np

from tunewright.devices.base import Target
from tunewright.ir.types import DType
from tunewright.solvers.base import Config, Missing, Problem, tensor

from ..movement.move import slices
from ..source.base import CSolver, both
from ..source.emit import ConstantTable, EmittedLaunch, Out, Source


class Range(CSolver):
    family = "range"
    ops = frozenset({"Range"})
    rank = 60

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if problem.epilogue:
            return "has no epilogue"
        if any(problem.value(i) is None for i in range(3)):
            return Missing("start, limit and delta are not constant")
        return None

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        y = tensor(problem.outputs[0])
        if not y.size:
            return []
        start, _, delta = (value for _, value in problem.values)
        # as in the reference: computed in 64 bits, then converted to the result's type
        wide, numpy = (DType.INT64, np.int64) if start.dtype.kind in "iu" else (DType.FLOAT64, np.float64)
        part = -(-y.size // slices(y.nbytes, target))
        source = Source("range", self.specialise)
        source.buffer("y", y.dtype, Out())
        source.buffer("terms", wide, ConstantTable(np.array([start.item(), delta.item()], numpy)))
        source.dims(SIZE=y.size, PART=part)
        source.add(f"""
int begin = GID(0) * PART, end = begin + PART < SIZE ? begin + PART : SIZE;
for (int i = begin; i < end; i++) {{
  {source.store("y", "i", f"({source.compute('y')})(i * terms[1] + terms[0])")}
}}""")
        return [source.call([-(-y.size // part)])]


SOLVERS = both(Range)
