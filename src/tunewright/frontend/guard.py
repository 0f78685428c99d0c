"""Bounds what a file may ask for before folding or native code sees it. Each limit is a setting.

`check` computes the size to which a model would expand, without expanding it. It counts nodes through functions, the
depth of subgraphs and functions, and the memory of tensors. No recursion has a depth that the file controls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ..errors import LimitError, ModelError
from ..settings import Settings
from .protobuf_messages import onnx
from .tensors import declared_bytes

#: domain, name, overload
FunctionKey: TypeAlias = tuple[str, str, str]

#: an optional sequence of maps of tensors has 4 levels; no legal use is deeper
MAX_TYPE_NESTING = 8

_KIND = onnx.AttributeProto
#: fields of an attribute by kind, for old files whose attributes do not name their type
_FIELD_KINDS = (
    ("f", _KIND.FLOAT), ("i", _KIND.INT), ("s", _KIND.STRING), ("t", _KIND.TENSOR), ("g", _KIND.GRAPH),
    ("sparse_tensor", _KIND.SPARSE_TENSOR), ("tp", _KIND.TYPE_PROTO),
)  # fmt: skip
_LIST_KINDS = (
    ("floats", _KIND.FLOATS), ("ints", _KIND.INTS), ("strings", _KIND.STRINGS), ("tensors", _KIND.TENSORS),
    ("graphs", _KIND.GRAPHS), ("sparse_tensors", _KIND.SPARSE_TENSORS), ("type_protos", _KIND.TYPE_PROTOS),
)  # fmt: skip


def kind_of(a: onnx.AttributeProto) -> int:
    """Return the attribute's type. If it names none, infer it from the field that is set (UNDEFINED if none is)."""
    if a.type:
        return int(a.type)
    for name, kind in _FIELD_KINDS:
        if a.HasField(name):
            return int(kind)
    return next((int(kind) for name, kind in _LIST_KINDS if len(getattr(a, name))), 0)


def domain_of(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def function_key(function: onnx.FunctionProto) -> FunctionKey:
    return domain_of(function.domain), function.name, getattr(function, "overload", "")


def call_key(node: onnx.NodeProto) -> FunctionKey:
    return domain_of(node.domain), node.op_type, getattr(node, "overload", "")


def check(model: onnx.ModelProto, settings: Settings) -> None:
    """Raise if the model exceeds a limit, is recursive, defines a function twice, or has a name that is not text."""
    for opset in model.opset_import:
        _check_text([opset.domain], "opset_import")
    bodies: dict[FunctionKey, _Part] = {}
    for function in model.functions:
        _check_text(
            [function.name, function.domain, *function.input, *function.output, *function.attribute], "a function"
        )
        key = function_key(function)
        if key in bodies:
            raise ModelError("is defined twice", where=_name(key))
        bodies[key] = part = _Part()
        part.tensors([a.t for a in function.attribute_proto if a.HasField("t")], settings, _name(key))
    for function in model.functions:
        _survey(function.node, bodies[function_key(function)], bodies, settings, _name(function_key(function)))
    main = _Part()
    _survey_graph(model.graph, main, settings, "graph")
    _survey(model.graph.node, main, bodies, settings, "graph")
    _total(main, bodies, settings)


def check_type(proto: onnx.TypeProto, where: str) -> None:
    """Raise if a type is nested too deeply or contains a dimension name that is not text."""
    inner = proto
    for _ in range(MAX_TYPE_NESTING):
        kind = inner.WhichOneof("value")
        if kind in ("tensor_type", "sparse_tensor_type"):
            _check_text((d.dim_param for d in getattr(inner, kind).shape.dim), where)
            return
        if kind in ("sequence_type", "optional_type"):
            inner = getattr(inner, kind).elem_type
        elif kind == "map_type":
            inner = inner.map_type.value_type
        else:
            return
    raise LimitError(f"its type is nested deeper than {MAX_TYPE_NESTING} levels", where=where)


@dataclass
class _Part:
    """The size of a graph or function: first its own content and its calls, later the sum including all calls."""

    nodes: int = 0
    nbytes: int = 0
    depth: int = 0
    # number of calls, and depth of the deepest one
    calls: dict[FunctionKey, tuple[int, int]] = field(default_factory=dict)

    def call(self, key: FunctionKey, depth: int) -> None:
        times, deepest = self.calls.get(key, (0, 0))
        self.calls[key] = (times + 1, max(deepest, depth))

    def tensors(self, given: Iterable[onnx.TensorProto], settings: Settings, where: str) -> None:
        for tensor in given:
            nbytes = declared_bytes(tensor)
            if nbytes > settings.max_tensor_bytes:
                raise LimitError(
                    f"has shape {list(tensor.dims[:16])}, {nbytes:,} bytes",
                    where=f"{where}, tensor {tensor.name!r}",
                    hint=f"the limit is MAX_TENSOR_BYTES = {settings.max_tensor_bytes:,}",
                )
            self.nbytes += nbytes


def _survey(
    nodes: Sequence[onnx.NodeProto], part: _Part, functions: dict[FunctionKey, _Part], settings: Settings, where: str
) -> None:
    """Count nodes and the content of their attributes, including subgraphs at any depth."""
    stack = [(nodes, 0)]
    while stack:
        nodes, depth = stack.pop()
        part.depth = max(part.depth, depth)
        if depth > settings.max_nesting:
            raise _too_deep(where, settings)
        part.nodes += len(nodes)
        if part.nodes > settings.max_nodes:
            raise _too_many(part.nodes, where, settings)
        for node in nodes:
            _check_text([node.name, node.op_type, node.domain, *node.input, *node.output], "a node")
            if functions and (key := call_key(node)) in functions:
                part.call(key, depth)
            stack += [(graph.node, depth + 1) for graph in _survey_attributes(node, part, settings)]


def _survey_attributes(node: onnx.NodeProto, part: _Part, settings: Settings) -> list[onnx.GraphProto]:
    """Count the tensors of a node's attributes. Returns the graphs among them, whose nodes are still to be counted."""
    found: list[onnx.GraphProto] = []
    for a in node.attribute:
        where = f"node {node.name!r} ({node.op_type})"
        _check_text([a.name, a.ref_attr_name], where)
        kind = kind_of(a)
        if kind in (_KIND.TENSOR, _KIND.TENSORS):
            part.tensors([a.t] if kind == _KIND.TENSOR else a.tensors, settings, where)
        elif kind in (_KIND.GRAPH, _KIND.GRAPHS):
            for graph in [a.g] if kind == _KIND.GRAPH else a.graphs:
                _survey_graph(graph, part, settings, f"graph {a.name!r} of node {node.name!r}")
                found.append(graph)
    return found


def _survey_graph(graph: onnx.GraphProto, part: _Part, settings: Settings, where: str) -> None:
    """Check the names and count the tensors of a graph, without its nodes."""
    _check_text([graph.name, *(v.name for v in [*graph.input, *graph.output, *graph.initializer])], where)
    _check_text([s.values.name for s in graph.sparse_initializer], where)
    part.tensors(graph.initializer, settings, where)
    for sparse in graph.sparse_initializer:  # the loader makes them dense
        part.tensors(
            [onnx.TensorProto(name=sparse.values.name, data_type=sparse.values.data_type, dims=sparse.dims)],
            settings,
            where,
        )


def _total(main: _Part, functions: dict[FunctionKey, _Part], settings: Settings) -> None:
    """Add up the calls, innermost functions first."""
    for key in _callees_first(functions):
        _add_calls(functions[key], functions, settings, _name(key))
    _add_calls(main, functions, settings, "graph")
    if main.nbytes > settings.max_memory_bytes:
        raise LimitError(
            f"the constants need {main.nbytes:,} bytes",
            where="graph",
            hint=f"the limit is MAX_MEMORY_BYTES = {settings.max_memory_bytes:,}",
        )


def _add_calls(part: _Part, functions: dict[FunctionKey, _Part], settings: Settings, where: str) -> None:
    for key, (times, deepest) in part.calls.items():
        callee = functions[key]
        part.nodes += times * callee.nodes
        part.nbytes += times * callee.nbytes
        part.depth = max(part.depth, deepest + 1 + callee.depth)
    if part.depth > settings.max_nesting:
        raise _too_deep(where, settings)
    if part.nodes > settings.max_nodes:  # the check per function also keeps the numbers of deep nests small
        raise _too_many(part.nodes, where, settings)


def _callees_first(functions: dict[FunctionKey, _Part]) -> Iterator[FunctionKey]:
    done: set[FunctionKey] = set()
    open_: set[FunctionKey] = set()
    for root in functions:
        stack = [(root, iter(functions[root].calls))] if root not in done else []
        open_.update(key for key, _ in stack)
        while stack:
            key, calls = stack[-1]
            for callee in calls:
                if callee in open_:
                    raise ModelError("calls itself, directly or through others", where=_name(callee))
                if callee not in done:
                    stack.append((callee, iter(functions[callee].calls)))
                    open_.add(callee)
                    break
            else:
                stack.pop()
                open_.discard(key)
                done.add(key)
                yield key


def _check_text(names: Iterable[str], where: str) -> None:
    for name in names:
        if not isinstance(name, str):  # protobuf returns bytes if a string is not UTF-8
            raise ModelError(f"the name {bytes(name)[:40]!r} is not UTF-8 text", where=where)


def _name(key: FunctionKey) -> str:
    return f"function {key[1]!r}" + (f" of domain {key[0]!r}" if key[0] else "")


def _too_many(nodes: int, where: str, settings: Settings) -> LimitError:
    return LimitError(
        f"expands to {nodes:,} nodes or more", where=where, hint=f"the limit is MAX_NODES = {settings.max_nodes:,}"
    )


def _too_deep(where: str, settings: Settings) -> LimitError:
    return LimitError(
        "subgraphs or functions are nested too deep",
        where=where,
        hint=f"the limit is MAX_NESTING = {settings.max_nesting}",
    )
