"""Hostile files: paths, tensors, graphs, functions, and what is no model at all."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from faults.hostile import BOOL, FLOAT, body, external, hostile, info, model_of, one, weight

# ---- files outside the model's folder ------------------------------------------------------------------------------


@hostile("'w'")
def path_traversal(folder: Path, secret: Path) -> Any:
    return external(os.path.relpath(secret, folder))


@hostile("'w'")
def path_traversal_through_a_folder(folder: Path, secret: Path) -> Any:
    (folder / "sub").mkdir()
    return external(f"sub/../../{secret.parent.name}/{secret.name}")


@hostile("'w'")
def absolute_path(folder: Path, secret: Path) -> Any:
    return external(str(secret))


@hostile("'w'")
def symbolic_link(folder: Path, secret: Path) -> Any:
    (folder / "data").symlink_to(secret)
    return external("data")


@hostile("'w'")
def symbolic_link_to_a_folder(folder: Path, secret: Path) -> Any:
    (folder / "sub").symlink_to(secret.parent)
    return external(f"sub/{secret.name}")


@hostile("'w'")
def symbolic_link_inside_the_folder(folder: Path) -> Any:
    (folder / "real").write_bytes(bytes(24))
    (folder / "data").symlink_to("real")
    return external("data")


@hostile("hard link")
def hard_link(folder: Path, secret: Path) -> Any:
    os.link(secret, folder / "data")
    return external("data")


@hostile("'w'")
def fifo(folder: Path) -> Any:
    os.mkfifo(folder / "data")
    return external("data")


@hostile("'w'")
def device_file(folder: Path) -> Any:
    (folder / "data").symlink_to("/dev/zero")
    return external("data")


@hostile("'w'")
def folder_as_data(folder: Path) -> Any:
    (folder / "data").mkdir()
    return external("data")


@hostile("'w'")
def no_such_file() -> Any:
    return external("data")


@hostile("'w'")
def nul_in_the_path() -> Any:
    return external("da\0ta")


@hostile("'w'")
def no_path() -> Any:
    return external("")


@hostile("'w'")
def model_folder_itself() -> Any:
    return external(".")


@hostile("'w'")
def path_is_not_text(folder: Path) -> Any:
    return external("QQQQ").SerializeToString().replace(b"QQQQ", b"\xff\xfe\xfd\xfc")


@hostile("", 2.0)
def honest_external_data(folder: Path) -> Any:
    (folder / "sub").mkdir()
    (folder / "sub" / "data").write_bytes(bytes(64))
    return external("sub/data", offset="8", length="24")


@hostile("'w'")
def external_length_2_62(folder: Path) -> Any:
    (folder / "data").write_bytes(bytes(64))
    return external("data", length=str(1 << 62))


@hostile("'w'")
def external_offset_2_62(folder: Path) -> Any:
    (folder / "data").write_bytes(bytes(64))
    return external("data", offset=str(1 << 62))


@hostile("'w'")
def external_offset_negative(folder: Path) -> Any:
    (folder / "data").write_bytes(bytes(64))
    return external("data", offset="-8")


@hostile("'w'")
def external_offset_of_a_million_digits(folder: Path) -> Any:
    (folder / "data").write_bytes(bytes(64))
    return external("data", offset="9" * 1_000_000)


@hostile("'w'")
def external_offset_past_the_end(folder: Path) -> Any:
    (folder / "data").write_bytes(bytes(64))
    return external("data", offset="60")


@hostile("'w'")
def external_file_too_short(folder: Path) -> Any:
    (folder / "data").write_bytes(bytes(23))
    return external("data")


@hostile("'w'")
def external_file_empty(folder: Path) -> Any:
    (folder / "data").write_bytes(b"")
    return external("data")


# ---- tensors -------------------------------------------------------------------------------------------------------


def with_weight(**fields: Any) -> onnx.ModelProto:
    w = TensorProto(name="w", **{"data_type": FLOAT, **fields})
    return model_of([helper.make_node("Add", ["x", "w"], ["y"])], ["x"], weights=[w])


@hostile("'w'")
def length_2_62() -> Any:
    return with_weight(dims=[1 << 62], raw_data=bytes(24))


@hostile("'w'")
def size_overflows() -> Any:
    return with_weight(dims=[1 << 33, 1 << 33], raw_data=b"")


@hostile("'w'")
def size_overflows_to_zero() -> Any:
    return with_weight(dims=[1 << 32, 1 << 32, 0], raw_data=b"")


@hostile("'w'")
def raw_data_short() -> Any:
    return with_weight(dims=[2, 3], raw_data=bytes(20))


@hostile("'w'")
def raw_data_long() -> Any:
    return with_weight(dims=[2, 3], raw_data=bytes(28))


@hostile("'w'")
def typed_data_short() -> Any:
    return with_weight(dims=[2, 3], float_data=[1.0] * 5)


@hostile("'w'")
def typed_data_in_another_field() -> Any:
    return with_weight(dims=[2, 3], int64_data=[1] * 6)


@hostile("'w'")
def negative_dims() -> Any:
    return with_weight(dims=[-2, -3], raw_data=bytes(24))


@hostile("'w'")
def rank_1000() -> Any:
    return with_weight(dims=[1] * 1000, raw_data=bytes(4))


@hostile("'w'")
def unknown_element_type() -> Any:
    return with_weight(data_type=77, dims=[2, 3], raw_data=bytes(24))


@hostile("'w'")
def raw_strings() -> Any:
    return with_weight(data_type=TensorProto.STRING, dims=[2], raw_data=bytes(24))


@hostile("negative")
def negative_input_dims() -> Any:
    return model_of([helper.make_node("Relu", ["x"], ["y"])], [info("x", [-5, 3])])


@hostile("MAX_")
def many_weights_that_do_not_fit() -> Any:
    weights = [TensorProto(name=f"w{k}", data_type=FLOAT, dims=[1 << 29], raw_data=b"") for k in range(2000)]
    return model_of([helper.make_node("Add", ["x", "w0"], ["y"])], ["x"], weights=weights)


def sparse(dims: Sequence[int], values: Any, indices: Any) -> onnx.ModelProto:
    model = model_of([helper.make_node("Identity", ["w"], ["y"])])
    given = helper.make_sparse_tensor(weight("w", values, np.float32), weight("at", indices), dims)
    model.graph.sparse_initializer.append(given)
    return model


@hostile("'w'")
def sparse_index_outside() -> Any:
    return sparse([4], [1, 2], [0, 1 << 40])


@hostile("'w'")
def sparse_index_negative() -> Any:
    return sparse([4, 4], [1, 2], [[0, -1], [1, 1]])


@hostile("'w'")
def sparse_of_2_60_elements() -> Any:
    return sparse([1 << 60], [1, 2], [0, 1])


@hostile("'w'")
def sparse_that_does_not_fit_together() -> Any:
    return sparse([4], [1, 2], [0, 1, 2])


# ---- graphs --------------------------------------------------------------------------------------------------------


@hostile("cycle")
def cycle() -> Any:
    return model_of(
        [helper.make_node("Add", ["x", "b"], ["a"], name="p"), helper.make_node("Relu", ["a"], ["b"])], ["x"], ["b"]
    )


@hostile("cycle")
def node_that_reads_itself() -> Any:
    return model_of([helper.make_node("Relu", ["y"], ["y"], name="p")])


@hostile("cycle")
def cycle_through_a_body() -> Any:
    inner = body([helper.make_node("Relu", ["y"], ["z"])], [], ["z"])
    return model_of(
        [helper.make_node("If", ["c"], ["y"], name="p", then_branch=inner, else_branch=inner)], [info("c", [], BOOL)]
    )


@hostile("'y'")
def duplicate_outputs() -> Any:
    return model_of([helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Neg", ["x"], ["y"], name="p")], ["x"])


@hostile("'y'")
def duplicate_outputs_of_one_node() -> Any:
    return one("Split", n=1, num_outputs=2).SerializeToString() and model_of(
        [helper.make_node("Split", ["x"], ["y", "y"], name="p", num_outputs=2)], ["x"]
    )


@hostile("'p'")
def output_named_like_an_input() -> Any:
    return model_of([helper.make_node("Relu", ["x"], ["x"], name="p")], ["x"], ["x"])


@hostile("'w'")
def duplicate_weights() -> Any:
    return model_of([helper.make_node("Identity", ["w"], ["y"])], weights=[weight("w", [1]), weight("w", [2])])


@hostile("'x'")
def duplicate_inputs() -> Any:
    return model_of([helper.make_node("Relu", ["x"], ["y"])], ["x", "x"])


@hostile("'y'")
def duplicate_graph_outputs() -> Any:
    return model_of([helper.make_node("Relu", ["x"], ["y"])], ["x"], ["y", "y"])


@hostile("'nothing'")
def input_that_nothing_makes() -> Any:
    return model_of([helper.make_node("Add", ["x", "nothing"], ["y"], name="p")], ["x"])


@hostile("'nothing'")
def output_that_nothing_makes() -> Any:
    return model_of([helper.make_node("Relu", ["x"], ["y"])], ["x"], ["nothing"])


@hostile("NoSuchOperator")
def unknown_operator() -> Any:
    return one("NoSuchOperator")


@hostile("NoSuchOperator")
def unknown_domain() -> Any:
    return model_of([helper.make_node("NoSuchOperator", ["x"], ["y"], domain="com.example")], ["x"])


@hostile("opset 0")
def opset_0() -> Any:
    return one("Relu", opset=0)


@hostile("opset 999")
def opset_999() -> Any:
    return one("Relu", opset=999)


@hostile("opset -1")
def opset_negative() -> Any:
    return one("Relu", opset=-1)


@hostile("UTF-8")
def name_is_not_text() -> Any:
    return (
        model_of([helper.make_node("Relu", ["x"], ["QQQQ"])], ["x"], ["QQQQ"])
        .SerializeToString()
        .replace(b"QQQQ", b"\xff\xfe\xfd\xfc")
    )


@hostile("UTF-8")
def dimension_is_not_text() -> Any:
    return (
        model_of([helper.make_node("Relu", ["x"], ["y"])], [info("x", ["QQQQ"])])
        .SerializeToString()
        .replace(b"QQQQ", b"\xff\xfe\xfd\xfc")
    )


@hostile("", 20.0)
def chain_of_50_000_nodes() -> Any:
    nodes = [helper.make_node("Relu", [f"v{i}"], [f"v{i + 1}"]) for i in range(50_000)]
    return model_of(nodes, [info("v0")], [info("v50000")])


@hostile("", 20.0)
def reversed_chain_of_20_000_nodes() -> Any:
    nodes = [helper.make_node("Relu", [f"v{i}"], [f"v{i + 1}"]) for i in range(20_000)]
    return model_of(nodes[::-1], [info("v0")], [info("v20000")])


@hostile("", 5.0)
def fan_of_5_000_nodes_in_the_wrong_order() -> Any:
    nodes = [helper.make_node("Relu", ["x"], [f"v{i}"]) for i in range(5_000)]
    return model_of([helper.make_node("Concat", [n.output[0] for n in nodes], ["y"], axis=0), *nodes], ["x"])


@hostile("", 5.0)
def outputs_2_000() -> Any:
    nodes = [helper.make_node("Identity", ["x"], [f"v{i}"]) for i in range(2_000)]
    return model_of(nodes, ["x"], [n.output[0] for n in nodes])


# ---- functions -----------------------------------------------------------------------------------------------------


def function(name: str, calls: Sequence[str]) -> onnx.FunctionProto:
    nodes = []
    for k, callee in enumerate(calls):
        nodes.append(helper.make_node(callee, ["a" if k == 0 else f"t{k}"], [f"t{k + 1}"], domain="f"))
    nodes.append(helper.make_node("Relu", [f"t{len(calls)}" if calls else "a"], ["b"]))
    return helper.make_function(
        "f", name, ["a"], ["b"], nodes, [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)]
    )


def with_functions(functions: Sequence[onnx.FunctionProto], call: str = "f0") -> onnx.ModelProto:
    model = model_of([helper.make_node(call, ["x"], ["y"], domain="f", name="call")], ["x"], functions=functions)
    model.opset_import.append(helper.make_opsetid("f", 1))
    return model


@hostile("MAX_NODES")
def function_bomb() -> Any:
    return with_functions([function(f"f{k}", [f"f{k + 1}"] * 2 if k < 29 else []) for k in range(30)])


@hostile("MAX_N")
def function_bomb_of_1000_functions() -> Any:
    return with_functions([function(f"f{k}", [f"f{k + 1}"] * 9 if k < 999 else []) for k in range(1000)])


@hostile("calls itself")
def function_that_calls_itself() -> Any:
    return with_functions([function("f0", ["f0"])])


@hostile("calls itself")
def functions_that_call_each_other() -> Any:
    return with_functions([function("f0", ["f1"]), function("f1", ["f2"]), function("f2", ["f0"])])


@hostile("MAX_NESTING")
def functions_nested_1000_deep() -> Any:
    return with_functions([function(f"f{k}", [f"f{k + 1}"] if k < 999 else []) for k in range(1000)])


@hostile("", 2.0)
def functions_nested_30_deep() -> Any:
    return with_functions([function(f"f{k}", [f"f{k + 1}"] if k < 29 else []) for k in range(30)])


@hostile("'f0'")
def function_defined_twice() -> Any:
    return with_functions([function("f0", []), function("f0", [])])


@hostile("opset 999")
def function_with_opset_999() -> Any:
    f = function("f0", [])
    f.opset_import[0].version = 999
    return with_functions([f])


@hostile("MAX_MEMORY_BYTES")
def function_that_multiplies_weights() -> Any:
    big = TensorProto(name="w", data_type=FLOAT, dims=[1 << 28], raw_data=b"")
    last = helper.make_function(
        "f", "f6", ["a"], ["b"], [helper.make_node("Constant", [], ["b"], value=big)], [helper.make_opsetid("", 21)]
    )
    return with_functions([*(function(f"f{k}", [f"f{k + 1}"] * 4) for k in range(6)), last])


@hostile("", 2.0)
def function_that_copies_an_attribute() -> Any:
    """One tensor of 1 MB handed to a thousand nodes, through two names: it must not become a thousand tensors."""
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)]
    copy = helper.make_node("Constant", [], ["b"])
    copy.attribute.add(name="value", ref_attr_name="v", type=onnx.AttributeProto.TENSOR)
    calls = []
    for k in range(1000):
        call = helper.make_node("copy", [], [f"b{k}"], domain="f")
        call.attribute.add(name="v", ref_attr_name="w", type=onnx.AttributeProto.TENSOR)
        calls.append(call)
    joined = helper.make_node("Identity", ["b999"], ["b"])
    functions = [
        helper.make_function("f", "copy", [], ["b"], [copy], imports, ["v"]),
        helper.make_function("f", "many", [], ["b"], [*calls, joined], imports, ["w"]),
    ]
    big = weight("", np.zeros(1 << 20), np.uint8)
    model = model_of([helper.make_node("many", [], ["y"], domain="f", w=big)], functions=functions)
    model.opset_import.append(helper.make_opsetid("f", 1))
    return model


# ---- files that are no models --------------------------------------------------------------------------------------


@hostile("empty")
def empty_file() -> Any:
    return b""


@hostile("model.onnx")
def random_bytes() -> Any:
    return random.Random(1).randbytes(10_000)


@hostile("model.onnx")
def zeros() -> Any:
    return bytes(100_000)


@hostile("model.onnx")
def text() -> Any:
    return b"This is not a model.\n" * 100


@hostile("model.onnx")
def archive() -> Any:
    return b"PK\x03\x04" + bytes(200)


@hostile("model.onnx")
def truncated() -> Any:
    data = model_of([helper.make_node("Relu", ["x"], ["y"])], ["x"]).SerializeToString()
    return data[: len(data) // 2]


@hostile("model.onnx")
def length_past_the_end() -> Any:
    return b"\x3a\xff\xff\xff\xff\x07" + bytes(10)


@hostile("model.onnx")
def a_graph_without_its_model() -> Any:
    return model_of([helper.make_node("Relu", ["x"], ["y"])], ["x"]).graph.SerializeToString()


@hostile("model.onnx")
def groups_nested_100_000_deep() -> Any:
    return b"\xa3\x06" * 100_000


@hostile("no graph")
def no_graph() -> Any:
    return onnx.ModelProto(ir_version=10)


@hostile("input 'x'")
def type_nested_30_deep() -> Any:
    kind = helper.make_tensor_type_proto(FLOAT, [2])
    for _ in range(30):
        kind = helper.make_sequence_type_proto(kind)
    return model_of(
        [helper.make_node("SequenceLength", ["x"], ["y"], name="type")], [helper.make_value_info("x", kind)]
    )
