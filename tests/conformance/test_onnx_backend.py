"""The whole ONNX backend suite through `tunewright.backend`: nodes, small models, and the light networks."""

from __future__ import annotations

import unittest
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance import device_families
from tunewright import Core, UnsupportedError
from tunewright.backend import TunewrightBackend
from tunewright.plugins.single import open_device

#: A program for each set of kernels takes long to compile, and they are many: networks are where that is tested.
APART = {"JOIN_LAUNCHES": "NO"}


class Apart(TunewrightBackend):
    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", **kwargs: Any) -> Any:
        return super().prepare(model, device, **{**kwargs, "config": APART})


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # generating the cases divides by zero and overflows on purpose
    import onnx.backend.test
    from onnx.backend.test.loader import load_node_model_tests

    RUNNER = onnx.backend.test.BackendTest(Apart, __name__)
    CLASSES = RUNNER.test_cases

_DRAWN = "the expected values were drawn from a random generator; see test_bernoulli_draws_ones_as_often_as_asked"

_FRACTION = (
    "expects a fractional length_resized in align_corners; the specification's text, ONNX Runtime, OpenVINO and the "
    "frameworks that export it take the length of the result"
)

#: tests that cannot pass, with the reason
EXCLUDED = {
    "test_bernoulli_cpu": _DRAWN,
    "test_bernoulli_double_cpu": _DRAWN,
    "test_bernoulli_double_expanded_cpu": _DRAWN,
    "test_bernoulli_expanded_cpu": _DRAWN,
    "test_bernoulli_seed_cpu": _DRAWN,
    "test_bernoulli_seed_expanded_cpu": _DRAWN,
    "test_loop16_seq_none_cpu": "the suite takes len() of a tensor of rank 0; see test_a_loop_over_an_absent_sequence",
    "test_resize_downsample_scales_cubic_align_corners_cpu": _FRACTION,
    "test_resize_downsample_scales_linear_align_corners_cpu": _FRACTION,
    "test_gradient_of_add_cpu": "Gradient asks for training; this engine runs inference",
    "test_gradient_of_add_and_mul_cpu": "Gradient asks for training; this engine runs inference",
}

#: Expected values that were rounded to halves after each node, by more than the suite's tolerance of 0.1 %. These tests
#: run without the pass that keeps more digits; `test_results_with_more_digits_are_nearer` runs them with it.
ROUNDED_BETWEEN_NODES = ("test_attention_4d_causal_fp16_expanded_cpu",)

#: class -> tests that it has at least in onnx 1.23
COUNTS = {
    "OnnxBackendNodeModelTest": 1884,
    "OnnxBackendSimpleModelTest": 23,
    "OnnxBackendPyTorchConvertedModelTest": 82,
    "OnnxBackendPyTorchOperatorModelTest": 35,
    "OnnxBackendRealModelTest": 9,
}


NEWEST = tuple(int(part) for part in onnx.__version__.split(".")[:2]) >= (1, 23)


def names(category: str) -> list[str]:
    """Tests of a class for the CPU (each is there for CUDA too)."""
    return sorted(n for n in dir(CLASSES[category]) if n.startswith("test_") and n.endswith("_cpu"))


def cases(category: str) -> list[Any]:
    return [pytest.param(getattr(CLASSES[category], n), id=n) for n in names(category) if n not in EXCLUDED]


def run(case: Callable[[Any], None]) -> None:
    """A case that skips itself has not passed."""
    try:
        case(None)
    except unittest.SkipTest as reason:
        pytest.fail(f"skipped: {reason}")


#: the node tests of the families that have kernels, and why some of them need the host all the same
FAMILY_TESTS = {f"{t.name}_cpu": t.model for t in load_node_model_tests() if device_families.of_families(t.model)}
EXCUSES = {
    name: reason
    for name, model in FAMILY_TESTS.items()
    if (reason := device_families.EXCEPTIONS.get(name) or device_families.excuse(model)) is not None
}
#: node tests that run on the device alone
ON_DEVICE = FAMILY_TESTS.keys() - EXCUSES.keys() - EXCLUDED.keys()
#: how many there are at least in onnx 1.23
ON_DEVICE_COUNT = 1420


@pytest.mark.parametrize("name", [n for n in names("OnnxBackendNodeModelTest") if n not in EXCLUDED])
def test_node(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device alone where the test is of a family with kernels; elsewhere the host helps."""
    if name in ON_DEVICE:
        monkeypatch.setenv("TUNEWRIGHT_HOST_FALLBACK", "NO")
    if name in ROUNDED_BETWEEN_NODES:
        monkeypatch.setenv("TUNEWRIGHT_DISABLED_PASSES", "widen-halves")
    run(getattr(CLASSES["OnnxBackendNodeModelTest"], name))


def test_results_with_more_digits_are_nearer() -> None:
    """A causal attention in halves, against double precision: no farther off than what the suite expects."""
    (name,) = ROUNDED_BETWEEN_NODES
    (case,) = (t for t in load_node_model_tests() if f"{t.name}_cpu" == name)
    ((inputs, (expected,)),) = case.data_sets
    q, k, v = (np.asarray(array, np.float64) for array in inputs[:3])
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    weights = np.exp(np.where(np.triu(np.ones(scores.shape[-2:], bool), 1), -np.inf, scores))
    exact = weights @ v / weights.sum(-1, keepdims=True)
    compiled = Core().compile_model(case.model, "CPU")
    (result,) = compiled({one.name: array for one, array in zip(case.model.graph.input, inputs, strict=True)}).values()
    off, allowed = (np.abs(array.astype(np.float64) - exact).max() for array in (result, expected))
    assert off <= allowed < 1e-3


@pytest.mark.parametrize("case", cases("OnnxBackendSimpleModelTest"))
def test_simple(case: Callable[[Any], None]) -> None:
    run(case)


@pytest.mark.parametrize("case", cases("OnnxBackendPyTorchConvertedModelTest"))
def test_pytorch_converted(case: Callable[[Any], None]) -> None:
    run(case)


@pytest.mark.parametrize("case", cases("OnnxBackendPyTorchOperatorModelTest"))
def test_pytorch_operator(case: Callable[[Any], None]) -> None:
    run(case)


@pytest.mark.parametrize("case", cases("OnnxBackendRealModelTest"))
def test_light_model(case: Callable[[Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNX_MODELS", str(tmp_path))  # the suite writes inputs and outputs there
    run(case)


@pytest.mark.parametrize("category", COUNTS)
def test_how_many_run(category: str) -> None:
    found = names(category)
    left_out = [n for n in found if n in EXCLUDED]
    assert not NEWEST or len(found) >= COUNTS[category]
    allowed = {"OnnxBackendNodeModelTest": 9, "OnnxBackendSimpleModelTest": 2}.get(category, 0)
    assert len(left_out) <= allowed


def test_how_many_run_on_the_device_alone() -> None:
    counts = Counter(family for name in ON_DEVICE for family in device_families.families(FAMILY_TESTS[name]))
    for family in device_families.FAMILIES:
        print(f"{counts[family]:5} of {family}")
    print(f"{len(ON_DEVICE)} without the host, {len(EXCUSES)} of the families with it")
    assert all(counts[family] for family in device_families.FAMILIES)
    assert not NEWEST or len(ON_DEVICE) >= ON_DEVICE_COUNT


def test_every_excuse_is_of_a_test_and_has_a_reason() -> None:
    assert FAMILY_TESTS.keys() >= device_families.EXCEPTIONS.keys()
    assert all(EXCUSES.values()) and set(names("OnnxBackendNodeModelTest")) >= EXCUSES.keys()


@pytest.mark.skipif(open_device("CPU").family == "host", reason="needs a CPU device with kernels")
@pytest.mark.parametrize("name", sorted(EXCUSES))
def test_an_excused_node_cannot_do_without_the_host(name: str) -> None:
    """An excuse that is needed no longer goes."""
    with pytest.raises(UnsupportedError, match="HOST_FALLBACK"):
        model = Core({"HOST_FALLBACK": "NO", **APART}).compile_model(FAMILY_TESTS[name])
        model(node_case(name.removesuffix("_cpu")).data_sets[0][0])


def test_every_exclusion_names_a_test() -> None:
    assert set(CLASSES) == set(COUNTS)
    known = {n for category in CLASSES for n in names(category)}
    assert known.issuperset(EXCLUDED)


def node_case(name: str) -> Any:
    return next(t for t in load_node_model_tests() if t.name == name)


def test_a_loop_over_an_absent_sequence() -> None:
    """test_loop16_seq_none, compared element by element."""
    case = node_case("test_loop16_seq_none")
    for inputs, outputs in case.data_sets:
        (got,) = Core().compile_model(case.model)(inputs).values()
        (want,) = outputs
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", [n.removesuffix("_cpu") for n in EXCLUDED if "bernoulli" in n])
def test_bernoulli_draws_ones_as_often_as_asked(name: str) -> None:
    """The excluded tests of Bernoulli by what ONNX fixes: types, shapes, and how often a one is drawn."""
    case = node_case(name)
    model = Core().compile_model(case.model)
    ((x,), (y,)) = case.data_sets[0]
    draws = [next(iter(model([x]).values())) for _ in range(1 if "seed" in name else 400)]
    assert all(d.shape == y.shape and d.dtype == y.dtype and set(np.unique(d)) <= {0, 1} for d in draws)
    if len(draws) > 1:  # five standard deviations of the mean of 400 draws
        share = 1 - x if "expanded" in name else x  # onnx's expansion asks for random > p, which is the other way round
        np.testing.assert_allclose(np.mean(draws, 0), share, atol=5 * 0.5 / np.sqrt(len(draws)))
