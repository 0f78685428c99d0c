"""Unusual models with open sizes, at random sizes: a sample of what `bench/zoo_shapes.py` checks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from native.harness import native

pytest.importorskip("onnxruntime")
sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
import zoo_shapes
from zoo_shapes_texts import TEXTS

pytestmark = native

#: models of the short form, and the most plans for classes of shapes that they need at five sizes
SAMPLE = {"pads": 2, "crop": 2, "quotients": 5, "resized": 4, "scan": 3, "thirds": 4, "kept-columns": 4}
#: other kernels run where a plan for one shape leaves rows of data to the host
BY_DATA = {"kept-columns", "filter"}
RUNS = [pytest.param(name, 5, most, id=name) for name, most in SAMPLE.items()]
RUNS += [pytest.param(name, 20, 20, id=f"{name}-all", marks=pytest.mark.soak) for name in TEXTS]


@pytest.mark.parametrize(("name", "count", "most"), RUNS)
def test_results_are_those_of_other_plans_and_of_onnx_runtime(name: str, count: int, most: int) -> None:
    (subject,) = (one for one in zoo_shapes.subjects(Path("nowhere"), False) if one.name == f"{name}/text")
    found = zoo_shapes.check(subject.load(), subject, "fp32", count, 0)
    assert not found.faults, found.faults[:3]
    assert found.compared >= 5 and (found.bits == found.compared or name in BY_DATA)
    assert 0 < found.plans <= most and not found.reasons


def test_the_forms_of_a_network_are_quantised_ones() -> None:
    (subject,) = (one for one in zoo_shapes.subjects(Path("nowhere"), False) if one.name == "convolutions-of-one/text")
    for form in ("int8", "qdq"):
        found = zoo_shapes.check(zoo_shapes.formed(subject, form, 0), subject, form, 3, 0)
        assert found.compared and not found.faults, (form, found.faults[:3])
