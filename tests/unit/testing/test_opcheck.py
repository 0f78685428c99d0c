"""opcheck finds each broken promise."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tunewright.ir.types import DType, TensorType
from tunewright.ops import lookup
from tunewright.ops.base import OpSpec, Sample
from tunewright.ops.shapes import same_as
from tunewright.ops.tolerance import TOLERANCES, compare
from tunewright.testing.opcheck import assert_op, violations

SAMPLES = [Sample([np.arange(6, dtype=np.float32).reshape(2, 3)], {})]


def spec_of(function: Any, infer: Any = None, **flags: Any) -> OpSpec:
    return OpSpec("mine::Op", lambda inputs, attrs, n: [function(inputs[0])], infer or same_as(), **flags)


def text_of(spec: OpSpec, **kwargs: Any) -> str:
    return "; ".join(violations(spec, SAMPLES, **kwargs))


def test_a_good_op_passes() -> None:
    spec = spec_of(lambda x: x * 2, elementwise=True)
    assert_op(spec, SAMPLES, oracle=lambda _, sample: [sample.inputs[0] + sample.inputs[0]])


def test_the_specs_own_samples_are_used() -> None:
    spec = dataclasses.replace(spec_of(lambda x: x[0]), samples=lambda rng: SAMPLES)
    with pytest.raises(AssertionError, match="mine::Op: sample 0: inference claims"):
        assert_op(spec)


def _claims_a_number(operands: Any, attrs: Any, n: int) -> Sequence[TensorType]:
    """Takes an open dimension for 7."""
    shape = operands[0].type.shape or (2, 3)
    return [TensorType(DType.FLOAT32, tuple(d if isinstance(d, int) else 7 for d in shape))]


def _needs_a_rank(operands: Any, attrs: Any, n: int) -> Sequence[TensorType]:
    return [TensorType(DType.FLOAT32, tuple(operands[0].type.shape))]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (spec_of(lambda x: x.T), "claims float32[2,3] for output 0, which is float32[3,2]"),
        (spec_of(lambda x: x.astype(np.float64)), "which is float64[2,3]"),
        (spec_of(lambda x: np.add(x, 1, out=x)), "the reference raises ValueError"),
        (spec_of(lambda x: x.sum()), "instead of ndarrays"),
        (spec_of(lambda x: x[5]), "the reference raises IndexError"),
        (spec_of(lambda x: x * 2, _claims_a_number), "open"),
        (spec_of(lambda x: x * 2, _needs_a_rank), "inference raises TypeError"),
        (spec_of(lambda x: x > 1, same_as(dtype=DType.BOOL), elementwise=True), "none of its inputs' types"),
        (spec_of(lambda x: x[:, :1], lambda o, a, n: [None], elementwise=True), "broadcasting gives"),
        (spec_of(lambda x: x * 2, view=True), "other bytes"),
        (spec_of(lambda x: x * 2, flops=lambda i, o, a: -1.0), "flops"),
        (spec_of(lambda x: x * 2, value_from_types=lambda o, a: np.zeros(3)), "value_from_types"),
        (OpSpec("mine::Op", lambda inputs, attrs, n: [], same_as()), "0 outputs instead of 1"),
    ],
)
def test_broken_promises(spec: OpSpec, expected: str) -> None:
    assert expected in text_of(spec)


def test_changed_inputs_are_found() -> None:
    x = np.arange(6, dtype=np.float32)

    def reference(inputs: Any, attrs: Any, n: int) -> list[Any]:
        x[0] = 9  # behind the read-only view's back
        return [inputs[0].copy()]

    found = "; ".join(violations(OpSpec("mine::Op", reference, same_as()), [Sample([x], {})]))
    assert "changes input 0" in found


@pytest.mark.parametrize("dtype", [d.numpy for d in TOLERANCES if d.is_float])
def test_one_percent_off_fails(dtype: Any) -> None:
    good = np.random.default_rng(0).uniform(0.5, 2, 500).astype(dtype)
    wrong = good.copy()
    wrong[137] = (np.float64(good[137]) * (1.03 if good.dtype.itemsize == 2 else 1.01)).astype(dtype)
    assert compare(good, good) == ""
    assert "against" in compare(wrong, good)


def test_compare_minds_types_shapes_and_infinities() -> None:
    x = np.array([1.0, np.inf, np.nan], np.float32)
    assert compare(x, x.copy()) == ""
    assert "float64" in compare(x, x.astype(np.float64))
    assert "shape" in compare(x, x[None])
    assert "infinities" in compare(x, np.array([1.0, 2.0, np.nan], np.float32))
    assert "1 of 2" in compare(np.array([1, 2]), np.array([1, 3]))
    assert compare(np.array(["a"], object), np.array(["a"], object)) == ""


def test_real_ops_pass_through_the_public_door() -> None:
    for name in ("Conv", "Reshape", "Add"):
        spec = lookup(name)
        assert spec is not None
        assert_op(spec)
