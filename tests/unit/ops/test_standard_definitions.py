"""Operators that run through onnx's own definitions."""

from __future__ import annotations

import numpy as np
import pytest

from tunewright.ir.types import DType, OptionalType, SequenceType, TensorType
from tunewright.ops import standard
from tunewright.ops.base import Operand

F = TensorType(DType.FLOAT32, (2, 3))


def test_results_follow_the_attributes_of_each_call() -> None:
    """Evaluators are shared between calls; one made for other attributes must never be taken."""
    x = np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3)
    for alpha in (0.5, 1.0, 0.5):
        (y,) = standard.run_reference("LeakyRelu", [x], {"alpha": alpha}, 1)
        np.testing.assert_allclose(y, np.where(x < 0, alpha * x, x), rtol=1e-6)
    for axis in (0, 1, True):  # 1 and True are equal, and mean the same
        (y,) = standard.run_reference("Concat", [x, x], {"axis": axis}, 1)
        np.testing.assert_array_equal(y, np.concatenate([x, x], int(axis)))
    for value in (np.zeros(1, np.float32), np.zeros(1, np.int32), np.ones(1, np.int32)):
        (y,) = standard.run_reference("ConstantOfShape", [np.asarray([2])], {"value": value}, 1)
        assert y.dtype == value.dtype and y.tolist() == [value[0]] * 2


def test_results_follow_which_inputs_are_there() -> None:
    x = np.asarray([-5.0, 5.0], np.float32)
    low, high = np.asarray(-1, np.float32), np.asarray(1, np.float32)
    for inputs in ([x, low], [x, None, high], [x, low, high], [x]):
        lower, upper = [*inputs, None, None][1:3]
        (y,) = standard.run_reference("Clip", inputs, {}, 1)
        np.testing.assert_array_equal(y, np.clip(x, -9 if lower is None else lower, 9 if upper is None else upper))


def test_rank_0_and_strings_arrive_as_the_ir_holds_them() -> None:
    (y,) = standard.run_reference("ReduceSum", [np.ones(3, np.float32)], {"keepdims": 0}, 1)
    assert isinstance(y, np.ndarray) and y.shape == ()
    assert standard.to_value(np.asarray(["a"])).dtype == object
    assert standard.to_value([np.float32(1)])[0].shape == ()


@pytest.mark.parametrize("type", [SequenceType(), OptionalType(), OptionalType(SequenceType())], ids=str)
def test_an_unknown_element_type_is_no_mistake(type: SequenceType | OptionalType) -> None:
    assert standard.infer_by_schema("Identity", [Operand(type)], {}, 1) == [None]


def test_only_what_is_known_can_be_wrong() -> None:
    wrong, open_ = TensorType(DType.FLOAT32, (4, 5)), TensorType(DType.FLOAT32, (None, 5))
    with pytest.raises(ValueError, match="ShapeInferenceError"):
        standard.infer_by_schema("MatMul", [Operand(F), Operand(wrong)], {}, 1)
    fits = standard.infer_by_schema("MatMul", [Operand(F), Operand(open_)], {}, 1)
    assert fits == [TensorType(DType.FLOAT32, (2, 5))]
    batch = TensorType(DType.FLOAT32, (None, 3))
    assert standard.infer_by_schema("MatMul", [Operand(batch), Operand(wrong)], {}, 1) == [None]


def test_an_attribute_that_onnx_does_not_know_is_left_out() -> None:
    x = np.ones(3, np.float32)
    assert standard.infer_by_schema("Relu", [Operand(F)], {"legacy": 1}, 1) == [F]
    np.testing.assert_array_equal(standard.run_reference("Relu", [x], {"legacy": 1}, 1)[0], x)


def test_a_deprecated_operator_has_its_last_definition() -> None:
    assert standard.find_schema("Upsample").since_version == 9
    assert standard.find_schema("ai.onnx.ml::TreeEnsembleRegressor").since_version == 3
    assert standard.find_schema("Nothing") is None and standard.define("Nothing") is None
