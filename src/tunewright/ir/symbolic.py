"""Symbolic integers: sizes that stand for whole classes of shapes.

A `ShapeTrace` runs the planner once, with `SymInt` where input dimensions are open. A `SymInt` computes like a number.
It carries an expression and a hint, which is its value for the current shapes:

- arithmetic (+ - * // %) makes new expressions; equal expressions are one object;
- a comparison answers for the hint and records a *guard*: the result of the trace is valid where the guard holds;
- a conversion to a number (``int``, ``float``, an index) *pins* it: a guard that the expression has this very value.

It is no `int`, so that C code cannot take its value unnoticed. After the trace, `formulas` computes the wanted
expressions from the sizes of other inputs, or reports that a guard fails.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np

#: the range of a symbol: 0 and 1 have other meanings (empty, broadcasting) and stay numbers
LEAST, MOST = 2, 2**31 - 1

#: ("==" or "<", left, right) -> the recorded answer
Guards: TypeAlias = "dict[tuple[str, SymInt, int], bool]"
#: the terms of a polynomial: (factors, coefficient), sorted; factors are numbers of atoms. Non-integer coefficients
#: come from thresholds (0.8 * n) and quotients (n / 4).
_Terms: TypeAlias = tuple[tuple[tuple[int, ...], "int | Fraction"], ...]


_Number = TypeVar("_Number", bound=Any)


class TraceClosed(RuntimeError):
    """A decision about a symbolic integer after its trace ended: nobody would check it for other shapes."""


class SymInt:
    """An integer that depends on the symbols of a trace."""

    __slots__ = ("_terms", "_trace", "hint", "least", "most", "number")

    def __init__(self, trace: ShapeTrace, terms: _Terms, number: int) -> None:
        self._trace, self._terms, self.number = trace, terms, number
        self.hint = sum(c * math.prod(trace.atoms[k].hint for k in factors) for factors, c in terms)
        #: bounds for all sizes
        self.least, self.most = trace.bounds(terms)

    # -- arithmetic
    def __add__(self, other: Any) -> Any:
        return self._sum(other, 1)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._sum(other, -1)

    def __rsub__(self, other: Any) -> Any:
        return (-self)._sum(other, 1)

    def __neg__(self) -> SymInt:
        return cast("SymInt", self._trace.made(tuple((f, -c) for f, c in self._terms)))

    def __pos__(self) -> SymInt:
        return self

    def __abs__(self) -> Any:
        return self if self >= 0 else -self

    def _sum(self, other: Any, sign: int) -> Any:
        terms = self._trace.terms(other)
        if terms is None:
            return NotImplemented
        found = dict(self._terms)
        for factors, c in terms:
            found[factors] = found.get(factors, 0) + sign * c
        return self._trace.of(found)

    def __mul__(self, other: Any) -> Any:
        terms = self._trace.terms(other)
        if terms is None:
            return NotImplemented
        found: dict[tuple[int, ...], Any] = {}
        for f, c in self._terms:
            for g, d in terms:
                both = tuple(sorted(f + g))
                found[both] = found.get(both, 0) + c * d
        return self._trace.of(found)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        return self._trace.divided(self, other, 0)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._trace.divided(other, self, 0)

    def __mod__(self, other: Any) -> Any:
        return self._trace.divided(self, other, 1)

    def __rmod__(self, other: Any) -> Any:
        return self._trace.divided(other, self, 1)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    # -- decisions
    def __eq__(self, other: object) -> bool:
        return self._trace.compare("==", self, other)

    def __ne__(self, other: object) -> bool:
        return not self._trace.compare("==", self, other)

    def __lt__(self, other: Any) -> bool:
        return self._trace.compare("<", self, other)

    def __ge__(self, other: Any) -> bool:
        return not self._trace.compare("<", self, other)

    def __gt__(self, other: Any) -> bool:
        return self._trace.compare("<", other, self)

    def __le__(self, other: Any) -> bool:
        return not self._trace.compare("<", other, self)

    def __bool__(self) -> bool:
        return not self._trace.compare("==", self, 0)

    def __hash__(self) -> int:
        return hash((id(self._trace), self.number))

    # -- numbers
    def __index__(self) -> int:
        return self._trace.pin(self)

    def __int__(self) -> int:
        whole = self if isinstance(self.hint, int) else self // 1 if self >= 0 else -(-self // 1)
        return self._trace.pin(whole)

    __trunc__ = __int__

    def __float__(self) -> float:
        return float(self._trace.pin(self))

    def __round__(self, digits: int | None = None) -> Any:
        return round(self._trace.pin(self), digits)

    def __floor__(self) -> Any:
        return self // 1

    def __ceil__(self) -> Any:
        return -(-self // 1)

    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, (int, float, np.number)) and other:
            return self * (1 / Fraction(float(other)))
        return self._trace.pin(self) / other

    def __rtruediv__(self, other: Any) -> Any:
        return other / self._trace.pin(self)

    def __pow__(self, other: Any) -> Any:
        if other == 2:
            return self * self
        return self._trace.pin(self) ** other

    def __str__(self) -> str:
        spelled = _SPELLED.get()
        if spelled is not None:
            return spelled(self)
        return f"{self.hint}<{self.text}#{self._trace.serial}>"  # no number: nobody can take it for one

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return str(self) if not spec else format(self.hint, spec)  # for people: thousands in messages

    @property
    def divisor(self) -> int:
        """A number that divides this one for all sizes."""
        return math.gcd(*(c if isinstance(c, int) else 1 for _, c in self._terms))

    @property
    def spare(self) -> SymInt | None:
        """See `ShapeTrace.spare`."""
        return self._trace.spare

    @property
    def text(self) -> str:
        """The expression in readable form."""
        return self._trace.text(self._terms)


#: writes a symbolic number into a text: inside `spelling`
_SPELLED: ContextVar[Callable[[SymInt], str] | None] = ContextVar("spelling of sizes", default=None)


@contextmanager
def spelling(spelled: Callable[[SymInt], str]) -> Iterator[None]:
    """Write symbolic numbers by these names in every text made inside the block, such as the text of a kernel."""
    token = _SPELLED.set(spelled)
    try:
        yield
    finally:
        _SPELLED.reset(token)


#: a number, known or symbolic
Whole: TypeAlias = int | SymInt
#: the types of `Whole`, for `isinstance`
WHOLE = (int, SymInt)


class _Atom:
    """A symbol, or the result of a function of two polynomials."""

    __slots__ = ("hint", "least", "most", "name", "parts")

    def __init__(
        self, name: str, hint: int, least: float, most: float,
        parts: tuple[Callable[[int, int], int], Any, Any] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.hint, self.least, self.most, self.parts = name, hint, least, most, parts


class ShapeTrace:
    """Symbols, the expressions over them, and the guards that decisions recorded."""

    _serials = 0

    def __init__(self) -> None:
        ShapeTrace._serials += 1
        self.serial = ShapeTrace._serials
        self.atoms: list[_Atom] = []
        self.symbols = 0
        self._known: dict[_Terms, SymInt] = {}
        self._made: dict[tuple[Callable[[int, int], int], Any, Any], SymInt] = {}
        self.guards: Guards = {}
        #: numbers of the atoms that become known during a launch (`late`)
        self.late_symbols: set[int] = set()
        #: guards of one part of the result; a caller makes that part anew where they fail
        self._scope: Guards | None = None
        self.is_open = True

    @contextmanager
    def scope(self) -> Iterator[Guards]:
        """Collect the guards of decisions inside the block apart from those of the trace."""
        assert self._scope is None, "scopes do not nest"
        self._scope = {}
        try:
            yield self._scope
        finally:
            self._scope = None

    #: how much larger growing storage is than its content; None where the class of shapes has no such storage
    spare: SymInt | None = None

    def symbol(self, name: str, hint: int) -> SymInt:
        """Make the symbol of an input's size, from `LEAST` to `MOST`."""
        assert LEAST <= hint <= MOST and self.symbols == len(self.atoms), "symbols come first"
        self.symbols += 1
        return self._atom(_Atom(name, hint, LEAST, MOST))

    def late(self, name: str, hint: int, least: int, most: float = MOST) -> SymInt:
        """Make the symbol of a number that a launch finds out by itself (`ir/launch_symbols.py`)."""
        assert least <= hint <= most
        self.late_symbols.add(len(self.atoms))
        return self._atom(_Atom(name, hint, least, most))

    def bounds(self, terms: _Terms) -> tuple[Any, Any]:
        """Return the least and the greatest value of a polynomial."""
        low: Any = 0
        high: Any = 0
        for factors, c in terms:
            a: Any = 1
            b: Any = 1
            for k in factors:
                atom = self.atoms[k]
                if len(factors) > 1 and atom.least < 0:
                    a, b = -math.inf, math.inf
                    break
                a, b = a * atom.least, b * atom.most
            low, high = (low + c * a, high + c * b) if c > 0 else (low + c * b, high + c * a)
        return low, high

    def _atom(self, atom: _Atom) -> SymInt:
        self.atoms.append(atom)
        found = self.made((((len(self.atoms) - 1,), 1),))
        assert isinstance(found, SymInt)
        return found

    def terms(self, other: Any) -> _Terms | None:
        """Return the terms of an operand; None where it is no integer."""
        if isinstance(other, SymInt):
            if other._trace is not self:
                raise TraceClosed("sizes of two traces meet")
            return other._terms
        if isinstance(other, (int, np.integer)):
            return (((), int(other)),)
        if isinstance(other, (float, np.floating, Fraction)) and math.isfinite(other):
            return (((), _plain(Fraction(other) if isinstance(other, Fraction) else Fraction(float(other)))),)
        return None

    def of(self, terms: Mapping[tuple[int, ...], Any]) -> Any:
        return self.made(tuple(sorted((f, _plain(c)) for f, c in terms.items() if c)))

    def made(self, terms: _Terms) -> Any:
        """Return the one object for a polynomial; a plain number where it is constant."""
        if not terms:
            return 0
        if len(terms) == 1 and not terms[0][0]:
            return terms[0][1]
        found = self._known.get(terms)
        if found is None:
            found = self._known[terms] = SymInt(self, terms, len(self._known))
        return found

    def divided(self, left: Any, right: Any, which: int) -> Any:
        """Return the floor of a quotient (0), or the remainder (1)."""
        a, b = self.terms(left), self.terms(right)
        if a is None or b is None:
            return NotImplemented
        scale = math.lcm(*(Fraction(c).denominator for _, c in (*a, *b)))
        if scale != 1:
            made = self.divided(left * scale, right * scale, which)
            return made if which == 0 else made / scale
        if not isinstance(right, SymInt):
            by = int(right)
            if by and by != 1 and isinstance(left, SymInt):
                # divisible terms leave the quotient: (4 n + 5) // 4 = n + 5 // 4
                whole = {f: c // by for f, c in a if c % by == 0}
                left = self.of({f: c for f, c in a if c % by})
                if not isinstance(left, SymInt):
                    rest = divmod(left, by)[which]
                    return self.of(whole) + rest if which == 0 else rest
                if whole:
                    return (self.of(whole) + left // by) if which == 0 else left % by
            elif by == 1:
                return left if which == 0 else 0
        if isinstance(left, SymInt) and isinstance(right, SymInt) and right > 0:
            exact = self._exact(left, right)
            if exact is not None:
                return exact if which == 0 else 0
        if which == 0 and not isinstance(right, SymInt) and right > 0 and isinstance(left, SymInt):
            nested = self._nested(left)
            if nested is not None:  # (n // a + k) // b = (n + k a) // (a b)
                inner, by, more = nested
                return self.divided(inner + more * by, by * right, 0)
        if not hint(right):
            self.pin(right)
            raise ZeroDivisionError("a size is divided by zero")
        if isinstance(right, SymInt) and not right > 0:  # a guard: the quotient is computed for positive divisors
            return self.divided(left, self.pin(right), which)
        if not isinstance(right, SymInt) and right < 0:
            return self.divided(-left, -right, 0) if which == 0 else -self.divided(-left, -right, 1)
        (low, high), (least, most) = _bounds(left), _bounds(right)
        if which == 1:
            return self._function(operator.mod, left, right, 0, most - 1)
        least = max(least, 1)
        low = _floor(low, least) if low < 0 else _floor(low, most)
        high = _floor(high, least) if high >= 0 else _floor(high, most)
        return self._function(operator.floordiv, left, right, low, high)

    def _nested(self, left: SymInt) -> tuple[Any, int, int] | None:
        """Return (n, a, k) where the number is n // a + k."""
        terms = dict(left._terms)
        more = terms.pop((), 0)
        if len(terms) != 1:
            return None
        ((factors, c),) = terms.items()
        atom = self.atoms[factors[0]]
        if c != 1 or len(factors) != 1 or atom.parts is None or not isinstance(more, int):
            return None
        function, inner, by = atom.parts
        return (inner, by, more) if function is operator.floordiv and isinstance(by, int) and by > 0 else None

    def _exact(self, left: SymInt, right: SymInt) -> Any:
        """Return the quotient where no sizes leave a remainder: (6 n m + 3 n) // 3 n = 2 m + 1; else None."""

        def first(terms: Iterable[tuple[tuple[int, ...], Any]]) -> tuple[tuple[int, ...], Any]:
            return max(terms, key=lambda term: (len(term[0]), term[0]))

        factors, by = first(right._terms)
        rest, found = dict(left._terms), dict[tuple[int, ...], Any]()
        for _ in range(len(left._terms) + 4):
            if not rest:
                return self.of(found)
            highest, c = first(rest.items())
            over = [*highest]
            for k in factors:
                if k not in over:
                    return None
                over.remove(k)
            if c % by:
                return None
            quotient = tuple(over), c // by
            found[quotient[0]] = quotient[1]
            for f, d in right._terms:
                at = tuple(sorted((*f, *over)))
                rest[at] = rest.get(at, 0) - d * quotient[1]
                if not rest[at]:
                    del rest[at]
        return None

    def common(self, a: Any, b: Any) -> Any:
        """Return a divisor of both for all sizes: the greatest product that all terms share, times the rest of each
        where the rests are equal."""
        (factors, number, rest), (others, count, other) = (_parted(self.terms(x) or ()) for x in (a, b))
        shared = self.of({_shared([factors, others]): math.gcd(number, count)})
        return shared * self.made(rest) if rest == other else shared

    def extreme(self, function: Callable[[int, int], int], left: Any, right: Any) -> Any:
        """Return the lesser (`min`) or the greater (`max`) of two numbers."""
        (low, high), (least, most) = _bounds(left), _bounds(right)
        (below, above) = _bounds(left - right)
        if high <= least or above <= 0:
            return left if function is min else right
        if most <= low or below >= 0:
            return right if function is min else left
        return self._function(function, left, right, function(low, least), function(high, most))

    def _function(self, function: Callable[[int, int], int], left: Any, right: Any, least: Any, most: Any) -> SymInt:
        key = (function, left, right)
        found = self._made.get(key)
        if found is None:
            value = function(hint(left), hint(right))
            found = self._made[key] = self._atom(_Atom("", value, least, most, key))
        return found

    def compare(self, how: str, left: Any, right: Any) -> bool:
        """Compare the hints. Records a guard, unless the answer is the same for all sizes."""
        a, b = self.terms(left), self.terms(right)
        if a is None or b is None:
            return how == "<" and (right == math.inf or left == -math.inf)  # other operands: a name, None
        if a == b:
            return how == "=="
        answer = bool(hint(left) == hint(right) if how == "==" else hint(left) < hint(right))
        difference = left - right  # more terms may cancel
        if not isinstance(difference, SymInt):
            return bool(difference == 0 if how == "==" else difference < 0)
        if difference.least >= (1 if how == "==" else 0):
            return False
        if difference.most < 0:
            return how == "<"
        scale = math.lcm(*(Fraction(c).denominator for _, c in difference._terms))
        difference = difference * scale
        self._guard((how, difference, 0), answer)
        return answer

    def pin(self, number: Any) -> int:
        """Return the hint, which is the number's only value from now on."""
        if not isinstance(number, SymInt):
            return int(number)
        if self.compare("==", number, number.hint) is not True:
            raise AssertionError("a size is not what its hint says")
        return cast("int", number.hint)

    def _guard(self, key: tuple[str, Any, Any], answer: bool) -> None:
        if key in self.guards:
            return
        if not self.is_open:
            raise TraceClosed(f"{key[1].text} {key[0]} {key[2]} is asked after its trace")
        (self.guards if self._scope is None else self._scope)[key] = answer

    def text(self, terms: _Terms) -> str:
        """Return a polynomial in readable form."""
        parts = []
        for factors, c in terms:
            names = "*".join(self._name(k) for k in factors)
            part = str(abs(c)) if not factors else names if abs(c) == 1 else f"{abs(c)}*{names}"
            parts.append(("-" if c < 0 else "+") + " " + part)
        return " ".join(reversed(parts)).removeprefix("+ ") if parts else "0"

    def _name(self, k: int) -> str:
        atom = self.atoms[k]
        if atom.parts is None:
            return atom.name
        function, left, right = atom.parts
        sides = [s.text if isinstance(s, SymInt) else str(s) for s in (left, right)]
        if function in (min, max):
            return f"{function.__name__}({sides[0]}, {sides[1]})"
        sides = [f"({s})" if " " in s else s for s in sides]
        return f"({sides[0]} {'%' if function is operator.mod else '//'} {sides[1]})"

    def guard_texts(self) -> list[str]:
        """Return the guards in readable form."""
        words = {("==", True): "==", ("==", False): "!=", ("<", True): "<", ("<", False): ">="}
        return [f"{left.text} {words[how, answer]} {right}" for (how, left, right), answer in self.guards.items()]


def _shared(products: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the factors that all products share."""
    shared = list(products[0])
    for factors in products:
        shared = [k for k in sorted(set(shared)) for _ in range(min(shared.count(k), factors.count(k)))]
    return tuple(shared)


def _parted(terms: _Terms) -> tuple[tuple[int, ...], int, _Terms]:
    """Split a polynomial into the factors and the number that all its terms share, and the rest."""
    shared, number = _shared([factors for factors, _ in terms]), math.gcd(*(int(c) for _, c in terms))
    rest = []
    for factors, c in terms:
        left = list(factors)
        for k in shared:
            left.remove(k)
        rest.append((tuple(left), c // (number or 1)))
    return shared, number, tuple(sorted(rest))


def _bounds(number: Any) -> tuple[Any, Any]:
    return (number.least, number.most) if isinstance(number, SymInt) else (number, number)


def _floor(a: Any, b: Any) -> Any:
    """Return a // b, where either may be infinite."""
    if math.isinf(a):
        return a
    return a // b if not math.isinf(b) else (0 if a >= 0 else -1)


def _plain(number: Any) -> Any:
    return int(number) if number.denominator == 1 else number


def hint(number: _Number) -> _Number:
    """Return the value for the current shapes, for estimates: records no guard."""
    return cast("_Number", number.hint) if isinstance(number, SymInt) else number


class SymArray(np.ndarray[Any, Any]):
    """A small tensor of integers, some of them symbolic: a numpy array of objects, but no text."""


def sym_array(items: Any) -> np.ndarray[Any, Any]:
    """Return integers as an array: a `SymArray` where some are symbolic, else an int64 array."""
    objects = np.array(items, dtype=object)
    if any(isinstance(v, SymInt) for v in objects.flat):
        return objects.view(SymArray)
    return objects.astype(np.int64)


def at_hand(array: np.ndarray[Any, Any], dtype: np.dtype[Any] | type = np.int64) -> np.ndarray[Any, Any]:
    """Return the tensor for the current shapes; records no guard."""
    if not isinstance(array, SymArray):
        return array
    return np.array([hint(v) for v in array.flat], dtype).reshape(array.shape)


def lesser(a: _Number, *others: _Number) -> _Number:
    """Return the least of some numbers. For symbolic ones it is an expression, where `min` would record a guard."""
    for b in others:
        trace = _trace_of(a, b)
        a = (a if a <= b else b) if trace is None else trace.extreme(min, a, b)
    return a


def greater(a: _Number, *others: _Number) -> _Number:
    """Return the greatest of some numbers. For symbolic ones it is an expression, where `max` would record a guard."""
    for b in others:
        trace = _trace_of(a, b)
        a = (a if a >= b else b) if trace is None else trace.extreme(max, a, b)
    return a


def same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes have the same expressions. Shapes with different ones may still be equal; records no guard."""
    if len(a) != len(b):
        return False
    return all(x is y or (x == y if not isinstance(x, SymInt) and not isinstance(y, SymInt) else False)
               for x, y in zip(a, b, strict=True))  # fmt: skip


def common_divisor(a: Any, b: Any) -> Any:
    """Return a common divisor; for plain numbers the greatest one."""
    trace = _trace_of(a, b)
    return math.gcd(a, b) if trace is None else trace.common(a, b)


def _trace_of(*numbers: Any) -> ShapeTrace | None:
    return next((number._trace for number in numbers if isinstance(number, SymInt)), None)


def always_divides(by: int, number: Any) -> bool:
    """Whether `by` divides a number for all sizes; records no guard."""
    return number.divisor % by == 0 if isinstance(number, SymInt) else number % by == 0
