"""Concat and Split: a whole and its parts along an axis, with up to eight parts in one launch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater, lesser
from tunewright.ir.types import TensorType, Type
from tunewright.search.space import Config as Point
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Problem, tensor

from ..source.base import CSolver, both
from ..source.element_words import MOVABLE, word, words
from ..source.emit import STORAGE, EmittedLaunch, In, Out, Source
from .move import SLICE, SLICES, slices

#: Parts of one launch: there is a text for each of these counts, and unused parts have length zero.
_PARTS = (2, 4, 8)


#: Copies rows of n words, ``from`` and ``to`` apart. Short rows are copied column by column.
COPY_ROWS = """
INLINE void copy_rows(GLOBAL const WORD* restrict s, int from, GLOBAL WORD* restrict d, int to, int rows, int n) {
  if (n < 8) {
    for (int i = 0; i < n; i++)
      for (int row = 0; row < rows; row++) d[row * to + i] = s[row * from + i];
  } else {
    for (int row = 0; row < rows; row++)
      for (int i = 0; i < n; i++) d[row * to + i] = s[row * from + i];
  }
}
"""


class JoinedParts(CSolver):
    """The base of Concat and Split: each row of the whole is a row of every part in turn."""

    dtypes = MOVABLE
    layouts = frozenset({"plain", "blocked"})
    rank = 60
    joins: bool

    def sides(self, problem: Problem) -> tuple[Type | None, Sequence[Type | None]]:
        """The type of the whole, and those of its parts."""
        if self.joins:
            return problem.outputs[0], problem.inputs
        return problem.inputs[0], problem.outputs

    def refuse(self, problem: Problem, target: Target) -> str | None:
        side, others = self.sides(problem)
        whole, parts = tensor(side), [t for t in others if isinstance(t, TensorType)]
        if len(parts) != len(others):
            return f"nothing is known of an {'input' if self.joins else 'output'}"
        if any(t.layout != whole.layout for t in parts):
            return "the layouts of inputs and output differ"
        if whole.layout.name == "blocked" and whole.is_static and _axis(problem, whole) == 1:
            uneven = [t.dims[1] for t in parts[:-1] if t.is_static and t.dims[1] % whole.layout.block]
            if uneven:
                return f"{uneven[0]} channels do not end with a block of {whole.layout.block}"
        return "has no epilogue" if problem.epilogue else None

    def default(self, problem: Problem, target: Target) -> Config:
        return Point(slice=SLICE)

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({"slice": SLICES})

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        whole, parts = (tensor(self.sides(problem)[0]), [tensor(t) for t in self.sides(problem)[1]])
        if not whole.size:
            return []
        axis = _axis(problem, whole)
        rows = math.prod(whole.physical[:axis])
        lengths = [math.prod(t.physical[axis:]) * words(t.dtype) for t in parts]
        given = [i for i, length in enumerate(lengths) if length]
        calls, at = [], 0
        for first in range(0, len(given), _PARTS[-1]):
            group = {i: lengths[i] for i in given[first : first + _PARTS[-1]]}
            calls.append(self._launch(whole, rows, sum(lengths), at, group, config, target))
            at += sum(group.values())
        return calls

    def _launch(
        self, whole: TensorType, rows: int, stride: int, at: int, group: dict[int, int], config: Config, target: Target
    ) -> EmittedLaunch:
        """The launch for parts (by index, with their lengths) that lie in the whole from ``at`` on."""
        source, dtype = Source("concat" if self.joins else "split", self.specialise), word(whole.dtype)
        source.buffer("whole", dtype, Out() if self.joins else In(0))
        count = next(n for n in _PARTS if n >= len(group))
        numbers = list(group)
        items = slices(rows * sum(group.values()) * dtype.itemsize, target, config["slice"])
        per_item = -(-rows // items)
        columns = greater(1, items // rows)
        source.dims(ROWS=rows, ITEM=per_item, STRIDE=stride, COLUMNS=columns, AT=at)
        source.fixed(COUNT=count)
        for k in range(count):
            i = numbers[lesser(k, len(numbers) - 1)]
            source.buffer(f"part{k}", dtype, In(i) if self.joins else Out(i))
            source.dims(**{f"N{k}": group[i] if k < len(numbers) else 0})
        c = STORAGE[dtype]
        source.function(COPY_ROWS.replace("WORD", c))
        pick = " : ".join([*(f"k == {k} ? {{0}}{k}" for k in range(count - 1)), f"{{0}}{count - 1}"])
        inside, outside = "whole + first * STRIDE + at + begin, STRIDE", "part + first * length + begin, length"
        moved = f"{outside}, {inside}" if self.joins else f"{inside}, {outside}"
        source.add(f"""
int first = GID(0) * ITEM, rows = first + ITEM < ROWS ? ITEM : ROWS - first;
for (int k = 0, at = AT; k < COUNT; k++) {{
  int length = {pick.format("N")};
  GLOBAL {"const " if self.joins else ""}{c}* part = {pick.format("part")};
  int share = (length + COLUMNS - 1) / COLUMNS, begin = GID(1) * share;
  int n = begin + share < length ? share : length - begin;
  copy_rows({moved}, rows, n);
  at += length;
}}""")
        return source.call([-(-rows // per_item), columns])


def _axis(problem: Problem, whole: TensorType) -> int:
    """The axis in memory: a blocked tensor has its blocks where a plain one has its channels."""
    return int(problem.attrs.get("axis", 0)) % len(whole.dims)


class Concat(JoinedParts):
    family = "concat"
    ops = frozenset({"Concat"})
    joins = True


class Split(JoinedParts):
    """Splits by the sizes of the outputs; therefore it does not matter where the model gives the sizes."""

    family = "split"
    ops = frozenset({"Split"})
    joins = False


SOLVERS = (*both(Concat), *both(Split))
