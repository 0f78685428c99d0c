"""What of the prelude is part of a kernel's key: the functions that it calls, and those that these call."""

from __future__ import annotations

import re

from tunewright.solvers.c.source.prelude import MATHEMATICS, ORDER, mathematics_of

NAMES = re.compile(r"INLINE\s[^(]*?(\w+)\(")


def test_only_what_is_called_counts() -> None:
    assert mathematics_of("y[0] = x[0] + 1;") == ORDER
    found = mathematics_of("y[0] = f32_mish(x[0]);")
    assert "f32_mish(f32 x)" in found and "f32_exp(f32 x)" in found and "f64_exp" not in found
    assert mathematics_of("f32_exp f32_mish") == found and len(found) < len(MATHEMATICS) / 2


def test_no_function_is_left_out() -> None:
    """Whatever a definition names that is defined, too, is there."""
    names = set(NAMES.findall(MATHEMATICS.removeprefix(ORDER)))
    assert len(names) > 40
    for name in names:
        found = mathematics_of(name).removeprefix(ORDER)
        assert name in NAMES.findall(found)
        assert names & set(re.findall(r"\w+", found)) == set(NAMES.findall(found))
