"""Base of the adapters of old operator forms: the call that they rewrite, their registry, and small emitted steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from tunewright.ir.graph import Graph, Value
from tunewright.ir.types import DType
from tunewright.ops import lookup
from tunewright.ops.infer import infer_node


@dataclass(frozen=True)
class OperatorCall:
    """One operator about to be added to a graph. The last ``captures`` inputs are the captures of its bodies."""

    op: str
    inputs: Sequence[Value | None]
    attrs: dict[str, Any]
    outputs: Sequence[str]
    name: str
    bodies: dict[str, Graph] = field(default_factory=dict)
    captures: int = 0

    def add(self, graph: Graph) -> list[Value]:
        """Add the call to the graph unchanged. Returns its results."""
        node = graph.add(
            self.op,
            self.inputs,
            self.attrs,
            outputs=self.outputs,
            name=self.name,
            bodies=self.bodies,
            captures=self.captures,
        )
        return node.outputs

    def input(self, i: int) -> Value | None:
        """Input i, or None where it is absent."""
        return self.inputs[i] if i < len(self.inputs) else None

    def needed(self, i: int) -> Value:
        """Input i. Raises ValueError if it is absent."""
        value = self.input(i)
        if value is None:
            raise ValueError(f"input {i} is missing")
        return value

    def without(self, *keys: str) -> OperatorCall:
        """The call without some attributes."""
        return replace(self, attrs={k: v for k, v in self.attrs.items() if k not in keys})

    def having(self, **attrs: Any) -> OperatorCall:
        """The call with some attributes set."""
        return replace(self, attrs={**self.attrs, **attrs})

    def taking(self, *inputs: Value | None) -> OperatorCall:
        """The call with other inputs."""
        return replace(self, inputs=inputs)

    def named(self, op: str) -> OperatorCall:
        """The call of another operator."""
        return replace(self, op=op)


Adapter: TypeAlias = Callable[[Graph, OperatorCall], OperatorCall | list[Value]]

#: op -> [(version at which the new form began, adapter)], ascending
ADAPTERS: dict[str, list[tuple[int, Adapter]]] = {}

#: ``since`` of an adapter for every version: forms that were never legal in ONNX's newest opset
ALWAYS = 1 << 30


def adapter(since: int, *ops: str) -> Callable[[Adapter], Adapter]:
    """Register an adapter for calls from opsets below ``since``."""

    def register(function: Adapter) -> Adapter:
        for op in ops:
            ADAPTERS.setdefault(op, []).append((since, function))
            ADAPTERS[op].sort(key=lambda pair: pair[0])
        return function

    return register


def infer(values: Sequence[Value]) -> None:
    """Infer the types of a new node's outputs, which adapters of later nodes need."""
    node = values[0].producer if values else None
    spec = lookup(node.op) if node is not None and not node.bodies else None
    if node is not None and spec is not None:
        infer_node(node, spec)


def emit(
    graph: Graph,
    call: OperatorCall,
    op: str,
    inputs: Sequence[Value | None],
    attrs: Mapping[str, Any] | None = None,
    outputs: Sequence[str] | int = 1,
    name: str = "",
) -> list[Value]:
    """Add one of the nodes that replace a call. Returns its results."""
    name = name or graph.fresh(f"{call.name}/{op}")
    node = graph.add(op, inputs, attrs, outputs=outputs, name=name, origin=(call.name,))
    infer(node.outputs)
    return node.outputs


def one(graph: Graph, call: OperatorCall, op: str, *inputs: Value | None, **attrs: Any) -> Value:
    """Add a step with one result."""
    return emit(graph, call, op, inputs, attrs)[0]


def last(graph: Graph, call: OperatorCall, op: str, *inputs: Value | None, **attrs: Any) -> list[Value]:
    """Add the step that produces the call's results."""
    return emit(graph, call, op, inputs, attrs, call.outputs)


def ints(graph: Graph, values: Iterable[int] | int, name: str = "ints") -> Value:
    """Add a constant of int64: a list gives a vector, a number a scalar."""
    array = values if isinstance(values, int) else list(values)
    return graph.constant(np.asarray(array, np.int64), name)


def rank(value: Value) -> int | None:
    return None if value.tensor is None else value.tensor.rank


def dtype(value: Value) -> DType | None:
    return None if value.tensor is None else value.tensor.dtype


def scalar(graph: Graph, call: OperatorCall, number: float, like: Value) -> Value:
    """Add a constant number with the element type of ``like``."""
    kind = dtype(like)
    if kind is None:
        return one(graph, call, "CastLike", graph.constant(np.asarray(number, np.float32)), like)
    with np.errstate(over="ignore"):  # the largest float32 becomes infinity in float16, which has the same effect
        return graph.constant(np.asarray(number, np.float32).astype(kind.numpy))


def align(graph: Graph, call: OperatorCall, a: Value, b: Value, axis: int) -> Value:
    """Append dimensions of one to ``b``, so that broadcasting puts its first dimension at ``axis`` of ``a``."""
    rank_a, rank_b = rank(a), rank(b)
    if rank_a is not None and rank_b is not None:
        missing = (rank_a - axis if axis >= 0 else -axis) - rank_b
        if missing <= 0:
            return b
        if b.const is not None:
            return graph.constant(b.const.reshape(b.const.shape + (1,) * missing), b.name)
        return one(graph, call, "Unsqueeze", b, ints(graph, range(rank_b, rank_b + missing)))
    shape = one(graph, call, "Shape", b)
    behind = ints(graph, [-axis])
    if axis >= 0:
        behind = one(graph, call, "Add", one(graph, call, "Shape", one(graph, call, "Shape", a)), behind)
    missing_dims = one(graph, call, "Sub", behind, one(graph, call, "Shape", shape))
    count = one(graph, call, "Max", missing_dims, ints(graph, [0]))
    ones = one(graph, call, "ConstantOfShape", count, value=np.ones(1, np.int64))
    return one(graph, call, "Reshape", b, one(graph, call, "Concat", shape, ones, axis=0), allowzero=1)
