"""Values that the samples do not reach: exactness, precision, edges, and chunks of large inputs."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tunewright.ops import lookup
from tunewright.ops.base import Array
from tunewright.ops.numeric import erf, integer_matmul, product_type
from tunewright.ops.onnx import conv
from tunewright.ops.tolerance import compare


def run(op: str, *inputs: Any, n: int = 1, **attrs: Any) -> Array:
    spec = lookup(op)
    assert spec is not None
    with np.errstate(all="ignore"):
        result = spec.reference(inputs, attrs, n)[0]
    assert isinstance(result, np.ndarray)
    return result


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


# -- numbers ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("dtype", "limit"), [(np.float32, 1e-7), (np.float64, 3e-16)])
def test_erf_to_the_last_digits(dtype: Any, limit: float) -> None:
    x = np.concatenate([np.linspace(-7, 7, 4001), np.logspace(-12, 0, 200), [0.0]]).astype(dtype)
    exact = np.array([math.erf(v) for v in x])
    assert np.abs(erf(x) - exact).max() <= limit
    tiny = x[np.abs(x) < 1e-3]
    assert np.allclose(erf(tiny), tiny * (2 / math.sqrt(math.pi)), rtol=1e-5, atol=0)
    assert erf(np.array([np.inf, -np.inf, np.nan], dtype)).tolist()[:2] == [1, -1]
    assert np.isnan(erf(np.array([np.nan], dtype))).all()


def test_integer_products_are_exact(rng: np.random.Generator) -> None:
    for high, length in ((100, 50), (1 << 15, 300), (1 << 40, 3)):
        a, b = rng.integers(-high, high, (4, length)), rng.integers(-high, high, (length, 3))
        exact = [[sum(int(x) * int(y) for x, y in zip(row, column, strict=True)) for column in b.T] for row in a]
        wrapped = [[(v + (1 << 63)) % (1 << 64) - (1 << 63) for v in row] for row in exact]
        assert integer_matmul(a, b).tolist() == wrapped
    assert product_type(np.zeros(1, np.uint8), np.zeros(1, np.uint8), 200) == np.float32
    assert product_type(np.zeros(1, np.uint8), np.zeros(1, np.uint8), 300) == np.float64


def test_integers_wrap_and_divide_like_c() -> None:
    assert run("Add", np.array([127], np.int8), np.array([1], np.int8)).tolist() == [-128]
    assert run("Div", np.array([-7, 7, -8], np.int32), np.array([2, -2, 2], np.int32)).tolist() == [-3, -3, -4]
    assert run("Mod", np.array([-7, 7], np.int32), np.array([3, -3], np.int32)).tolist() == [2, -2]
    assert run("Mod", np.array([-7, 7], np.int32), np.array([3, -3], np.int32), fmod=1).tolist() == [-1, 1]
    assert run("Pow", np.array([2, -3], np.int32), np.array([-1, 3], np.int32)).tolist() == [0, -27]
    assert run("ReduceSum", np.full(3, 1 << 30, np.int32), keepdims=0).item() == np.int32(3 * (1 << 30) - (1 << 32))


def test_shifts_beyond_the_width() -> None:
    x, y = np.array([-8, 8], np.int8), np.array([9, -1], np.int8)
    assert run("BitShift", x, y, direction="RIGHT").tolist() == [-1, 0]
    assert run("BitShift", x, y, direction="LEFT").tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_floats_are_summed_in_float32(dtype: Any, rng: np.random.Generator) -> None:
    a = rng.standard_normal((3, 4096)).astype(dtype)
    b = rng.standard_normal((4096, 2)).astype(dtype)
    exact = (a.astype(np.float64) @ b.astype(np.float64)).astype(dtype)
    assert not compare(run("MatMul", a, b), exact)
    ones = np.ones((1, 5000), dtype)
    assert run("ReduceSum", ones).item() == np.asarray(5000.0).astype(dtype)
    x, w = rng.standard_normal((1, 64, 9, 9)).astype(dtype), rng.standard_normal((4, 64, 3, 3)).astype(dtype)
    wide = run("Conv", x.astype(np.float64), w.astype(np.float64), None)
    assert not compare(run("Conv", x, w, None), wide.astype(dtype))


def test_float8_saturates_or_not() -> None:
    x = np.array([500.0, -1e9, np.inf, np.nan, 3.3], np.float32)
    kept = run("Cast", x, to=17).astype(np.float32)
    assert kept[:3].tolist() == [448, -448, 448] and np.isnan(kept[3]) and kept[4] == 3.25
    assert np.isnan(run("Cast", x, to=17, saturate=0).astype(np.float32)[:4]).all()
    assert run("Cast", np.array([200], np.int16), to=3).tolist() == [-56]
    assert run("Cast", np.array(["1.5", "-INF", "2e3"], object), to=1).tolist() == [1.5, -math.inf, 2000]
    assert run("Cast", np.array([1.5, 2.0], np.float32), to=8).tolist() == ["1.5", "2.0"]


# -- convolutions -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("group", [1, 2, 4])
def test_chunks_do_not_change_a_convolution(
    group: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = rng.standard_normal((2, 4, 23, 19)), rng.standard_normal((8, 4 // group, 3, 5))
    attrs = {"group": group, "strides": (2, 1), "pads": (1, 2, 0, 1), "dilations": (1, 2)}
    whole = run("Conv", x, w, None, **attrs)
    monkeypatch.setattr(conv, "_CHUNK", 1)
    assert not compare(run("Conv", x, w, None, **attrs), whole)


def test_convolution_by_its_definition(rng: np.random.Generator) -> None:
    x, w, bias = rng.standard_normal((1, 4, 6, 7)), rng.standard_normal((6, 2, 3, 2)), rng.standard_normal(6)
    y = run("Conv", x, w, bias, group=2, strides=(2, 1), pads=(1, 0, 1, 1), dilations=(1, 2))
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (0, 1)))
    for m, i, j in np.ndindex(*y.shape[1:]):
        group = m // 3
        window = padded[0, 2 * group : 2 * group + 2, 2 * i : 2 * i + 3, j : j + 3 : 2]
        assert math.isclose(y[0, m, i, j], float((window * w[m]).sum() + bias[m]), rel_tol=1e-12, abs_tol=1e-12)


def test_transposed_convolution_is_the_gradient_of_a_convolution(rng: np.random.Generator) -> None:
    attrs = {"strides": (2, 3), "pads": (1, 0, 0, 1), "dilations": (2, 1), "group": 2}
    x, w = rng.standard_normal((1, 4, 9, 11)), rng.standard_normal((6, 2, 2, 3))
    y = run("Conv", x, w, None, **attrs)
    up = rng.standard_normal(y.shape)
    back = run("ConvTranspose", up, w, None, **attrs, output_shape=None, output_padding=(0, 0))
    back = np.pad(back, [(0, 0), (0, 0), *((0, a - b) for a, b in zip(x.shape[2:], back.shape[2:], strict=True))])
    assert math.isclose(float((y * up).sum()), float((x * back).sum()), rel_tol=1e-9)


def test_empty_batches() -> None:
    assert run("Conv", np.zeros((0, 3, 8, 8), np.float32), np.zeros((4, 3, 3, 3), np.float32), None).shape == (
        0,
        4,
        6,
        6,
    )
    assert run("MatMul", np.zeros((0, 3), np.float32), np.zeros((3, 2), np.float32)).shape == (0, 2)
    assert run("Softmax", np.zeros((0, 3), np.float32)).shape == (0, 3)
    assert run("MaxPool", np.zeros((0, 3, 8, 8), np.float32), kernel_shape=(2, 2)).shape == (0, 3, 7, 7)
    assert run("ReduceMax", np.zeros((0, 3), np.float32), np.array([0])).tolist() == [[-math.inf] * 3]
    assert run("ReduceProd", np.zeros((0,), np.int32), keepdims=0).item() == 1


# -- the rest ---------------------------------------------------------------------------------------------------------
def test_lrn_with_an_even_size(rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 7, 2, 3))
    y = run("LRN", x, size=4, alpha=0.5, beta=0.6, bias=2.0)
    for c in range(7):
        total = (x[:, max(0, c - 1) : c + 3] ** 2).sum(1)
        assert np.allclose(y[:, c], x[:, c] / (2.0 + 0.5 / 4 * total) ** 0.6, rtol=1e-12)


def test_top_k_takes_the_lower_index_of_equals(rng: np.random.Generator) -> None:
    spec = lookup("TopK")
    assert spec is not None
    x = rng.integers(0, 9, (2, 4000)).astype(np.float32)
    for largest in (0, 1):
        values, indices = spec.reference([x, np.array([50])], {"largest": largest}, 2)
        order = np.argsort(-x if largest else x, axis=-1, kind="stable")[:, :50]
        assert indices.tolist() == order.tolist()
        assert values.tolist() == np.take_along_axis(x, order, -1).tolist()
    small = np.array([3, 255, 0, 255], np.uint8)
    assert spec.reference([small, np.array([2])], {}, 2)[1].tolist() == [1, 3]


def test_backward_slices_start_on_the_first_element() -> None:
    x = np.arange(5)
    assert run("Slice", x, np.array([-9]), np.array([-9]), np.array([0]), np.array([-1])).tolist() == [0]
    assert run("Slice", x, np.array([9]), np.array([-9]), np.array([0]), np.array([-2])).tolist() == [4, 2, 0]


def test_gather_refuses_what_is_outside() -> None:
    for op in ("Gather", "GatherElements"):
        with pytest.raises(IndexError):
            run(op, np.arange(4), np.array([4]))
    with pytest.raises(IndexError):
        run("ScatterND", np.arange(4), np.array([[-5]]), np.array([1]))


def test_masked_rows_of_attention_are_zero(rng: np.random.Generator) -> None:
    q, k = rng.standard_normal((1, 2, 3, 4)).astype(np.float32), rng.standard_normal((1, 2, 5, 4)).astype(np.float32)
    mask = np.ones((3, 5), bool)
    mask[1] = False
    y = run("Attention", q, k, k, mask)
    assert not y[:, :, 1].any() and y[:, :, 0].all()


def test_quantisation_rounds_half_to_even_and_saturates() -> None:
    x = np.array([0.5, 1.5, 2.5, -0.5, 1000, -1000], np.float32)
    one = np.array(1, np.float32)
    assert run("QuantizeLinear", x, one, np.array(10, np.uint8)).tolist() == [10, 12, 12, 10, 255, 0]
    assert run("QuantizeLinear", x, one, np.array(0, np.int8)).tolist() == [0, 2, 2, 0, 127, -128]
    nibbles = run("QuantizeLinear", x, one, np.array(0, ml_dtypes.int4))
    assert nibbles.dtype == ml_dtypes.int4 and nibbles.astype(int).tolist() == [0, 2, 2, 0, 7, -8]
    big = np.array([(1 << 24) + 1], np.int32)
    assert run("DequantizeLinear", big, np.array(1, np.float32), np.array(1, np.int32)).tolist() == [1 << 24]


def test_recurrence_stops_at_each_sequence_end(rng: np.random.Generator) -> None:
    x, w, r = (rng.standard_normal(s).astype(np.float32) for s in ((5, 2, 3), (1, 16, 3), (1, 16, 4)))
    spec = lookup("LSTM")
    assert spec is not None
    y, last, _ = spec.reference([x, w, r, None, np.array([2, 5], np.int32)], {"hidden_size": 4}, 3)
    short, end, _ = spec.reference([x[:2, :1], w, r], {"hidden_size": 4}, 3)
    assert np.allclose(y[:2, :, :1], short, atol=1e-6) and not y[2:, :, 0].any()
    assert np.allclose(last[:, :1], end, atol=1e-6)


def test_boxes_that_overlap_are_suppressed() -> None:
    boxes = np.array([[[0, 0, 1, 1], [0, 0.1, 1, 1.1], [0, 5, 1, 6], [1, 1, 0, 0]]], np.float32)
    scores = np.array([[[0.9, 0.95, 0.5, 0.1]]], np.float32)
    limit, overlap = np.array([9]), np.array([0.5], np.float32)
    assert run("NonMaxSuppression", boxes, scores, limit, overlap).tolist() == [[0, 0, 1], [0, 0, 2]]
    assert run("NonMaxSuppression", boxes, scores, np.array([1]), overlap).tolist() == [[0, 0, 1]]
    assert run("NonMaxSuppression", boxes, scores).shape == (0, 3)
