"""Sizes that a tensor gives, inside of a launch: results are ONNX Runtime's, whatever the numbers are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import parser

from helpers.counted_models import HALF, HEAD, check, inside, launches
from native.harness import native
from tunewright import Core, TunewrightError

pytestmark = native
NAMES = """
    zero = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    two = Constant <value_ints = [2]> ()
    seven = Constant <value_ints = [7]> ()
    forty = Constant <value_ints = [40]> ()
    far = Constant <value_ints = [9999]> ()
    """
#: outputs, nodes, the operations in the launch, numbers
FORMS: dict[str, tuple[str, str, list[str], list[Any]]] = {
    "TopK": ("float[n] v, int64[n] i", "v, i = TopK(x, k)", ["TopK"], [0, 1, 2, 7, 40]),
    "TopK of at most some": (
        "float[n] v, int64[n] i", "c = Min(k, seven) v, i = TopK(x, c)", ["Min", "TopK"], [0, 1, 2, 7, 40],
    ),
    "Slice to an end": ("float[n] y", "y = Slice(x, zero, k)", ["Slice"], [0, 1, 2, 7, 39, 40, 100]),
    "Slice from a start": ("float[n] y", "y = Slice(x, k, far)", ["Slice"], [0, 1, 2, 7, 30]),
    "Slice of a known length": (
        "float[n] y", "e = Add(k, seven) y = Slice(x, k, e)", ["Add", "Slice"], [0, 1, 2, 7, 30, 33],
    ),
    "ConstantOfShape": (
        "float[n] y", "c = Min(k, seven) y = ConstantOfShape(c)", ["Min", "ConstantOfShape"], [0, 1, 5, 9],
    ),
    "Range": (
        "int64[n] y",
        "c = Min(k, seven) first = Squeeze(zero) last = Squeeze(c) step = Squeeze(one) y = Range(first, last, step)",
        ["Min", "Squeeze", "Range"], [0, 1, 5, 9],
    ),
    "Expand": (
        "float[n,40] y", "c = Min(k, seven) to = Concat <axis = 0> (c, forty) y = Expand(x, to)",
        ["Min", "Concat", "Expand"], [0, 1, 5, 9],
    ),
    "Tile": ("float[n] y", "c = Min(k, seven) y = Tile(x, c)", ["Min", "Tile"], [0, 1, 5, 9]),
    "Pad": (
        "float[n] y", "c = Min(k, seven) p = Concat <axis = 0> (c, zero) y = Pad(x, p)", ["Min", "Concat", "Pad"],
        [0, 1, 5, 9],
    ),
    "TopK and what is behind": (
        "float[n] y", "v, i = TopK(x, k) e = Exp(v) s = ReduceSum(e, zero) y = Div(e, s)",
        ["TopK", "Softmax"], [1, 2, 7, 40],
    ),
}  # fmt: skip


def feed(k: Any, dtype: Any = np.int64) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {"x": rng.random(40).astype(np.float32), "k": np.atleast_1d(np.array(k, dtype))}


@pytest.mark.parametrize("form", FORMS)
def test_sizes_are_part_of_the_launch(form: str) -> None:
    outputs, nodes, expected, numbers = FORMS[form]
    feeds = [feed(k) for k in numbers]
    one = check(f"g (float[40] x, int64[1] k) => ({outputs}) {{ {NAMES} {nodes} }}", feeds)
    assert inside(one) == [expected]
    assert launches(one, feeds) == [1] * len(feeds)


def test_narrow_integers() -> None:
    feeds = [feed(k, np.int32) for k in (0, 1, 9, 40)]
    text = "g (float[40] x, int32[1] k) => (float[n] v, int64[n] i) { c = Cast <to = 7> (k) v, i = TopK(x, c) }"
    assert launches(check(text, feeds), feeds) == [1] * 4


def test_a_size_that_is_counted() -> None:
    text = (
        "g (float[40] x, int64[1] k) => (float[n] v, int64[n] i) {"
        + NAMES
        + HALF
        + """
        ones = Cast <to = 7> (m)
        sum = ReduceSum <keepdims = 1> (ones, zero)
        both = Add(sum, k)
        v, i = TopK(x, both)
    }"""
    )
    feeds = [feed(k) for k in (0, 1, 5)]
    for one in feeds:
        one["x"][10:] *= 0.4
    assert launches(check(text, feeds), feeds) == [1, 1, 1]


def test_a_size_beside_a_number_of_rows() -> None:
    rng = np.random.default_rng(2)
    text = (
        "g (float[40] x, int64[1] k) => (float[n] v, int64[n] i) {"
        + HALF
        + """
        at = NonZero(m)
        turned = Transpose <perm = [1, 0]> (at)
        picked = GatherND(x, turned)
        rows = Shape(picked)
        c = Min(k, rows)
        v, i = TopK(picked, c)
    }"""
    )
    feeds = []
    for rows, k in ((0, 0), (0, 3), (1, 0), (1, 1), (1, 9), (20, 0), (20, 1), (20, 9), (40, 99)):
        feeds.append(feed(k))
        feeds[-1]["x"] *= 0.4
        feeds[-1]["x"][:rows] = 0.6 + 0.3 * rng.random(rows)
    assert launches(check(text, feeds), feeds) == [1] * len(feeds)


def test_a_part_from_a_number_to_another() -> None:
    text = (
        "g (float[40] x, int64[2] k) => (float[n] y) {"
        + NAMES
        + """
        a = Slice(k, zero, one)
        b = Slice(k, one, two)
        y = Slice(x, a, b)
    }"""
    )
    feeds = [feed(k) for k in ((0, 0), (0, 1), (3, 9), (9, 3), (39, 40), (0, 400), (-5, -2), (5, -3), (-99, 99))]
    one = check(text, feeds)
    assert inside(one) == [["Slice", "Slice", "Slice"]]
    assert launches(one, [feeds[2]]) == [1]


@pytest.mark.parametrize("k", [-3, -1, 41, 2**40, -(2**63)])
def test_numbers_that_are_no_size(k: int) -> None:
    """The request says what is wrong; the next inference is right again."""
    model = parser.parse_model(HEAD + "g (float[40] x, int64[1] k) => (float[n] v, int64[n] i) { v, i = TopK(x, k) }")
    core = Core()
    request = core.compile_model(core.read_model(model), "CPU").create_infer_request()
    good = feed(3)
    for _ in range(2):
        np.testing.assert_array_equal(request.infer(good)["v"], np.sort(good["x"])[::-1][:3])
        with pytest.raises(TunewrightError, match="TopK"):
            request.infer(feed(k))


@pytest.mark.parametrize("k", [-3, -40, -41, 2**40, -(2**40), 2**63 - 1])
def test_ends_that_are_far_or_count_from_the_end(k: int) -> None:
    check("g (float[40] x, int64[1] k) => (float[n] y) {" + NAMES + "y = Slice(x, zero, k) }", [feed(k), feed(3)])


def test_without_a_bound_the_request_runs_it() -> None:
    one = check("g (float[40] x, int64[2] k) => (float[n,m] y) { y = Reshape(x, k) }", [feed((4, 10)), feed((8, -1))])
    assert not inside(one)


def test_long_arithmetic_that_is_shared() -> None:
    """Each number is computed once, however often it is read: following all ways would take for ever."""
    steps = "".join(f"a{k + 1} = Add(a{k}, a{k}) b{k + 1} = Div(a{k + 1}, two) " for k in range(60))
    text = "g (float[40] x, int64[1] k) => (float[n] y) {" + NAMES + "a0 = Min(k, seven) " + steps
    check(text + " y = Slice(x, zero, b60) }", [feed(k) for k in (0, 1)])


def test_more_numbers_than_a_launch_finds_out() -> None:
    rng = np.random.default_rng(3)
    steps = "".join(f"y{k + 1} = Slice(y{k}, zero, k{k})" for k in range(40))
    names = ", ".join(f"int64[1] k{k}" for k in range(40))
    x = rng.random(40).astype(np.float32)
    feeds = [{"y0": x} | {f"k{k}": np.array([40 - k if most > 20 else most]) for k in range(40)} for most in (40, 5)]
    one = check(f"g (float[40] y0, {names}) => (float[n] y40) {{ {NAMES} {steps} }}", feeds)
    assert not inside(one)
