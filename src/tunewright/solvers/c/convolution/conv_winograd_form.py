"""Winograd's transforms F(m, 3): m results of three taps for m + 2 products, as matrices and as lines of C.

They evaluate polynomials at the points 0, p, -p, ... and infinity. The points determine the error. Most texts name 1
and 2 for F(4, 3); its error is then above the table of tolerances. With 11/16 and 3/2 the error is less than half. That
is about the error of direct summation, which adds nine times as many terms one after the other. All coefficients are
exact in f32. The transform of the weights is done in f64 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

import numpy as np

from tunewright.solvers.base import Array

#: The positive points of F(m, 3), by m. No points are known for F(6, 3) whose error is below the table of tolerances.
POINTS = {2: (Fraction(1),), 4: (Fraction(11, 16), Fraction(3, 2))}


def weight_matrix(tile: int) -> Array:
    """The matrix G that transforms the weights of a tile: (m + 2) x 3, in f64."""
    roots = [Fraction(0), *(r for p in POINTS[tile] for r in (p, -p))]
    rows = []
    for root in roots:
        scale = Fraction(1)
        for other in roots:
            scale *= root - other if other != root else 1
        rows.append([root**k / scale for k in range(3)])
    return np.array([*rows, [0, 0, 1]], np.float64)


def of_input(tile: int, name: str) -> tuple[str, list[str]]:
    """Statements over variables name0, name1, ... of m + 2 inputs, and the expression of each transformed input."""
    points = POINTS[tile]
    whole = _even(points)
    d = [f"{name}{k}" for k in range(tile + 2)]
    lines, rows = [], [_sum(zip(whole, d[::2], strict=True))]
    for n, p in enumerate(points):
        rest = _even([q for q in points if q != p])
        lines.append(f"V {name}e{n} = {_sum(zip(rest, d[2::2], strict=False))};")
        lines.append(f"V {name}o{n} = {_sum(zip(rest, d[1::2], strict=False))};")
        rows += [f"{name}e{n} {sign} {_times(p, f'{name}o{n}')}" for sign in "+-"]
    return "\n".join(lines), [*rows, _sum(zip(whole, d[1::2], strict=True))]


def of_output(tile: int, name: str) -> tuple[str, list[str]]:
    """Statements over variables name0, name1, ... of m + 2 products, and the expression of each of m results."""
    points = POINTS[tile]
    lines, pairs = [], []
    for n in range(len(points)):
        plus, minus = f"{name}{2 * n + 1}", f"{name}{2 * n + 2}"
        lines.append(f"V {name}s{n} = {plus} + {minus}, {name}d{n} = {plus} - {minus};")
        pairs.append((f"{name}s{n}", f"{name}d{n}"))
    results = []
    for k in range(tile):
        terms = [(p**k, pair[k % 2]) for p, pair in zip(points, pairs, strict=True)]
        first = [(Fraction(1), f"{name}0")] if k == 0 else []
        last = [(Fraction(1), f"{name}{tile + 1}")] if k == tile - 1 else []
        results.append(_sum([*first, *last, *terms]))
    return "\n".join(lines), results


def lines(
    transform: Callable[[int, str], tuple[str, list[str]]],
    tile: int,
    load: Callable[[int], str],
    store: Callable[[int, str], str],
) -> str:
    """Statements of one transform along one axis. ``load(k)`` returns an expression, ``store(k, expression)`` a
    statement."""
    loads = "\n".join(f"V d{k} = {load(k)};" for k in range(tile + 2))
    statements, rows = transform(tile, "d")
    return "\n".join([loads, statements, *(store(k, row) for k, row in enumerate(rows))])


def _even(points: Sequence[Fraction]) -> list[Fraction]:
    """Coefficients of the powers of x * x in the product of (x * x - p * p)."""
    found = [Fraction(1)]
    for p in points:
        shifted, scaled = [Fraction(0), *found], [*(-p * p * c for c in found), Fraction(0)]
        found = [a + b for a, b in zip(shifted, scaled, strict=True)]
    return found


def _sum(terms: Iterable[tuple[Fraction, str]]) -> str:
    """The sum of (coefficient, name). Terms without a factor come first, so that each other term is one instruction."""
    ordered = sorted(terms, key=lambda term: term[0] != 1)
    text = ""
    for c, name in ordered:
        sign = " - " if c < 0 else " + "
        text += (sign if text else sign.strip(" +")) + _times(abs(c), name)
    return text


def _times(c: Fraction, name: str) -> str:
    return name if c == 1 else f"{float(c)!r}f * {name}"
