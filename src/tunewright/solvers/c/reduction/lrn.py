"""Local response normalisation: divides elements by a power of a sum of squares of neighbouring channels."""

from __future__ import annotations

import math

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater, lesser
from tunewright.ir.types import TensorType
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Problem, tensor

from ..source.base import CSolver, both
from ..source.emit import EmittedLaunch, In, Out, Source
from .norm import FLOATS, MOST_ITEMS

#: Exponents that roots can express, as C of t; roots are faster and more accurate than a power.
_ROOTS = {0.5: "ROOT(t)", 0.75: "ROOT(t) * ROOT(ROOT(t))", 0.25: "ROOT(ROOT(t))", 1.0: "t"}


class LRN(CSolver):
    """A work-item takes some rows of pixels, tile by tile; the sums of a tile stay in the first-level cache."""

    family = "lrn"
    ops = frozenset({"LRN"})
    dtypes = FLOATS
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if problem.epilogue:
            return "takes no epilogue"
        x = problem.input(0)
        if isinstance(x, TensorType) and x.rank is not None and x.rank < 2:
            return f"{x} has no channels"
        return None

    def default(self, problem: Problem, target: Target) -> Config:
        return {"elements": 8192, "tile": 256}

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({"elements": [2048, 8192, 32768], "tile": [64, 256, 1024]})

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x, attrs = tensor(problem.inputs[0]), problem.attrs
        rows, pixels, size = x.dims[0] * x.dims[1], math.prod(x.dims[2:]), int(attrs["size"])
        source = Source("lrn", self.specialise)
        source.buffer("x", x.dtype, In(0))
        source.buffer("y", tensor(problem.outputs[0]).dtype, Out())
        real = source.compute("x")
        beta = float(attrs.get("beta", 0.75))
        numbers = {"ALPHA": float(attrs.get("alpha", 1e-4)) / size, "BIAS": float(attrs.get("bias", 1.0)), "BETA": beta}
        if real == "f64":
            source.fixed(**{k: repr(v) for k, v in numbers.items()})
        else:
            source.numbers(**numbers)
        source.fixed(REAL=real, ROOT=f"{real}_sqrt", TILE=int(config["tile"]))
        source.fixed(POWER=_ROOTS.get(beta, f"{real}_pow(t, BETA)"))
        per_item = greater(1, int(config["elements"]) // greater(pixels, 1), -(-rows // MOST_ITEMS))
        source.dims(ROWS=rows, CHANNELS=x.dims[1], PIXELS=pixels, PER_ITEM=per_item)
        source.dims(BEFORE=lesser((size - 1) // 2, x.dims[1]), BEHIND=lesser(size // 2, x.dims[1]))
        source.add(f"""int begin = GID(0) * PER_ITEM, end = ROWS - begin < PER_ITEM ? ROWS : begin + PER_ITEM;
REAL sums[TILE];
for (int row = begin; row < end; row++) {{
  int c = row % CHANNELS;
  int first = c < BEFORE ? row - c : row - BEFORE;
  int last = CHANNELS - 1 - c < BEHIND ? row - c + CHANNELS - 1 : row + BEHIND;
  for (int p = 0; p < PIXELS; p += TILE) {{
    int n = PIXELS - p < TILE ? PIXELS - p : TILE, at = row * PIXELS + p;
    for (int j = 0; j < n; j++) sums[j] = 0;
    for (int other = first; other <= last; other++) {{
      int from = other * PIXELS + p;
      for (int j = 0; j < n; j++) {{ REAL v = {source.load("x", "from + j")}; sums[j] += v * v; }}
    }}
    for (int j = 0; j < n; j++) {{
      REAL t = sums[j] * ALPHA + BIAS, v = {source.load("x", "at + j")};
      {source.store("y", "at + j", "v / (POWER)")}
    }}
  }}
}}""")
        return [source.call([-(-rows // per_item)])]


SOLVERS = both(LRN)
