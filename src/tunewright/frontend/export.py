"""IR -> ONNX: exports a graph as a model that other tools can read and run.

The result is a legal ONNX model for any engine that knows its opset. A fused node becomes a call of a model-local
function in the domain ``tunewright``; its body is the main operation and the epilogue. A node with notes is also such a
call. It carries the notes as attributes, which viewers such as Netron show.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ..errors import ModelError
from ..ir.graph import Graph, Node, Value
from ..ir.graph_text import format_epilogue
from ..ir.types import TensorType, Type
from ..ops.internal.half_weights import PRODUCTS, is_half_of
from ..ops.internal.reorder import REORDER
from ..ops.internal.row_counts import GATHERED
from ..ops.internal.strided_attention import MULTI_HEAD, OWN, STRIDED, Place, main_attrs, separate
from ..ops.onnx.attention import NAN_ROWS
from ..ops.standard import is_complete, make_attribute, split_name, type_to_proto

DOMAIN = "tunewright"
#: texts to show at a node, by key
Notes: TypeAlias = Mapping[Node, Mapping[str, str]]


def to_model(
    graph: Graph, notes: Notes | None = None, name: str = "", declared: Mapping[str, Type | None] | None = None
) -> onnx.ModelProto:
    """Export the graph as an ONNX model. ``notes`` become attributes of their nodes.

    ``declared``: types of the outputs, for a graph whose types are not inferred yet.
    """
    return _Exporter(notes or {}, declared or {}).model(graph, name)


class _Exporter:
    def __init__(self, notes: Notes, declared: Mapping[str, Type | None]) -> None:
        self.notes, self.declared = notes, declared
        self.names: dict[Value, str] = {}
        self.taken: set[str] = set()
        self.domains: dict[str, int] = {}
        #: product nodes -> the name of their weights after a cast to the type of the other operand
        self.casts: dict[Node, str] = {}
        #: key of a function's content -> the function
        self.functions: dict[tuple[Any, ...], onnx.FunctionProto] = {}

    def model(self, graph: Graph, name: str) -> onnx.ModelProto:
        self.domains = _versions(graph)
        self.taken.update(graph.output_names)
        body = self.graph(graph, name or graph.name, graph.output_names)
        opsets = [helper.make_opsetid(d, v) for d, v in self.domains.items()]
        model = helper.make_model(
            body, producer_name="tunewright", functions=list(self.functions.values()), opset_imports=opsets
        )
        model.ir_version = max(10, helper.find_min_ir_version_for(opsets, ignore_unknown=True))
        return model

    def graph(
        self, graph: Graph, name: str, output_names: Sequence[str] | None = None, captures: int = 0
    ) -> onnx.GraphProto:
        """Export one graph. Values keep their names if these are free; a body sees the names of enclosing graphs."""
        formal = graph.inputs[: len(graph.inputs) - captures]
        for value in formal:
            self.name(value)
        identities = []
        if output_names is not None:
            free = dict.fromkeys(v for v in graph.outputs if v not in self.names)
            for value, out in zip(graph.outputs, output_names, strict=True):
                if value in free and value.const is None:
                    self.names[value] = out
                    del free[value]
                else:  # an input, a constant or a second name of the same value
                    identities.append((value, out))
        nodes = [made for node in graph.nodes for made in (*self.weights(node), self.node(node))]
        nodes += [helper.make_node("Identity", [self.name(v)], [out], name=f"{out}_identity") for v, out in identities]
        outputs: list[onnx.ValueInfoProto] = []
        for i, value in enumerate(graph.outputs):
            out = self.name(value) if output_names is None else output_names[i]
            if output_names is None and (value.producer is None or any(o.name == out for o in outputs)):
                again = self.fresh(f"{out}_out")
                nodes.append(helper.make_node("Identity", [out], [again]))
                out = again
            type = value.type
            if output_names is not None and (type is None or (isinstance(type, TensorType) and type.shape is None)):
                type = self.declared.get(out) or type  # outputs of a model must have a shape
            outputs.append(_info(out, type))
        weights = [numpy_helper.from_array(v.const, self.name(v)) for v in graph.constants() if v.const is not None]
        return helper.make_graph(
            nodes,
            name,
            [_info(self.name(v), v.type) for v in formal],
            outputs,
            weights,
            value_info=[
                _info(self.name(v), v.type)
                for n in graph.nodes
                for v in n.outputs
                if isinstance(v.type, TensorType) and not graph.is_output(v)
            ],
        )

    def name(self, value: Value) -> str:
        if value not in self.names:
            self.names[value] = self.fresh(value.name)
        return self.names[value]

    def fresh(self, name: str) -> str:
        made, k = name, 0
        while made in self.taken:
            k += 1
            made = f"{name}_{k}"
        self.taken.add(made)
        return made

    def weights(self, node: Node) -> Iterator[onnx.NodeProto]:
        """Yield a Cast for half-precision weights: other engines multiply only operands of one type."""
        x, weights = node.input(0), node.input(1)
        if node.op not in PRODUCTS or x is None or weights is None or x.tensor is None or weights.tensor is None:
            return
        if is_half_of(weights.tensor.dtype, x.tensor.dtype):
            made = self.casts[node] = self.fresh(f"{self.name(weights)}_wide")
            yield helper.make_node("Cast", [self.name(weights)], [made], name=made, to=x.tensor.dtype.onnx_code)

    def node(self, node: Node) -> onnx.NodeProto:
        inputs = ["" if v is None else self.name(v) for v in node.inputs]
        if node in self.casts:
            inputs[1] = self.casts[node]
        outputs = [self.name(v) for v in node.outputs]
        domain, op = split_name(node.op)
        notes = self.notes.get(node)
        if node.op == REORDER:  # shapes are logical, so a reorder changes nothing for other engines
            return helper.make_node("Identity", inputs, outputs, name=node.name)
        if node.op == GATHERED:
            what = "computes sizes of its results inside a launch, which ONNX has no form for"
            raise ModelError(what, where=f"node {node.name!r}", hint="export the stage optimized")
        if node.bodies:
            formal = inputs[: len(inputs) - node.captures]
            made = helper.make_node(op, formal, outputs, name=node.name, domain=domain)
            made.attribute.extend(make_attribute(k, v) for k, v in node.attrs.items())
            captured = node.inputs[len(node.inputs) - node.captures :]
            for key, body in node.bodies.items():
                inner = body.clone()  # several nodes may share a body; each copy gets its own value names
                for mine, outer in zip(inner.inputs[len(inner.inputs) - node.captures :], captured, strict=True):
                    self.names[mine] = self.name(_known(outer))
                made.attribute.append(helper.make_attribute(key, self.graph(inner, key, captures=node.captures)))
            return made
        if notes is None and not node.epilogue and node.op != STRIDED:
            made = helper.make_node(op, _trim(inputs), outputs, name=node.name, domain=domain)
            made.attribute.extend(make_attribute(k, v) for k, v in node.attrs.items() if k != NAN_ROWS)
            return made
        about = dict(notes or {})
        if node.epilogue:
            about["epilogue"] = format_epilogue(node).strip(" |")
        about["from"] = ", ".join(node.origin)
        function = self.function(node, tuple(about))
        made = helper.make_node(function.name, [i for i in inputs if i], outputs, name=node.name, domain=DOMAIN)
        made.attribute.extend(make_attribute(k, v) for k, v in {**node.attrs, **about}.items())
        return made

    def function(self, node: Node, about: tuple[str, ...]) -> onnx.FunctionProto:
        """Return the function that computes a node. Attributes of the main operation stay attributes of the call."""
        epilogue = tuple((s.op, s.args, repr(sorted(s.attrs.items()))) for s in node.epilogue)
        key = (
            node.op,
            tuple(sorted(node.attrs)),
            tuple(v is None for v in node.inputs),
            len(node.outputs),
            node.operands,
            epilogue,
            about,
            tuple(node.attrs[k] for k in OWN) if node.op == STRIDED else None,
        )
        if key in self.functions:
            return self.functions[key]
        self.domains.setdefault(DOMAIN, 1)
        formal = ["" if v is None else f"x{i}" for i, v in enumerate(node.inputs)]
        results = [f"y{i}" for i in range(len(node.outputs))]
        main = results if not node.epilogue else ["r0"]
        domain, op = split_name(_main(node))
        body, given = _parts(node, formal[: len(formal) - node.operands])
        body.append(helper.make_node(op, _trim(given), ["turned"] if node.op == STRIDED else main, domain=domain))
        for k in main_attrs(node.attrs) if node.op == STRIDED else node.attrs:
            if k == NAN_ROWS:  # ONNX has no such attribute
                continue
            reference = onnx.AttributeProto(name=k, ref_attr_name=k, type=make_attribute(k, node.attrs[k]).type)
            body[-1].attribute.append(reference)
        if node.op == STRIDED:
            body += _turned(node, "turned", main[0])
        used = {"": self.domains[""], domain: self.domains[domain]}
        for i, step in enumerate(node.epilogue):
            domain, op = split_name(step.op)
            used[domain] = self.domains[domain]
            args = [formal[a] if a >= 0 else f"r{~a}" for a in step.args]
            out = "y0" if i == len(node.epilogue) - 1 else f"r{i + 1}"
            made = helper.make_node(op, args, [out], domain=domain)
            made.attribute.extend(make_attribute(k, v) for k, v in step.attrs.items())
            body.append(made)
        name = "_".join(split_name(op)[1] for op in [node.op, *(s.op for s in node.epilogue)])
        same = sum(f.name.partition("__")[0] == name for f in self.functions.values())
        function = helper.make_function(
            DOMAIN,
            f"{name}__{same + 1}" if same else name,
            [i for i in formal if i],
            results,
            body,
            [helper.make_opsetid(d, v) for d, v in used.items()],
            [*sorted(node.attrs), *about],
        )
        self.functions[key] = function
        return function


def _versions(graph: Graph) -> dict[str, int]:
    """Return per domain the oldest version with the newest form of every operator used: more engines accept it."""
    nodes = [node for g in graph.walk() for node in g.nodes]
    versions = {"": 13}  # the first version in which Identity, which the exporter adds, takes every type
    for op in {_main(node) for node in nodes} | {step.op for node in nodes for step in node.epilogue}:
        domain, name = split_name(op)
        since = int(onnx.defs.get_schema(name, domain=domain).since_version) if onnx.defs.has(name, domain) else 1
        versions[domain] = max(versions.get(domain, 1), since)
    return versions


def _main(node: Node) -> str:
    """Return the name of the operation in terms of ONNX."""
    return str(node.attrs["main"]) if node.op == STRIDED else node.op


def _parts(node: Node, given: list[str]) -> tuple[list[onnx.NodeProto], list[str]]:
    """Return nodes that separate queries, keys and values of a strided attention, and its main operation's inputs."""
    if node.op != STRIDED:
        return [], given
    made: list[onnx.NodeProto] = []

    def part(source: str, place: Place) -> str:
        shape, start, strides = place
        name = f"part{len(made)}"
        made.append(_constant([start], f"{name}_at"))
        for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
            steps = np.arange(size, dtype=np.int64) * stride
            made.append(_constant(steps.reshape([-1 if k == axis else 1 for k in range(4)]), f"{name}_{axis}"))
            made.append(helper.make_node("Add", [made[-2].output[0], f"{name}_{axis}"], [f"{name}_to_{axis}"]))
        made.append(_constant([-1], f"{name}_flat"))
        made.append(helper.make_node("Reshape", [source, f"{name}_flat"], [f"{name}_all"]))
        made.append(helper.make_node("Gather", [f"{name}_all", f"{name}_to_3"], [name]))
        if node.attrs["main"] != MULTI_HEAD:
            return name
        made.append(helper.make_node("Transpose", [name], [f"{name}_turned"], perm=[0, 2, 1, 3]))
        made.append(_constant([0, 0, shape[1] * shape[3]], f"{name}_shape"))
        made.append(helper.make_node("Reshape", [f"{name}_turned", f"{name}_shape"], [f"{name}_rows"]))
        return f"{name}_rows"

    return made, [name or "" for name in separate(given, node.attrs, part)]


def _turned(node: Node, given: str, out: str) -> list[onnx.NodeProto]:
    """Return nodes that bring the main operation's result into the output order of a strided attention."""
    order = [int(axis) for axis in node.attrs["order"]]
    if node.attrs["main"] != MULTI_HEAD:
        return [helper.make_node("Transpose", [given], [out], perm=order)]
    batch, heads, _, queries, _, _, width = (int(n) for n in node.attrs["sizes"])
    shape, perm = _constant([batch, queries, heads, width], f"{given}_shape"), [(0, 2, 1, 3)[axis] for axis in order]
    return [shape, helper.make_node("Reshape", [given, f"{given}_shape"], [f"{given}_heads"]),
            helper.make_node("Transpose", [f"{given}_heads"], [out], perm=perm)]  # fmt: skip


def _constant(values: Any, name: str) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(values, np.int64)))


def _known(value: Value | None) -> Value:
    assert value is not None
    return value


def _trim(names: list[str]) -> list[str]:
    """Remove absent inputs at the end."""
    while names and not names[-1]:
        names = names[:-1]
    return names


def _info(name: str, type: Type | None) -> onnx.ValueInfoProto:
    info = onnx.ValueInfoProto(name=name)
    if type is not None and is_complete(type):
        info.type.CopyFrom(type_to_proto(type))
    return info
