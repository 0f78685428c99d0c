"""Attention that reads queries, keys and values in place: one product computes all three, and no node moves them.

Products of one tensor with constant weights become one product with the weights side by side. That is one launch, which
reads the tensor once and has more tiles to distribute. Splitting its result would cost what it gains. Therefore it is
done only where the device has an attention that takes strides (`ops.internal.strided_attention`). The same attention
saves the Splits and Transposes of models that already have one product, and the Transpose behind an attention. Shapes
must be known: before that a device cannot tell which problems it accepts. The pass runs after fusion.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import numpy as np

from tunewright.ir.graph import Fused, Graph, Node, Value, freeze
from tunewright.ir.symbolic import sym_array
from tunewright.ir.types import PLAIN, TensorType
from tunewright.ops import lookup
from tunewright.ops.base import Array
from tunewright.ops.infer import infer_node
from tunewright.ops.internal.strided_attention import MULTI_HEAD, STRIDED

from .. import value_facts
from ..base import Context, Joined
from ..pattern import remove_dead
from ..placement.views import PartialView, view

_PRODUCTS = frozenset({"MatMul", "Gemm"})
#: [batch, rows, heads, elements] -> [batch, heads, rows, elements], and back
_TURN = (0, 2, 1, 3)


@dataclass(eq=False)
class _Product:
    """One of the products to be joined."""

    node: Node
    weights: Array
    #: constants per column: a Gemm's bias, then the operands of the epilogue
    vectors: list[Array] = field(default_factory=list)

    @property
    def affine(self) -> tuple[Array | None, Array | None] | None:
        """The addend and the factor of each column, for a MatMul with no other epilogue; else None."""
        steps = [(s.op, set(s.args)) for s in self.node.epilogue]
        known = {n: [("Add", {~0, 2}), ("Mul", {~1, 3})][:n] for n in range(3)}
        if self.node.op != "MatMul" or steps not in (*known.values(), [("Mul", {~0, 2})]):
            return None
        if len(steps) == 1 and steps[0][0] == "Mul":
            return None, self.vectors[0]
        bias, scale = [*self.vectors, None, None][:2]
        return bias, scale

    @property
    def columns(self) -> int:
        return int(self.weights.shape[0 if self.node.attrs.get("transB", 0) else 1])


class StrideAttention:
    """Tries each attention once its shapes are known."""

    name = "attention-strides"

    def run(self, graph: Graph, context: Context) -> bool:
        if context.layouts is None:  # the host runs the model's operations
            return False
        found = [n for n in graph.nodes if n.op in ("Attention", MULTI_HEAD) and not n.epilogue]
        return sum(_rewrite(graph, node, context) for node in found) > 0


def _rewrite(graph: Graph, node: Node, context: Context) -> bool:
    views = _heads(graph, node)
    if views is None:
        return False
    products = _products(graph, node, views)
    last, order = _result(graph, node)
    joins = any(len(group) > 1 for group in products.values())
    if not joins and last is node and not any(v.moves for v in views):
        return False  # nothing would be saved
    # Ask the device before copying any weights.
    sources: list[Value] = []
    waiting: list[tuple[int, tuple[_Product, ...]]] = []
    for i, each in enumerate(views):
        group = tuple(products.get(each.value, ()))
        if len(group) < 2:
            sources += [each.value] if each.value not in sources else []
            continue
        known = next((at for at, other in waiting if other == group), None)
        if known is None:
            known = len(sources)
            waiting.append((known, group))
            sources.append(graph.value(f"{group[0].node.name}_joined", _joined_type(group)))
        views[i] = _moved(each, group, sources[known])
    new = _add(graph, node, views, sources, order)
    reason = context.works_in(new, PLAIN, [])
    if reason is not None:
        context.log.refused(StrideAttention.name, node, reason)
        graph.remove(new)
        return False
    for at, group in waiting:
        graph.set_input(new, at, _join(graph, group, sources[at], context))
    _replace(graph, last, new)
    through = [n for v in views for n in reversed(v.through)]
    # Nodes between all three and the product occur once for each, and are removed the last time.
    remove_dead(graph, [last, node, *through, *(p.node for _, group in waiting for p in group)])
    context.log.applied(StrideAttention.name, new)
    return True


# -- queries, keys, values and the result -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Heads:
    """Queries, keys or values: a view [batch, heads, rows, elements] of a value, whose elements are adjacent."""

    value: Value
    dims: tuple[int, ...]
    start: int
    batch: int
    head: int
    row: int
    #: the number of successive heads that read the same one
    sharing: int
    moves: bool
    through: tuple[Node, ...]

    @staticmethod
    def of(each: PartialView) -> _Heads | None:
        batch, heads, rows, elements = each.axes
        sharing = 1
        if len(heads) and heads[-1][1] == 0:
            *heads_, (sharing, _) = heads
            heads = tuple(heads_)
        if max(map(len, (batch, heads, rows, elements))) > 1 or (elements and elements[0][1] != 1):
            return None
        steps = [axis[0][1] if axis else 0 for axis in (batch, heads, rows)]
        dims = (each.dims[0], each.dims[1] // sharing, *each.dims[2:])
        return _Heads(each.value, dims, each.start, steps[0], steps[1], steps[2], sharing, each.moves, each.through)


def _heads(graph: Graph, node: Node) -> list[_Heads] | None:
    """Queries, keys and values; None where their types or strides do not suffice."""
    types = [value_facts.static(v) for v in (*node.inputs[:3], node.output)]
    if len(types) < 4 or any(t is None or t.layout != PLAIN or len(t.dims) not in (3, 4) for t in types):
        return None
    if any(graph.is_read(v) for v in node.outputs[1:]):
        return None
    names = ("num_heads",) * 3 if node.op == MULTI_HEAD else ("q_num_heads", "kv_num_heads", "kv_num_heads")
    found = []
    for value, name in zip(node.inputs[:3], names, strict=True):
        assert value is not None
        each = view(value)
        if each is not None and len(each.axes) == 3:
            heads, (batch, length, width) = int(node.attrs.get(name, 0)), each.dims
            split = each.reshaped((batch, length, heads, width // max(heads, 1)))
            each = None if split is None else split.permuted(_TURN)
        one = None if each is None else _Heads.of(each)
        if one is None:
            return None
        found.append(one)
    q, k, v = found
    # Heads that share keys share values, and each query has a separate head.
    return found if q.sharing == 1 and k.sharing == v.sharing and (k.sharing == 1 or node.op != MULTI_HEAD) else None


def _result(graph: Graph, node: Node) -> tuple[Node, tuple[int, ...]]:
    """The node whose result is needed, the attention or a Transpose behind it, and the order of its axes."""
    if value_facts.rank(node.output) == 3:
        return node, _TURN
    users = node.output.users
    if len(users) == 1 and users[0].op == "Transpose" and not graph.is_output(node.output) and not users[0].epilogue:
        perm = tuple(int(p) for p in users[0].attrs.get("perm", ()))
        if len(perm) == 4 and perm[3] == 3:
            return users[0], perm
    return node, (0, 1, 2, 3)


def _add(graph: Graph, node: Node, views: Sequence[_Heads], sources: Sequence[Value], order: tuple[int, ...]) -> Node:
    """Adds the strided attention that replaces another one."""
    q, k, v = views
    attrs: dict[str, Any] = {a: x for a, x in node.attrs.items() if a not in ("q_num_heads", "kv_num_heads")}
    attrs |= {
        "main": node.op, "sizes": (*q.dims[:2], k.dims[1], q.dims[2], k.dims[2], q.dims[3], v.dims[3]),
        "sources": tuple(sources.index(each.value) for each in views), "order": order,
        **{name: (each.start, each.batch, each.head, each.row) for name, each in zip("qkv", views, strict=True)},
    }  # fmt: skip
    made = graph.add(STRIDED, [*sources, *node.inputs[3:]], attrs, name=node.name, origin=node.origin)
    _infer(made)
    return made


def _replace(graph: Graph, last: Node, new: Node) -> None:
    """Replaces the result of ``last`` with the strided attention's result, in the shape that readers expect."""
    old, made = last.output, new.output
    assert isinstance(old.type, TensorType)
    if old.type != made.type:
        shape = graph.constant(sym_array(old.type.dims), "shape")
        made = graph.add("Reshape", [made, shape], types=[old.type], name=f"{new.name}_shape", origin=new.origin).output
    made.name, old.name = old.name, made.name
    graph.replace(old, made)


def _infer(node: Node) -> None:
    spec = lookup(node.op)
    assert spec is not None
    infer_node(node, spec)


# -- products ---------------------------------------------------------------------------------------------------------


def _products(graph: Graph, node: Node, views: Sequence[_Heads]) -> dict[Value, list[_Product]]:
    """The products that make queries, keys and values, each with the group of products that it can be joined with."""
    found: dict[Value, _Product] = {}
    for each in views:
        product = _product_of(graph, each, node)
        if product is not None:
            found[each.value] = product
    groups: dict[Hashable, list[_Product]] = {}
    for product in found.values():
        groups.setdefault(_kind(product), []).append(product)
    return {value: groups[_kind(product)] for value, product in found.items()}


def _product_of(graph: Graph, each: _Heads, reader: Node) -> _Product | None:
    """The product that makes a view, or None.

    Only ``reader`` may read it, and its constants may vary only from column to column.
    """
    node = each.value.producer
    if node is None or node.op not in _PRODUCTS or node.attrs.get("transA", 0):
        return None
    between = [each.value, *(n.output for n in each.through)]
    for value, only in zip(between, [*each.through, reader], strict=True):
        if value.users != [only] or graph.is_output(value):
            return None
    weights, left = node.inputs[1], value_facts.static(node.inputs[0])
    if weights is None or weights.const is None or weights.const.ndim != 2 or left is None or left.layout != PLAIN:
        return None
    found = _Product(node, weights.const)
    columns = found.columns
    for operand in node.inputs[2:]:
        array = None if operand is None else operand.const
        if array is None or array.size not in (1, columns) or array.shape[-1:] not in ((), (array.size,)):
            return None
        found.vectors.append(np.broadcast_to(array.reshape(-1), (columns,)))
    # Rows of the view are rows of the product, and heads lie within them.
    inside = each.start % columns + (each.dims[1] - 1) * each.head + each.dims[3] <= columns
    return found if inside and each.batch % columns == 0 and each.row % columns == 0 else None


def _kind(product: _Product) -> Hashable:
    """Products of equal kinds can be joined: a missing bias is a bias of zeros, a missing scale one of ones."""
    node = product.node
    types = tuple(value_facts.dtype(v) for v in node.inputs)
    main = (node.op, node.inputs[0], freeze(node.attrs), value_facts.dtype(node.output))
    if product.affine is not None:
        return (*main, types[:2])
    return (*main, types, len(node.main_inputs), tuple((s.op, s.args, freeze(s.attrs)) for s in node.epilogue))


def _joined_type(group: Sequence[_Product]) -> TensorType:
    one = value_facts.static(group[0].node.output)
    assert one is not None
    return one.with_shape((*one.dims[:-1], sum(p.columns for p in group)))


def _moved(each: _Heads, group: Sequence[_Product], to: Value) -> _Heads:
    """The view of one product's result as a view of the joined result."""
    at = next(i for i, p in enumerate(group) if p.node is each.value.producer)
    columns, total = group[at].columns, sum(p.columns for p in group)
    before = sum(p.columns for p in group[:at])
    start = each.start // columns * total + before + each.start % columns
    batch, row = (step // columns * total for step in (each.batch, each.row))
    return replace(each, value=to, start=start, batch=batch, row=row)


def _join(graph: Graph, group: Sequence[_Product], to: Value, context: Context) -> Value:
    """Adds one product in place of the group."""
    first = group[0].node
    weights = _side_by_side(context, [p.weights for p in group], 0 if first.attrs.get("transB", 0) else 1)
    inputs: list[Value | None] = [first.inputs[0], graph.constant(weights, to.name)]
    vectors, epilogue = _behind(group)
    inputs += [graph.constant(np.concatenate(parts), to.name) for parts in vectors]
    made = graph.add(
        first.op, inputs, first.attrs, types=[to.type], name=first.name,
        origin=[name for p in group for name in p.node.origin], epilogue=epilogue,
        operands=len(inputs) - 2 if first.op == "MatMul" else first.operands,
    )  # fmt: skip
    return made.output


def _behind(group: Sequence[_Product]) -> tuple[list[list[Array]], tuple[Fused, ...]]:
    """The constants of the joined product, each as the parts of all products, and its epilogue."""
    each = [p.affine for p in group]
    if any(affine is None for affine in each):
        return [list(parts) for parts in zip(*(p.vectors for p in group), strict=True)], group[0].node.epilogue
    vectors: list[list[Array]] = []
    epilogue: list[Fused] = []
    for k, (op, neutral) in enumerate((("Add", 0), ("Mul", 1))):
        given = [affine[k] if affine is not None else None for affine in each]
        known = next((v for v in given if v is not None), None)
        if known is not None:
            epilogue.append(Fused(op, (~len(epilogue), 2 + len(epilogue))))
            vectors.append([np.full(p.columns, neutral, known.dtype) if v is None else v
                            for p, v in zip(group, given, strict=True)])  # fmt: skip
    return vectors, tuple(epilogue)


def _side_by_side(context: Context, parts: Sequence[Array], axis: int) -> Array:
    """The arrays joined along an axis; all plans of a model share the result."""
    key = (axis, *map(id, parts))
    found = context.joined.get(key)
    if found is None or any(kept() is not part for kept, part in zip(found.parts, parts, strict=True)):
        found = context.joined[key] = Joined(tuple(ref(p) for p in parts), np.concatenate(parts, axis))
    return found.whole
