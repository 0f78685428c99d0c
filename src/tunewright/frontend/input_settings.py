"""Changes that settings make to a model before it is compiled: NV12_TWO_INPUTS and DYN_BATCH_ENABLED."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import SettingsError
from ..ir.graph import Graph, Value
from ..ir.types import Dim, DType, TensorType
from ..settings import Settings
from .model import Model

#: BT.601, as in OpenCV and OpenVINO: blue, green and red from (Y - 16, U - 128, V - 128)
_COLOURS = np.array([[1.164, 2.018, 0.0], [1.164, -0.391, -0.813], [1.164, 0.0, 1.596]], np.float32)
_ZERO = np.array([16, 128, 128], np.float32)


def adapted(model: Model, settings: Settings) -> Model:
    """Return the model with the inputs that these settings ask for; mostly the model itself."""
    if settings.nv12_two_inputs:
        model = replace(model, graph=two_planes(model.graph))
    return open_batch(model) if settings.dyn_batch_enabled else model


def open_batch(model: Model) -> Model:
    """Let a model with a fixed batch also take fewer examples (DYN_BATCH_ENABLED). All inputs must share the batch."""
    types = model.inputs
    first = {t.shape[0] for t in types.values() if isinstance(t, TensorType) and t.shape}
    fixed = all(isinstance(t, TensorType) and t.shape for t in types.values())
    if not fixed or len(first) != 1 or not isinstance(batch := first.pop(), int):
        hint = "all inputs need the same fixed first dimension; a model with an open one takes any batch without it"
        raise SettingsError("the model has no fixed batch", where="DYN_BATCH_ENABLED", hint=hint)
    shapes = {n: (f"batch<={batch}", *t.shape[1:]) for n, t in types.items() if isinstance(t, TensorType) and t.shape}
    return model.reshape(shapes)


def two_planes(graph: Graph) -> Graph:
    """Return a copy whose pictures come as the planes of NV12 (NV12_TWO_INPUTS).

    A picture is an input [N, 3, H, W] in blue, green and red. Such an input ``x`` becomes ``x/y``, uint8 [N, H, W, 1],
    and ``x/uv``, uint8 [N, H/2, W/2, 2].
    """
    graph = graph.clone()
    pictures = [v for v in graph.inputs if _is_picture(v)]
    if not pictures:
        raise SettingsError("no input is a picture: [N, 3, H, W]", where="NV12_TWO_INPUTS")
    for value in pictures:
        _split(graph, value)
    graph.sort()
    for node in graph.nodes:
        for value in node.outputs:
            value.type = None
    return graph


def _is_picture(value: Value) -> bool:
    type = value.type
    return isinstance(type, TensorType) and type.shape is not None and len(type.shape) == 4 and type.shape[1] == 3


def _split(graph: Graph, value: Value) -> None:
    type = value.type
    assert isinstance(type, TensorType) and type.shape is not None
    count, _, height, width = type.shape
    halves = []
    for size in (height, width):
        if not isinstance(size, int) or size % 2:
            hint = "set them with Model.reshape"
            raise SettingsError(f"{type}: height and width must be even numbers", where="NV12_TWO_INPUTS", hint=hint)
        halves.append(size // 2)
    readers, is_output = list(value.uses), graph.is_output(value)

    def node(op: str, *inputs: Value | None, **attrs: Any) -> Value:
        return graph.add(op, inputs, attrs, name=graph.fresh(f"{value.name}/{op.lower()}")).output

    def plane(name: str, *dims: Dim) -> Value:
        given = graph.add_input(f"{value.name}/{name}", TensorType(DType.UINT8, (count, *dims)))
        return node("Transpose", node("Cast", given, to=DType.FLOAT32.onnx_code), perm=(0, 3, 1, 2))

    light, colour = plane("y", height, width, 1), plane("uv", *halves, 2)
    scales = graph.constant(np.array([1, 1, 2, 2], np.float32))
    attrs = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    whole = node("Concat", light, node("Resize", colour, None, scales, None, **attrs), axis=1)
    bias = -(_COLOURS @ _ZERO)
    last = node("Conv", whole, graph.constant(_COLOURS.reshape(3, 3, 1, 1).copy()), graph.constant(bias))
    last = node("Clip", last, *(graph.constant(np.array(limit, np.float32)) for limit in (0, 255)))
    if not type.dtype.is_float:
        last = node("Round", last)
    if type.dtype is not DType.FLOAT32:
        last = node("Cast", last, to=type.dtype.onnx_code)
    for reader, i in readers:
        graph.set_input(reader, i, last)
    if is_output:
        graph.outputs = [last if v is value else v for v in graph.outputs]
    # put the planes at the picture's position
    at, planes = graph.inputs.index(value), graph.inputs[-2:]
    del graph.inputs[-2:]
    graph.inputs[at : at + 1] = planes
