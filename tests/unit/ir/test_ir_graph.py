"""The graph keeps its links right under any edit, the verifier sees every broken rule, text is stable."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from golden import graphs
from tunewright.errors import TunewrightError
from tunewright.ir.graph import Fused, Graph
from tunewright.ir.graph_text import to_dot
from tunewright.ir.types import DType, TensorType
from tunewright.ir.verify import verify, violations

FLOAT = TensorType(DType.FLOAT32, (2,))


def small() -> Graph:
    """y = relu(x + c) * x"""
    g = Graph("small")
    x = g.add_input("x", FLOAT)
    total = g.add("Add", [x, g.constant(np.ones(2, np.float32), "c")], types=[FLOAT], name="add").output
    relu = g.add("Relu", [total], types=[FLOAT], name="relu").output
    g.add_output(g.add("Mul", [relu, x], types=[FLOAT], name="mul").output, "y")
    return g


def test_a_good_graph_is_legal() -> None:
    assert list(violations(small())) == []


def _two_names(g: Graph) -> None:
    g.nodes[0].output.name = "x"


def _lost_use(g: Graph) -> None:
    g.inputs[0].uses.clear()


def _wrong_producer(g: Graph) -> None:
    g.nodes[0].output.producer = g.nodes[1]


def _wrong_order(g: Graph) -> None:
    g._nodes = dict.fromkeys(reversed(g.nodes))


def _wrong_constant(g: Graph) -> None:
    next(g.constants()).const = np.ones(3, np.float32)


def _strange_step(g: Graph) -> None:
    g.nodes[1].epilogue = (Fused("Neg", (~1,)),)


def _operand_without_epilogue(g: Graph) -> None:
    g.nodes[0].operands = 1


def _foreign_output(g: Graph) -> None:
    g.outputs = [Graph().value("other", FLOAT)]


def _unnamed_output(g: Graph) -> None:
    g.output_names.clear()


def _captures_without_body(g: Graph) -> None:
    g.nodes[0].captures = 1


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_two_names, "two values are named x"),
        (_lost_use, "does not list it as a use"),
        (_wrong_producer, "does not name Add 'add' as its producer"),
        (_wrong_order, "before it is made"),
        (_wrong_constant, "is a constant of another type"),
        (_strange_step, "has no argument -2"),
        (_operand_without_epilogue, "1 operands for an epilogue of 0 steps"),
        (_foreign_output, "is not made in this graph"),
        (_unnamed_output, "differ in number"),
        (_captures_without_body, "captures values and has no body"),
    ],
)
def test_every_broken_rule_is_said(damage: Callable[[Graph], None], said: str) -> None:
    g = small()
    damage(g)
    assert any(said in text for text in violations(g)), list(violations(g))
    with pytest.raises(TunewrightError, match="not legal after some-pass"):
        verify(g, "some-pass")


def test_sort_restores_order_and_names_a_cycle() -> None:
    g = small()
    _wrong_order(g)
    g.sort()
    assert [n.name for n in g.nodes] == ["add", "relu", "mul"]
    g.set_input(g.nodes[0], 1, g.nodes[1].output)
    with pytest.raises(ValueError, match="depends on its own output"):
        g.sort()


def test_a_clone_shares_nothing_but_arrays() -> None:
    g = small()
    twin = g.clone()
    assert str(twin) == str(g)
    assert next(twin.constants()).const is next(g.constants()).const
    twin.remove(twin.nodes[-1])
    twin.outputs = []
    twin.output_names = []
    assert len(g) == 3 and not list(violations(g))


def test_a_value_may_be_several_outputs() -> None:
    g = small()
    x, y = g.inputs[0], g.outputs[0]
    g.add_output(y, "again")
    g.add_output(x, "x")
    assert g.is_output(y) and g.is_output(x)
    g.replace(y, x)
    assert g.outputs == [x] * 3 and not g.is_output(y) and g.is_read(x) and not g.is_read(y)
    z = g.value("z", FLOAT)
    g.replace(x, z)
    assert g.outputs == [z] * 3 and not g.is_output(x)


def test_recording_collects_what_is_added() -> None:
    g = small()
    with g.recording() as added:
        node = g.add("Neg", [g.inputs[0]])
    g.add("Abs", [g.inputs[0]])
    assert added == [node]


def test_text_shows_operands_of_an_epilogue_once() -> None:
    g = Graph("fused")
    x, r = g.add_input("x", FLOAT), g.add_input("r", FLOAT)
    steps = (Fused("Add", (~0, 1)), Fused("Relu", (~1,)))
    g.add_output(g.add("Neg", [x, r], types=[FLOAT], outputs=["y"], epilogue=steps, operands=1).output)
    assert "%y: float32[2] = Neg(%x) | Add(@, %r) | Relu(@1)" in str(g)
    assert not list(violations(g))


def test_dot_has_every_node_and_edge() -> None:
    dot = to_dot(small())
    assert dot.count("->") == 5 and all(f"\\n{name}" in dot for name in ("add", "relu", "mul"))


def test_fresh_names_stay_fresh() -> None:
    g = Graph()
    names = [g.value("v").name for _ in range(100)] + [g.value("v_3").name]
    assert len(set(names)) == 101


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(0, 50)), max_size=40))
def test_edits_keep_the_links_right(edits: list[tuple[int, int, int]]) -> None:
    g = small()
    for kind, a, b in edits:
        values = [v for v in g.values() if v.const is None]
        x, nodes = values[a % len(values)], g.nodes
        if kind == 0:
            g.add("Neg", [x], types=[FLOAT])
        elif kind == 1 and nodes:
            node = nodes[b % len(nodes)]
            earlier = [*g.inputs, *(v for n in nodes[: nodes.index(node)] for v in n.outputs)]
            g.set_input(node, 0, earlier[a % len(earlier)])
        elif kind == 2 and x.producer is not None:
            at = nodes.index(x.producer)
            earlier = [*g.inputs, *(v for n in nodes[:at] for v in n.outputs)]
            g.replace(x, earlier[b % len(earlier)])
        elif kind == 3 and nodes:
            node = nodes[b % len(nodes)]
            if not any(v.uses or v in g.outputs for v in node.outputs):
                g.remove(node)
    g.sort()
    assert list(violations(g)) == []


def test_bodies_are_walked_and_printed() -> None:
    g = graphs.graph(
        """g (bool c, float[2] x) => (float[2] y)
        { y = If (c) <then_branch = t () => (float[2] p) { p = Neg(x) },
                      else_branch = e () => (float[2] q) { q = Abs(x) }> }"""
    )
    assert {b.name for b in g.walk()} == {"g", "then_branch", "else_branch"}
    assert "then_branch:" in str(g) and "Neg(%x)" in str(g)


def test_a_constant_is_an_array_although_numpy_made_a_scalar() -> None:
    """Kernels are given the address of its memory, and a scalar has none that lasts."""
    value = Graph("g").constant(np.float32(2) * np.ones((), np.float32), "c")
    assert isinstance(value.const, np.ndarray) and value.const.shape == ()
