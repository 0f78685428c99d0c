"""Experimental operators of ONNX 1.0 to 1.4 that left the standard and still occur in old files."""

from __future__ import annotations

import numpy as np

from tunewright.ir.graph import Graph, Value

from .base import ALWAYS, OperatorCall, adapter, ints, last, one, scalar


@adapter(ALWAYS, "Affine")
def affine(graph: Graph, call: OperatorCall) -> list[Value]:
    """Compute alpha * x + beta."""
    x = call.needed(0)
    scaled = one(graph, call, "Mul", x, scalar(graph, call, call.attrs.get("alpha", 1.0), x))
    return last(graph, call, "Add", scaled, scalar(graph, call, call.attrs.get("beta", 0.0), x))


@adapter(ALWAYS, "Scale")
def scale(graph: Graph, call: OperatorCall) -> list[Value]:
    x = call.needed(0)
    return last(graph, call, "Mul", x, scalar(graph, call, call.attrs.get("scale", 1.0), x))


@adapter(ALWAYS, "ImageScaler")
def image_scaler(graph: Graph, call: OperatorCall) -> list[Value]:
    """Compute scale * x + the bias of the channel."""
    x = call.needed(0)
    bias = np.asarray(call.attrs.get("bias", (0.0,)), np.float32).reshape(-1, 1, 1)
    scaled = one(graph, call, "Mul", x, scalar(graph, call, call.attrs.get("scale", 1.0), x))
    return last(graph, call, "Add", scaled, one(graph, call, "CastLike", graph.constant(bias), x))


@adapter(ALWAYS, "ScaledTanh", "ParametricSoftplus")
def scaled_activation(graph: Graph, call: OperatorCall) -> list[Value]:
    """Compute alpha * f(beta * x)."""
    x = call.needed(0)
    inner = one(graph, call, "Mul", x, scalar(graph, call, call.attrs.get("beta", 1.0), x))
    outer = one(graph, call, "Tanh" if call.op == "ScaledTanh" else "Softplus", inner)
    return last(graph, call, "Mul", outer, scalar(graph, call, call.attrs.get("alpha", 1.0), x))


@adapter(ALWAYS, "Crop")
def crop(graph: Graph, call: OperatorCall) -> list[Value]:
    """Cut a border off the last two dimensions: left, top, right, bottom. ``scale`` sets height and width instead."""
    left, top, right, bottom = (int(v) for v in call.attrs["border"])
    ends = [-bottom or np.iinfo(np.int64).max, -right or np.iinfo(np.int64).max]
    if "scale" in call.attrs:
        height, width = (int(v) for v in call.attrs["scale"])
        ends = [top + height, left + width]
    return last(graph, call, "Slice", call.needed(0), ints(graph, [top, left]), ints(graph, ends), ints(graph, [2, 3]))


@adapter(ALWAYS, "DynamicSlice")
def dynamic_slice(graph: Graph, call: OperatorCall) -> OperatorCall:
    return call.named("Slice")


@adapter(ALWAYS, "GivenTensorFill")
def given_tensor_fill(graph: Graph, call: OperatorCall) -> list[Value]:
    """Turn the operator into a constant."""
    if call.inputs:
        raise ValueError("a shape that comes as an input is not supported")
    values = np.asarray(call.attrs["values"], np.float32)
    return [graph.constant(values.reshape(call.attrs.get("shape", values.shape)), call.outputs[0])]


@adapter(9, "MeanVarianceNormalization")
def mean_variance_across(graph: Graph, call: OperatorCall) -> OperatorCall | list[Value]:
    """Convert ``across_channels`` and ``normalize_variance`` to ``axes``; images only."""
    x = call.needed(0)
    axes = (1, 2, 3) if call.attrs.get("across_channels", 0) else (2, 3)
    variance = call.attrs.get("normalize_variance", 1)
    call = call.without("across_channels", "normalize_variance")
    if variance:
        return call.having(axes=axes)
    return last(graph, call, "Sub", x, one(graph, call, "ReduceMean", x, ints(graph, axes)))
