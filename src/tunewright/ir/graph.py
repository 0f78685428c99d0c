"""The graph: values, nodes, and edits that keep use-def links right.

Three choices keep passes simple:

* Initializers and ``Constant`` nodes are the same thing: a `Value` with ``const`` set and no producer.
* Bodies capture nothing implicitly. A value of the outer graph that a body uses is an extra input of the node (the last
  ``captures`` ones) and an extra input of each body, in the same order.
* A fused node is its main operation plus an ``epilogue``: a small program over the node's inputs and earlier results.
  The last ``operands`` inputs belong to the epilogue alone; the main operation sees only those before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .types import TensorType, Type


@dataclass(frozen=True)
class Fused:
    """One step of an epilogue. Argument i >= 0 is the node's input i; i < 0 is result ~i (~0: the main result)."""

    op: str
    args: tuple[int, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict, hash=False)


def freeze(value: Any) -> Any:
    """Return a hashable stand-in for an attribute or a mapping of attributes. It compares types as well as values."""
    if isinstance(value, np.ndarray):
        content = tuple(value.reshape(-1).tolist()) if value.dtype == object else value.tobytes()
        return (value.dtype.name, value.shape, content)
    if isinstance(value, Mapping):
        return tuple((key, freeze(value[key])) for key in sorted(value))
    if isinstance(value, tuple) and value and not isinstance(value[0], np.ndarray):
        return (type(value[0]), value)  # all elements of a list have the same type
    if isinstance(value, (list, tuple)):
        return tuple(freeze(v) for v in value)
    return (type(value), value)


class Value:
    """A named, typed edge: a graph input, a constant, or an output of a node."""

    __slots__ = ("const", "index", "name", "producer", "type", "uses")

    def __init__(self, name: str, type: Type | None) -> None:
        self.name, self.type = name, type
        self.producer: Node | None = None
        self.index = 0
        self.const: np.ndarray[Any, Any] | None = None
        self.uses: dict[tuple[Node, int], None] = {}

    @property
    def users(self) -> list[Node]:
        """The nodes that read this value, each once, in the order in which the uses were added."""
        return list(dict.fromkeys(node for node, _ in self.uses))

    @property
    def tensor(self) -> TensorType | None:
        """The type if it is known to be a tensor, else None."""
        return self.type if isinstance(self.type, TensorType) else None

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type or '?'}"


class Node:
    """An operation. ``op`` is ``Conv`` in ONNX's own domain and ``domain::Name`` in any other."""

    __slots__ = ("attrs", "bodies", "captures", "epilogue", "inputs", "name", "op", "operands", "origin", "outputs")

    def __init__(self, op: str, name: str, attrs: Mapping[str, Any]) -> None:
        self.op, self.name = op, name
        self.attrs: dict[str, Any] = dict(attrs)
        self.inputs: list[Value | None] = []
        self.outputs: list[Value] = []
        self.bodies: dict[str, Graph] = {}
        self.captures = 0
        self.epilogue: tuple[Fused, ...] = ()
        self.operands = 0
        #: names of the model's nodes that this node implements
        self.origin: tuple[str, ...] = (name,)

    @property
    def output(self) -> Value:
        """The first output."""
        return self.outputs[0]

    @property
    def main_inputs(self) -> list[Value | None]:
        """The inputs of the main operation, without the epilogue's operands."""
        return self.inputs[: len(self.inputs) - self.operands]

    def input(self, i: int) -> Value | None:
        """Input i, or None where it is absent."""
        return self.inputs[i] if i < len(self.inputs) else None

    def __repr__(self) -> str:
        return f"{self.op} {self.name!r}"


class Graph:
    """An ordered, acyclic set of nodes. After edits call `sort` before relying on the order."""

    def __init__(self, name: str = "main") -> None:
        self.name = name
        self.inputs: list[Value] = []
        self.output_names: list[str] = []
        self._outputs: list[Value] = []
        self._places: dict[Value, list[int]] = {}  # output -> its positions among the outputs
        self._nodes: dict[Node, None] = {}
        self._names: set[str] = set()
        self._counter: dict[str, int] = {}
        self._recorders: list[list[Node]] = []

    # -- reading ------------------------------------------------------------------------------------------------------
    @property
    def nodes(self) -> list[Node]:
        """The nodes in order (a copy: safe to edit the graph while iterating)."""
        return list(self._nodes)

    @property
    def outputs(self) -> list[Value]:
        """The results in order (a copy; use `is_output` to test one value)."""
        return list(self._outputs)

    @outputs.setter
    def outputs(self, values: Iterable[Value]) -> None:
        self._outputs, self._places = list(values), {}
        for i, value in enumerate(self._outputs):
            self._places.setdefault(value, []).append(i)

    def is_output(self, value: Value) -> bool:
        return value in self._places

    def is_read(self, value: Value) -> bool:
        """Whether a node reads the value or it is a graph output."""
        return bool(value.uses) or value in self._places

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: Node) -> bool:
        return node in self._nodes

    def values(self) -> Iterator[Value]:
        """Every value, each once: inputs, then constants and results in order of appearance."""
        seen: set[Value] = set()
        for value in [*self.inputs, *(v for n in self._nodes for v in [*n.inputs, *n.outputs]), *self._outputs]:
            if value is not None and value not in seen:
                seen.add(value)
                yield value

    def constants(self) -> Iterator[Value]:
        return (v for v in self.values() if v.const is not None)

    def walk(self) -> Iterator[Graph]:
        """This graph and every body inside it."""
        stack = [self]
        while stack:
            graph = stack.pop()
            yield graph
            stack.extend(body for node in graph._nodes for body in node.bodies.values())

    # -- building -----------------------------------------------------------------------------------------------------
    def fresh(self, name: str) -> str:
        """Return ``name``, or the first variation of it that is free."""
        base = name or "v"
        name = base
        while name in self._names:
            self._counter[base] = self._counter.get(base, 0) + 1
            name = f"{base}_{self._counter[base]}"
        self._names.add(name)
        return name

    def value(self, name: str, type: Type | None = None) -> Value:
        return Value(self.fresh(name), type)

    def add_input(self, name: str, type: Type | None) -> Value:
        value = self.value(name, type)
        self.inputs.append(value)
        return value

    def constant(self, array: np.ndarray[Any, Any], name: str = "const") -> Value:
        # numpy returns scalars for single elements; they have no memory to point at
        if not isinstance(array, np.ndarray):
            array = np.asarray(array)
        value = self.value(name, TensorType.of(array))
        value.const = array
        return value

    def add_output(self, value: Value, name: str | None = None) -> None:
        self._places.setdefault(value, []).append(len(self._outputs))
        self._outputs.append(value)
        self.output_names.append(value.name if name is None else name)

    def add(
        self,
        op: str,
        inputs: Sequence[Value | None],
        attrs: Mapping[str, Any] | None = None,
        *,
        outputs: Sequence[str] | int = 1,
        types: Sequence[Type | None] = (),
        name: str = "",
        origin: Iterable[str] = (),
        bodies: Mapping[str, Graph] | None = None,
        captures: int = 0,
        epilogue: tuple[Fused, ...] = (),
        operands: int = 0,
    ) -> Node:
        """Add a node at the end. ``outputs``: how many, or their names."""
        node = Node(op, name, attrs or {})
        node.origin = tuple(dict.fromkeys(origin)) or ((name,) if name else ())
        if isinstance(outputs, int):
            outputs = [f"{name or op.rsplit(':', 1)[-1]}_out"] * outputs
        for i, out in enumerate(outputs):
            value = self.value(out, types[i] if i < len(types) else None)
            value.producer, value.index = node, i
            node.outputs.append(value)
        node.inputs = list(inputs)
        for i, v in enumerate(node.inputs):
            if v is not None:
                v.uses[node, i] = None
        node.bodies, node.captures = dict(bodies or {}), captures
        node.epilogue, node.operands = epilogue, operands
        self._nodes[node] = None
        for added in self._recorders:
            added.append(node)
        return node

    def add_copy(
        self, node: Node, inputs: Sequence[Value | None], types: Sequence[Type | None] = (), name: str = ""
    ) -> Node:
        """Add a node that applies the operation of ``node``, which may be of another graph, to ``inputs``."""
        return self.add(
            node.op,
            inputs,
            node.attrs,
            outputs=[v.name for v in node.outputs],
            types=types,
            name=name or node.name,
            origin=node.origin,
            bodies={k: body.clone() for k, body in node.bodies.items()},
            captures=node.captures,
            epilogue=node.epilogue,
            operands=node.operands,
        )

    @contextmanager
    def recording(self) -> Iterator[list[Node]]:
        """Collects the nodes that are added inside a ``with`` block."""
        added: list[Node] = []
        self._recorders.append(added)
        try:
            yield added
        finally:
            self._recorders.pop()

    # -- editing ------------------------------------------------------------------------------------------------------
    def set_input(self, node: Node, i: int, value: Value | None) -> None:
        old = node.inputs[i]
        if old is not None:
            old.uses.pop((node, i), None)
        node.inputs[i] = value
        if value is not None:
            value.uses[node, i] = None

    def set_inputs(self, node: Node, inputs: Sequence[Value | None]) -> None:
        """Replace the whole input list."""
        for i, old in enumerate(node.inputs):
            if old is not None:
                old.uses.pop((node, i), None)
        node.inputs = list(inputs)
        for i, value in enumerate(node.inputs):
            if value is not None:
                value.uses[node, i] = None

    def replace(self, old: Value, new: Value) -> None:
        """Turn every use of ``old``, graph outputs included, into a use of ``new``."""
        if old is new:
            return
        for node, i in list(old.uses):
            self.set_input(node, i, new)
        places = self._places.pop(old, [])
        for i in places:
            self._outputs[i] = new
        if places:
            self._places.setdefault(new, []).extend(places)

    def remove(self, node: Node) -> None:
        """Remove a node. Its outputs must be unused."""
        for i, value in enumerate(node.inputs):
            if value is not None:
                value.uses.pop((node, i), None)
        for value in node.outputs:  # breaking the cycle frees the node's own values, such as weights, at once
            value.producer = None
        del self._nodes[node]

    def sort(self) -> None:
        """Restore topological order, stably. Raises ValueError that names a node if there is a cycle."""
        order: dict[Node, None] = {}
        state: dict[Node, int] = {}
        for root in self._nodes:
            if root in state:
                continue
            stack: list[tuple[Node, Iterator[Value | None]]] = [(root, iter(root.inputs))]
            state[root] = 1
            while stack:
                node, inputs = stack[-1]
                for value in inputs:
                    producer = value.producer if value is not None else None
                    if producer is None or state.get(producer) == 2:
                        continue
                    if state.get(producer) == 1:
                        raise ValueError(f"{producer!r} depends on its own output")
                    state[producer] = 1
                    stack.append((producer, iter(producer.inputs)))
                    break
                else:
                    stack.pop()
                    state[node] = 2
                    order[node] = None
        self._nodes = order

    def clone(self) -> Graph:
        """A deep copy that shares only the constants' arrays."""
        copy = Graph(self.name)
        copy._names, copy._counter = set(self._names), dict(self._counter)
        mapping: dict[Value, Value] = {}

        def of(value: Value) -> Value:
            if value not in mapping:
                new = mapping[value] = Value(value.name, value.type)
                new.const = value.const
            return mapping[value]

        copy.inputs = [of(v) for v in self.inputs]
        for node in self._nodes:
            twin = Node(node.op, node.name, node.attrs)
            twin.origin, twin.captures = node.origin, node.captures
            twin.epilogue, twin.operands = node.epilogue, node.operands
            twin.bodies = {k: body.clone() for k, body in node.bodies.items()}
            for i, v in enumerate(node.inputs):
                twin.inputs.append(None if v is None else of(v))
                if v is not None:
                    of(v).uses[twin, i] = None
            for i, v in enumerate(node.outputs):
                out = of(v)
                out.producer, out.index = twin, i
                twin.outputs.append(out)
            copy._nodes[twin] = None
        copy.outputs = [of(v) for v in self._outputs]
        copy.output_names = list(self.output_names)
        return copy

    def __str__(self) -> str:
        from .graph_text import to_text

        return to_text(self)
