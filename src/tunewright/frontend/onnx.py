"""ONNX -> IR: parsing, scopes, functions, subgraphs. Operators arrive in their newest form (see `upgrade`).

Nothing here trusts the file: `guard` has bounded it before anything large is touched, `tensors` checks every tensor.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError

from ..errors import LimitError, ModelError, UnsupportedError
from ..ir.graph import Graph, Value
from ..ops.standard import type_from_proto
from ..settings import Settings
from . import guard, tensors
from .model import Model
from .upgrade import Call, upgrade


def load(source: str | os.PathLike[str] | bytes | onnx.ModelProto, settings: Settings) -> Model:
    """A model from a file, from bytes, or from a ModelProto."""
    folder: Path | None = None
    where = "model"
    if isinstance(source, onnx.ModelProto):
        proto = source
    elif isinstance(source, (bytes, bytearray, memoryview)):
        proto = _parse(bytes(source), where)
    else:
        path = Path(source)
        where, folder = str(path), path.absolute().parent
        proto = _parse(guard.read_file(path, settings), where)
    guard.check(proto, settings)
    graph = _Converter(proto, folder, settings).convert()
    return Model(
        graph,
        name=proto.graph.name,
        producer=f"{proto.producer_name} {proto.producer_version}".strip(),
        opsets={o.domain: o.version for o in proto.opset_import},
        metadata={p.key: p.value for p in proto.metadata_props},
        declared={o.name: _type(o.type, f"output {o.name!r}") for o in proto.graph.output},
    )


def _parse(data: bytes, where: str) -> onnx.ModelProto:
    if not data:
        raise ModelError("the file is empty", where=where)
    try:
        proto = onnx.ModelProto.FromString(data)
    except (DecodeError, RuntimeError, UnicodeDecodeError) as error:
        raise ModelError(f"this is not an ONNX model: {error}", where=where) from None
    if not proto.HasField("graph") or not (proto.opset_import or proto.ir_version):
        raise ModelError("this is not an ONNX model: it has no graph", where=where)
    return proto


def _type(proto: onnx.TypeProto, where: str) -> Any:
    try:
        return type_from_proto(proto)
    except (ValueError, KeyError) as error:
        raise ModelError(str(error), where=where) from None


class _Scope:
    """Names of one graph being built. A name of an outer graph becomes a capture on the way in."""

    def __init__(self, graph: Graph, outer: _Scope | None = None) -> None:
        self.graph, self.outer = graph, outer
        self.values: dict[str, Value | None] = {}
        self.captured: dict[str, Value] = {}

    def find(self, name: str, where: str) -> Value:
        value = self.get(name)
        if value is None:
            raise ModelError(f"reads {name!r}, which nothing before it makes", where=where)
        return value

    def get(self, name: str) -> Value | None:
        if name in self.values:
            return self.values[name]
        outer = self.outer.get(name) if self.outer is not None else None
        if outer is None:
            return None
        if outer.const is not None:  # constants are shared, not captured
            value = self.graph.constant(outer.const, name)
        else:
            value = self.graph.value(name, outer.type)
            self.captured[name] = value
        self.values[name] = value
        return value


class _Converter:
    def __init__(self, model: onnx.ModelProto, folder: Path | None, settings: Settings) -> None:
        self.model, self.folder, self.settings = model, folder, settings
        self.opsets = {_domain(o.domain): o.version for o in model.opset_import} or {"": 1}
        self.functions = {(_domain(f.domain), f.name, getattr(f, "overload", "")): f for f in model.functions}
        self.count = 0

    def convert(self) -> Graph:
        _check_opsets(self.opsets)
        scope = _Scope(Graph(self.model.graph.name or "main"))
        self.fill(self.model.graph, scope, self.opsets, 0)
        scope.graph.sort()
        return scope.graph

    def fill(self, proto: onnx.GraphProto, scope: _Scope, opsets: Mapping[str, int], depth: int) -> None:
        """Inputs, initializers, nodes and outputs of one GraphProto into ``scope.graph``."""
        graph = scope.graph
        weights: dict[str, Value] = {}
        for tensor in proto.initializer:
            array = tensors.to_array(tensor, self.folder, self.settings, f"initializer {tensor.name!r}")
            weights[tensor.name] = graph.constant(array, tensor.name)
        for sparse in proto.sparse_initializer:
            name = sparse.values.name
            array = tensors.sparse_to_array(sparse, self.folder, self.settings, f"initializer {name!r}")
            weights[name] = graph.constant(array, name)
        if "" in weights:
            raise ModelError("an initializer has no name", where=f"graph {proto.name!r}")
        scope.values.update(weights)
        for info in proto.input:
            if info.name in weights:  # old files list their weights among the inputs
                continue
            if not info.name or info.name in scope.values:
                raise ModelError("the name is used twice" if info.name else "has no name", where=f"input {info.name!r}")
            scope.values[info.name] = graph.add_input(info.name, _type(info.type, f"input {info.name!r}"))
        self.add_nodes(proto.node, scope, opsets, depth, {})
        seen: set[str] = set()
        for info in proto.output:
            if info.name in seen:
                raise ModelError("the name is used twice", where=f"output {info.name!r}")
            seen.add(info.name)
            graph.add_output(scope.find(info.name, f"output of graph {proto.name!r}"), info.name)

    def add_nodes(
        self,
        nodes: Sequence[onnx.NodeProto],
        scope: _Scope,
        opsets: Mapping[str, int],
        depth: int,
        attributes: Mapping[str, onnx.AttributeProto],
        prefix: str = "",
    ) -> None:
        for node in _ordered(nodes, scope):
            self.count += 1
            if self.count > self.settings.max_nodes:
                raise LimitError("the model has too many nodes", hint=f"the limit is MAX_NODES = {self.settings.max_nodes:,}")
            self.add_node(node, scope, opsets, depth, attributes, prefix)

    def add_node(
        self,
        node: onnx.NodeProto,
        scope: _Scope,
        opsets: Mapping[str, int],
        depth: int,
        attributes: Mapping[str, onnx.AttributeProto],
        prefix: str,
    ) -> None:
        domain = _domain(node.domain)
        label = prefix + (node.name or next((o for o in node.output if o), node.op_type))
        where = f"node {label!r} ({node.op_type})"
        if depth > self.settings.max_nesting:
            raise LimitError(
                "subgraphs or functions are nested too deep", where=where,
                hint=f"the limit is MAX_NESTING = {self.settings.max_nesting}",
            )
        inputs = [scope.find(name, where) if name else None for name in node.input]
        given = [_resolve(a, attributes) for a in node.attribute]
        given = [a for a in given if a is not None]
        function = self.functions.get((domain, node.op_type, getattr(node, "overload", "")))
        if function is not None:
            results = self.inline(function, inputs, given, scope, depth, label, where)
        else:
            if domain not in opsets and domain in ("", "ai.onnx.ml"):
                raise ModelError(f"the model imports no opset for domain {domain or 'ai.onnx'!r}", where=where)
            results = self.operator(node, domain, inputs, given, scope, opsets, depth, attributes, label, where)
        for name, value in zip(node.output, results, strict=False):
            if not name:
                continue
            if name in scope.values and name not in scope.captured:
                raise ModelError(f"makes {name!r}, which exists already", where=where)
            scope.values[name] = value
        if len(node.output) > len(results) and any(node.output[len(results):]):
            raise ModelError(f"has {len(node.output)} outputs instead of {len(results)}", where=where)

    def operator(
        self, node: onnx.NodeProto, domain: str, inputs: list[Value | None], given: Iterable[onnx.AttributeProto],
        scope: _Scope, opsets: Mapping[str, int], depth: int, attributes: Mapping[str, onnx.AttributeProto],
        label: str, where: str,
    ) -> list[Value]:
        """An ordinary operator: attributes to Python, bodies to graphs, then its newest form."""
        attrs: dict[str, Any] = {}
        bodies: dict[str, _Scope] = {}
        for a in given:
            if a.type == onnx.AttributeProto.GRAPH:
                bodies[a.name] = body = _Scope(Graph(a.name), scope)
                self.fill(_bind(a.g, attributes), body, opsets, depth + 1)
            elif a.type == onnx.AttributeProto.GRAPHS:
                raise UnsupportedError(f"attribute {a.name!r} holds several graphs", where=where)
            else:
                attrs[a.name] = self.attribute(a, where)
        captures = _close(bodies, scope, where)
        op = f"{domain}::{node.op_type}" if domain else node.op_type
        call = Call(
            op, [*inputs, *captures], attrs, [o or "unused" for o in node.output], label,
            {k: b.graph for k, b in bodies.items()}, len(captures),
        )
        try:
            return upgrade(scope.graph, call, opsets.get(domain, 1))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ModelError(f"is malformed: {error}", where=where) from error

    def attribute(self, a: onnx.AttributeProto, where: str) -> Any:
        where = f"{where}, attribute {a.name!r}"
        kinds = onnx.AttributeProto
        if a.type in (kinds.INT, kinds.FLOAT):
            return a.i if a.type == kinds.INT else a.f
        if a.type == kinds.STRING:
            return _decode(a.s)
        if a.type in (kinds.INTS, kinds.FLOATS):
            return tuple(a.ints if a.type == kinds.INTS else a.floats)
        if a.type == kinds.STRINGS:
            return tuple(_decode(s) for s in a.strings)
        if a.type == kinds.TENSOR:
            return tensors.to_array(a.t, self.folder, self.settings, where)
        if a.type == kinds.TENSORS:
            return tuple(tensors.to_array(t, self.folder, self.settings, where) for t in a.tensors)
        if a.type == kinds.SPARSE_TENSOR:
            return tensors.sparse_to_array(a.sparse_tensor, self.folder, self.settings, where)
        if a.type == kinds.TYPE_PROTO:
            return _type(a.tp, where)
        raise ModelError(f"has no usable type ({a.type})", where=where)

    def inline(
        self, function: onnx.FunctionProto, inputs: Sequence[Value | None], given: Sequence[onnx.AttributeProto],
        scope: _Scope, depth: int, label: str, where: str,
    ) -> list[Value]:
        """A model-local function: its nodes are added to this graph, with the call's values and attributes bound."""
        if len(inputs) > len(function.input):
            raise ModelError(f"has {len(inputs)} inputs, but the function takes {len(function.input)}", where=where)
        attributes = {a.name: a for a in [*function.attribute_proto, *given]}
        inner = _Scope(scope.graph)
        for i, name in enumerate(function.input):
            inner.values[name] = inputs[i] if i < len(inputs) else None
        opsets = {**self.opsets, **{_domain(o.domain): o.version for o in function.opset_import}}
        for node in _ordered(function.node, inner):
            self.count += 1
            if self.count > self.settings.max_nodes:
                raise LimitError(
                    "functions expand to too many nodes", where=where,
                    hint=f"the limit is MAX_NODES = {self.settings.max_nodes:,}",
                )
            absent = [n for n in node.input if n in inner.values and inner.values[n] is None]
            if absent:  # an optional input that the call left out
                node = _without(node, absent)
            self.add_node(node, inner, opsets, depth + 1, attributes, f"{label}/")
        return [inner.find(name, f"{where}, output {name!r} of the function") for name in function.output]


def _check_opsets(opsets: Mapping[str, int]) -> None:
    newest = onnx.defs.onnx_opset_version()
    version = opsets.get("", 1)
    if not 1 <= version <= newest:
        raise UnsupportedError(
            f"opset {version} is not supported", where="opset_import", hint=f"opsets 1 to {newest} are; upgrade onnx for newer ones"
        )


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _decode(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _resolve(a: onnx.AttributeProto, bound: Mapping[str, onnx.AttributeProto]) -> onnx.AttributeProto | None:
    """An attribute inside a function may refer to one of the call; None when the call does not give it."""
    if not a.ref_attr_name:
        return a
    target = bound.get(a.ref_attr_name)
    if target is None:
        return None
    copy = onnx.AttributeProto()
    copy.CopyFrom(target)
    copy.name = a.name
    return copy


def _bind(graph: onnx.GraphProto, bound: Mapping[str, onnx.AttributeProto]) -> onnx.GraphProto:
    """The graph with references to the attributes of a surrounding function call replaced, at any depth."""
    if not bound:
        return graph
    copy = onnx.GraphProto()
    copy.CopyFrom(graph)
    for node in copy.node:
        resolved = [_resolve(a, bound) for a in node.attribute]
        kept = [a for a in resolved if a is not None]
        for a in kept:
            if a.type == onnx.AttributeProto.GRAPH:
                a.g.CopyFrom(_bind(a.g, bound))
        kept_copies = [onnx.AttributeProto.FromString(a.SerializeToString()) for a in kept]
        del node.attribute[:]
        node.attribute.extend(kept_copies)
    return copy


def _without(node: onnx.NodeProto, names: Sequence[str]) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    for i, name in enumerate(copy.input):
        if name in names:
            copy.input[i] = ""
    return copy


def _close(bodies: Mapping[str, _Scope], scope: _Scope, where: str) -> list[Value]:
    """Make the captures of all bodies explicit: the same extra inputs, in the same order, on the node and each body."""
    names = list(dict.fromkeys(name for body in bodies.values() for name in body.captured))
    values = [scope.find(name, where) for name in names]
    for body in bodies.values():
        for name, value in zip(names, values, strict=True):
            inner = body.captured.get(name)
            body.graph.inputs.append(body.graph.value(name, value.type) if inner is None else inner)
        body.graph.sort()
    return values


def _ordered(nodes: Sequence[onnx.NodeProto], scope: _Scope) -> list[onnx.NodeProto]:
    """The nodes in topological order (files should be, but not all are). Raises on cycles and on values made twice."""
    made: dict[str, int] = {}
    for i, node in enumerate(nodes):
        for name in node.output:
            if name and name in made:
                raise ModelError(f"makes {name!r}, which exists already", where=f"node {node.name!r} ({node.op_type})")
            if name:
                made[name] = i
    needs: list[list[int]] = [[made[name] for name in _reads(node) if name in made] for node in nodes]
    if all(k < i for i, ks in enumerate(needs) for k in ks):
        return list(nodes)
    order: list[onnx.NodeProto] = []
    state = [0] * len(nodes)
    for root in range(len(nodes)):
        stack = [root]
        while stack:
            i = stack[-1]
            if state[i] == 2:
                stack.pop()
                continue
            state[i] = 1
            waiting = [k for k in needs[i] if state[k] != 2]
            if not waiting:
                state[i] = 2
                order.append(nodes[i])
                stack.pop()
            elif state[waiting[0]] == 1:
                node = nodes[i]
                raise ModelError("depends on its own output (a cycle)", where=f"node {node.name!r} ({node.op_type})")
            else:
                stack.append(waiting[0])
    return order


def _reads(node: onnx.NodeProto) -> list[str]:
    """Names that a node or its bodies read."""
    names = [name for name in node.input if name]
    for a in node.attribute:
        if a.type == onnx.AttributeProto.GRAPH:
            local = {i.name for i in a.g.input} | {t.name for t in a.g.initializer}
            local |= {o for n in a.g.node for o in n.output}
            names += [n for inner in a.g.node for n in _reads(inner) if n not in local]
            names += [o.name for o in a.g.output if o.name not in local]
    return names


def constant_array(attrs: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """The value of a Constant node."""
    for key, dtype in (("value_float", np.float32), ("value_floats", np.float32), ("value_int", np.int64), ("value_ints", np.int64)):
        if key in attrs:
            return np.asarray(attrs[key], dtype)
    for key in ("value_string", "value_strings"):
        if key in attrs:
            return np.asarray(attrs[key], object)
    value = attrs["value"] if "value" in attrs else attrs["sparse_value"]
    if not isinstance(value, np.ndarray):
        raise ValueError("value is not a tensor")
    return value
