"""Computes what symbolic integers stand for (`symbolic`), for any sizes for which the guards of their trace hold."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from .late import is_late
from .symbolic import Guards, SymInt, Trace, Whole


class Formulas:
    """Computes expressions of a trace, which ends with it, for other sizes. Guards of late symbols are not asked: who
    runs what depends on them checks these."""

    def __init__(self, trace: Trace, wanted: Sequence[Whole], scopes: Sequence[Guards] = ()) -> None:
        trace.is_open = False
        self.trace = trace
        #: (function, place of left operand, place of right operand): each makes the next value
        self._code: list[tuple[Callable[[int, int], int], int, int]] = []
        self._emitted: dict[tuple[Callable[[int, int], int], int, int], int] = {}
        #: values before the code runs: the symbols, then every coefficient and divisor
        coefficients = {c for terms in trace._known for _, c in terms if isinstance(c, int)}
        divisors = {side for _, *sides in trace._made for side in sides if not isinstance(side, SymInt)}
        plain = {int(one) for one in wanted if not isinstance(one, SymInt)}
        self._constants = sorted({0, 1} | coefficients | divisors | plain)
        self._place_of = {c: trace.symbols + at for at, c in enumerate(self._constants)}
        self._atoms = {k: k for k in range(trace.symbols)}
        self._known: dict[int, int] = {}
        self._guards = self._checks(trace.guards)
        #: code that guards need comes first
        self._guarded = len(self._code)
        self._scopes = [self._checks(scope) for scope in scopes]
        for one in wanted:
            self.place(one)

    def _checks(self, guards: Guards) -> list[tuple[bool, int, bool]]:
        known = ((how, left, answer) for (how, left, _), answer in guards.items() if not is_late(left))
        return [(how == "==", self.place(left), answer) for how, left, answer in known]

    def holds(self, scope: int, values: Sequence[int]) -> bool:
        """Whether the guards of a scope hold."""
        return _hold(self._scopes[scope], values)

    def __call__(self, symbols: Sequence[int]) -> list[int] | None:
        """Every value (`place` says which is where); None where a guard fails."""
        values = [*symbols, *self._constants]
        append = values.append
        try:
            for function, a, b in self._code[: self._guarded]:
                append(function(values[a], values[b]))
        except ZeroDivisionError:  # a guard says that a divisor is positive, and fails
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
        """Which value an expression is, with the code that computes it."""
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

    def _emit(self, function: Callable[[int, int], int], a: int, b: int) -> int:
        key = (function, a, b)
        found = self._emitted.get(key)
        if found is None:
            self._code.append(key)
            found = self._emitted[key] = self.trace.symbols + len(self._constants) + len(self._code) - 1
        return found


def _hold(checks: Sequence[tuple[bool, int, bool]], values: Sequence[int]) -> bool:
    return all((values[at] == 0 if is_equal else values[at] < 0) is answer for is_equal, at, answer in checks)
