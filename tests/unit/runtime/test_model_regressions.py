"""Models that users brought and that went wrong once, each cut down to the operator that was at fault."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tunewright import Core
from tunewright.devices.host import HostDevice
from tunewright.errors import InputError, ModelError
from tunewright.ir.types import DType, SequenceType, TensorType
from tunewright.solvers.base import Problem
from tunewright.solvers.host.reference import HostKernel

FLOAT, STRING = TensorProto.FLOAT, TensorProto.STRING


def run(
    op: str,
    feed: Mapping[str, Any],
    *,
    domain: str = "",
    inputs: Mapping[str, Any] | None = None,
    constants: Mapping[str, Any] | None = None,
    order: tuple[str, ...] = (),
    opset: int = 21,
    **attrs: Any,
) -> np.ndarray[Any, Any]:
    """The first result of one node. ``inputs``: types that are not those of the arrays in ``feed``."""
    types = {
        name: (inputs or {}).get(name)
        or helper.make_tensor_type_proto(DType.of_numpy(np.asarray(value).dtype).onnx_code, np.shape(value))
        for name, value in feed.items()
    }
    weights = [onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in (constants or {}).items()]
    node = helper.make_node(op, order or [*feed, *(constants or {})], ["y"], domain=domain, **attrs)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_value_info(name, type) for name, type in types.items()],
        [helper.make_empty_tensor_value_info("y")],
        weights,
    )
    opsets = [
        helper.make_opsetid("", opset),
        helper.make_opsetid("ai.onnx.ml", 3),
        helper.make_opsetid("com.microsoft", 1),
    ]
    compiled = Core().compile_model(helper.make_model(graph, opset_imports=opsets), "CPU", {"VERIFY_PASSES": "YES"})
    result: np.ndarray[Any, Any] = compiled(feed)["y"]
    return result


def texts(*items: Any) -> np.ndarray[Any, Any]:
    return np.asarray(items, object)


# -- Resize (exported interpolate with a fractional scale) -------------------------------------------------------------
def resize(x: Any, scale: float, **attrs: Any) -> np.ndarray[Any, Any]:
    x = np.asarray(x, np.float32)
    return run("Resize", {"x": x}, constants={"s": np.asarray([scale], np.float32)}, order=("x", "", "s"), **attrs)


def test_corners_are_aligned_to_the_last_pixel_also_where_the_scale_is_fractional() -> None:
    got = resize([1, 2, 3, 4], 0.6, mode="linear", coordinate_transformation_mode="align_corners")
    np.testing.assert_allclose(got, [1, 4])
    got = resize([0, 1, 2], 1.7, mode="linear", coordinate_transformation_mode="align_corners")
    np.testing.assert_allclose(got, np.linspace(0, 2, 5), atol=1e-6)


def test_the_nearest_pixel_is_found_in_single_precision() -> None:
    got = resize(np.arange(12), 1.7, coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    assert got[17] == 10  # 17 / 1.7; the double nearest to the scale would give 9
    np.testing.assert_array_equal(got, np.floor(np.arange(20, dtype=np.float32) / np.float32(1.7)))


def test_a_cubic_resize_to_one_pixel_takes_the_first_one() -> None:
    got = resize([5, 2, 3, 4], 0.25, mode="cubic", coordinate_transformation_mode="pytorch_half_pixel")
    np.testing.assert_allclose(got, [5])


# -- spectra -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("onesided", [0, 1])
def test_a_signal_without_a_last_axis_has_a_spectrum(onesided: int) -> None:
    x, window = np.random.default_rng(0).standard_normal((2, 40)).astype(np.float32), np.hanning(16).astype(np.float32)
    constants = {"step": np.int64(6), "window": window}
    got = run("STFT", {"x": x}, constants=constants, onesided=onesided)
    frames = np.stack([x[:, i : i + 16] * window for i in range(0, 40 - 16 + 1, 6)], 1)
    want = np.fft.rfft(frames) if onesided else np.fft.fft(frames)
    np.testing.assert_allclose(got, np.stack([want.real, want.imag], -1), atol=1e-5)
    np.testing.assert_array_equal(got, run("STFT", {"x": x[..., None]}, constants=constants, onesided=onesided))


# -- quantised scalars (static quantisers quantise the exponent of Pow too) --------------------------------------------
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, ml_dtypes.float8_e4m3fn], ids=str)
def test_one_number_is_quantised(dtype: Any) -> None:
    constants = {"scale": np.float32(0.5), "zero": np.asarray(0, dtype)}
    got = run("QuantizeLinear", {"x": np.asarray(2.0, np.float32)}, constants=constants)
    assert got.shape == () and got.dtype == dtype and got == 4


# -- text (pipelines of scikit-learn) ----------------------------------------------------------------------------------
def tokens(*items: str, **attrs: Any) -> list[list[str]]:
    settings = {"mark": 0, "pad_value": "#", "mincharnum": 1, **attrs}
    found: list[list[str]] = run("Tokenizer", {"x": texts(*items)}, domain="com.microsoft", **settings).tolist()
    return found


def test_tokens_are_what_matches_or_what_stands_between() -> None:
    assert tokens("a b,c", " x", separators=[" ", ","]) == [["a", "b", "c"], ["x", "#", "#"]]
    assert tokens("ab x", "héy", separators=[""]) == [["a", "b", " ", "x"], ["h", "é", "y", "#"]]
    assert tokens("xx abb c", tokenexp="[a-z]*", mincharnum=2) == [["xx", "abb"]]
    assert tokens("abcab", tokenexp="a|ab") == [["ab", "ab"]]  # the longest match, not the first
    assert tokens("héy", tokenexp=r"\w+") == [["h", "y"]]  # classes are ASCII
    assert tokens("a b", "c", separators=[" "], mark=1) == [["\x02", "a", "b", "\x03"], ["\x02", "c", "\x03", "#"]]
    assert tokens("..", tokenexp="[a-z]+", mark=1) == [[]]


def test_hashes_are_those_of_murmur_3() -> None:
    words = texts("foo", "", "héllo world!")
    got = run("MurmurHash3", {"x": words}, domain="com.microsoft")
    assert got.dtype == np.uint32 and got.tolist() == [4138058784, 0, 2663906861]
    got = run("MurmurHash3", {"x": np.asarray([1, -5, 3], np.int64)}, domain="com.microsoft", positive=0, seed=7)
    assert got.dtype == np.int32 and got.tolist() == [-836849528, -52999801, -2020699886]


def test_a_pattern_has_ascii_classes() -> None:
    assert run("RegexFullMatch", {"x": texts("ab1", "é")}, pattern=r"\w+").tolist() == [True, False]


# -- ai.onnx.ml --------------------------------------------------------------------------------------------------------
def map_type(value: int) -> onnx.TypeProto:
    return helper.make_map_type_proto(STRING, helper.make_tensor_type_proto(value, []))


@pytest.mark.parametrize("code, dtype", [(FLOAT, np.float32), (TensorProto.DOUBLE, np.float64), (7, np.int64)])
def test_a_dictionary_becomes_one_row_of_its_type(code: int, dtype: Any) -> None:
    feed = {"x": {"c": 4, "a": 1, "other": 9}}
    vocabulary = ["a", "b", "c"]
    got = run("DictVectorizer", feed, domain="ai.onnx.ml", inputs={"x": map_type(code)}, string_vocabulary=vocabulary)
    assert got.dtype == dtype and got.tolist() == [[1, 0, 4]]
    with pytest.raises(InputError, match="dictionary"):
        run(
            "DictVectorizer",
            {"x": [1]},
            domain="ai.onnx.ml",
            inputs={"x": map_type(code)},
            string_vocabulary=vocabulary,
        )


@pytest.mark.parametrize("one_class", [0, 1])
def test_a_support_vector_regression_of_many_samples(one_class: int) -> None:
    rng = np.random.default_rng(1)
    x, vectors, weights = rng.standard_normal((300, 3)), rng.standard_normal((40, 3)), rng.standard_normal(40)
    got = run(
        "SVMRegressor",
        {"x": x.astype(np.float32)},
        domain="ai.onnx.ml",
        kernel_type="RBF",
        kernel_params=[0.5, 0.0, 3.0],
        n_supports=40,
        support_vectors=vectors.ravel().tolist(),
        coefficients=weights.tolist(),
        rho=[0.25],
        one_class=one_class,
    )
    distance = ((x[:, None] - vectors) ** 2).sum(-1)
    scores = np.exp(-0.5 * distance) @ weights[:, None] + 0.25
    np.testing.assert_allclose(got, np.sign(scores) if one_class else scores, rtol=1e-4, atol=1e-5)


# -- costs that grew with the square -----------------------------------------------------------------------------------
def test_a_growing_list_is_not_copied_over_and_over() -> None:
    held = [np.zeros(2, np.float32), np.ones(2, np.float32)]
    new = np.full(2, 2, np.float32)
    type = TensorType(DType.FLOAT32, (2,))
    problem = Problem("SequenceInsert", (SequenceType(type), type), (SequenceType(type),), {}, constant=(False, False))
    (result,) = HostKernel(problem).run(HostDevice("CPU").queue(), [held, new], [None])
    assert all(a is b for a, b in zip(result, held, strict=False))
    assert result[2] is not new and not np.shares_memory(result[2], new)  # its bytes may be reused after this step
    np.testing.assert_array_equal(result[2], new)


def test_the_key_of_a_large_ensemble_is_short_and_tells_ensembles_apart() -> None:
    def key(**attrs: Any) -> str:
        return Problem("ai.onnx.ml::TreeEnsembleRegressor", (), (), attrs).key()

    values, names = tuple(float(i) for i in range(100_000)), tuple(f"n{i}" for i in range(100))
    assert len(key(nodes_values=values)) < 200
    assert key(nodes_values=values) == key(nodes_values=tuple(values))
    assert key(nodes_values=values) != key(nodes_values=(*values[:-1], 0.0))
    assert key(nodes_values=values) != key(nodes_values=tuple(map(int, values)))
    assert key(nodes_modes=names) != key(nodes_modes=names[::-1])


# -- empty batches -----------------------------------------------------------------------------------------------------
def test_a_dimension_is_left_open_also_in_an_empty_batch() -> None:
    for batch in (0, 2):
        x = np.zeros((batch, 8, 6), np.float32)
        assert run("Reshape", {"x": x}, constants={"s": np.asarray([0, -1, 2, 3])}).shape == (batch, 8, 2, 3)
        assert run("Reshape", {"x": x}, constants={"s": np.asarray([-1, 6])}).shape == (8 * batch, 6)


@pytest.mark.parametrize(
    "shape, wanted, result", [((0, 8, 16), (0, 8, -1, 8), (0, 8, 2, 8)), ((2, 0, 4), (2, -1, 0), (2, 4, 0))]
)
def test_a_literal_zero_beside_an_open_dimension(shape: Any, wanted: Any, result: Any) -> None:
    x = np.zeros(shape, np.float32)
    assert run("Reshape", {"x": x}, constants={"s": np.asarray(wanted)}, allowzero=1).shape == result
    with pytest.raises(ModelError, match="cannot become"):
        run("Reshape", {"x": np.zeros((2, 8, 16), np.float32)}, constants={"s": np.asarray([0, -1])}, allowzero=1)


@pytest.mark.parametrize("op, gates", [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_an_empty_batch_through_a_recurrent_layer(op: str, gates: int) -> None:
    weights = {"w": np.zeros((1, gates * 2, 3), np.float32), "r": np.zeros((1, gates * 2, 2), np.float32)}
    assert run(op, {"x": np.zeros((4, 0, 3), np.float32)}, constants=weights, hidden_size=2).shape == (4, 1, 0, 2)


def test_an_empty_batch_through_attention_and_group_normalization() -> None:
    q = np.zeros((0, 3, 8), np.float32)
    assert run("Attention", {"q": q, "k": q, "v": q}, opset=23, q_num_heads=2, kv_num_heads=2).shape == (0, 3, 8)
    ones = {"scale": np.ones(4, np.float32), "bias": np.ones(4, np.float32)}
    assert run("GroupNormalization", {"x": np.zeros((0, 4, 3), np.float32)}, constants=ones, num_groups=2).shape == (
        0,
        4,
        3,
    )
