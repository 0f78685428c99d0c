"""Old forms of normalisation, dropout, pooling and recurrent layers."""

from __future__ import annotations

from tunewright.ir.graph import Graph, Value
from tunewright.ir.types import DType

from .base import OperatorCall, adapter, dtype, emit, ints, last, one, rank, scalar


@adapter(9, "BatchNormalization")
def batch_norm_per_activation(graph: Graph, call: OperatorCall) -> OperatorCall | list[Value]:
    """Expand normalisation with ``spatial`` = 0, where parameters have one element for each activation of a sample."""
    spatial = call.attrs.get("spatial", 1)
    call = call.without("spatial")
    x, scale, bias, mean, variance = (call.needed(i) for i in range(5))
    if spatial or rank(scale) == 1:
        return call
    if len(call.outputs) > 1:
        raise ValueError("per-activation batch normalisation cannot be trained")
    shifted = one(graph, call, "Add", variance, scalar(graph, call, call.attrs.get("epsilon", 1e-5), x))
    normal = one(graph, call, "Div", one(graph, call, "Sub", x, mean), one(graph, call, "Sqrt", shifted))
    return last(graph, call, "Add", one(graph, call, "Mul", normal, scale), bias)


@adapter(14, "BatchNormalization")
def batch_norm_outputs(graph: Graph, call: OperatorCall) -> OperatorCall | list[Value]:
    """Convert training calls: more than one output meant training, with up to five (running and batch statistics)."""
    testing = call.attrs.get("is_test", 0)
    call = call.without("is_test")
    statistics = [call.needed(3), call.needed(4)]
    count = len(call.outputs)
    if count == 1:
        return call
    if testing:
        (y,) = emit(graph, call, call.op, call.inputs, call.attrs, call.outputs[:1], call.name)
        return [y, *statistics, *statistics][:count]
    trained = call.having(training_mode=1)
    results = emit(graph, call, call.op, call.inputs, trained.attrs, call.outputs[:3], call.name)
    if count > 3:  # with a momentum of 0 the running statistics are those of the batch
        batch = emit(graph, call, call.op, call.inputs, trained.having(momentum=0.0).attrs, 3)
        results = [*results, *batch[1:]]
    return results[:count]


@adapter(12, "Dropout")
def dropout_inference(graph: Graph, call: OperatorCall) -> OperatorCall:
    """Drop ``ratio``: without the training input, Dropout copies its input."""
    call = call.without("ratio", "is_test").taking(call.input(0))
    return call if len(call.outputs) > 1 else call.named("Identity")


@adapter(10, "Dropout")
def dropout_mask(graph: Graph, call: OperatorCall) -> OperatorCall | list[Value]:
    """Cast the mask to the data's type, which it had before."""
    if len(call.outputs) < 2:
        return call
    x = call.needed(0)
    y, mask = emit(graph, call, "Dropout", [x], {}, [call.outputs[0], f"{call.outputs[1]}/bool"], call.name)
    return [y, emit(graph, call, "CastLike", [mask, x], {}, call.outputs[1:2])[0]]


@adapter(21, "GroupNormalization")
def group_norm_per_channel(graph: Graph, call: OperatorCall) -> OperatorCall:
    """Expand scale and bias from one element per group to one per channel."""
    x, groups = call.needed(0), int(call.attrs["num_groups"])
    channels = x.tensor.shape[1] if x.tensor is not None and x.tensor.shape is not None else None
    if isinstance(channels, int) and groups:
        shape = ints(graph, [groups, channels // groups])
    else:
        count = one(graph, call, "Shape", x, start=1, end=2)
        shape = one(
            graph, call, "Concat", ints(graph, [groups]), one(graph, call, "Div", count, ints(graph, [groups])), axis=0
        )

    def spread(value: Value) -> Value:
        column = one(graph, call, "Unsqueeze", value, ints(graph, [1]))
        return one(graph, call, "Reshape", one(graph, call, "Expand", column, shape), ints(graph, [-1]))

    return call.taking(x, spread(call.needed(1)), spread(call.needed(2)))


@adapter(7, "LSTM", "GRU", "RNN")
def recurrent_sequence(graph: Graph, call: OperatorCall) -> OperatorCall:
    """Drop ``output_sequence``, which only said whether Y is wanted, and fix the misspelt default direction."""
    call = call.without("output_sequence")
    return call.having(direction="forward") if call.attrs.get("direction") == "foward" else call


@adapter(2, "LpPool", "GlobalLpPool")
def integral_norm(graph: Graph, call: OperatorCall) -> OperatorCall:
    """Convert ``p`` from float to int."""
    p = float(call.attrs.get("p", 2.0))
    if not p.is_integer():
        raise ValueError(f"p = {p} is not an integer")
    return call.having(p=int(p))


@adapter(2, "ai.onnx.ml::LabelEncoder")
def label_encoder_classes(graph: Graph, call: OperatorCall) -> OperatorCall:
    """Split the single list of classes, which served both directions, by the input's type."""
    classes = tuple(call.attrs.get("classes_strings", ()))
    call = call.without("classes_strings")
    numbers = tuple(range(len(classes)))
    if dtype(call.needed(0)) is DType.INT64:
        return call.without("default_int64").having(keys_int64s=numbers, values_strings=classes)
    return call.without("default_string").having(keys_strings=classes, values_int64s=numbers)
