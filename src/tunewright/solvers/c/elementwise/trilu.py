"""Trilu: copies the upper or lower triangle of matrices, and fills the rest with zeros."""

from __future__ import annotations

import math

import numpy as np

from tunewright.devices.base import Target
from tunewright.ir.types import DType
from tunewright.ops.microsoft import common
from tunewright.solvers.base import Config, Problem, tensor

from ..movement.move import COPY_ROW, slices
from ..source.base import CSolver, both
from ..source.element_words import SINGLE, word
from ..source.emit import STORAGE, ConstantTable, EmittedLaunch, In, Out, Source


class Trilu(CSolver):
    family = "trilu"
    ops = frozenset({"Trilu", common.MS + "Trilu"})
    dtypes = SINGLE
    rank = 60

    def refuse(self, problem: Problem, target: Target) -> str | None:
        return "has no epilogue" if problem.epilogue else None

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x = tensor(problem.inputs[0])
        if not x.size:
            return []
        height, width = x.dims[-2:]
        dtype = word(x.dtype)
        rows = math.prod(x.dims[:-1])
        per_item = -(-rows // slices(x.nbytes, target))
        source, c = Source("trilu", self.specialise), STORAGE[dtype]
        source.buffer("x", dtype, In(0))
        source.buffer("y", dtype, Out())
        given = problem.input(1)
        source.buffer("k", DType.INT64, ConstantTable(np.zeros(1, np.int64)) if given is None else In(1))
        source.dims(ROWS=rows, HEIGHT=height, WIDTH=width, ITEM=per_item)
        source.fixed(UPPER=int(bool(problem.attrs.get("upper", 1))))
        source.function(COPY_ROW.replace("WORD", c))
        source.add(f"""
int first = GID(0) * ITEM, last = first + ITEM < ROWS ? first + ITEM : ROWS;
int diagonal = k[0] < -HEIGHT ? -HEIGHT : k[0] < WIDTH ? (int)k[0] : WIDTH;
for (int row = first; row < last; row++) {{
  int edge = row % HEIGHT + diagonal + (UPPER ? 0 : 1);
  edge = edge < 0 ? 0 : edge < WIDTH ? edge : WIDTH;
  int begin = UPPER ? edge : 0, end = UPPER ? WIDTH : edge;
  GLOBAL const {c}* s = x + row * WIDTH;
  GLOBAL {c}* d = y + row * WIDTH;
  for (int j = 0; j < begin; j++) d[j] = 0;
  copy_row(s + begin, d + begin, end - begin);
  for (int j = end; j < WIDTH; j++) d[j] = 0;
}}""")
        return [source.call([-(-rows // per_item)])]


SOLVERS = both(Trilu)
