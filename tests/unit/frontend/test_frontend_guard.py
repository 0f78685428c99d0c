"""What the guard counts, what the schemas refuse, and how names find their values."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from faults.hostile import BOOL, body, info, model_of, one, weight
from faults.hostile_files import function, with_functions
from tunewright import Core, InputError, LimitError, ModelError
from tunewright.frontend import guard, schema
from tunewright.frontend.onnx import load
from tunewright.settings import Settings

node = helper.make_node


def nodes_of(model: onnx.ModelProto) -> int:
    """How many nodes a model has after everything is expanded."""
    return sum(len(g) for g in load(model, Settings()).graph.walk())


@pytest.mark.parametrize(
    ("functions", "count"),
    [
        ([function("f0", [])], 2),
        ([function("f0", ["f1", "f1"]), function("f1", ["f2"] * 3), function("f2", [])], 18),
        ([function("f0", ["f2", "f1"]), function("f1", ["f2"] * 2), function("f2", [])], 10),
    ],
    ids=["one", "multiplied", "shared"],
)
def test_functions_are_counted_as_they_expand(functions: list[onnx.FunctionProto], count: int) -> None:
    """Every call and everything in it, each time it is called."""
    model = with_functions(functions)
    guard.check(model, Settings(max_nodes=count))
    with pytest.raises(LimitError, match="MAX_NODES"):
        guard.check(model, Settings(max_nodes=count - 1))
    assert nodes_of(model) < count  # the calls themselves are gone


def test_function_bomb_is_refused_without_expanding() -> None:
    bomb = with_functions([function(f"f{k}", [f"f{k + 1}"] * 2 if k < 29 else []) for k in range(30)])
    assert len(bomb.SerializeToString()) < 4096
    begin = time.perf_counter()
    with pytest.raises(LimitError, match="function 'f"):
        guard.check(bomb, Settings())
    assert time.perf_counter() - begin < 10  # expanding it would take hours


def test_unused_function_that_calls_itself_is_refused_too() -> None:
    with pytest.raises(ModelError, match=r"'f9'.*calls itself"):
        guard.check(with_functions([function("f0", []), function("f9", ["f9"])]), Settings())


def test_depth_counts_bodies_and_functions() -> None:
    inner = body([node("f0", ["x"], ["z"], domain="f")], [], ["z"])
    model = with_functions([function("f0", ["f1"]), function("f1", [])])
    model.graph.node.append(node("If", ["c"], ["w"], then_branch=inner, else_branch=inner))
    model.graph.input.append(info("c", [], BOOL))
    guard.check(model, Settings(max_nesting=3))
    with pytest.raises(LimitError, match="MAX_NESTING = 2"):
        guard.check(model, Settings(max_nesting=2))


def test_memory_is_counted_over_all_weights() -> None:
    weights = [weight(f"w{k}", np.zeros(100), np.float64) for k in range(5)]
    model = model_of([node("Identity", ["w0"], ["y"])], weights=weights)
    guard.check(model, Settings(max_memory_bytes=4000))
    with pytest.raises(LimitError, match="MAX_MEMORY_BYTES"):
        guard.check(model, Settings(max_memory_bytes=3999))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (one("Cast", to=1.0), "attribute 'to': is FLOAT, but Cast takes INT"),
        (one("Cast"), "attribute 'to' is missing"),
        (one("Relu", ["x", "x"]), r"'bad' \(Relu\): has 2 inputs, but Relu takes 1"),
        (one("Gemm", ["x"]), "has 1 inputs, but Gemm takes 2 to 3"),
        (one("Clip", ["", "x"]), r"input 0 \(input\) is missing"),
        (one("Split", n=2, num_outputs=2, axis="x"), "attribute 'axis': is STRING"),
        (one("Concat", [], axis=0), "has 0 inputs, but Concat takes at least 1"),
        (one("Relu", n=2), "has 2 outputs"),
    ],
)
def test_schema(model: onnx.ModelProto, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(model, Settings())


def test_schema_is_that_of_the_models_opset() -> None:
    """Squeeze took its axes as an attribute before opset 13, as an input since then."""
    old = model_of([node("Squeeze", ["x"], ["y"], axes=[0])], [info("x", [1, 2])], opset=11)
    assert Core().compile_model(old)({"x": np.ones((1, 2), np.float32)})["y"].shape == (2,)
    new = model_of([node("Squeeze", ["x", "a"], ["y"])], [info("x", [1, 2])], weights=[weight("a", [0])], opset=11)
    with pytest.raises(ModelError, match="has 2 inputs, but Squeeze takes 1"):
        load(new, Settings())


def test_attributes_the_schema_does_not_know_are_let_through() -> None:
    """Exporters add some of their own; an operator without a schema has only such."""
    assert nodes_of(one("Relu", extra=3)) == 1
    schema.check_node("NoSuchOperator", "com.example", 1, [], [], {"any": 99}, "node")


def test_attribute_without_a_type_is_what_it_holds() -> None:
    """Files of the first versions did not say."""
    model = one("Softmax", axis=0)
    model.graph.node[0].attribute[0].ClearField("type")
    x = np.array([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]], np.float32)
    assert np.allclose(Core().compile_model(model)({"x": x})["y0"], 0.5)


@pytest.mark.parametrize("value", [2, 2.5, "text", [1, 2], [1.5], ["a"], TensorProto(data_type=1), onnx.GraphProto()])
def test_kind_of(value: Any) -> None:
    attribute = helper.make_attribute("a", value)
    want = attribute.type
    attribute.ClearField("type")
    assert guard.kind_of(attribute) == want


def test_nodes_may_stand_in_any_order() -> None:
    nodes = [node("Neg", ["b"], ["y"]), node("Relu", ["a"], ["b"]), node("Exp", ["x"], ["a"])]
    x = np.full((2, 3), 1.0, np.float32)
    assert np.allclose(Core().compile_model(model_of(nodes, ["x"]))({"x": x})["y"], -np.e)


def test_many_readers_in_the_wrong_order_take_linear_time() -> None:
    readers = [node("Relu", ["x"], [f"v{i}"]) for i in range(20_000)]
    model = model_of([node("Sum", [r.output[0] for r in readers], ["y"]), *readers], ["x"])
    begin = time.process_time()
    load(model, Settings())
    assert time.process_time() - begin < 10


def test_a_body_may_return_one_value_twice() -> None:
    inner = body([node("Relu", ["x"], ["z"])], [], ["z", "z"])
    model = model_of(
        [node("If", ["c"], ["p", "q"], then_branch=inner, else_branch=inner)], [info("c", [], BOOL), "x"], ["p", "q"]
    )
    x = np.full((2, 3), -1.0, np.float32)
    made = Core().compile_model(model)({"c": np.asarray(True), "x": x})
    assert np.array_equal(made["p"], made["q"]) and not made["p"].any()


def test_a_hidden_endless_loop_ends() -> None:
    from faults.hostile_control import loop_that_hides_that_it_never_ends

    model = Core({"MAX_ITERATIONS": 50}).compile_model(loop_that_hides_that_it_never_ends())
    with pytest.raises(LimitError, match="MAX_ITERATIONS = 50"):
        model({"x": np.ones((2, 3), np.float32)})
    with pytest.raises(LimitError):  # each inference counts anew, and a refused one leaves nothing behind
        model({"x": np.ones((2, 3), np.float32)})


def test_attributes_of_a_call_reach_nested_functions_and_bodies() -> None:
    """A reference by another name, inside the branch of an If, inside a function that a function calls."""
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)]
    leaky = node("LeakyRelu", ["a"], ["z"])
    leaky.attribute.add(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT)
    other = body([node("Neg", ["a"], ["z"])], [], ["z"])
    inner = helper.make_function(
        "f",
        "inner",
        ["c", "a"],
        ["b"],
        [node("If", ["c"], ["b"], then_branch=body([leaky], [], ["z"]), else_branch=other)],
        imports,
        ["slope"],
    )
    call = node("inner", ["c", "a"], ["b"], domain="f")
    call.attribute.add(name="slope", ref_attr_name="steepness", type=onnx.AttributeProto.FLOAT)
    outer = helper.make_function("f", "outer", ["c", "a"], ["b"], [call], imports, ["steepness"])
    first = node("outer", ["c", "x"], ["p"], domain="f", steepness=0.5)
    second = node("outer", ["c", "x"], ["q"], domain="f", steepness=0.25)
    model = model_of([first, second], [info("c", [], BOOL), "x"], ["p", "q"], functions=[inner, outer])
    model.opset_import.append(helper.make_opsetid("f", 1))
    x = np.full((2, 3), -4.0, np.float32)
    made = Core().compile_model(model)({"c": np.asarray(True), "x": x})
    assert np.all(made["p"] == -2) and np.all(made["q"] == -1)


@pytest.mark.parametrize("dims", [3, "ab", [2.5, 3], [True, 3], [b"a", 3], [-2, 3], [[2], 3]])
def test_reshape_takes_only_shapes(dims: Any) -> None:
    model = Core().read_model(one("Relu"))
    with pytest.raises(InputError, match=r"input 'x': .* is not a shape"):
        model.reshape({"x": dims})


def test_reshape_to_sizes_names_and_open_dimensions() -> None:
    model = Core().read_model(one("Relu"))
    assert str(model.reshape({"x": [np.int64(5), -1]}).inputs["x"]) == "float32[5,?]"
    assert str(model.reshape({"x": ("n", None)}).inputs["x"]) == "float32[n,?]"
