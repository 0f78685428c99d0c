"""Words of a launch table that the launch itself computes: numbers that depend on a late symbol
(`ir/launch_symbols.py`)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tunewright.ir.launch_symbols import Source, StepResult, Symbol
from tunewright.ir.symbolic import Whole, hint

from ..control_rows import Late
from .table_format import Function, Listing, Operand, RowCode, TableCell

_FUNCTIONS: Mapping[Callable[[int, int], int], Function] = {
    operator.add: Function.ADD, operator.mul: Function.MULTIPLY, operator.floordiv: Function.DIVIDE,
    operator.mod: Function.REST, min: Function.LEAST, max: Function.MOST,
}  # fmt: skip


@dataclass(eq=False)
class LateWords:
    """A COMPUTE row while its table is written."""

    late: Late
    #: the row, which `write` completes
    step: int
    #: for each late symbol, its word
    symbols: Mapping[int, Operand]
    listing: Listing
    #: iterations left, then the step that ended the run
    left: TableCell
    #: returns a word that holds a number
    constant: Callable[[int], TableCell]
    #: records the number of a word that is known before the launch
    word_is: Callable[[Operand, Whole], None]
    _functions: list[tuple[Function, Operand, Operand, Operand]] = field(default_factory=list)
    _results: list[TableCell] = field(default_factory=list)
    #: words that are a number, or another word with a number added
    _wanted: list[tuple[Operand, Whole]] = field(default_factory=list)
    _sums: list[tuple[Operand, Whole, Sequence[Operand]]] = field(default_factory=list)

    def set(self, at: Operand, number: Whole) -> None:
        """Set a word to this number from the row on."""
        self._wanted.append((at, number))

    def add(self, base: Operand, number: Whole, words: Sequence[Operand]) -> None:
        """Set words to this number plus the word at ``base``. More words may join the sequence until the row is
        written."""
        self._sums.append((base, number, words))

    def write(self) -> None:
        """Write the row."""
        code, nothing = self.late.code, self.constant(0)
        for function, a, b in code.steps:
            self._results.append(self.listing.cell())
            self._functions.append((_FUNCTIONS[function], self._results[-1], self._word(a), self._word(b)))
        for is_zero, source, answer in code.checks:
            how = Function.IS_ZERO if is_zero else Function.IS_NEGATIVE
            self._functions.append((how, int(answer), self._word(source), nothing))
        for at, number in self._wanted:
            self._functions.append((Function.ADD, at, self._word(code.value(number)), nothing))
        for base, number, words in self._sums:
            more = self._word(code.value(number))
            self._functions += [(Function.ADD, word, base, more) for word in words]
        flat = [operand for function in self._functions for operand in function]
        self.listing.rows[self.step] = (int(RowCode.COMPUTE), self.left, len(self._functions), *flat)

    def _word(self, source: Source) -> Operand:
        """Return the word that holds a value."""
        if isinstance(source, StepResult):
            return self._results[source.step]
        if isinstance(source, Symbol):
            return self.symbols[source.atom]
        if isinstance(source, int):
            return self.constant(source)
        cell = self.listing.cell(int(hint(source)))
        self.word_is(cell, source)
        return cell
