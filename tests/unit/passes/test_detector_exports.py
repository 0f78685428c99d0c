"""Detectors that find nothing, one thing, or many: one launch, and ONNX Runtime's results."""

from __future__ import annotations

import pytest

from helpers.counted_models import check, inside, launches
from native.harness import native

pytest.importorskip("torch")
from helpers.detector_exports import DETECTORS, exported, feeds

pytestmark = native


@pytest.mark.parametrize("name", DETECTORS)
def test_whatever_a_detector_finds_is_one_launch(name: str) -> None:
    given = [feeds(100, found, found) for found in (100, 0, 1, 2, 3, 30)]
    one = check(exported(name, 100), given)
    assert len(inside(one)) == 1
    assert launches(one, given) == [1] * len(given)
