"""Numbers that a launch finds out by itself, such as the number of finished iterations of a loop.

The planner computes with a late symbol (`ShapeTrace.late`) as with any other size. Its value is not known before the
launch. So each number that depends on it is split into parts known before the launch and a program of small steps
(`Code`). The launch runs that program whenever the symbol changes. A guard that depends on a late symbol is a check in
the program. Memory is planned for the upper bound of each number (`upper`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from .symbolic import ShapeTrace, SymInt, Whole

#: upper and lower bounds of late symbols, by the number of their atom
Bounds: TypeAlias = "Mapping[int, tuple[Whole, Whole]]"


class Unbounded(Exception):
    """A number has no bound that is known before a launch."""


def lates(number: Any) -> frozenset[int]:
    """Return the late symbols that a number depends on, by the numbers of their atoms."""
    return _of_terms(number._trace, number._terms) if isinstance(number, SymInt) else frozenset()


def newest(number: Any) -> int:
    """Return the last late symbol that a number depends on, or -1. Once that symbol is known, the number is."""
    return max(lates(number), default=-1)


def is_late(number: Any) -> bool:
    """Whether a number becomes known only during a launch."""
    return bool(lates(number))


def foreseen(number: Any) -> Any:
    """Return a number to decide with where every decision is right and one is faster. Records no guard for numbers that
    the launch finds out."""
    return number.hint if is_late(number) else number


def _of_terms(trace: ShapeTrace, terms: Any) -> frozenset[int]:
    if not trace.late_symbols:
        return frozenset()
    return frozenset().union(*(_of_atom(trace, k) for factors, _ in terms for k in factors))


def _of_atom(trace: ShapeTrace, k: int) -> frozenset[int]:
    if k in trace.late_symbols:
        return frozenset([k])
    parts = trace.atoms[k].parts
    return frozenset() if parts is None else lates(parts[1]) | lates(parts[2])


def upper(number: Any, bounds: Bounds) -> Any:
    """Return the upper bound of a number, known before the launch."""
    return _bound(number, bounds, 0)


def _bound(number: Any, bounds: Bounds, end: int) -> Any:
    """Return the upper (0) or the lower (1) bound."""
    if not is_late(number):
        return number
    trace, found = number._trace, 0
    for factors, c in number._terms:
        if len(factors) == 1:
            found = found + c * _bound_of_atom(trace, factors[0], bounds, end if c > 0 else 1 - end)
            continue
        signs = [_sign(trace, k) for k in factors]
        sign = math.prod(signs) * (1 if c > 0 else -1)
        product: Any = c
        for k, own in zip(factors, signs, strict=True):  # each factor's end with the larger absolute value
            product = product * _bound_of_atom(trace, k, bounds, end if sign * own > 0 else 1 - end)
        found = found + product
    return found


def _sign(trace: ShapeTrace, k: int) -> int:
    """Return 1 for an atom that is never negative, -1 for one that is never positive."""
    atom = trace.atoms[k]
    if atom.least < 0 < atom.most:
        raise Unbounded(f"a product with {trace._name(k)}, which may be negative")
    return 1 if atom.least >= 0 else -1


def _bound_of_atom(trace: ShapeTrace, k: int, bounds: Bounds, end: int) -> Any:
    """Return the upper (0) or the lower (1) bound of an atom."""
    atom = trace.atoms[k]
    if k in trace.late_symbols:
        return bounds[k][end]
    if not _of_atom(trace, k):
        return trace.made((((k,), 1),))
    assert atom.parts is not None
    function, left, right = atom.parts
    if function in (min, max):
        return trace.extreme(function, _bound(left, bounds, end), _bound(right, bounds, end))
    if function is operator.floordiv and not is_late(right):
        return _bound(left, bounds, end) // right
    if function is operator.mod and not is_late(right):
        return right - 1 if end == 0 else 0
    raise Unbounded("a quotient of numbers that change")


#: the value of a step: a number known before the launch, a late symbol, or the result of another step
@dataclass(frozen=True)
class Symbol:
    """A late symbol."""

    atom: int


@dataclass(frozen=True)
class StepResult:
    """The result of a step of a program."""

    step: int


Source: TypeAlias = "Whole | Symbol | StepResult"


@dataclass
class Code:
    """A program: steps, and checks of their results. Equal steps are stored once."""

    #: function, operands
    steps: list[tuple[Callable[[int, int], int], Source, Source]] = field(default_factory=list)
    #: (whether it checks for zero, else for a negative number; the checked value; the required answer)
    checks: list[tuple[bool, Source, bool]] = field(default_factory=list)
    _known: dict[Any, Source] = field(default_factory=dict)

    def value(self, number: Whole) -> Source:
        """Return the source of a number; adds the steps that compute it."""
        if not isinstance(number, SymInt) or not is_late(number):
            return number
        key = ("number", number.number)
        if key not in self._known:
            self._known[key] = self._computed(number)
        return self._known[key]

    def check(self, how: str, number: SymInt, answer: bool) -> None:
        """Add the check of a guard."""
        self.checks.append((how == "==", self.value(number), answer))

    def leaves(self) -> list[Whole]:
        """Return the numbers that must be known before the launch."""
        given = [side for _, *sides in self.steps for side in sides] + [side for _, side, _ in self.checks]
        return [side for side in given if not isinstance(side, Symbol | StepResult)]

    def _computed(self, number: SymInt) -> Source:
        """Return a sum of products: each known part times its late part."""
        trace = number._trace
        parts: dict[tuple[int, ...], dict[tuple[int, ...], Any]] = {}
        for factors, c in number._terms:
            if not isinstance(c, int):
                raise Unbounded("a fraction")
            late = tuple(k for k in factors if _of_atom(trace, k))
            early = tuple(k for k in factors if not _of_atom(trace, k))
            parts.setdefault(late, {})[early] = c
        found: Source = 0
        for late, terms in sorted(parts.items()):
            product: Source = trace.of(terms)
            for k in late:
                product = self._step(operator.mul, product, self._atom(trace, k))
            found = self._step(operator.add, found, product)
        return found

    def _atom(self, trace: ShapeTrace, k: int) -> Source:
        if k in trace.late_symbols:
            return Symbol(k)
        parts = trace.atoms[k].parts
        assert parts is not None
        return self._step(parts[0], self.value(parts[1]), self.value(parts[2]))

    def _step(self, function: Callable[[int, int], int], a: Source, b: Source) -> Source:
        if function is operator.mul and _is(a, 1):
            return b
        if function is operator.add and _is(a, 0):
            return b
        key = (function, _key(a), _key(b))
        if key not in self._known:
            self.steps.append((function, a, b))
            self._known[key] = StepResult(len(self.steps) - 1)
        return self._known[key]


def _is(source: Source, number: int) -> bool:
    return isinstance(source, int) and source == number


def _key(source: Source) -> Any:
    return ("number", source.number) if isinstance(source, SymInt) else source


def value_at(number: Any, values: Mapping[int, int]) -> Any:
    """Return a number for these values of late symbols and the current values of all others."""
    if not isinstance(number, SymInt):
        return number
    atoms = number._trace.atoms

    def of(k: int) -> Any:
        parts = atoms[k].parts
        if k in values:
            return values[k]
        return atoms[k].hint if parts is None else parts[0](value_at(parts[1], values), value_at(parts[2], values))

    return sum(c * math.prod(of(k) for k in factors) for factors, c in number._terms)


def guards_of(trace: ShapeTrace, atom: int) -> Sequence[tuple[str, SymInt, bool]]:
    """Return the guards of a trace that can be checked once this late symbol is known, and not before."""
    return [(how, left, answer) for (how, left, _), answer in trace.guards.items() if newest(left) == atom]


def root(number: SymInt, atom: int) -> int | None:
    """Return the value of a late symbol for which a number is zero. None unless the number depends linearly on this
    symbol alone and the root is an integer."""
    terms = dict(number._terms)
    constant, slope = terms.pop((), 0), terms.pop((atom,), 0)
    return None if terms or not slope or constant % slope else int(-constant // slope)
