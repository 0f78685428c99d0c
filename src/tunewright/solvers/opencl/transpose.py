"""Transpose: any permutation of any number of axes."""

from __future__ import annotations

from ..base import Problem
from .affine import Access, Move
from .base import both, tensor
from .emit import In, Out
from .move import Copy, MoveSolver
from .words import word, words


class Transpose(MoveSolver):
    family = "transpose"
    ops = frozenset({"Transpose"})

    def copies(self, problem: Problem) -> list[Copy]:
        x, y = tensor(problem.inputs[0]), tensor(problem.outputs[0])
        order = problem.attrs.get("perm")
        source = Access.of(x.dims).permute(range(len(x.dims))[::-1] if order is None else order)
        return [Copy(Move.between(source, Access.of(y.dims), words(x.dtype)), In(0), Out(), word(x.dtype))]


SOLVERS = both(Transpose)
