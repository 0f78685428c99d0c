"""The machinery of passes: patterns, rules, logs, switches, and what becomes of names and origins."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest

from golden import graphs
from tunewright.errors import TunewrightError
from tunewright.frontend.onnx import load
from tunewright.ir.graph import Fused, Graph, Node, Value
from tunewright.ir.verify import verify
from tunewright.passes.base import Context, Log, RepeatedPasses, run_passes
from tunewright.passes.cleanup.simplify import DeadCode, FlushDenormals, Propagate
from tunewright.passes.fusion.fuse import Fuse
from tunewright.passes.pattern import Const, Each, Match, OneOf, Op, RewritePass, Rule, matches, product
from tunewright.passes.standard import DEVICE, NEUTRAL, SPECIALISE
from tunewright.settings import Settings

SIMPLE = "g (float[2] x, float[2] z) => (float[2] y)"


def context(**config: str) -> Context:
    return Context(Settings.make(config, Settings()))


def found(pattern: Op | OneOf, graph: Graph) -> list[Match]:
    root = graph.outputs[0].producer
    assert root is not None
    return list(matches(pattern, root.output, Match(graph, root)))


def ops(graph: Graph) -> list[str]:
    return [n.op for n in graph.nodes]


# -- patterns ----------------------------------------------------------------------------------------------------------


def test_the_same_name_is_the_same_value() -> None:
    square = Op("Mul", "x", "x")
    assert found(square, graphs.graph(f"{SIMPLE} {{ y = Mul(x, x) }}"))
    assert not found(square, graphs.graph(f"{SIMPLE} {{ y = Mul(x, z) }}"))


def test_commutative_operands_match_in_either_order_others_do_not() -> None:
    assert found(Op("Add", Op("Neg", "a"), "b"), graphs.graph(f"{SIMPLE} {{ n = Neg(x) y = Add(z, n) }}"))
    assert not found(Op("Sub", Op("Neg", "a"), "b"), graphs.graph(f"{SIMPLE} {{ n = Neg(x) y = Sub(z, n) }}"))


def test_numbers_are_constants_of_one_element() -> None:
    half = Op("Mul", "x", 0.5)
    assert found(half, graphs.graph(f"{SIMPLE} <float h = {{0.5}}> {{ y = Mul(h, x) }}"))
    assert found(half, graphs.graph(f"{SIMPLE} <float[1] h = {{0.5}}> {{ y = Mul(x, h) }}"))
    assert not found(half, graphs.graph(f"{SIMPLE} <float[2] h = {{0.5, 0.5}}> {{ y = Mul(x, h) }}"))
    assert not found(half, graphs.graph(f"{SIMPLE} <float h = {{0.51}}> {{ y = Mul(x, h) }}"))


@pytest.mark.parametrize(
    "text", ["a = Mul(x, z) y = Mul(a, h)", "a = Mul(h, z) y = Mul(x, a)", "a = Mul(x, h) y = Mul(z, a)"]
)
def test_a_product_matches_however_it_is_bracketed(text: str) -> None:
    assert found(product("p", "q", 0.5), graphs.graph(f"{SIMPLE} <float h = {{0.5}}> {{ {text} }}"))


def test_absent_and_further_inputs() -> None:
    graph = graphs.graph(f"{SIMPLE} <float h = {{6}}> {{ y = Clip(x, , h) }}")
    assert found(Op("Clip", "x", None, Const("high")), graph)
    assert not found(Op("Clip", "x"), graph)
    assert found(Op("Clip", "x", rest=True), graph)


def test_each_numbers_its_captures() -> None:
    graph = graphs.graph(f"{SIMPLE} {{ a = Neg(x) b = Neg(z) y = Sum(a, b, a) }}")
    (match,) = found(Op("Sum", Each(Op("Neg", "v"))), graph)
    assert [match[f"v.{i}"].name for i in range(3)] == ["x", "z", "x"]
    assert not found(Op("Sum", Each(Op("Neg", "v"), common=("v",))), graph)


def test_a_fused_node_is_not_what_a_pattern_means() -> None:
    graph = graphs.graph(f"{SIMPLE} {{ a = Add(x, z) y = Relu(a) }}")
    run_passes(graph, [Fuse()], context())
    assert ops(graph) == ["Add"] and not found(Op("Add", "a", "b"), graph)


# -- rules -------------------------------------------------------------------------------------------------------------


def _abs_rule(name: str = "neg-abs") -> Rule:
    return Rule(name, Op("Abs", Op("Neg", "x")), lambda graph, match: graph.add("Abs", [match["x"]]).output)


def test_names_and_origins_survive() -> None:
    graph = graphs.graph(f"{SIMPLE} {{ n = Neg(x) a = Abs(n) y = Relu(a) }}")
    assert run_passes(graph, [RewritePass("p", [_abs_rule()])], context())
    node = graph.nodes[0]
    assert (node.name, node.origin, node.output.name) == ("a", ("n", "a"), "a")
    assert str(node.output.type) == "float32[2]"


def test_a_rule_that_would_lose_a_value_refuses() -> None:
    graph = graphs.graph("g (float[2] x) => (float[2] y, float[2] n) { n = Neg(x) y = Abs(n) }")
    log = context()
    assert not run_passes(graph, [RewritePass("p", [_abs_rule()])], log)
    assert [(e.rule, e.node, e.reason) for e in log.log.entries] == [("neg-abs", "y", "%n is an output of the graph")]


def test_a_refusal_is_logged_once() -> None:
    graph = graphs.graph("g (float[2] x) => (float[2] y, float[2] n) { n = Neg(x) y = Abs(n) }")
    log = context()
    for _ in range(3):
        run_passes(graph, [RewritePass("p", [_abs_rule()])], log)
    assert len(log.log.entries) == 1


@pytest.mark.parametrize("name", ["neg-abs", "p"])
def test_passes_and_rules_are_switched_off_by_name(name: str) -> None:
    graph = graphs.graph(f"{SIMPLE} {{ n = Neg(x) y = Abs(n) }}")
    assert not run_passes(graph, [RewritePass("p", [_abs_rule()])], context(DISABLED_PASSES=f"other, {name}"))


def test_rules_that_undo_each_other_end() -> None:
    there = Rule("there", Op("Abs", "x"), lambda graph, match: graph.add("Neg", [match["x"]]).output)
    back = Rule("back", Op("Neg", "x"), lambda graph, match: graph.add("Abs", [match["x"]]).output)
    with pytest.raises(TunewrightError, match="undo each other"):
        run_passes(graphs.graph(f"{SIMPLE} {{ y = Abs(x) }}"), [RewritePass("p", [there, back])], context())


def test_repeat_runs_until_nothing_changes() -> None:
    graph = graphs.graph(f"{SIMPLE} <float h = {{2}}> {{ a = Sqrt(h) b = Sqrt(a) c = Neg(b) y = Mul(x, c) }}")
    assert run_passes(graph, [RepeatedPasses((Propagate(), DeadCode()))], context())
    assert ops(graph) == ["Mul"]


# -- whole pipelines ---------------------------------------------------------------------------------------------------


def chain(ops: Sequence[str], length: int) -> Graph:
    nodes = [onnx.helper.make_node(ops[i % len(ops)], [f"v{i}"], [f"v{i + 1}"]) for i in range(length)]
    graph = onnx.helper.make_graph(
        nodes,
        "chain",
        [onnx.helper.make_tensor_value_info("v0", onnx.TensorProto.FLOAT, [2])],
        [onnx.helper.make_empty_tensor_value_info(f"v{length}")],
    )
    return load(onnx.helper.make_model(graph), Settings()).graph


def test_long_chains() -> None:
    identities = chain(["Identity"], 20_000)
    run_passes(identities, NEUTRAL, context())
    assert len(identities) == 0
    elementwise = chain(["Exp", "Neg", "Sigmoid"], 20_000)
    run_passes(elementwise, [*NEUTRAL, *DEVICE], context())
    verify(elementwise, "the passes")
    assert len(elementwise) < 400
    assert sum(1 + len(n.epilogue) for n in elementwise.nodes) == 20_000


@pytest.mark.parametrize("op", ["Identity", "Relu"])
def test_very_many_outputs_and_readers(op: str) -> None:
    """Work per rewrite must not grow with the number of outputs, of readers, or of nodes that became one."""
    count = 20_000
    nodes = [onnx.helper.make_node(op, ["x"], [f"y{i}"]) for i in range(count)]
    infos = [onnx.helper.make_tensor_value_info(name, 1, [2]) for name in ("x", *(f"y{i}" for i in range(count)))]
    graph = load(onnx.helper.make_model(onnx.helper.make_graph(nodes, "fan", infos[:1], infos[1:])), Settings()).graph
    run_passes(graph, [*NEUTRAL, *DEVICE], context())
    verify(graph, "the passes")
    assert len(graph) == (op != "Identity") and len(set(graph.outputs)) == 1 and len(graph.outputs) == count


def test_all_passes_share_one_budget_for_folding() -> None:
    text = "g (float[2] x) => (float[2] y) <float[2] w> { a = Exp(w) b = Neg(a) c = Sin(b) y = Add(x, c) }"
    graph = graphs.graph(text)
    run_passes(graph, NEUTRAL, context(FOLD_SECONDS="0"))
    assert ops(graph) == ["Neg", "Sin", "Add"], "the first used it up"
    run_passes(graph, NEUTRAL, context())
    assert ops(graph) == ["Add"]


def test_the_log_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Log, "MOST", 3)
    log, node = Log(), Node("Relu", "r", {})
    for k in range(9):
        log.refused("rule", node, f"shape {k // 2}")
    assert [e.reason for e in log.entries] == ["shape 0", "shape 1", "shape 2"]


def test_what_open_shapes_blocked_is_fused_once_they_are_known() -> None:
    def static_only(node: Node, operands: Sequence[Value], epilogue: tuple[Fused, ...], output: Value) -> str | None:
        return None if output.tensor is not None and output.tensor.is_static else "the shape is open"

    graph = graphs.graph("g (float[N,3,4,4] x) => (float[N,5,4,4] y) <float[5,3,1,1] w> { a = Conv(x, w) y = Relu(a) }")
    settings = Context(Settings(), can_fuse=static_only)
    run_passes(graph, [*NEUTRAL, *DEVICE], settings)
    assert ops(graph) == ["Conv", "Relu"]
    assert settings.log.entries[-1].reason == "not into 'a': the shape is open"
    assert graph.inputs[0].tensor is not None
    graph.inputs[0].type = graph.inputs[0].tensor.with_shape((2, 3, 4, 4))
    run_passes(graph, SPECIALISE, settings)
    assert ops(graph) == ["Conv"] and [s.op for s in graph.nodes[0].epilogue] == ["Relu"]


def test_a_branch_that_concrete_shapes_decide_is_written_out() -> None:
    """Behind an If nothing is known of its result; exporters of recurrent networks leave many of them."""
    graph = graphs.graph(
        """g (float[N, 4] x) => (float y) { s = Shape<start = 0, end = 1>(x) one = Constant<value_ints = [1]>()
           c = Equal(s, one) z = If(c) <then_branch = t () => (float p) { axis = Constant<value_ints = [0]>()
           p = Squeeze(x, axis) }, else_branch = e () => (float q) { q = Neg(x) }> y = Relu(z) }"""
    )
    run_passes(graph, [*NEUTRAL, *DEVICE], context())
    assert "If" in ops(graph)
    assert graph.inputs[0].tensor is not None
    for size, branch in ((1, "Squeeze"), (3, "Neg")):
        twin = graph.clone()
        twin.inputs[0].type = graph.inputs[0].tensor.with_shape((size, 4))
        run_passes(twin, SPECIALISE, context())
        assert ops(twin)[0] == branch and "If" not in ops(twin)
        assert twin.outputs[0].type is not None and twin.outputs[0].type.is_static


def test_the_device_cuts_an_epilogue_short() -> None:
    def only_relu(node: Node, operands: Sequence[Value], epilogue: tuple[Fused, ...], output: Value) -> str | None:
        return next((f"no kernel does {s.op}" for s in epilogue if s.op != "Relu"), None)

    graph = graphs.graph(
        "g (float[1,3,4,4] x) => (float[1,5,4,4] y) <float[5,3,1,1] w> { a = Conv(x, w) b = Relu(a) y = Erf(b) }"
    )
    asked = Context(Settings(), can_fuse=only_relu)
    run_passes(graph, [Fuse()], asked)
    assert [(n.op, [s.op for s in n.epilogue]) for n in graph.nodes] == [("Conv", ["Relu"]), ("Erf", [])]
    assert any(e.reason == "not into 'a': no kernel does Erf" for e in asked.log.entries)


def test_quantised_weights_stay_quantised_until_device_passes_had_a_look() -> None:
    graph = graphs.graph(
        """g (uint8[2,3] x) => (float[2,4] y) 
        <float s = {0.5}, uint8 z = {128}, int8[3,4] w, float t = {0.25}, int8 u = {0}>
        { a = DequantizeLinear(x, s, z) b = DequantizeLinear(w, t, u) y = MatMul(a, b) }"""
    )
    arrays = graphs.inputs(graph)
    want = graphs.run(graph, arrays)
    run_passes(graph, NEUTRAL, context())
    assert ops(graph) == ["DequantizeLinear", "DequantizeLinear", "MatMul"]
    run_passes(graph, DEVICE, context())
    assert ops(graph) == ["DequantizeLinear", "MatMul"]
    graphs.assert_close(graphs.run(graph, arrays), want, 0)


def test_denormals_are_kept_when_asked() -> None:
    text = "g (float[1,2] x) => (float[1,2] y) <float[2,2] w = {1.0, 1e-40, -1e-42, 2.0}> { y = MatMul(x, w) }"
    kept, flushed = graphs.graph(text), graphs.graph(text)
    assert not run_passes(kept, [FlushDenormals()], context(FLUSH_DENORMALS="NO"))
    run_passes(flushed, [FlushDenormals()], context())
    (weight,) = flushed.constants()
    np.testing.assert_array_equal(weight.const, np.asarray([[1, 0], [0, 2]], np.float32))


def test_nested_loops_unroll_and_fold_to_nothing_but_arithmetic() -> None:
    text = """g (float[2] x) => (float[2] y) <int64 n = {2}, bool c = {1}>
    { y = Loop (n, c, x) <body = b (int64 i, bool ci, float[2] s) => (bool co, float[2] so)
        { co = Identity(ci)
          so = Loop (n, c, s) <body = d (int64 j, bool cj, float[2] t) => (bool cp, float[2] tp)
            { cp = Identity(cj) p = Add(i, j) q = Cast<to=1>(p) tp = Add(t, q) }> }> }"""
    graph = graphs.graph(text)
    (x,) = graphs.inputs(graph)
    run_passes(graph, NEUTRAL, context(VERIFY_PASSES="YES"))
    assert set(ops(graph)) == {"Add"}
    graphs.assert_close(graphs.run(graph, [x]), [x + 0 + 1 + 1 + 2], 1e-6)
