"""What only gives the same bytes another shape, for where the bytes have to be copied after all."""

from __future__ import annotations

import math

from ...devices.base import Target
from ...ir.types import PLAIN
from ...ops import lookup, names
from ..base import Problem
from .affine import Access, Move
from .base import both, layout_of, tensor
from .emit import In, Out
from .move import Copy, MoveSolver
from .words import word, words


def _views() -> frozenset[str]:
    specs = [lookup(name) for name in names()]
    return frozenset(spec.name for spec in specs if spec is not None and spec.view)


class View(MoveSolver):
    family = "view"
    ops = _views()
    layouts = frozenset({"plain", "nhwc", "blocked"})

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x, y = problem.inputs[0], problem.outputs[0]
        if any(layout_of(t) != PLAIN for t in (x, y)) and x != y:
            return f"{y} is not {x} under another shape"
        return super().refuse(problem, target)

    def copies(self, problem: Problem) -> list[Copy]:
        x = tensor(problem.inputs[0])
        whole = Access.of([math.prod(x.physical)])
        return [Copy(Move.between(whole, whole, words(x.dtype)), In(0), Out(), word(x.dtype))]


SOLVERS = both(View)
