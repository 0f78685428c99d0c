"""The computations of a loop's body as polynomials: sums of products of gates, states and matrix products.

A value of shape [batch, n] is a row of columns. Exporters write cells in many forms: one product of Concat([x, h]) or a
product per gate, Split or Slice, biases anywhere, 1 - z or not. Sums, products and slices of such rows have one normal
form: a `Polynomial` per range of columns. Its factors are columns of a step's inputs (`Pick`), products with constant
matrices (`RowProduct`) and activations (`RowGate`). Factors are equal only if they are the same columns of one value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from tunewright.ops.base import Array

#: Larger polynomials, and rows in more ranges, are not recurrent cells.
MOST_TERMS, MOST_DEGREE, MOST_PARTS = 16, 4, 64
#: the most nested activations and products
DEEPEST = 64


class NotRowsError(Exception):
    """Why a value does not have this form, in words for the log."""


@dataclass(frozen=True, order=True)
class RowFactor:
    """A factor of a monomial. ``place`` is (value, part of a sum, first and last column).

    Factors are equal if their places are equal.
    """

    place: tuple[int, int, int, int]

    @property
    def start(self) -> int:
        return self.place[2]

    @property
    def stop(self) -> int:
        return self.place[3]

    def _cut(self, start: int, stop: int) -> tuple[int, int, int, int]:
        value, part, first, _ = self.place
        return (value, part, first + start, first + stop)

    @property
    def depth(self) -> int:
        return 0

    def columns(self, start: int, stop: int) -> RowFactor:
        """The factor for some of its columns."""
        raise NotImplementedError


@dataclass(frozen=True, order=True)
class Pick(RowFactor):
    """Columns of an input of a step: ``source`` is a scanned input or a carried value."""

    source: int = field(compare=False)

    def columns(self, start: int, stop: int) -> Pick:
        return Pick(self._cut(start, stop), self.source)


@dataclass(frozen=True, order=True)
class RowProduct(RowFactor):
    """Columns of ``rows`` times a constant matrix."""

    rows: Polynomial = field(compare=False)
    matrix: Array = field(compare=False)

    @property
    def depth(self) -> int:
        return self.rows.depth + 1

    def columns(self, start: int, stop: int) -> RowProduct:
        return RowProduct(self._cut(start, stop), self.rows, self.matrix[:, start:stop])


@dataclass(frozen=True)
class Activation:
    """A function with its name and parameters in recurrent layers."""

    name: str
    alpha: float | None = None
    beta: float | None = None


@dataclass(frozen=True, order=True)
class RowGate(RowFactor):
    """Columns of an activation. ``base`` was the first column when the gate had all columns of ``whole``."""

    activation: Activation = field(compare=False)
    whole: Polynomial = field(compare=False)
    base: int = field(compare=False)

    @property
    def depth(self) -> int:
        return self.whole.depth + 1

    @property
    def argument(self) -> Polynomial:
        return self.whole.columns(self.start - self.base, self.stop - self.base)

    def columns(self, start: int, stop: int) -> RowGate:
        return RowGate(self._cut(start, stop), self.activation, self.whole, self.base)


#: activations of ONNX's recurrent layers
DEFAULTS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}

Monomial: TypeAlias = tuple[RowFactor, ...]
ONE = np.ones(())


@dataclass(frozen=True, eq=False)
class Polynomial:
    """``width`` columns; each coefficient is one number, or one for each column."""

    width: int
    terms: Mapping[Monomial, Array]
    #: the depth of nested activations and products
    depth: int = field(init=False)

    def __post_init__(self) -> None:
        depth = max((f.depth for monomial in self.terms for f in monomial), default=0)
        if depth > DEEPEST:
            raise NotRowsError("it is a long chain")
        object.__setattr__(self, "depth", depth)

    @staticmethod
    def of(factor: RowFactor) -> Polynomial:
        return Polynomial(factor.stop - factor.start, {(factor,): ONE})

    @staticmethod
    def constant(array: Array) -> Polynomial:
        return Polynomial(len(array), {(): array.astype(np.float64)})

    def plus(self, other: Polynomial) -> Polynomial:
        terms = dict(self.terms)
        for monomial, coefficient in other.terms.items():
            terms[monomial] = terms[monomial] + coefficient if monomial in terms else coefficient
        return self._of(terms)

    def times(self, other: Polynomial) -> Polynomial:
        terms: dict[Monomial, Array] = {}
        if len(self.terms) * len(other.terms) > MOST_TERMS:
            raise NotRowsError("it is a product of long sums")
        for a, x in self.terms.items():
            for b, y in other.terms.items():
                monomial = tuple(sorted((*a, *b), key=lambda f: f.place))
                terms[monomial] = terms[monomial] + x * y if monomial in terms else x * y
        return self._of(terms)

    def columns(self, start: int, stop: int) -> Polynomial:
        if (start, stop) == (0, self.width):
            return self
        terms = {
            tuple(f.columns(start, stop) for f in monomial): c if c.ndim == 0 else c[start:stop]
            for monomial, c in self.terms.items()
        }
        return Polynomial(stop - start, terms)

    def _of(self, terms: Mapping[Monomial, Array]) -> Polynomial:
        kept = {monomial: c for monomial, c in terms.items() if c.any()}
        if len(kept) > MOST_TERMS or any(len(monomial) > MOST_DEGREE for monomial in kept):
            raise NotRowsError("it is a long sum or product")
        return Polynomial(self.width, kept)

    def equals(self, other: Polynomial) -> bool:
        return (
            self.width == other.width
            and self.terms.keys() == other.terms.keys()
            and all(bool((c == other.terms[monomial]).all()) for monomial, c in self.terms.items())
        )

    def only(self) -> Monomial | None:
        """The factors, if this is a product of factors without a coefficient; else None."""
        if len(self.terms) != 1:
            return None
        ((monomial, coefficient),) = self.terms.items()
        return monomial if (coefficient == 1).all() else None


@dataclass(frozen=True, eq=False)
class Rows:
    """Ranges of columns side by side. ``axes`` in front of them: ``b`` is the batch, ``u`` an axis of one element."""

    axes: str
    parts: tuple[Polynomial, ...]

    @property
    def width(self) -> int:
        return sum(p.width for p in self.parts)

    def columns(self, start: int, stop: int) -> Rows:
        parts, at = [], 0
        for part in self.parts:
            first, last = max(start - at, 0), min(stop - at, part.width)
            if first < last:
                parts.append(part.columns(first, last))
            at += part.width
        return Rows(self.axes, tuple(parts))

    def borders(self) -> list[int]:
        return list(accumulate(p.width for p in self.parts))

    def cut(self, borders: Iterable[int]) -> Rows:
        """The same rows in ranges that end at these borders."""
        parts: list[Polynomial] = []
        start = 0
        for stop in borders:
            parts.extend(self.columns(start, stop).parts)
            start = stop
        return Rows(self.axes, tuple(parts))


def combine(a: Rows, b: Rows, multiply: bool) -> Rows:
    """The sum or product of rows, column by column."""
    if a.width != b.width:
        raise NotRowsError(f"it joins rows of {a.width} and {b.width} columns")
    axes = max(a.axes, b.axes, key=len)
    if not (axes.endswith(a.axes) and axes.endswith(b.axes)) or set(axes[: -min(len(a.axes), len(b.axes))]) - {"u"}:
        raise NotRowsError("it joins rows with different axes")
    borders = sorted({*a.borders(), *b.borders()})
    if len(borders) > MOST_PARTS:
        raise NotRowsError("its columns are in too many parts")
    pairs = zip(a.cut(borders).parts, b.cut(borders).parts, strict=True)
    return Rows(axes, tuple(x.times(y) if multiply else x.plus(y) for x, y in pairs))


def beside(rows: Iterable[Rows]) -> Rows:
    """The rows side by side, along the columns."""
    rows = list(rows)
    if len({r.axes for r in rows}) != 1:
        raise NotRowsError("it joins rows with different axes")
    parts = tuple(p for r in rows for p in r.parts)
    if len(parts) > MOST_PARTS:
        raise NotRowsError("its columns are in too many parts")
    return Rows(rows[0].axes, parts)


def multiplied(rows: Rows, matrix: Array, serial: int) -> Rows:
    """Rows times a constant matrix; ``serial`` is a unique number for the result."""
    if rows.width != len(matrix):
        raise NotRowsError(f"it multiplies {rows.width} columns with a matrix of shape {list(matrix.shape)}")
    sums, at = [], 0
    for k, part in enumerate(rows.parts):
        place = (serial, k, 0, matrix.shape[1])
        sums.append(Polynomial.of(RowProduct(place, part, matrix[at : at + part.width])))
        at += part.width
    return Rows(rows.axes, (reduce(Polynomial.plus, sums),))


def activated(rows: Rows, activation: Activation, serial: int) -> Rows:
    """An activation of every column; ``serial`` is a unique number for the result."""
    parts, at = [], 0
    for part in rows.parts:
        parts.append(Polynomial.of(RowGate((serial, 0, at, at + part.width), activation, part, at)))
        at += part.width
    return Rows(rows.axes, tuple(parts))
