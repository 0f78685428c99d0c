"""Rewrites of control flow: moves constants into bodies, and writes out known branches and short loops."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.symbolic import SymArray
from tunewright.ops.control_types import loop_trips, states

from .. import value_facts
from ..base import Context


def inline(graph: Graph, body: Graph, arguments: Sequence[Value | None], prefix: str) -> list[Value]:
    """Copy a body's nodes into ``graph`` with its inputs bound; returns the values of its outputs.

    Types are left to inference: in a loop, one name of a dimension may mean another size in each iteration.
    """
    bound: dict[Value, Value | None] = dict(zip(body.inputs, arguments, strict=True))

    def of(value: Value) -> Value | None:
        if value not in bound:
            assert value.const is not None, value
            bound[value] = graph.constant(value.const, value.name)
        return bound[value]

    for node in body.nodes:
        inputs = [None if v is None else of(v) for v in node.inputs]
        twin = graph.add_copy(node, inputs, name=f"{prefix}{node.name}")
        bound.update(zip(node.outputs, twin.outputs, strict=True))
    results = [of(v) for v in body.outputs]
    return [v for v in results if v is not None]


class SinkConstants:
    """Makes a captured constant a constant of the body, and removes captures that no body reads."""

    name = "sink-constants"

    def run(self, graph: Graph, context: Context) -> bool:
        changed = False
        for node in graph.nodes:
            if not node.captures:
                continue
            kept: list[int] = []
            for k in range(node.captures):
                outer = node.inputs[len(node.inputs) - node.captures + k]
                formals = [body.inputs[len(body.inputs) - node.captures + k] for body in node.bodies.values()]
                if outer is not None and outer.const is not None and not isinstance(outer.const, SymArray):
                    for body, formal in zip(node.bodies.values(), formals, strict=True):
                        body.replace(formal, body.constant(outer.const, formal.name))
                elif any(body.is_read(v) for body, v in zip(node.bodies.values(), formals, strict=True)):
                    kept.append(k)
            if len(kept) == node.captures:
                continue
            first = len(node.inputs) - node.captures
            for body in node.bodies.values():
                start = len(body.inputs) - node.captures
                body.inputs = [*body.inputs[:start], *(body.inputs[start + k] for k in kept)]
            graph.set_inputs(node, [*node.inputs[:first], *(node.inputs[first + k] for k in kept)])
            node.captures = len(kept)
            context.log.applied(self.name, node)
            changed = True
        return changed


class UnchangedStates:
    """Captures the states of a Loop or Scan that it never changes; after the loop, their first values are read."""

    name = "unchanged-states"

    def run(self, graph: Graph, context: Context) -> bool:
        changed = False
        for node in graph.nodes:
            if node.op not in ("Loop", "Scan") or not node.bodies:
                continue
            body, ahead = node.bodies["body"], 2 if node.op == "Loop" else 0
            results = body.outputs[ahead // 2 :]
            formal = body.inputs[ahead : ahead + states(node)]
            steady = [k for k, v in enumerate(formal) if plain(results[k]) is v and node.inputs[ahead + k] is not None]
            if steady and len(steady) < len(node.outputs):
                _capture_states(graph, node, steady, ahead)
                context.log.applied(self.name, node)
                changed = True
        return changed


def _capture_states(graph: Graph, node: Node, steady: Sequence[int], ahead: int) -> None:
    """Turn the states ``steady`` into captures; ``ahead`` is the number of inputs in front of the states."""
    body, places = node.bodies["body"], {ahead + k for k in steady}
    body.inputs = [v for i, v in enumerate(body.inputs) if i not in places] + [body.inputs[i] for i in sorted(places)]
    inputs = [v for i, v in enumerate(node.inputs) if i not in places] + [node.inputs[i] for i in sorted(places)]
    kept = [i for i in range(len(body.outputs)) if i - ahead // 2 not in steady]
    names, values = body.output_names, body.outputs
    body.output_names, body.outputs = [names[i] for i in kept], [values[i] for i in kept]
    left = [v for k, v in enumerate(node.outputs) if k not in steady]
    twin = graph.add(
        node.op, inputs, node.attrs, outputs=[v.name for v in left], types=[v.type for v in left], name=node.name,
        origin=node.origin, bodies=node.bodies, captures=node.captures + len(steady),
    )  # fmt: skip
    for old, new in zip(left, twin.outputs, strict=True):
        graph.replace(old, new)
    for k in steady:
        first = node.inputs[ahead + k]
        assert first is not None
        graph.replace(node.outputs[k], first)
    graph.remove(node)


def plain(value: Value) -> Value:
    """The value before any Identity nodes."""
    while value.producer is not None and value.producer.op == "Identity" and value.producer.inputs[0] is not None:
        value = value.producer.inputs[0]
    return value


class TypeCaptures:
    """Gives a captured value in a body the type that it has outside, if only inference found that type."""

    name = "type-captures"

    def run(self, graph: Graph, context: Context) -> bool:
        changed = False
        for node in graph.nodes:
            for body in node.bodies.values() if node.captures else ():
                for k in range(1, node.captures + 1):
                    outer, inner = node.inputs[-k], body.inputs[-k]
                    if inner.type is None and outer is not None and outer.type is not None:
                        inner.type, changed = outer.type, True
        return changed


class InlineBranches:
    """Replaces an If whose condition is constant with the branch that it takes."""

    name = "inline-branches"

    def run(self, graph: Graph, context: Context) -> bool:
        changed = False
        for node in graph.nodes:
            if node.op != "If" or not node.bodies:
                continue
            condition = node.inputs[0]
            if condition is None or condition.const is None or condition.const.size != 1:
                continue
            branch = "then_branch" if bool(condition.const.reshape(())) else "else_branch"
            results = inline(graph, node.bodies[branch], node.inputs[1:], f"{node.name}/")
            _replace(graph, node, results)
            context.log.applied(self.name, node)
            changed = True
        return changed


#: The most nodes that one loop may become; nested loops would turn a small file into a large graph.
UNROLLED_NODES = 10_000


class UnrollLoops:
    """Replaces a Loop or Scan with a known, small number of iterations by copies of its body."""

    name = "unroll-loops"

    def run(self, graph: Graph, context: Context) -> bool:
        changed = False
        for node in graph.nodes:
            if node.op not in ("Loop", "Scan") or not node.bodies:
                continue
            reason = self.why_not(graph, node, context)
            if reason is not None:
                context.log.refused(self.name, node, reason)
                continue
            results = _unroll_loop(graph, node) if node.op == "Loop" else _unroll_scan(graph, node)
            _replace(graph, node, results)
            context.log.applied(self.name, node)
            changed = True
        return changed

    def why_not(self, graph: Graph, node: Node, context: Context) -> str | None:
        s = context.settings
        if not s.enable_loop_unrolling:
            return "ENABLE_LOOP_UNROLLING is NO"
        trips, reason = loop_trips(node) if node.op == "Loop" else _scan_trips(node)
        if reason:
            return reason
        if trips > s.max_unroll:
            return f"{trips} iterations are more than MAX_UNROLL = {s.max_unroll}"
        size = sum(len(g) for g in node.bodies["body"].walk())
        if trips * size > UNROLLED_NODES or trips * size + len(graph) > s.max_nodes:
            return f"{trips} times {size} nodes are too many"
        scans = len(node.outputs) - states(node)
        if trips == 0 and any(graph.is_read(v) for v in node.outputs[len(node.outputs) - scans :]):
            return "the loop never runs, and the shape of its scan outputs is unknown"
        return None


def _replace(graph: Graph, node: Node, results: Sequence[Value]) -> None:
    for old, new in zip(node.outputs, results, strict=True):
        graph.replace(old, new)
    graph.remove(node)


def _scan_trips(node: Node) -> tuple[int, str]:
    """The number of iterations of a Scan (the length of its scanned inputs), and why it is unknown, or ""."""
    m, first = int(node.attrs["num_scan_inputs"]), states(node)
    axes = node.attrs.get("scan_input_axes") or [0] * m
    lengths = set()
    for value, axis in zip(node.inputs[first : first + m], axes, strict=True):
        dims = value_facts.shape(value)
        lengths.add(dims[axis] if dims is not None and -len(dims) <= axis < len(dims) else None)
    length = lengths.pop() if len(lengths) == 1 else None
    return (length, "") if isinstance(length, int) else (0, "the length of the scanned inputs is not known")


def _unroll_loop(graph: Graph, node: Node) -> list[Value]:
    formal, captured = _split(node)
    body, state = node.bodies["body"], formal[2:]
    trips, _ = loop_trips(node)
    go = graph.constant(np.asarray(True), "true")
    rows: list[list[Value]] = [[] for _ in body.outputs[1 + len(state) :]]
    for t in range(trips):
        step = graph.constant(np.asarray(t, np.int64), "iteration")
        results = inline(graph, body, [step, go, *state, *captured], f"{node.name}/{t}/")
        state = list(results[1 : 1 + len(state)])
        for row, value in zip(rows, results[1 + len(state) :], strict=True):
            row.append(value)
    return [*(v for v in state if v is not None), *(_stack(graph, node, row, 0) for row in rows)]


def _unroll_scan(graph: Graph, node: Node) -> list[Value]:
    formal, captured = _split(node)
    attrs, body, carried, m = node.attrs, node.bodies["body"], states(node), int(node.attrs["num_scan_inputs"])
    state, scanned = formal[:carried], formal[carried:]
    trips, _ = _scan_trips(node)
    axes = attrs.get("scan_input_axes") or [0] * m
    backwards = attrs.get("scan_input_directions") or [0] * m
    slices = [_unstack(graph, node, v, int(a), trips) for v, a in zip(scanned, axes, strict=True)]
    slices = [row[::-1] if b else row for row, b in zip(slices, backwards, strict=True)]
    rows: list[list[Value]] = [[] for _ in body.outputs[carried:]]
    for t in range(trips):
        results = inline(graph, body, [*state, *(row[t] for row in slices), *captured], f"{node.name}/{t}/")
        state = list(results[:carried])
        for row, value in zip(rows, results[carried:], strict=True):
            row.append(value)
    out_axes = attrs.get("scan_output_axes") or [0] * len(rows)
    out_backwards = attrs.get("scan_output_directions") or [0] * len(rows)
    rows = [row[::-1] if b else row for row, b in zip(rows, out_backwards, strict=True)]
    whole = [_stack(graph, node, row, int(a)) for row, a in zip(rows, out_axes, strict=True)]
    return [*(v for v in state if v is not None), *whole]


def _split(node: Node) -> tuple[list[Value | None], list[Value | None]]:
    """The formal inputs, and the captured values."""
    at = len(node.inputs) - node.captures
    return list(node.inputs[:at]), list(node.inputs[at:])


def _unstack(graph: Graph, node: Node, value: Value | None, axis: int, count: int) -> list[Value]:
    """The slices of a value along an axis, without that axis."""
    axes = graph.constant(np.asarray([axis], np.int64), "axis")
    attrs = {"axis": axis, "num_outputs": count}
    parts = graph.add("Split", [value], attrs, outputs=count, name=f"{node.name}/split", origin=node.origin).outputs
    return [
        graph.add("Squeeze", [part, axes], name=f"{node.name}/{t}/slice", origin=node.origin).output
        for t, part in enumerate(parts)
    ]


def _stack(graph: Graph, node: Node, rows: Sequence[Value], axis: int) -> Value:
    """Values stacked along a new axis; for a loop that never runs, an empty constant that no node reads."""
    if not rows:
        return graph.constant(np.empty((0,), np.float32), "nothing")
    axes = graph.constant(np.asarray([axis], np.int64), "axis")
    parts = [graph.add("Unsqueeze", [row, axes], name=f"{node.name}/stack", origin=node.origin).output for row in rows]
    return graph.add("Concat", parts, {"axis": axis}, name=f"{node.name}/concat", origin=node.origin).output
