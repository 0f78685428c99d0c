"""Transpose: any permutation of any number of axes, which may also convert into and out of channels in blocks."""

from __future__ import annotations

from tunewright.devices.base import Target
from tunewright.ir.types import TensorType
from tunewright.solvers.base import Problem, tensor

from ..source.base import both
from ..source.element_words import word, words
from ..source.emit import In, Out
from ..source.strided_access import Access, StridedMove
from .move import MoveLaunch, MoveSolver


class Transpose(MoveSolver):
    """Handles an axis in blocks as two axes, on both sides."""

    family = "transpose"
    ops = frozenset({"Transpose"})
    layouts = frozenset({"plain", "blocked"})

    def refuse(self, problem: Problem, target: Target) -> str | None:
        for type in (problem.inputs[0], problem.outputs[0]):
            if isinstance(type, TensorType) and type.layout.block and type.is_static:
                if len(type.dims) < 3:
                    return f"{type} has no spatial axes"
                if type.dims[1] % type.layout.block:
                    return f"the last block of {type} is not full"
        return super().refuse(problem, target)

    def copies(self, problem: Problem) -> list[MoveLaunch]:
        x, y = tensor(problem.inputs[0]), tensor(problem.outputs[0])
        rank = len(x.dims)
        order = [int(k) % rank for k in problem.attrs.get("perm", range(rank)[::-1])]
        source, target = _whole(x), _whole(y)
        if x.layout.block:  # Axis 1 of x is axes 1 and 2 of the access.
            at = order.index(1)
            order = [part for k in order for part in ((1, 2) if k == 1 else (k + (k > 1),))]
        source = source.permute(order)
        if x.layout.block and not (y.layout.block and at == 1):
            target = target.split(at + bool(y.layout.block and at > 1), _halves(x))
        if y.layout.block and not (x.layout.block and at == 1):
            source = source.split(1 + bool(x.layout.block and at < 1), _halves(y))
        return [MoveLaunch(StridedMove.between(source, target, words(x.dtype)), In(0), Out(), word(x.dtype))]


def _halves(type: TensorType) -> tuple[int, int]:
    """The number of blocks, and of channels of each."""
    return type.dims[1] // type.layout.block, type.layout.block


def _whole(type: TensorType) -> Access:
    """The access to every element by its logical axes; channels in blocks are two axes, the block and the index inside
    it."""
    if not type.layout.block:
        return Access.of(type.dims)
    whole = Access.of(type.physical)
    last = len(whole.dims) - 1
    return whole.permute((0, 1, last, *range(2, last)))


SOLVERS = both(Transpose)
