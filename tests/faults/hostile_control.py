"""Hostile control flow: nesting, bodies that do not fit, loops that do not end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import helper

from faults.hostile import BOOL, INT64, body, hostile, info, model_of, one, weight

# ---- control flow --------------------------------------------------------------------------------------------------


def nested_if(top: onnx.GraphProto, depth: int, both: bool = False) -> None:
    """Fill a graph with an If in an If, ``depth`` deep (in place: protobuf does not copy what is so deep)."""
    pending = [(top, 0)]
    while pending:
        graph, level = pending.pop()
        graph.output.add(name="y")
        if level == depth:
            graph.node.add(op_type="Identity", input=["x"], output=["y"])
            continue
        node = graph.node.add(op_type="If", input=["c"], output=["y"], name=f"if{level}")
        for name in ("then_branch", "else_branch"):
            a = node.attribute.add(name=name, type=onnx.AttributeProto.GRAPH)
            a.g.name = name
            pending.append((a.g, level + 1 if both or name == "then_branch" else depth))


def if_model(depth: int, both: bool = False) -> onnx.ModelProto:
    model = onnx.ModelProto(ir_version=10, opset_import=[helper.make_opsetid("", 21)])
    nested_if(model.graph, depth, both)
    model.graph.input.extend([info("c", [], BOOL), info("x")])
    return model


@hostile("", 1.0)
def if_nested_20_deep() -> Any:
    return if_model(20)


@hostile("", 5.0)
def if_nested_9_deep_on_both_sides() -> Any:
    return if_model(9, both=True)


def deep_message(depth: int) -> bytes:
    """If in If as bytes, deeper than protobuf would write or read."""

    def field(number: int, payload: bytes) -> bytes:
        length, size = len(payload), b""
        while length > 127:
            size, length = size + bytes([length & 127 | 128]), length >> 7
        return bytes([number << 3 | 2]) + size + bytes([length]) + payload

    graph = onnx.GraphProto(name="g").SerializeToString()
    for _ in range(depth):
        attribute = onnx.AttributeProto(name="then_branch", type=onnx.AttributeProto.GRAPH).SerializeToString()
        node = onnx.NodeProto(op_type="If", input=["c"], output=["y"]).SerializeToString()
        graph = field(1, node + field(5, attribute + field(6, graph)))
    return onnx.ModelProto(ir_version=10, opset_import=[helper.make_opsetid("", 21)]).SerializeToString() + field(
        7, graph
    )


@hostile("model.onnx")
def if_nested_1000_deep() -> Any:
    return deep_message(1000)


@hostile("model.onnx")
def message_nested_4_000_deep() -> Any:
    return deep_message(4_000)


@hostile("_branch")
def if_without_branches() -> Any:
    return one("If", [info("c", [], BOOL)])


@hostile("branch")
def if_with_a_number_as_branch() -> Any:
    return one("If", [info("c", [], BOOL)], then_branch=1, else_branch=2)


@hostile("branch")
def if_with_branches_of_different_length() -> Any:
    inner = body([helper.make_node("Relu", ["x"], ["z"])], [], ["z", "z"])
    return model_of(
        [helper.make_node("If", ["c"], ["y"], name="p", then_branch=inner, else_branch=inner)],
        [info("c", [], BOOL), "x"],
    )


def loop_model(trips: Any, condition: str = "go", extra: Sequence[onnx.NodeProto] = ()) -> onnx.ModelProto:
    inner = body(
        [helper.make_node("Identity", [condition], ["again"]), helper.make_node("Relu", ["v"], ["w"]), *extra],
        [info("i", [], INT64), info("go", [], BOOL), info("v")], ["again", "w", "w"],
    )  # fmt: skip
    weights = [] if trips is None else [weight("m", trips)]
    loop = helper.make_node("Loop", ["" if trips is None else "m", "", "x"], ["y", "z"], name="loop", body=inner)
    return model_of([loop], ["x"], ["y", "z"], weights)


@hostile("'loop'")
def loop_that_never_ends() -> Any:
    return loop_model(None)


@hostile("'loop'")
def loop_of_2_62_trips() -> Any:
    return loop_model(1 << 62)


@hostile("MAX_ITERATIONS", 5.0)
def loop_that_hides_that_it_never_ends() -> Any:
    zero = helper.make_node("Constant", [], ["zero"], value=weight("", 0))
    return loop_model(None, "fine", [helper.make_node("GreaterOrEqual", ["i", "zero"], ["fine"]), zero])


@hostile("MAX_ITERATIONS", 5.0)
def loops_nested_8_deep() -> Any:
    graph = body([helper.make_node("Identity", ["go7"], ["again7"]), helper.make_node("Sin", ["v7"], ["w7"])],
                 [info("i7", [], INT64), info("go7", [], BOOL), info("v7")], ["again7", "w7"])  # fmt: skip
    for k in range(6, -1, -1):
        graph = body(
            [helper.make_node("Identity", [f"go{k}"], [f"again{k}"]),
             helper.make_node("Loop", ["m", "", f"v{k}"], [f"w{k}"], name=f"loop{k}", body=graph)],
            [info(f"i{k}", [], INT64), info(f"go{k}", [], BOOL), info(f"v{k}")], [f"again{k}", f"w{k}"],
        )  # fmt: skip
    loop = helper.make_node("Loop", ["m", "", "x"], ["y"], name="loop", body=graph)
    return model_of([loop], ["x"], weights=[weight("m", 17)])  # one more than is unrolled


@hostile("trip count")
def loop_with_a_vector_as_trip_count() -> Any:
    return loop_model([3, 4])


@hostile("'body'")
def loop_with_a_body_of_other_inputs() -> Any:
    inner = body([helper.make_node("Identity", ["go"], ["again"])], [info("go", [], BOOL)], ["again", "again"])
    loop = helper.make_node("Loop", ["", "", "x"], ["y"], name="loop", body=inner)
    return model_of([loop], ["x"])


def scan_model(**attrs: Any) -> onnx.ModelProto:
    inner = body([helper.make_node("Add", ["s", "v"], ["t"])], [info("s", [3]), info("v", [3])], ["t", "t"])
    scan = helper.make_node("Scan", ["s0", "x"], ["y", "z"], name="scan", body=inner, **attrs)
    return model_of([scan], [info("s0", [3]), "x"], ["y", "z"])


@hostile("scan")
def scan_of_more_inputs_than_there_are() -> Any:
    return scan_model(num_scan_inputs=3)


@hostile("scan")
def scan_of_minus_one_inputs() -> Any:
    return scan_model(num_scan_inputs=-1)


@hostile("scan_input_axes")
def scan_with_too_many_axes() -> Any:
    return scan_model(num_scan_inputs=1, scan_input_axes=[0, 1, 2])


@hostile("'scan'")
def scan_along_an_axis_that_is_not_there() -> Any:
    return scan_model(num_scan_inputs=1, scan_input_axes=[7])


@hostile("'scan")
def scan_into_an_axis_that_is_not_there() -> Any:
    return scan_model(num_scan_inputs=1, scan_output_axes=[-9])
