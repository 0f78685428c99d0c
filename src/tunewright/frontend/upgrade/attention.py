"""FlexAttention, whose scores and probabilities pass through bodies of the model, as ordinary nodes."""

from __future__ import annotations

import math

import numpy as np

from tunewright.ir.graph import Graph, Value
from tunewright.ir.types import DType

from .base import ALWAYS, OperatorCall, adapter, dtype, infer, ints, last, one


@adapter(ALWAYS, "ai.onnx.preview::FlexAttention")
def flex_attention(graph: Graph, call: OperatorCall) -> list[Value]:
    """Compute softmax(score_mod(Q K^T)) through prob_mod, times V. A head of keys may serve several of queries."""
    query, key, value = (call.needed(i) for i in range(3))
    captured = list(call.inputs[len(call.inputs) - call.captures :])
    resolve(query)
    precision = call.attrs.get("softmax_precision")
    compute = DType.FLOAT64 if dtype(query) is DType.FLOAT64 else DType.FLOAT32
    if precision is not None:
        compute = DType.of_onnx(int(precision))
    factor = _root_of_scale(graph, call, query)
    keys = _repeat_heads(graph, call, query, one(graph, call, "Mul", key, factor))
    values = _repeat_heads(graph, call, query, value)
    keys = one(graph, call, "Transpose", keys, perm=(0, 1, 3, 2))
    scores = one(graph, call, "MatMul", one(graph, call, "Mul", query, factor), keys)
    scores = one(graph, call, "Cast", scores, to=compute.onnx_code)
    if "score_mod" in call.bodies:
        scores = _applied(graph, call, "score_mod", scores, captured)
    odds = one(graph, call, "Softmax", scores, axis=-1)
    if "prob_mod" in call.bodies:
        odds = _applied(graph, call, "prob_mod", odds, captured)
    result = one(graph, call, "MatMul", odds, one(graph, call, "Cast", values, to=compute.onnx_code))
    return last(graph, call, "CastLike", result, value)


def _root_of_scale(graph: Graph, call: OperatorCall, query: Value) -> Value:
    """Return the square root of the scale in the query's type. Both factors of the product are multiplied by it."""
    scale = call.attrs.get("scale")
    size = query.tensor.shape[-1] if query.tensor is not None and query.tensor.shape else None
    if scale is None and isinstance(size, int):
        scale = 1 / math.sqrt(size)
    if scale is None:
        width = one(graph, call, "Cast", one(graph, call, "Shape", query, start=3, end=4), to=DType.FLOAT32.onnx_code)
        root: Value = one(graph, call, "Pow", width, graph.constant(np.asarray(-0.25, np.float32)))
    else:
        root = graph.constant(np.asarray(math.sqrt(scale), np.float32))
    return one(graph, call, "CastLike", root, query)


def _repeat_heads(graph: Graph, call: OperatorCall, query: Value, value: Value) -> Value:
    """Expand [B, heads of keys, S, E] to [B, heads of queries, S, E]."""
    shapes = [None if v.tensor is None or v.tensor.shape is None else v.tensor.shape[1] for v in (query, value)]
    if shapes[0] is not None and shapes[0] == shapes[1]:
        return value
    heads = one(graph, call, "Shape", query, start=1, end=2)
    own = one(graph, call, "Shape", value, start=1, end=2)
    front, back = (one(graph, call, "Shape", value, start=a, end=b) for a, b in ((0, 1), (2, 4)))
    spread = one(graph, call, "Concat", front, own, one(graph, call, "Div", heads, own), back, axis=0)
    whole = one(graph, call, "Concat", front, heads, back, axis=0)
    column = one(graph, call, "Unsqueeze", value, ints(graph, [2]))
    return one(graph, call, "Reshape", one(graph, call, "Expand", column, spread), whole)


def _applied(graph: Graph, call: OperatorCall, name: str, value: Value, captured: list[Value | None]) -> Value:
    """Apply one of the call's bodies by copying its nodes into this graph. Returns its result."""
    body = call.bodies[name]
    if len(body.inputs) != 1 + len(captured) or len(body.outputs) != 1:
        raise ValueError(f"{name} must take one tensor and make one")
    mapping: dict[Value, Value | None] = dict(zip(body.inputs, [value, *captured], strict=True))

    def of(old: Value | None) -> Value | None:
        if old is not None and old.const is not None and old not in mapping:
            mapping[old] = graph.constant(old.const, old.name)
        return None if old is None else mapping[old]

    for node in body.nodes:
        twin = graph.add(
            node.op,
            [of(v) for v in node.inputs],
            node.attrs,
            outputs=[v.name for v in node.outputs],
            name=graph.fresh(f"{call.name}/{node.name}"),
            origin=(call.name,),
            bodies=node.bodies,
            captures=node.captures,
        )
        mapping.update(zip(node.outputs, twin.outputs, strict=True))
    result = of(body.outputs[0])
    assert result is not None
    return result


def resolve(value: Value) -> None:
    """Infer the types that the type of a value depends on."""
    seen: set[Value] = set()
    stack = [value]
    while stack:
        top = stack[-1]
        node = top.producer
        inputs = node.inputs if node is not None else []
        waiting = [v for v in inputs if v is not None and v.type is None and v not in seen]
        if top.type is None and waiting:
            seen.update(waiting)
            stack.extend(waiting)
        else:
            if top.type is None and node is not None:
                infer(node.outputs)
            stack.pop()
