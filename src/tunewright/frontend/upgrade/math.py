"""Old forms of arithmetic, reductions and activations."""

from __future__ import annotations

import numpy as np

from tunewright.ir.graph import Graph, Value

from ..protobuf_messages import onnx
from .base import OperatorCall, adapter, align, emit, ints, last, one, rank, scalar


@adapter(7, "Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor", "Equal", "Less", "Greater")
def legacy_broadcast(graph: Graph, call: OperatorCall) -> OperatorCall:
    """Replace ``broadcast`` and ``axis``, which aligned B's dimensions with A's (without an axis by numpy's rule)."""
    axis = call.attrs.get("axis") if call.attrs.get("broadcast") else None
    call = call.without("axis", "broadcast")
    if axis is None:
        return call
    a, b = call.needed(0), call.needed(1)
    return call.taking(a, align(graph, call, a, b, int(axis)))


@adapter(7, "PRelu")
def prelu_per_channel(graph: Graph, call: OperatorCall) -> OperatorCall:
    """Align a slope with one element per channel to axis 1."""
    x, slope = call.needed(0), call.needed(1)
    return call.taking(x, align(graph, call, x, slope, 1))


@adapter(7, "Gemm")
def gemm_broadcast(graph: Graph, call: OperatorCall) -> OperatorCall:
    return call.without("broadcast")


@adapter(6, "Selu")
def selu_defaults(graph: Graph, call: OperatorCall) -> OperatorCall:
    return call.having(alpha=call.attrs.get("alpha", 1.6732), gamma=call.attrs.get("gamma", 1.0507))


@adapter(6, "Cast")
def cast_by_name(graph: Graph, call: OperatorCall) -> OperatorCall:
    """Convert ``to`` from the name of a type to its number."""
    to = call.attrs["to"]
    return call.having(to=onnx.TensorProto.DataType.Value(to.upper())) if isinstance(to, str) else call


@adapter(11, "Clip")
def clip_bounds(graph: Graph, call: OperatorCall) -> OperatorCall:
    """Turn the bounds into inputs. Their defaults were the limits of float32."""
    x = call.needed(0)
    limit = float(np.finfo(np.float32).max)
    bounds = [scalar(graph, call, call.attrs.get(k, d), x) for k, d in (("min", -limit), ("max", limit))]
    return call.without("min", "max").taking(x, *bounds)


@adapter(13, "Softmax", "LogSoftmax", "Hardmax")
def softmax_over_the_rest(graph: Graph, call: OperatorCall) -> OperatorCall | list[Value]:
    """Flatten: the old form ran over all dimensions from ``axis`` on, the new one runs over one dimension."""
    x = call.needed(0)
    axis, dims = int(call.attrs.get("axis", 1)), rank(x)
    if axis == -1 or (dims is not None and axis == dims - 1):
        return call.having(axis=-1)
    flat = one(graph, call, "Flatten", x, axis=axis)
    (result,) = emit(graph, call, call.op, [flat], {"axis": -1}, name=call.name)
    return last(graph, call, "Reshape", result, one(graph, call, "Shape", x), allowzero=1)


def axes_to_input(graph: Graph, call: OperatorCall) -> OperatorCall:
    """Turn ``axes`` into an input."""
    axes = call.attrs.get("axes")
    return call if axes is None else call.without("axes").taking(call.input(0), ints(graph, axes, "axes"))


adapter(13, "ReduceSum", "Squeeze", "Unsqueeze")(axes_to_input)
adapter(
    18,
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ReduceProd",
    "ReduceSumSquare",
)(axes_to_input)


@adapter(20, "DFT")
def dft_axis(graph: Graph, call: OperatorCall) -> OperatorCall:
    """Turn ``axis`` into an input, with the old default."""
    axis = ints(graph, int(call.attrs.get("axis", 1)), "axis")
    return call.without("axis").taking(call.input(0), call.input(1), axis)
