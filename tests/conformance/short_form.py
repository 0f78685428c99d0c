"""What the short form of the tests leaves to `make soak`, and what needs results."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

from tunewright.plugins.single import open_device

#: for tests that a form without results would fail (see `syntax`)
needs_results = pytest.mark.skipif(open_device("CPU").family == "syntax", reason="nothing runs here")


def every_other(*axes: tuple[str, Iterable[Any]]) -> pytest.MarkDecorator:
    """`parametrize` with all combinations of some axes, the fields of a chess-board of one colour marked ``soak``.

    Every value of every axis stays in the short form, and with three axes or more any two values of different ones
    still meet. For axes of which a kernel knows nothing of each other: to compile all combinations takes minutes.
    An axis may have several names ("m, n"), with a tuple for each value.
    """
    names = [[name.strip() for name in axis.split(",")] for axis, _ in axes]
    values = [[each if len(n) > 1 else (each,) for each in given] for n, (_, given) in zip(names, axes, strict=True)]
    found = []
    for places in itertools.product(*(range(len(axis)) for axis in values)):
        chosen = itertools.chain.from_iterable(axis[at] for axis, at in zip(values, places, strict=True))
        found.append(pytest.param(*chosen, marks=[pytest.mark.soak] if sum(places) % 2 else []))
    return pytest.mark.parametrize(list(itertools.chain(*names)), found, ids=_name)


def _name(value: Any) -> str:
    return str(getattr(value, "__name__", value))
