"""Computes the values of symbolic integers (`symbolic`) for all sizes that satisfy the guards of their trace.

A device may compute them in another language (`Flat`, `Formulas.computed`), many times as fast as Python.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from .launch_symbols import is_late
from .symbolic import Guards, ShapeTrace, SymInt, Whole

#: makes a value from two others
Function: TypeAlias = Callable[[int, int], int]
#: all functions; a `Flat` refers to them by number
FUNCTIONS: tuple[Function, ...] = (operator.add, operator.mul, operator.floordiv, operator.mod, min, max)


class Computed(NamedTuple):
    """Values of formulas for some sizes, as a memoryview of 64-bit words."""

    values: Sequence[int]
    #: scopes whose guards fail
    failing: Sequence[int]


@dataclass(frozen=True, eq=False)
class Flat:
    """Formulas as arrays."""

    #: number of symbols, and the known values that follow them
    symbols: int
    constants: Sequence[int]
    #: function, left and right operand of each further value; how many of them come before the guards of the trace
    code: np.ndarray[tuple[int, int], np.dtype[np.int32]]
    guarded: int
    #: (test for zero (1) or negative (0), value, answer, scope); how many of them belong to the trace, without a scope
    checks: np.ndarray[tuple[int, int], np.dtype[np.int32]]
    guards: int
    scopes: int


class Formulas:
    """Computes the expressions of a trace for other sizes; making one ends the trace. Guards of late symbols are not
    checked: the code that runs their dependents checks them."""

    #: computes the values in another language; raises OverflowError where a value does not fit
    compiled: Callable[[Sequence[int]], Computed | None] | None = None

    def __init__(self, trace: ShapeTrace, wanted: Sequence[Whole], scopes: Sequence[Guards] = ()) -> None:
        trace.is_open = False
        self.trace = trace
        #: (function, place of left operand, place of right operand): each makes the next value
        self._code: list[tuple[Function, int, int]] = []
        self._emitted: dict[tuple[Function, int, int], int] = {}
        #: the values before the code runs: the symbols, then every coefficient and divisor
        coefficients = {c for terms in trace._known for _, c in terms if isinstance(c, int)}
        divisors = {side for _, *sides in trace._made for side in sides if not isinstance(side, SymInt)}
        plain = {int(one) for one in wanted if not isinstance(one, SymInt)}
        self._asked = plain
        self._constants = sorted({0, 1} | coefficients | divisors | plain)
        self._place_of = {c: trace.symbols + at for at, c in enumerate(self._constants)}
        self._atoms = {k: k for k in range(trace.symbols)}
        self._known: dict[int, int] = {}
        self._guards = self._checks(trace.guards)
        #: the code of the guards comes first
        self._guarded = len(self._code)
        self._scopes = [self._checks(scope) for scope in scopes]
        for one in wanted:
            self.place(one)

    def _checks(self, guards: Guards) -> list[tuple[bool, int, bool]]:
        known = ((how, left, answer) for (how, left, _), answer in guards.items() if not is_late(left))
        return [(how == "==", self.place(left), answer) for how, left, answer in known]

    def computed(self, symbols: Sequence[int]) -> Computed | None:
        """Return every value and the failing scopes; None where a guard of the trace fails."""
        if self.compiled is not None:
            try:
                return self.compiled(symbols)
            except OverflowError:
                pass
        values = self(symbols)
        if values is None:
            return None
        return Computed(values, [scope for scope in range(len(self._scopes)) if not self.holds(scope, values)])

    def flat(self) -> Flat:
        """Return all formulas, once complete. OverflowError where they need a constant of more than 64 bits."""
        numbers = {function: number for number, function in enumerate(FUNCTIONS)}
        code = [(numbers[function], a, b) for function, a, b in self._code]
        checks = [(is_equal, at, answer, 0) for is_equal, at, answer in self._guards]
        checks += [(e, at, answer, k) for k, scope in enumerate(self._scopes) for e, at, answer in scope]
        constants = self._small({at for _, *sides in code for at in sides} | {at for _, at, _, _ in checks})
        return Flat(
            self.trace.symbols, constants, np.array(code, np.int32).reshape(-1, 3), self._guarded,
            np.array(checks, np.int32).reshape(-1, 4), len(self._guards), len(self._scopes),
        )  # fmt: skip

    def _small(self, used: AbstractSet[int]) -> list[int]:
        """Return the constants. Unused ones of more than 64 bits become zero: nobody may ask for them any more."""
        found = []
        for constant in self._constants:
            fits = -(2**63) <= constant < 2**63
            if not fits and (constant in self._asked or self._place_of[constant] in used):
                raise OverflowError(f"{constant} is wanted")
            found.append(constant if fits else 0)
        self._place_of = {c: at for c, at in self._place_of.items() if -(2**63) <= c < 2**63}
        return found

    def made(self, function: Function, a: int, b: int) -> int:
        """Return the place of the result of one of `FUNCTIONS`: for expressions that need no trace."""
        return self._emit(function, a, b)

    def holds(self, scope: int, values: Sequence[int]) -> bool:
        """Whether the guards of a scope hold."""
        return _hold(self._scopes[scope], values)

    def __call__(self, symbols: Sequence[int]) -> list[int] | None:
        """Return every value (`place` gives the position of each); None where a guard fails."""
        values = [*symbols, *self._constants]
        append = values.append
        try:
            for function, a, b in self._code[: self._guarded]:
                append(function(values[a], values[b]))
        except ZeroDivisionError:  # the guard that the divisor is positive fails
            return None
        if not _hold(self._guards, values):
            return None
        for function, a, b in self._code[self._guarded :]:
            try:
                append(function(values[a], values[b]))
            except ZeroDivisionError:  # the guards of its scope fail
                append(0)
        return values

    def place(self, of: Whole) -> int:
        """Return the position of an expression's value; adds the code that computes it."""
        if not isinstance(of, SymInt):
            return self._place_of[int(of)]
        found = self._known.get(of.number)
        if found is not None:
            return found
        for factors, c in of._terms:
            product = None if c == 1 and factors else self._place_of[c]
            for k in factors:
                product = self._atom(k) if product is None else self._emit(operator.mul, product, self._atom(k))
            assert product is not None
            found = product if found is None else self._emit(operator.add, found, product)
        assert found is not None
        self._known[of.number] = found
        return found

    def _atom(self, k: int) -> int:
        found = self._atoms.get(k)
        if found is None:
            parts = self.trace.atoms[k].parts
            assert parts is not None
            function, left, right = parts
            found = self._atoms[k] = self._emit(function, self.place(left), self.place(right))
        return found

    def _emit(self, function: Function, a: int, b: int) -> int:
        key = (function, a, b)
        found = self._emitted.get(key)
        if found is None:
            if self.compiled is not None:  # the compiled values end before this one
                raise AssertionError("a number is wanted that nobody asked for in time")
            self._code.append(key)
            found = self._emitted[key] = self.trace.symbols + len(self._constants) + len(self._code) - 1
        return found


def _hold(checks: Sequence[tuple[bool, int, bool]], values: Sequence[int]) -> bool:
    return all((values[at] == 0 if is_equal else values[at] < 0) is answer for is_equal, at, answer in checks)
