"""Symbolic integers: what they say of the sizes at hand holds for every size for which the guards hold."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tunewright.ir.formulas import Formulas
from tunewright.ir.symbolic import (
    ShapeTrace,
    SymArray,
    SymInt,
    TraceClosed,
    at_hand,
    common_divisor,
    greater,
    hint,
    lesser,
    same,
    sym_array,
)  # fmt: skip

COUNT = 3


def symbols(*sizes: int) -> tuple[ShapeTrace, list[SymInt]]:
    trace = ShapeTrace()
    return trace, [trace.symbol(f"n{k}", size) for k, size in enumerate(sizes)]


class Program:
    """A random computation with decisions, which plain and symbolic integers run through alike."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, sizes: Sequence[Any]) -> list[Any]:
        rng, values = random.Random(self.seed), [*sizes, 1, 2, 7]
        for _ in range(rng.randrange(5, 30)):
            a, b = rng.choice(values), rng.choice(values)
            kind, k = rng.randrange(12), rng.choice([1, 2, 3, 4, 8, 16])
            if kind < 3:
                made = [a + b, a - b, a * k][kind]
            elif kind == 3:
                made = a * b if -1000 < a < 1000 and -1000 < b < 1000 else a
            elif kind == 4:
                made = (a + k) // k
            elif kind == 5:
                made = -(-a // k)
            elif kind == 6:
                made = a % k
            elif kind == 7:
                made = lesser(a, b, k)
            elif kind == 8:
                made = greater(a, b)
            elif kind == 9:  # decisions
                made = a - 1 if a > b else b + 1
            elif kind == 10:
                made = a if a == b or a < 0.75 * b else math.ceil(a / k)
            else:
                made = a // b if b > 0 else int(b)
            values.append(made)
        return values


@pytest.mark.parametrize("block", range(8))
def test_values_are_right_wherever_guards_hold(block: int) -> None:
    rng, held, failed = random.Random(block), 0, 0
    for seed in range(block * 100, block * 100 + 100):
        sizes = [rng.randrange(2, 40) for _ in range(COUNT)]
        program, (trace, given) = Program(seed), symbols(*sizes)
        made = program(given)
        wanted = [v for v in made if isinstance(v, (SymInt, int))]
        assert [hint(v) for v in made] == program(sizes)
        formulas = Formulas(trace, wanted)
        for _ in range(20):
            others = sizes if rng.random() < 0.1 else [rng.choice([s, rng.randrange(2, 60)]) for s in sizes]
            values = formulas(others)
            if values is None:
                failed += 1
                assert others != sizes
                continue
            held += 1
            assert [values[formulas.place(v)] for v in wanted] == program(others)
            for value, now in zip(made, program(others), strict=True):
                if isinstance(value, SymInt):
                    assert value.least <= now <= value.most
    assert held > 300 and failed > 150


def test_scopes_have_guards_of_their_own() -> None:
    trace, (n,) = symbols(10)
    assert n > 4
    with trace.scope() as scope:
        assert n < 20
        assert n > 4
    assert trace.guard_texts() == ["- n0 + 4 < 0"] and len(scope) == 1
    formulas = Formulas(trace, [n], [scope])
    for size, whole, part in ((10, True, True), (30, True, False), (3, False, False)):
        values = formulas([size])
        assert (values is not None) is whole
        assert values is None or formulas.holds(0, values) is part


def test_canonical_forms() -> None:
    _, (n, m) = symbols(12, 5)
    assert n + m - n is m and (n + 1) * 2 - 2 * n == 2
    assert (4 * n + 5) // 4 is n + 1 and (n * m) // m is n and (2 * n * m + 2 * m) // (n + 1) is 2 * m
    assert (n * m) % n == 0 and ((n - 1) // 2) // 2 is (n - 1) // 4 and ((n + 3) // 4 + 1) // 2 is (n + 7) // 8
    assert common_divisor(6 * n * m, 4 * n) is 2 * n and common_divisor(6, 4) == 2
    assert common_divisor(8 * n + 8, n + 1) is n + 1 and common_divisor(m * n + m, 4 * n + 4) is n + 1
    assert common_divisor(6 * m * n + 6 * m, 4 * m) is 2 * m and common_divisor(n + 1, n + 2) == 1
    assert n / 4 * 4 is n and (n * 2.0) is 2 * n and np.int64(3) + n is n + 3 and same((n, 3), (n, 3))
    assert not same((n, 3), (m, 3)) and lesser(1, n) == 1 and greater(n, 2) is n and lesser(3, 2) == 2


def test_what_follows_from_bounds_is_no_guard() -> None:
    trace, (n, m) = symbols(12, 5)
    assert n > 1 and n != 0 and n * m >= 4 and -(-n // 8) > 0 and n + m != 3 and n != 1 and bool(n) and not n < 2
    assert n < 2**31 and greater(n, 1) is n and n % 4 >= 0 and n % 4 < 4 and n < math.inf and n is not None
    assert n != "n" and not trace.guards


@pytest.mark.parametrize("pin", [
    int, operator.index, float, lambda n: range(n)[-1], lambda n: [0] * n, lambda n: math.sqrt(n), lambda n: 7 / n,
    lambda n: np.zeros(n), lambda n: np.array([n], np.int64), lambda n: np.arange(n + 0), lambda n: round(n),
])  # fmt: skip
def test_a_number_cannot_drop_its_symbol(pin: Any) -> None:
    trace, (n,) = symbols(12)
    pin(n)
    formulas = Formulas(trace, [n])
    assert formulas([12]) is not None and formulas([13]) is None


def test_floats_keep_thresholds() -> None:
    trace, (n,) = symbols(12)
    assert 0.5 * n > 5.5 and n < 30.5
    formulas = Formulas(trace, [n, math.ceil(n / 8), math.floor(n * 1.5)])
    assert formulas([12]) is not None and formulas([11]) is None and formulas([30]) is not None
    assert formulas([31]) is None


def test_a_closed_trace_decides_nothing() -> None:
    trace, (n, m) = symbols(12, 5)
    other, _ = symbols(12)
    Formulas(trace, [n])
    assert n > 1 and n == n + 0  # for all sizes
    for ask in (lambda: n > 10, lambda: int(n), lambda: n == m, lambda: n + other.atoms[0].name):
        with pytest.raises((TraceClosed, TypeError)):
            ask()


def test_arrays() -> None:
    _, (n,) = symbols(12)
    array = sym_array([[n, 2], [3, n * 2]])
    assert isinstance(array, SymArray) and at_hand(array).tolist() == [[12, 2], [3, 24]]
    assert sym_array([1, 2]).dtype == np.int64
    text = str(n)
    assert "12" in text and f"{n:,}" == "12"
    with pytest.raises(ValueError, match="invalid literal"):
        int(text)
