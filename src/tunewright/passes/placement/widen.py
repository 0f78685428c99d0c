"""Converts half-precision networks on devices that compute in single precision: tensors between layers become f32.

A processor computes halves in f32 in any case. Between two layers, halves would only be rounded, stored and converted
back; and kernels of f32 have blocked layouts and every fusion. Therefore layers and their constants become f32, and a
Cast stands where a half enters or leaves. Results are at least as exact as those of the half network.

Halves stay where a Cast would cost more than it saves: in movement at the border of the graph (embedding tables, caches
of keys and values) and in an attention that reads such a cache. They also stay in operations that determine the type of
their result.
"""

from __future__ import annotations

from collections.abc import Iterator

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.types import DType, TensorType
from tunewright.ops import lookup
from tunewright.ops.internal.half_weights import HALVES, PRODUCTS

from ..base import Context
from ..fusion.fuse import names
from ..pattern import remove_dead
from .precision import is_quantised

WIDE = DType.FLOAT32
MS = "com.microsoft::"
#: operations that only move elements, in any type
_MOVES = names(
    """Identity Reshape Flatten Squeeze Unsqueeze Transpose Slice Split Concat Tile Expand Gather GatherElements
    GatherND ScatterElements ScatterND TensorScatter DepthToSpace SpaceToDepth Pad ReverseSequence Compress Where"""
)
#: operations that only read shapes, whatever the type
_ASKING = frozenset({"Shape", "Size"})
#: Operations whose result type does not follow from their inputs, that draw random digits, or that count in halves.
_MAKERS = names("BitCast CastLike EyeLike Range Bernoulli Multinomial RandomNormalLike RandomUniformLike")
#: Weights of products with at least this number of elements stay half.
LEAST_WEIGHTS = 1 << 14
_OTHERS = ("org.openvinotoolkit::", "ai.onnx.ml::")
#: the inputs of attentions for keys and values of the past
_CACHES = {
    "Attention": (1, 2, 4, 5), "MatMul": (1,), MS + "Attention": (4,), MS + "MultiHeadAttention": (1, 2, 6, 7),
    MS + "GroupQueryAttention": (1, 2, 3, 4), MS + "DecoderMaskedMultiHeadAttention": (1, 2, 5, 6),
}  # fmt: skip


class WidenHalves:
    """Runs once, before fusion, where `Context.widens` holds and the graph has a layer that gains."""

    name = "widen-halves"

    def run(self, graph: Graph, context: Context) -> bool:
        if not context.widens or not any(_is_half(v) for v in graph.values()):
            return False
        kept = _kept(graph)
        wide = [node for node in graph.nodes if node not in kept and any(_halves(node))]
        reason = _why_not(graph, wide)
        if reason is not None:
            for node in graph.nodes[:1]:
                context.log.refused(self.name, node, reason)
            return False
        _Widening(graph, context, wide).run()
        context.log.applied(self.name, wide[0])
        return True


def _why_not(graph: Graph, wide: list[Node]) -> str | None:
    if is_quantised(graph):
        return "a quantised network keeps the floats between its integers"
    if any(value.type is None for node in graph.nodes for value in node.outputs):
        return "not every type is known"
    if not any((spec := lookup(node.op)) is not None and spec.heavy for node in wide):
        return "no layer gains by it"
    return None


def _is_half(value: Value | None) -> bool:
    return value is not None and value.tensor is not None and value.tensor.dtype in HALVES


def _halves(node: Node) -> Iterator[Value]:
    """The half inputs that are not constant, and the half results of a node."""
    for value in [*node.inputs, *node.outputs]:
        if value is not None and value.const is None and _is_half(value):
            yield value


def _kept(graph: Graph) -> set[Node]:
    """The nodes whose halves stay halves."""
    kept: set[Node] = set()
    leaving = _leaving(graph)

    def is_border(value: Value | None) -> bool:
        return value is not None and (value.producer is None or value.producer in kept)

    for node in graph.nodes:
        given = [v for v in node.inputs if v is not None and v.const is None and _is_half(v)]
        border = [v for v in given if is_border(v)]
        grows = bool(border) and node in leaving
        states = (node.input(i) for i in _CACHES.get(node.op, ()))
        if (
            _says_itself(node)
            or (node.op in _MOVES and (len(border) == len(given) > 0 or grows or _is_table(node)))
            or any(v in border for v in states)
        ):
            kept.add(node)
    for node in reversed(graph.nodes):
        given = [v for v in node.inputs if v is not None and v.const is None and _is_half(v)]
        readers = [user for v in node.outputs for user in v.users]
        if node.op in _MOVES and len(given) == 1 and all(user in kept for user in readers):
            kept.add(node)
    return kept


def _is_table(node: Node) -> bool:
    """Whether a node picks rows of a constant, usually a few of many."""
    return node.op.startswith("Gather") and node.inputs[0] is not None and node.inputs[0].const is not None


def _leaving(graph: Graph) -> set[Node]:
    """Moving nodes that reach a result of the graph through moving nodes only: they may add to a cache."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.op in _MOVES and any(graph.is_output(v) or found & set(v.users) for v in node.outputs):
            found.add(node)
    return found


def _is_weights(node: Node, value: Value) -> bool:
    """Whether weights stay half: reading them limits a product of few rows, and other kernels unpack them once."""
    if node.op not in PRODUCTS or value.const is None or value.const.ndim != 2:
        return False
    return value.const.size >= LEAST_WEIGHTS and min(value.const.shape) > 1


def _says_itself(node: Node) -> bool:
    if node.bodies or node.op in _MAKERS or node.op.startswith(_OTHERS) or lookup(node.op) is None:
        return True
    if any(v is not None and not isinstance(v.type, TensorType) for v in [*node.inputs, *node.outputs]):
        return True
    if node.op != "Cast" and not any(map(_is_half, node.inputs)):  # an attribute determines that the result is half
        return any(map(_is_half, node.outputs))
    # A Cast to halves and back is there to round.
    users = node.output.users
    return node.op == "Cast" and _is_half(node.output) and bool(users) and all(user.op == "Cast" for user in users)


class _Widening:
    """Converts the nodes ``wide`` to nodes over f32."""

    def __init__(self, graph: Graph, context: Context, wide: list[Node]) -> None:
        self.graph, self.context, self.wide = graph, context, set(wide)
        #: results of wide nodes, with their previous types
        self.widened: dict[Value, DType] = {}
        self._made: dict[tuple[Value, DType], Value] = {}

    def run(self) -> None:
        nodes, outputs = self.graph.nodes, self.graph.outputs
        for node in nodes:
            if node in self.wide:
                self._types(node)
        for node in nodes:
            for i, value in enumerate(node.inputs):
                if value is None or node.op in _ASKING:
                    continue
                if node in self.wide and _is_half(value) and not (i == 1 and _is_weights(node, value)):
                    self.graph.set_input(node, i, self._as(value, WIDE))
                elif node not in self.wide and value in self.widened:
                    self.graph.set_input(node, i, self._as(value, self.widened[value]))
        self.graph.outputs = [self._as(v, self.widened[v]) if v in self.widened else v for v in outputs]
        for node in nodes:
            source = node.input(0)
            if node.op == "Cast" and node in self.wide and source is not None and source.type == node.output.type:
                self.graph.replace(node.output, source)
                remove_dead(self.graph, [node])

    def _types(self, node: Node) -> None:
        for value in node.outputs:
            if _is_half(value):
                assert isinstance(value.type, TensorType)
                self.widened[value] = value.type.dtype
                value.type = value.type.with_dtype(WIDE)
                if node.op == "Cast":
                    node.attrs["to"] = WIDE.onnx_code

    def _as(self, value: Value, to: DType) -> Value:
        """The value in another type: one Cast for all readers, or a constant."""
        if (value, to) not in self._made:
            assert isinstance(value.type, TensorType)
            if value.const is not None:
                made = self.graph.constant(self.context.convert(value.const, to), value.name)
            else:
                types, name = [value.type.with_dtype(to)], f"{value.name}_{to.value}"
                made = self.graph.add("Cast", [value], {"to": to.onnx_code}, types=types, name=name).output
            self._made[value, to] = made
        return self._made[value, to]
