"""Small models of every kind that real ones are made of: what the mutations start from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from faults.hostile import BOOL, FLOAT, INT64, body, info, model_of, weight

node = helper.make_node


def floats(name: str, *dims: int) -> onnx.TensorProto:
    return weight(name, np.random.default_rng(len(name)).standard_normal(dims), np.float32)


def bytes_(name: str, *dims: int) -> onnx.TensorProto:
    return weight(name, np.random.default_rng(len(name)).integers(-9, 9, dims), np.int8)


def conv_net() -> onnx.ModelProto:
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["c1"], name="c1", pads=[1, 1, 1, 1], strides=[2, 2]),
        node("BatchNormalization", ["c1", "s", "t", "m", "v"], ["n1"], name="n1", epsilon=1e-4),
        node("Relu", ["n1"], ["r1"], name="r1"),
        node("MaxPool", ["r1"], ["p1"], name="p1", kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
        node("Conv", ["p1", "w2"], ["c2"], name="c2", kernel_shape=[3, 3], auto_pad="SAME_UPPER", group=2),
        node("Add", ["c2", "p1"], ["a1"], name="a1"),
        node("Clip", ["a1", "low", "high"], ["r2"], name="r2"),
        node("AveragePool", ["r2"], ["p2"], name="p2", kernel_shape=[2, 2], pads=[1, 1, 0, 0], count_include_pad=1),
        node("GlobalAveragePool", ["p2"], ["g"], name="g"),
        node("Flatten", ["g"], ["f"], name="f", axis=1),
        node("Gemm", ["f", "w3", "b3"], ["l"], name="l", transB=1, alpha=0.5),
        node("Softmax", ["l"], ["y"], name="y", axis=-1),
    ]
    weights = [
        floats("w1", 4, 3, 3, 3),
        floats("b1", 4),
        *(floats(n, 4) for n in "stm"),
        weight("v", [1, 2, 3, 4], np.float32),
        floats("w2", 4, 2, 3, 3),
        weight("low", 0, np.float32),
        weight("high", 6, np.float32),
        floats("w3", 5, 4),
        floats("b3", 5),
    ]
    return model_of(nodes, [info("x", ["n", 3, 8, 8])], ["y"], weights)


def recurrent() -> onnx.ModelProto:
    nodes = [
        node("LSTM", ["x", "w", "r", "b"], ["h", "hn", "cn"], name="lstm", hidden_size=3, direction="bidirectional"),
        node("Transpose", ["h"], ["t"], name="t", perm=[0, 2, 1, 3]),
        node("Reshape", ["t", "shape"], ["q"], name="q"),
        node("GRU", ["q", "w2", "r2"], ["g"], name="gru", hidden_size=2, linear_before_reset=1),
        node("RNN", ["q", "w3", "r3"], ["", "z"], name="rnn", hidden_size=2, activations=["Relu"]),
    ]
    weights = [
        floats("w", 2, 12, 4),
        floats("r", 2, 12, 3),
        floats("b", 2, 24),
        weight("shape", [0, 0, -1]),
        floats("w2", 1, 6, 6),
        floats("r2", 1, 6, 2),
        floats("w3", 1, 2, 6),
        floats("r3", 1, 2, 2),
    ]
    return model_of(nodes, [info("x", ["t", "n", 4])], ["g", "z", "cn"], weights)


def transformer() -> onnx.ModelProto:
    nodes = [
        node("Gather", ["table", "ids"], ["e"], name="embed"),
        node("LayerNormalization", ["e", "s", "t"], ["n"], name="norm", axis=-1),
        node("MatMul", ["n", "wq"], ["q"], name="q"),
        node("MatMul", ["n", "wk"], ["k"], name="k"),
        node("Shape", ["ids"], ["dims"], name="dims"),
        node("Concat", ["dims", "heads"], ["split"], name="split", axis=0),
        node("Reshape", ["q", "split"], ["q4"], name="q4"),
        node("Reshape", ["k", "split"], ["k4"], name="k4"),
        node("Transpose", ["q4"], ["qt"], name="qt", perm=[0, 2, 1, 3]),
        node("Transpose", ["k4"], ["kt"], name="kt", perm=[0, 2, 3, 1]),
        node("MatMul", ["qt", "kt"], ["scores"], name="scores"),
        node("Mul", ["scores", "scale"], ["scaled"], name="scaled"),
        node("Softmax", ["scaled"], ["p"], name="p", axis=-1),
        node("MatMul", ["p", "qt"], ["o"], name="o"),
        node("Transpose", ["o"], ["ot"], name="ot", perm=[0, 2, 1, 3]),
        node("Reshape", ["ot", "back"], ["flat"], name="flat"),
        node("Gelu", ["flat"], ["act"], name="act", approximate="tanh"),
        node("Add", ["act", "e"], ["sum"], name="sum"),
        node("ReduceMean", ["sum", "axes"], ["y"], name="mean", keepdims=0),
    ]
    weights = [
        floats("table", 10, 8),
        floats("s", 8),
        floats("t", 8),
        floats("wq", 8, 8),
        floats("wk", 8, 8),
        weight("heads", [2, 4]),
        weight("scale", 0.5, np.float32),
        weight("back", [0, 0, -1]),
        weight("axes", [1]),
    ]
    return model_of(nodes, [info("ids", ["n", "len"], INT64)], ["y"], weights)


def quantised() -> onnx.ModelProto:
    nodes = [
        node("QuantizeLinear", ["x", "sx", "zx"], ["xq"], name="xq"),
        node("DequantizeLinear", ["xq", "sx", "zx"], ["xd"], name="xd"),
        node("DequantizeLinear", ["wq", "sw", "zw"], ["wd"], name="wd", axis=0),
        node("Conv", ["xd", "wd"], ["c"], name="c"),
        node("QLinearConv", ["xq", "sx", "zx", "wq", "sw", "zw", "sx", "zx"], ["qc"], name="qc"),
        node("DequantizeLinear", ["qc", "sx", "zx"], ["qd"], name="qd"),
        node("Add", ["c", "qd"], ["a"], name="a"),
        node("DynamicQuantizeLinear", ["a"], ["dq", "ds", "dz"], name="dyn"),
        node("Flatten", ["dq"], ["f"], name="f"),
        node("MatMulInteger", ["f", "w8", "dz"], ["i"], name="i"),
        node("Cast", ["i"], ["y"], name="y", to=FLOAT),
    ]
    weights = [
        weight("sx", 0.1, np.float32),
        weight("zx", 3, np.uint8),
        bytes_("wq", 2, 3, 1, 1),
        weight("sw", [0.1, 0.2], np.float32),
        weight("zw", [0, 0], np.int8),
        bytes_("w8", 32, 3),
    ]
    return model_of(nodes, [info("x", [1, 3, 4, 4])], ["y", "ds"], weights)


def control_flow() -> onnx.ModelProto:
    then = body([node("Mul", ["x", "k"], ["a"], name="mul")], [], ["a"])
    other = body([node("Neg", ["x"], ["b"], name="neg")], [], ["b"])
    step = body(
        [
            node("Add", ["v", "k"], ["v2"], name="add"),
            node("Identity", ["go"], ["go2"], name="go"),
            node("ReduceSum", ["v2"], ["row"], name="row", keepdims=0),
        ],
        [info("i", [], INT64), info("go", [], BOOL), info("v")],
        ["go2", "v2", "row"],
    )
    scan = body([node("Add", ["s", "e"], ["s2"], name="acc")], [info("s", [3]), info("e", [3])], ["s2", "s2"])
    nodes = [
        node("If", ["c"], ["z"], name="if", then_branch=then, else_branch=other),
        node("Loop", ["m", "", "z"], ["l", "rows"], name="loop", body=step),
        node("Scan", ["s0", "l"], ["last", "all"], name="scan", num_scan_inputs=1, body=scan),
    ]
    weights = [weight("k", 2, np.float32), weight("m", 3), floats("s0", 3)]
    return model_of(nodes, [info("c", [], BOOL), "x"], ["rows", "last", "all"], weights)


def functions() -> onnx.ModelProto:
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)]
    leaky = node("LeakyRelu", ["a"], ["b"], name="leaky")
    leaky.attribute.add(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT)
    inner = helper.make_function("f", "inner", ["a"], ["b"], [leaky], imports, ["slope"])
    outer = helper.make_function(
        "f",
        "outer",
        ["p", "q"],
        ["r", "t"],
        [
            node("inner", ["p"], ["u"], domain="f", slope=0.3),
            node("Add", ["u", "q"], ["r"]),
            node("Shape", ["r"], ["t"]),
        ],
        imports,
    )
    model = model_of(
        [
            node("outer", ["x", "w"], ["h", "s"], domain="f", name="first"),
            node("outer", ["h", "x"], ["y", ""], domain="f", name="second"),
        ],
        ["x"],
        ["y", "s"],
        [floats("w", 3)],
        functions=[inner, outer],
    )
    model.opset_import.append(helper.make_opsetid("f", 1))
    return model


def sequences() -> onnx.ModelProto:
    inner = body([node("Relu", ["v"], ["w"], name="relu")], [info("v", None)], ["w"])
    nodes = [
        node("SplitToSequence", ["x", "one"], ["s"], name="split", axis=1),
        node("SequenceMap", ["s"], ["mapped"], name="map", body=inner),
        node("SequenceAt", ["mapped", "at"], ["e"], name="at"),
        node("SequenceInsert", ["mapped", "e"], ["longer"], name="insert"),
        node("SequenceLength", ["longer"], ["n"], name="len"),
        node("ConcatFromSequence", ["longer"], ["y"], name="concat", axis=1),
        node("Optional", ["y"], ["o"], name="opt"),
        node("OptionalHasElement", ["o"], ["has"], name="has"),
        node("OptionalGetElement", ["o"], ["z"], name="get"),
    ]
    return model_of(nodes, ["x"], ["n", "y", "has", "z"], [weight("one", 1), weight("at", -1)])


def dynamic_shapes() -> onnx.ModelProto:
    nodes = [
        node("NonZero", ["x"], ["nz"], name="nz"),
        node("Transpose", ["nz"], ["t"], name="t"),
        node("GatherND", ["x", "t"], ["picked"], name="pick"),
        node("TopK", ["picked", "k"], ["top", "where"], name="top"),
        node("Shape", ["x"], ["dims"], name="dims"),
        node("Expand", ["one", "dims"], ["ones"], name="ones"),
        node("Pad", ["ones", "pads"], ["padded"], name="pad", mode="edge"),
        node("Slice", ["padded", "begin", "end", "axes"], ["cut"], name="cut"),
        node("Unsqueeze", ["cut", "zero2"], ["img"], name="img"),
        node("Resize", ["img", "", "scales"], ["big"], name="big", mode="linear"),
        node("Tile", ["big", "reps"], ["tiled"], name="tile"),
        node("Split", ["tiled"], ["p", "q"], name="split", axis=1, num_outputs=2),
        node("Where", ["cond", "p", "q"], ["w"], name="where"),
        node("CumSum", ["w", "last"], ["y"], name="cumsum"),
        node("Range", ["z", "n", "o"], ["range"], name="range"),
        node("Compress", ["range", "mask"], ["z2"], name="compress"),
    ]
    weights = [
        weight("k", [1]),
        weight("one", [[1]], np.float32),
        weight("pads", [1, 1, 1, 1]),
        weight("begin", [0, -3]),
        weight("end", [99, 99]),
        weight("axes", [0, 1]),
        weight("zero2", [0, 1]),
        weight("scales", [1, 1, 2, 1.5], np.float32),
        weight("reps", [1, 2, 1, 1]),
        weight("cond", True, bool),
        weight("last", 3),
        weight("z", 0),
        weight("n", 5),
        weight("o", 1),
        weight("mask", [1, 0, 1], bool),
    ]
    return model_of(nodes, ["x"], ["top", "where", "y", "z2"], weights)


def old_opset() -> onnx.ModelProto:
    nodes = [
        node("Conv", ["x", "w"], ["c"], name="c", kernel_shape=[1, 1]),
        node("BatchNormalization", ["c", "s", "t", "m", "v"], ["n"], name="n"),
        node("Dropout", ["n"], ["d"], name="d", ratio=0.3),
        node("Upsample", ["d"], ["u"], name="u", scales=[1.0, 1.0, 2.0, 2.0], mode="nearest"),
        node("Pad", ["u"], ["p"], name="p", pads=[0, 0, 1, 1, 0, 0, 1, 1], value=1.5),
        node("ReduceSum", ["p"], ["r"], name="r", axes=[2], keepdims=0),
        node("Squeeze", ["r"], ["q"], name="q", axes=[0]),
        node("Slice", ["q"], ["sl"], name="sl", starts=[0], ends=[3], axes=[1]),
        node("Softmax", ["sl"], ["y"], name="y"),
    ]
    weights = [floats("w", 2, 3, 1, 1), *(floats(n, 2) for n in "stm"), weight("v", [1, 2], np.float32)]
    return model_of(nodes, [info("x", [1, 3, 4, 4])], ["y"], weights, opset=7)


def types() -> onnx.ModelProto:
    targets = {
        "h": TensorProto.FLOAT16,
        "b": TensorProto.BFLOAT16,
        "d": TensorProto.DOUBLE,
        "i": INT64,
        "f8": TensorProto.FLOAT8E4M3FN,
    }
    nodes = [node("Cast", ["x"], [name], name=name, to=to) for name, to in targets.items()]
    nodes += [
        node("DequantizeLinear", ["w4", "s4"], ["w"], name="w4d", axis=0, block_size=2),
        node("Add", ["x", "w"], ["y"], name="y"),
        node("CastLike", ["y", "h"], ["y16"], name="like"),
        node("BitShift", ["u", "u"], ["bits"], name="bits", direction="LEFT"),
    ]
    weights = [
        helper.make_tensor("w4", TensorProto.INT4, [2, 3], [1, -2, 3, -4, 5, -6]),
        floats("s4", 1, 3),
        weight("u", [1, 2], np.uint8),
    ]
    return model_of(nodes, ["x"], ["b", "d", "i", "f8", "y16", "bits"], weights)


def vision() -> onnx.ModelProto:
    nodes = [
        node("ConvTranspose", ["x", "w"], ["c"], name="c", strides=[2, 2], output_padding=[1, 1]),
        node("InstanceNormalization", ["c", "s", "t"], ["n"], name="n"),
        node("PRelu", ["n", "slope"], ["p"], name="p"),
        node("DepthToSpace", ["p"], ["d"], name="d", blocksize=2),
        node("GridSample", ["d", "grid"], ["g"], name="g", mode="linear", align_corners=1),
        node("Einsum", ["g", "g"], ["e"], name="e", equation="nchw,nchw->nhw"),
        node("ArgMax", ["e"], ["a"], name="a", axis=1),
        node("RoiAlign", ["x", "rois", "batch"], ["r"], name="r", output_height=2, output_width=2),
        node("NonMaxSuppression", ["boxes", "scores", "most", "iou"], ["k"], name="nms"),
        node("OneHot", ["a", "depth", "onoff"], ["y"], name="y", axis=-1),
        node("LRN", ["d"], ["l"], name="l", size=3),
    ]
    weights = [
        floats("w", 2, 4, 2, 2),
        floats("s", 4),
        floats("t", 4),
        floats("slope", 4, 1, 1),
        floats("grid", 1, 2, 2, 2),
        weight("rois", [[0, 0, 2, 2]], np.float32),
        weight("batch", [0]),
        floats("boxes", 1, 3, 4),
        floats("scores", 1, 1, 3),
        weight("most", [2]),
        weight("iou", [0.5], np.float32),
        weight("depth", 4),
        weight("onoff", [0, 1], np.float32),
    ]
    return model_of(nodes, [info("x", [1, 2, 3, 3])], ["y", "r", "k", "l"], weights)


def contributed() -> onnx.ModelProto:
    ms = {"domain": "com.microsoft"}
    nodes = [
        node("FusedMatMul", ["x", "w"], ["m"], name="m", transB=1, alpha=0.5, **ms),
        node("BiasGelu", ["m", "b"], ["g"], name="g", **ms),
        node("SkipLayerNormalization", ["g", "g", "s", "t"], ["n"], name="n", epsilon=1e-5, **ms),
        node("QuickGelu", ["n"], ["y"], name="y", alpha=1.7, **ms),
    ]
    model = model_of(
        nodes, [info("x", [1, 2, 3])], ["y"], [floats("w", 4, 3), floats("b", 4), floats("s", 4), floats("t", 4)]
    )
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


def strings_and_trees() -> onnx.ModelProto:
    ml = {"domain": "ai.onnx.ml"}
    nodes = [
        node("StringNormalizer", ["words"], ["lower"], name="lower", case_change_action="LOWER"),
        node(
            "LabelEncoder",
            ["lower"],
            ["ids"],
            name="ids",
            keys_strings=["text", "b"],
            values_int64s=[1, 2],
            default_int64=-1,
            **ml,
        ),
        node("Cast", ["ids"], ["f"], name="f", to=FLOAT),
        node("Scaler", ["f"], ["scaled"], name="scaled", offset=[0.5], scale=[2.0], **ml),
        node("Normalizer", ["x"], ["unit"], name="unit", norm="L2", **ml),
        node("StringConcat", ["lower", "lower"], ["double"], name="double"),
    ]
    model = model_of(nodes, [info("words", [2], TensorProto.STRING), "x"], ["scaled", "unit", "double"])
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 4))
    return model


BUILDERS = (
    conv_net,
    recurrent,
    transformer,
    quantised,
    control_flow,
    functions,
    sequences,
    dynamic_shapes,
    old_opset,
    types,
    vision,
    contributed,
    strings_and_trees,
)


def seeds() -> Sequence[tuple[str, Any]]:
    """Name and model of each seed."""
    return [(build.__name__, build()) for build in BUILDERS]
