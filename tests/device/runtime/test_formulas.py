"""Formulas in C compute what Python does, or leave it to Python."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from native.harness import native
from tunewright.devices.native.formulas import Evaluator, Words
from tunewright.ir.formulas import FUNCTIONS, Computed, Formulas
from tunewright.ir.symbolic import ShapeTrace
from tunewright.plugins.single import open_device

pytestmark = native
#: numbers at which functions of 64 bits go wrong, if they do
EDGES = (0, 1, -1, 2, -2, 3, -7, 63, 64, 2**31 - 1, 2**31, -(2**31), 2**62, -(2**62), 2**63 - 1, -(2**63))


def both(formulas: Formulas) -> tuple[Callable[[Any], Computed | None], Evaluator]:
    """What Python computes, and what C does."""
    assert formulas.compiled is None
    return formulas.computed, Evaluator(formulas.flat(), lambda: open_device("CPU").pool.quick)


def agree(python: Callable[[Any], Computed | None], c: Evaluator, symbols: Any) -> str:
    """What became of some sizes, of which C says the same as Python, or nothing."""
    wanted = python(symbols)
    try:
        found = c(symbols)
    except OverflowError:
        assert wanted is None or not all(-(2**63) <= value < 2**63 for value in wanted.values)
        return "overflow"
    if wanted is None or found is None:
        assert wanted is found
        return "fails"
    assert list(found.values)[: len(wanted.values)] == list(wanted.values)
    assert list(found.failing) == list(wanted.failing)
    return "part" if wanted.failing else "holds"


def random_formulas(rng: random.Random, constants: list[int]) -> Formulas:
    """Functions of two symbols and of each other, with guards of the trace and of three scopes among them."""
    trace = ShapeTrace()
    first = trace.symbol("n", 7) + trace.symbol("m", 11)
    scopes: list[dict[Any, bool]] = [{}, {}, {}]
    formulas = Formulas(trace, [first, *constants], scopes)
    places = [0, 1, *(formulas.place(constant) for constant in constants)]

    def grow(count: int) -> None:
        for _ in range(count):
            places.append(formulas.made(rng.choice(FUNCTIONS), rng.choice(places), rng.choice(places)))

    def checks() -> list[tuple[bool, int, bool]]:
        return [(rng.random() < 0.2, rng.choice(places), rng.random() < 0.3) for _ in range(rng.randrange(2))]

    grow(rng.randrange(8))
    formulas._guards, formulas._guarded = checks(), len(formulas._code)
    grow(30)
    formulas._scopes = [checks() for _ in scopes]
    return formulas


def test_c_computes_what_python_does() -> None:
    rng, seen = random.Random(0), dict.fromkeys(("overflow", "fails", "part", "holds"), 0)
    for _ in range(600):
        constants = rng.sample([*EDGES[:9], *rng.sample(EDGES, 2), rng.randrange(-100, 100)], 4)
        python, c = both(random_formulas(rng, constants))
        for _ in range(5):
            seen[agree(python, c, [rng.choice(EDGES), rng.randrange(-50, 50)])] += 1
    assert min(seen.values()) > 50, seen


@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_function_at_the_edges(function: Callable[[int, int], int]) -> None:
    trace = ShapeTrace()
    total = trace.symbol("n", 7) + trace.symbol("m", 11)
    formulas = Formulas(trace, [total])
    formulas._code.clear()
    formulas.made(function, 0, 1)
    python, c = both(formulas)
    for a in EDGES:
        for b in EDGES:
            agree(python, c, (a, b))


def test_sizes_that_need_more_than_64_bits_are_computed_in_python() -> None:
    trace = ShapeTrace()
    n = trace.symbol("n", 7)
    formulas = Formulas(trace, [n * n * n])
    open_device("CPU").compute_formulas(formulas)
    assert formulas.compiled is not None
    for size in (10, 2**31 - 1):
        found = formulas.computed((size,))
        assert found is not None and found.values[formulas.place(n * n * n)] == size**3


def test_constants_that_need_more_than_64_bits_are_left_to_python() -> None:
    trace = ShapeTrace()
    n = trace.symbol("n", 7) * 2**70
    formulas = Formulas(trace, [n])
    open_device("CPU").compute_formulas(formulas)
    assert formulas.compiled is None
    found = formulas.computed((3,))
    assert found is not None and found.values[formulas.place(n)] == 3 * 2**70


def test_words_of_a_table() -> None:
    device, table = open_device("CPU"), np.zeros(6, np.uint64)
    words = Words(device.pool.quick, table, [(1, 0, 0), (4, 1, 2), (2, 1, 0)], 3)
    words.bases[2] = 2**63
    trace = ShapeTrace()
    n = trace.symbol("n", 7)
    formulas = Formulas(trace, [n, -5])
    formulas.made(operator.mul, 0, formulas.place(-5))
    device.compute_formulas(formulas)
    for values in ([9, -5], np.array([9, -5]).data):
        table[:] = 0
        words.write(values)
        assert table.tolist() == [0, 9, 2**64 - 5, 0, 2**63 - 5, 0]
    Words(device.pool.quick, table, [], 1).write([1])


def test_large_constants_that_nothing_needs_are_no_hindrance() -> None:
    trace = ShapeTrace()
    n = trace.symbol("n", 7)
    assert n * 2**70 > n  # for all sizes; the trace knows the product all the same
    formulas = Formulas(trace, [n * 3])
    open_device("CPU").compute_formulas(formulas)
    assert formulas.compiled is not None
    found = formulas.computed((5,))
    assert found is not None and found.values[formulas.place(n * 3)] == 15
    with pytest.raises(KeyError):
        formulas.place(2**70)
