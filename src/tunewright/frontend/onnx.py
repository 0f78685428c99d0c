"""ONNX -> IR: parsing, scopes, functions, subgraphs. Operators are converted to their newest form (see `upgrade`).

The file is not trusted: `guard` bounds it before any large data is read, and `tensors` checks every tensor.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from ..errors import LimitError, ModelError, UnsupportedError
from ..ir.graph import Graph, Value
from ..ir.types import OptionalType, SequenceType, TensorType
from ..ops.infer import MISTAKES
from ..ops.standard import type_from_proto
from ..settings import Settings
from . import guard, schema, tensors, weight_reader
from .external import ExternalFiles, check_file_size, read_file
from .guard import call_key, domain_of, function_key, kind_of
from .model import Model
from .node_protos import Attributes, ordered, resolve, without
from .protobuf_messages import onnx
from .upgrade.base import OperatorCall
from .upgrade.upgrade import upgrade


def load(source: str | os.PathLike[str] | bytes | onnx.ModelProto, settings: Settings) -> Model:
    """Load a model from a file, from bytes, or from a ModelProto. Raises ModelError for an illegal model."""
    folder: Path | None = None
    where = "model"
    parts = weight_reader.SplitModel(b"", {})
    if isinstance(source, onnx.ModelProto):
        proto = source
    elif isinstance(source, (bytes, bytearray, memoryview)):
        check_file_size(len(source), where, settings)
        proto = _parse(bytes(source), where)
    elif isinstance(source, (str, os.PathLike)):
        path = Path(source)
        where, folder = str(path), path.absolute().parent
        parts = read_file(path, settings)
        proto = _parse(parts.small, where)
    else:
        raise ModelError(f"a path, bytes or a ModelProto is needed, not {type(source).__name__}", where=where)
    guard.check(proto, settings)
    graph = _Converter(proto, ExternalFiles(folder), settings, parts.tensors(proto)).convert()
    return Model(
        graph,
        name=proto.graph.name,
        producer=f"{proto.producer_name} {proto.producer_version}".strip(),
        opsets={o.domain: o.version for o in proto.opset_import},
        metadata={p.key: p.value for p in proto.metadata_props},
        declared={o.name: _type(o.type, f"output {o.name!r}") for o in proto.graph.output},
        path=where if folder is not None else "",
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
    guard.check_type(proto, where)
    try:
        return type_from_proto(proto)
    except (ValueError, KeyError) as error:
        raise ModelError(f"its type is not legal: {error}", where=where) from None


def _open_elements(type: Any) -> Any:
    """Relax the type of a body's input: elements of a list that a loop carries need not have the declared shapes."""
    if isinstance(type, (SequenceType, OptionalType)):
        elem = type.elem
        return replace(type, elem=TensorType(elem.dtype) if isinstance(elem, TensorType) else _open_elements(elem))
    return type


class _Scope:
    """Names of one graph under construction. A name of an enclosing graph becomes a capture when it is first read."""

    def __init__(self, graph: Graph, outer: _Scope | None = None) -> None:
        self.graph, self.outer = graph, outer
        self.values: dict[str, Value | None] = {}
        self.captured: dict[str, Value] = {}

    def find(self, name: str, where: str) -> Value:
        value = self.get(name)
        if value is None:
            raise ModelError(f"reads {name!r}, which no earlier node produces", where=where)
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
    def __init__(
        self,
        model: onnx.ModelProto,
        files: ExternalFiles,
        settings: Settings,
        large: Mapping[int, tuple[onnx.TensorProto, weight_reader.Bytes]],
    ) -> None:
        self.model, self.files, self.settings = model, files, settings
        #: tensors whose raw_data was read separately, by identity
        self.large = large
        self.opsets = {domain_of(o.domain): o.version for o in model.opset_import} or {"": 1}
        self.functions = {function_key(f): f for f in model.functions}
        self.count = 0
        self.nbytes = 0
        #: values of call attributes, by identity of the attribute; keeping the attribute keeps its id unique
        self.referred: dict[int, tuple[onnx.AttributeProto, Any]] = {}

    def convert(self) -> Graph:
        _check_opsets(self.opsets)
        scope = _Scope(Graph(self.model.graph.name or "main"))
        self.fill(self.model.graph, scope, self.opsets, 0, {})
        scope.graph.sort()
        return scope.graph

    def fill(
        self, proto: onnx.GraphProto, scope: _Scope, opsets: Mapping[str, int], depth: int, attributes: Attributes
    ) -> None:
        """Add the inputs, initializers, nodes and outputs of one GraphProto to ``scope.graph``."""
        graph = scope.graph
        weights: dict[str, Value] = {}
        for tensor in proto.initializer:
            if tensor.name in weights:
                raise ModelError("the name is used twice", where=f"initializer {tensor.name!r}")
            array = self.tensor(tensor, f"initializer {tensor.name!r}")
            weights[tensor.name] = graph.constant(array, tensor.name)
        for sparse in proto.sparse_initializer:
            name = sparse.values.name
            if name in weights:
                raise ModelError("the name is used twice", where=f"initializer {name!r}")
            array = tensors.sparse_to_array(sparse, self.files, self.settings, f"initializer {name!r}")
            weights[name] = graph.constant(array, name)
        if "" in weights:
            raise ModelError("an initializer has no name", where=f"graph {proto.name!r}")
        scope.values.update(weights)
        for info in proto.input:
            if info.name in weights:  # old files list their weights among the inputs
                continue
            if not info.name or info.name in scope.values:
                raise ModelError("the name is used twice" if info.name else "has no name", where=f"input {info.name!r}")
            type = _type(info.type, f"input {info.name!r}")
            scope.values[info.name] = graph.add_input(info.name, type if scope.outer is None else _open_elements(type))
        self.add_nodes(proto.node, scope, opsets, depth, attributes)
        seen: set[str] = set()
        for info in proto.output:
            if info.name in seen and depth == 0:  # results of a body are identified by position
                raise ModelError("the name is used twice", where=f"output {info.name!r}")
            seen.add(info.name)
            graph.add_output(scope.find(info.name, f"output of graph {proto.name!r}"), info.name)

    def add_nodes(
        self,
        nodes: Sequence[onnx.NodeProto],
        scope: _Scope,
        opsets: Mapping[str, int],
        depth: int,
        attributes: Attributes,
        prefix: str = "",
    ) -> None:
        for node in ordered(nodes):
            self.count += 1
            if self.count > self.settings.max_nodes:
                raise LimitError(
                    "the model has too many nodes", hint=f"the limit is MAX_NODES = {self.settings.max_nodes:,}"
                )
            self.add_node(node, scope, opsets, depth, attributes, prefix)

    def add_node(
        self,
        node: onnx.NodeProto,
        scope: _Scope,
        opsets: Mapping[str, int],
        depth: int,
        attributes: Attributes,
        prefix: str,
    ) -> None:
        domain = domain_of(node.domain)
        label = prefix + (node.name or next((o for o in node.output if o), node.op_type))
        where = f"node {label!r} ({node.op_type})"
        if depth > self.settings.max_nesting:
            raise LimitError(
                "subgraphs or functions are nested too deep",
                where=where,
                hint=f"the limit is MAX_NESTING = {self.settings.max_nesting}",
            )
        inputs = [scope.find(name, where) if name else None for name in node.input]
        given = resolve(node, attributes, where)
        function = self.functions.get(call_key(node))
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
        if len(node.output) > len(results) and any(node.output[len(results) :]):
            raise ModelError(f"has {len(node.output)} outputs instead of {len(results)}", where=where)

    def operator(
        self,
        node: onnx.NodeProto,
        domain: str,
        inputs: list[Value | None],
        given: Attributes,
        scope: _Scope,
        opsets: Mapping[str, int],
        depth: int,
        attributes: Attributes,
        label: str,
        where: str,
    ) -> list[Value]:
        """Add an ordinary operator in its newest form. Attributes become Python values, bodies become graphs."""
        attrs: dict[str, Any] = {}
        bodies: dict[str, _Scope] = {}
        kinds = {name: kind_of(a) for name, a in given.items()}
        version = min(opsets.get(domain, 1), 1 << 30)  # the largest version that onnx accepts
        schema.check_node(node.op_type, domain, version, inputs, node.output, kinds, where)
        shared = {id(a) for a in attributes.values()}
        for name, a in given.items():
            if kinds[name] == onnx.AttributeProto.GRAPHS:
                raise UnsupportedError(f"attribute {name!r} holds several graphs", where=where)
            if kinds[name] == onnx.AttributeProto.GRAPH:
                bodies[name] = body = _Scope(Graph(name), scope)
                self.fill(a.g, body, opsets, depth + 1, attributes)
            else:
                convert = self.shared_attribute if id(a) in shared else self.attribute
                attrs[name] = convert(a, kinds[name], where)
        schema.check_values(node.op_type, attrs, where)
        # before opset 9 Scan had a batch dimension
        if bodies and not domain and (version >= 9 or node.op_type != "Scan"):
            sizes = {k: (len(b.graph.inputs), len(b.graph.outputs)) for k, b in bodies.items()}
            schema.check_bodies(node.op_type, len(inputs), len(node.output), attrs, sizes, where)
        captures = _close(bodies, scope, where)
        op = f"{domain}::{node.op_type}" if domain else node.op_type
        call = OperatorCall(
            op,
            [*inputs, *captures],
            attrs,
            [o or "unused" for o in node.output],
            label,
            {k: b.graph for k, b in bodies.items()},
            len(captures),
        )
        try:
            return upgrade(scope.graph, call, version)
        except MISTAKES as error:
            raise ModelError(f"is malformed: {error}", where=where) from error

    def shared_attribute(self, a: onnx.AttributeProto, kind: int, where: str) -> Any:
        """Convert an attribute's value to Python once: nodes that refer to the same attribute share its value."""
        if id(a) not in self.referred:
            self.referred[id(a)] = a, self.attribute(a, kind, where)
        return self.referred[id(a)][1]

    def attribute(self, a: onnx.AttributeProto, kind: int, where: str) -> Any:
        """Convert an attribute's value to Python."""
        where = f"{where}, attribute {a.name!r}"
        kinds = onnx.AttributeProto
        if kind in (kinds.INT, kinds.FLOAT):
            return a.i if kind == kinds.INT else a.f
        if kind == kinds.STRING:
            return _decode(a.s)
        if kind in (kinds.INTS, kinds.FLOATS):
            return tuple(a.ints if kind == kinds.INTS else a.floats)
        if kind == kinds.STRINGS:
            return tuple(_decode(s) for s in a.strings)
        if kind == kinds.TENSOR:
            return self.tensor(a.t, where)
        if kind == kinds.TENSORS:
            return tuple(self.tensor(t, where) for t in a.tensors)
        if kind == kinds.SPARSE_TENSOR:
            return tensors.sparse_to_array(a.sparse_tensor, self.files, self.settings, where)
        if kind == kinds.TYPE_PROTO:
            return _type(a.tp, where)
        raise ModelError(f"has no usable type ({kind})", where=where)

    def tensor(self, tensor: onnx.TensorProto, where: str) -> np.ndarray[Any, Any]:
        """Read a tensor and count its memory. The guard counted the declared sizes; this counts the actual ones."""
        _, raw = self.large.get(id(tensor), (None, None))
        array = tensors.to_array(tensor, self.files, self.settings, where, raw)
        self.nbytes += array.nbytes
        if self.nbytes > self.settings.max_memory_bytes:
            limit = f"the limit is MAX_MEMORY_BYTES = {self.settings.max_memory_bytes:,}"
            raise LimitError("the constants of the model are too large", where=where, hint=limit)
        return array

    def inline(
        self,
        function: onnx.FunctionProto,
        inputs: Sequence[Value | None],
        given: Attributes,
        scope: _Scope,
        depth: int,
        label: str,
        where: str,
    ) -> list[Value]:
        """Inline a model-local function: add its nodes to this graph, with the call's values and attributes."""
        if len(inputs) > len(function.input):
            raise ModelError(f"has {len(inputs)} inputs, but the function takes {len(function.input)}", where=where)
        attributes = {**{a.name: a for a in function.attribute_proto}, **given}
        inner = _Scope(scope.graph)
        for i, name in enumerate(function.input):
            inner.values[name] = inputs[i] if i < len(inputs) else None
        opsets = {**self.opsets, **{domain_of(o.domain): o.version for o in function.opset_import}}
        _check_opsets(opsets, where)
        for node in ordered(function.node):
            self.count += 1
            if self.count > self.settings.max_nodes:
                raise LimitError(
                    "functions expand to too many nodes",
                    where=where,
                    hint=f"the limit is MAX_NODES = {self.settings.max_nodes:,}",
                )
            absent = [n for n in node.input if n in inner.values and inner.values[n] is None]
            if absent:  # the call left out an optional input
                node = without(node, absent)
            self.add_node(node, inner, opsets, depth + 1, attributes, f"{label}/")
        return [inner.find(name, f"{where}, output {name!r} of the function") for name in function.output]


def _check_opsets(opsets: Mapping[str, int], where: str = "opset_import") -> None:
    version = opsets.get("", 1)
    newest = schema.newest_opset(version)
    if not 1 <= version <= newest:
        raise UnsupportedError(
            f"opset {version} is not supported",
            where=where,
            hint=f"opsets 1 to {newest} are; upgrade onnx for newer ones",
        )


def _decode(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _close(bodies: Mapping[str, _Scope], scope: _Scope, where: str) -> list[Value]:
    """Make the captures of all bodies explicit: the node and each body get the same extra inputs in the same order."""
    names = list(dict.fromkeys(name for body in bodies.values() for name in body.captured))
    values = [scope.find(name, where) for name in names]
    for body in bodies.values():
        for name, value in zip(names, values, strict=True):
            inner = body.captured.get(name)
            body.graph.inputs.append(body.graph.value(name, value.type) if inner is None else inner)
        body.graph.sort()
    return values
