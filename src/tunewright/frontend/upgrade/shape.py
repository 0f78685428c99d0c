"""Old forms of operators that move, cut, repeat or resample data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tunewright.ir.graph import Graph, Value

from ..protobuf_messages import onnx
from .base import ALWAYS, OperatorCall, adapter, ints, last, one, scalar


@adapter(4, "Concat")
def concat_axis(graph: Graph, call: OperatorCall) -> OperatorCall:
    return call.having(axis=call.attrs.get("axis", 1))


@adapter(5, "Reshape")
def reshape_shape(graph: Graph, call: OperatorCall) -> OperatorCall:
    """Turn ``shape`` into an input."""
    return call.without("shape").taking(call.input(0), ints(graph, call.attrs["shape"], "shape"))


@adapter(6, "Tile")
def tile_one_axis(graph: Graph, call: OperatorCall) -> OperatorCall:
    """Convert repetition along one axis, with count and axis of any numeric type."""
    x, tiles, axis = call.needed(0), call.needed(1), call.needed(2)
    at, count = (
        one(graph, call, "Reshape", one(graph, call, "Cast", v, to=onnx.TensorProto.INT64), ints(graph, [1]))
        for v in (axis, tiles)
    )
    dims = one(graph, call, "Shape", one(graph, call, "Shape", x))
    ones = one(graph, call, "ConstantOfShape", dims, value=np.ones(1, np.int64))
    return call.taking(x, one(graph, call, "ScatterElements", ones, at, count, axis=0))


@adapter(2, "Pad")
def pad_paddings(graph: Graph, call: OperatorCall) -> OperatorCall:
    return call.without("paddings").having(pads=call.attrs["paddings"])


@adapter(11, "Pad")
def pad_inputs(graph: Graph, call: OperatorCall) -> OperatorCall:
    """Turn ``pads`` and ``value`` into inputs."""
    x, pads = call.needed(0), ints(graph, call.attrs["pads"], "pads")
    number = call.attrs.get("value", 0.0)
    return call.without("pads", "value").taking(x, pads, *([scalar(graph, call, number, x)] if number else []))


@adapter(10, "Slice")
def slice_inputs(graph: Graph, call: OperatorCall) -> OperatorCall:
    """Turn ``starts``, ``ends`` and ``axes`` into inputs."""
    inputs = [ints(graph, call.attrs[k], k) for k in ("starts", "ends", "axes") if k in call.attrs]
    return call.without("starts", "ends", "axes").taking(call.input(0), *inputs)


@adapter(13, "Split")
def split_sizes(graph: Graph, call: OperatorCall) -> OperatorCall:
    """Turn the attribute ``split`` into an input (the first version allowed both)."""
    sizes = call.attrs.get("split")
    call = call.without("split")
    return call if sizes is None else call.taking(call.input(0), ints(graph, sizes, "split"))


@adapter(18, "Split")
def split_count(graph: Graph, call: OperatorCall) -> OperatorCall:
    """Without sizes, take the number of parts from the number of outputs."""
    return call if call.input(1) is not None else call.having(num_outputs=len(call.outputs))


@adapter(10, "TopK")
def topk_k(graph: Graph, call: OperatorCall) -> OperatorCall:
    return call.without("k").taking(call.input(0), ints(graph, [int(call.attrs["k"])], "k"))


@adapter(ALWAYS, "Scatter")
def scatter(graph: Graph, call: OperatorCall) -> OperatorCall:
    return call.named("ScatterElements")


@adapter(ALWAYS, "Upsample")
def upsample(graph: Graph, call: OperatorCall) -> OperatorCall | list[Value]:
    """Convert to Resize. The scales were two attributes, then one, then an input."""
    x = call.needed(0)
    if "height_scale" in call.attrs:
        factors: Value = graph.constant(
            np.asarray([1, 1, call.attrs["height_scale"], call.attrs["width_scale"]], np.float32), "scales"
        )
    elif "scales" in call.attrs:
        factors = graph.constant(np.asarray(call.attrs["scales"], np.float32), "scales")
    else:
        factors = call.needed(1)
    mode = "nearest" if call.attrs.get("mode", "nearest") == "nearest" else "linear"
    return resize_10(graph, replace(call, op="Resize", inputs=[x, factors], attrs={"mode": mode}))


@adapter(11, "Resize")
def resize_10(graph: Graph, call: OperatorCall) -> OperatorCall | list[Value]:
    """Set asymmetric coordinates; nearest rounded down when enlarging and up when shrinking."""
    x, scales = call.needed(0), call.needed(1)
    call = call.having(coordinate_transformation_mode="asymmetric")
    if call.attrs.get("mode", "nearest") != "nearest":
        return call.taking(x, None, scales)
    if scales.const is not None and (scales.const >= 1).all():
        return call.having(nearest_mode="floor").taking(x, None, scales)
    if scales.const is not None and (scales.const <= 1).all():
        return call.having(nearest_mode="ceil").taking(x, None, scales)
    unit = graph.constant(np.ones(1, np.float32))
    grow, shrink = one(graph, call, "Max", scales, unit), one(graph, call, "Min", scales, unit)
    larger = one(graph, call, "Resize", x, None, grow, **call.having(nearest_mode="floor").attrs)
    return last(graph, call, "Resize", larger, None, shrink, **call.having(nearest_mode="ceil").attrs)


@adapter(ALWAYS, "Resize")
def resize_normal_form(graph: Graph, call: OperatorCall) -> OperatorCall:
    """Treat constant empty inputs as absent, and express a removed coordinate mode with a current one."""
    inputs = [v if i == 0 or v is None or v.const is None or v.const.size else None for i, v in enumerate(call.inputs)]
    if call.attrs.get("coordinate_transformation_mode") == "tf_half_pixel_for_nn":
        # Its coordinates are those of half_pixel plus one half, which another rounding mode absorbs.
        rounding = {"floor": "round_prefer_ceil", "round_prefer_floor": "ceil"}
        nearest = call.attrs.get("nearest_mode", "round_prefer_floor")
        if nearest in rounding:
            call = call.having(coordinate_transformation_mode="half_pixel", nearest_mode=rounding[nearest])
    return call.taking(*inputs)


@adapter(16, "RoiAlign")
def roi_align_mode(graph: Graph, call: OperatorCall) -> OperatorCall:
    return call.having(coordinate_transformation_mode="output_half_pixel")


@adapter(20, "GridSample")
def grid_sample_mode(graph: Graph, call: OperatorCall) -> OperatorCall:
    """Rename the modes, which lost the prefix for two dimensions."""
    mode = call.attrs.get("mode", "bilinear")
    return call.having(mode={"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode))
