"""Prove from the graph alone that the examples of a batch do not depend on each other.

The model is examined with two numbers of examples, and must be the same except for them. In its order of elements, a
tensor that depends on the inputs is ``before`` x examples x the rest. Every operation must keep examples apart, and its
rule tells where they are in the results. Tensors that do not depend on the inputs (weights and what follows from them)
must treat all examples alike. An operation without a rule proves nothing; neither do loops and branches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tunewright.errors import TunewrightError, UnsupportedError
from tunewright.frontend.model import Model
from tunewright.ir.graph import Graph, Node, Value, freeze
from tunewright.ir.types import DType, TensorType
from tunewright.ops import lookup
from tunewright.ops.batch_rules import Examples, Unproven, elementwise
from tunewright.passes.base import Context, run_passes
from tunewright.passes.standard import NEUTRAL
from tunewright.settings import Settings

#: Numbers of examples for the proof; other sizes are rarely equal to them.
COUNTS = (7, 5)


def batched(model: Model, size: int) -> Model:
    """Return the model for ``size`` examples. Raises `UnsupportedError` if its inputs are not one example each."""
    shapes: dict[str, list[int | str | None]] = {}
    for name, type in model.inputs.items():
        where = f"input {name!r}"
        if not isinstance(type, TensorType) or type.dtype is DType.STRING or not type.shape:
            raise UnsupportedError(f"{type} has no dimension for examples", where=where)
        first, *rest = type.shape
        if isinstance(first, int) and first != 1:
            raise UnsupportedError(f"{type} is not one example: its first dimension is not 1", where=where)
        if not all(isinstance(size, int) for size in rest):
            raise UnsupportedError(f"{type} has a size that requests may choose", where=where, hint="reshape the model")
        shapes[name] = [size, *rest]
    if not shapes:
        raise UnsupportedError("the model has no inputs")
    return model.reshape(shapes)


def why_not(model: Model, settings: Settings) -> str:
    """Return why the examples of a model may depend on each other or on their number; empty if they do not."""
    try:
        one, other = (_Proof(_folded(batched(model, count), settings), count) for count in COUNTS)
        one.check()
        other.check()
        _check_same(one, other)
    except (Unproven, TunewrightError) as error:
        return str(error)
    return ""


def _folded(model: Model, settings: Settings) -> Graph:
    """Return the graph without arithmetic on shapes. Graph dumps are switched off for it."""
    graph = model.graph.clone()
    run_passes(graph, NEUTRAL, Context(replace(settings, graph_dumps_dir="")))
    return graph


class _Proof(Examples):
    """Follows the graph from its inputs to its outputs."""

    def check(self) -> None:
        for node in self.graph.nodes:
            if not any(self.has(value) for value in node.inputs):
                continue
            try:
                self._follow(node)
            except Unproven as error:
                raise Unproven(f"{node.op} {node.name!r} {error}") from None
        for value in self.graph.outputs:
            if not self.has(value) or self.axis(value) != 0:
                raise Unproven(f"output {value.name!r} is not one part for each example")

    def _follow(self, node: Node) -> None:
        spec = lookup(node.op)
        if spec is not None and spec.view:
            self.only(node, 0)
            for value in node.outputs:
                self.before[value] = self.before[self.input(node, 0)]
            return
        rule = None if spec is None else spec.batch or (elementwise if spec.elementwise else None)
        if rule is None or node.bodies or node.epilogue:
            raise Unproven("is not known to keep examples independent")
        axes = rule(self, node)
        for value, axis in zip(node.outputs, axes, strict=False):
            if self.dims(value)[axis] % self.count:
                raise Unproven("cuts or repeats examples")
            self.before[value] = math.prod(self.dims(value)[:axis])


def _check_same(one: _Proof, other: _Proof) -> None:
    """Check that the model is the same for another number of examples, so that nothing is computed from that number."""
    nodes = list(zip(one.graph.nodes, other.graph.nodes, strict=False))
    if len(one.graph.nodes) != len(other.graph.nodes) or any(
        (a.op, freeze(a.attrs), len(a.inputs)) != (b.op, freeze(b.attrs), len(b.inputs)) for a, b in nodes
    ):
        raise Unproven("the graph changes with the number of examples")
    for a, b in nodes:
        spec = lookup(a.op)
        sizes: Sequence[int] = () if spec is None else spec.size_inputs
        if spec is not None and spec.view:  # all inputs but the first hold sizes
            sizes = range(1, len(a.inputs))
        for i, (v, w) in enumerate(zip(a.inputs, b.inputs, strict=True)):
            if (v is not None and v.const is not None) and i not in sizes and not _alike(v, w):
                raise Unproven(f"{a.op} {a.name!r} takes {v.name!r}, which depends on the number of examples")
        if any(
            one.has(v) and one.one_example(v) != other.one_example(w) for v, w in zip(a.outputs, b.outputs, strict=True)
        ):
            raise Unproven(f"{a.op} {a.name!r} has sizes that depend on the number of examples")


def _alike(one: Value, other: Value | None) -> bool:
    """Whether constants are equal except for parts repeated for each example."""
    a, b = one.const, None if other is None else other.const
    if a is None or b is None or a.ndim != b.ndim or a.dtype != b.dtype:
        return False
    common = tuple(slice(min(sizes)) for sizes in zip(a.shape, b.shape, strict=True))
    return a is b or np.array_equal(a[common], b[common], equal_nan=a.dtype.kind in "fc")
