"""Operations that only give the same bytes another shape, for cases where the bytes must be copied."""

from __future__ import annotations

import math

from tunewright.devices.base import Target
from tunewright.ir.types import PLAIN, TensorType
from tunewright.ops import lookup, names
from tunewright.solvers.base import Problem, tensor

from ..source.base import both
from ..source.element_words import word, words
from ..source.emit import In, Out
from ..source.strided_access import Access, StridedMove
from .move import MoveLaunch, MoveSolver

#: Views of other domains; their modules are imported when a model contains one.
RARE = frozenset({"com.microsoft::ExpandDims", "org.openvinotoolkit::Copy"})


def _views() -> frozenset[str]:
    specs = [lookup(name) for name in names(rare=False)]
    return RARE | {spec.name for spec in specs if spec is not None and spec.view}


def _same_pixels(x: TensorType, y: TensorType) -> bool:
    """Whether y has the bytes of x in its layout: equal batches and channels, and pixels counted along other axes."""
    if x.shape is None or y.shape is None or x.layout != y.layout:
        return False
    same = x.shape == y.shape or (x.is_static and y.is_static and math.prod(x.dims[2:]) == math.prod(y.dims[2:]))
    return len(x.shape) > 2 < len(y.shape) and x.shape[:2] == y.shape[:2] and same


class ViewCopy(MoveSolver):
    family = "view"
    ops = _views()
    layouts = frozenset({"plain", "nhwc", "blocked"})

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x, y = tensor(problem.inputs[0]), tensor(problem.outputs[0])
        if any(t.layout != PLAIN for t in (x, y)) and not _same_pixels(x, y):
            return f"{y} is not {x} under another shape"
        return super().refuse(problem, target)

    def copies(self, problem: Problem) -> list[MoveLaunch]:
        x = tensor(problem.inputs[0])
        whole = Access.of([math.prod(x.physical)])
        return [MoveLaunch(StridedMove.between(whole, whole, words(x.dtype)), In(0), Out(), word(x.dtype))]


SOLVERS = both(ViewCopy)
