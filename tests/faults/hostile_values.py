"""Hostile values: sizes that do not fit into memory, attributes that make no sense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from faults.hostile import CASES, INT64, Case, hostile, info, model_of, one, weight

# ---- memory --------------------------------------------------------------------------------------------------------


@hostile("MAX_TENSOR_BYTES")
def constant_of_shape_2_40() -> Any:
    return one("ConstantOfShape", ["s"], [weight("s", [1 << 20, 1 << 20])])


@hostile("bad")
def constant_of_negative_shape() -> Any:
    return one("ConstantOfShape", ["s"], [weight("s", [-4])])


@hostile("bad")
def constant_of_shape_2_62_squared() -> Any:
    return one("ConstantOfShape", ["s"], [weight("s", [1 << 62, 1 << 62])])


@hostile("MAX_TENSOR_BYTES")
def expand_2_40() -> Any:
    return one("Expand", ["x", "s"], [weight("s", [1 << 40, 2, 3])])


@hostile("MAX_TENSOR_BYTES")
def tile_2_40() -> Any:
    return one("Tile", ["x", "s"], [weight("s", [1 << 20, 1 << 20])])


@hostile("bad")
def tile_negative() -> Any:
    return one("Tile", ["x", "s"], [weight("s", [-1, 2])])


@hostile("MAX_TENSOR_BYTES")
def range_2_40() -> Any:
    return one("Range", ["a", "b", "c"], [weight("a", 0), weight("b", 1 << 40), weight("c", 1)])


@hostile("bad")
def range_with_step_zero() -> Any:
    return one("Range", ["a", "b", "c"], [weight("a", 0), weight("b", 5), weight("c", 0)])


@hostile("bad")
def range_to_infinity() -> Any:
    limits = [weight(n, v, np.float32) for n, v in (("a", 0), ("b", np.inf), ("c", 1))]
    return one("Range", ["a", "b", "c"], limits)


@hostile("MAX_TENSOR_BYTES")
def pad_2_40() -> Any:
    return one("Pad", ["x", "s"], [weight("s", [0, 1 << 40, 0, 0])])


@hostile("MAX_TENSOR_BYTES")
def resize_2_40() -> Any:
    return one("Resize", ["x", "", "", "s"], [weight("s", [1 << 20, 1 << 20])], mode="nearest")


@hostile("bad")
def resize_by_1e30() -> Any:
    return one("Resize", ["x", "", "s"], [weight("s", [1e30, 1e30], np.float32)], mode="nearest")


@hostile("bad")
def resize_by_nan() -> Any:
    return one("Resize", ["x", "", "s"], [weight("s", [np.nan, 1], np.float32)], mode="nearest")


@hostile("MAX_TENSOR_BYTES")
def one_hot_2_40() -> Any:
    given = [weight("d", 1 << 40), weight("v", [0, 1], np.float32)]
    return one("OneHot", [info("i", [2], INT64), "d", "v"], given)


@hostile("MAX_TENSOR_BYTES")
def random_2_40() -> Any:
    return one("RandomNormal", [], shape=[1 << 20, 1 << 20])


@hostile("MAX_TENSOR_BYTES")
def window_2_40() -> Any:
    return one("HannWindow", ["s"], [weight("s", 1 << 40)])


@hostile("MAX_TENSOR_BYTES")
def outer_product_2_40() -> Any:
    return model_of(
        [helper.make_node("Add", ["a", "b"], ["y"], name="bad")], [info("a", [1 << 20, 1]), info("b", [1, 1 << 20])]
    )


def at_run_time(
    op: str, inputs: Sequence[str], name: str, shape_from: Sequence[onnx.NodeProto], **attrs: Any
) -> onnx.ModelProto:
    """The size comes from the data: a model input, multiplied up."""
    nodes = [
        *shape_from,
        helper.make_node(op, inputs, ["y"], name="bad", **attrs),
    ]
    weights = [weight("million", [1 << 20, 1 << 20]), weight("one", 1), weight("zero", 0), weight("huge", 1 << 40)]
    return model_of(nodes, [info("n", [2], INT64), "x", info("k", [], INT64)], weights=weights)


SHAPE = [helper.make_node("Max", ["n", "million"], ["shape"])]
COUNT = [helper.make_node("Max", ["k", "huge"], ["count"])]


@hostile("bad")
def constant_of_shape_2_40_at_run_time() -> Any:
    return at_run_time("ConstantOfShape", ["shape"], "bad", SHAPE)


@hostile("bad")
def expand_2_40_at_run_time() -> Any:
    return at_run_time("Expand", ["one", "shape"], "bad", SHAPE)


@hostile("bad")
def tile_2_40_at_run_time() -> Any:
    return at_run_time("Tile", ["x", "shape"], "bad", SHAPE)


@hostile("bad")
def range_2_40_at_run_time() -> Any:
    return at_run_time("Range", ["zero", "count", "one"], "bad", COUNT)


@hostile("bad")
def resize_2_40_at_run_time() -> Any:
    return at_run_time("Resize", ["x", "", "", "shape"], "bad", SHAPE, mode="nearest")


@hostile("bad")
def window_2_40_at_run_time() -> Any:
    return at_run_time("BlackmanWindow", ["count"], "bad", COUNT)


@hostile("bad")
def outer_product_2_38_at_run_time() -> Any:
    """Two columns of unknown length, each small, whose sum is not."""
    nodes = [
        helper.make_node("Range", ["zero", "count", "one"], ["r"]),
        helper.make_node("Unsqueeze", ["r", "one"], ["a"]),
        helper.make_node("Unsqueeze", ["r", "zero"], ["b"]),
    ]
    weights = [weight("one", [1]), weight("zero", [0]), weight("many", [1 << 19]), weight("z", 0), weight("o", 1)]
    nodes[0] = helper.make_node("Range", ["z", "count", "o"], ["r"])
    nodes.insert(0, helper.make_node("Squeeze", ["most"], ["count"]))
    nodes.insert(0, helper.make_node("Max", ["k", "many"], ["most"]))
    nodes.append(helper.make_node("Add", ["a", "b"], ["y"], name="bad"))
    return model_of(nodes, [info("k", [1], INT64)], weights=weights)


# ---- attributes and values that make no sense ----------------------------------------------------------------------

IMAGE = info("x", [1, 4, 8, 8])
KERNEL = weight("w", np.ones((4, 4, 3, 3)), np.float32)


def conv(**attrs: Any) -> onnx.ModelProto:
    return one("Conv", [IMAGE, "w"], [KERNEL], **attrs)


def pool(op: str = "MaxPool", **attrs: Any) -> onnx.ModelProto:
    return one(op, [IMAGE], **{"kernel_shape": [2, 2], **attrs})


STRANGE: dict[str, Callable[[], onnx.ModelProto]] = {
    "conv_strides_zero": lambda: conv(strides=[0, 0]),
    "conv_strides_negative": lambda: conv(strides=[-1, 1]),
    "conv_group_zero": lambda: conv(group=0),
    "conv_group_negative": lambda: conv(group=-2),
    "conv_group_that_does_not_divide": lambda: conv(group=3),
    "conv_dilations_zero": lambda: conv(dilations=[0, 0]),
    "conv_dilations_huge": lambda: conv(dilations=[1 << 62, 1]),
    "conv_pads_too_few": lambda: conv(pads=[1, 1]),
    "conv_pads_huge": lambda: conv(pads=[1 << 40, 0, 0, 0]),
    "conv_pads_negative": lambda: conv(pads=[-9, -9, -9, -9]),
    "conv_kernel_shape_wrong": lambda: conv(kernel_shape=[5, 5]),
    "conv_kernel_larger_than_image": lambda: one(
        "Conv", [IMAGE, "w"], [weight("w", np.ones((4, 4, 20, 20)), np.float32)]
    ),
    "conv_auto_pad_unknown": lambda: conv(auto_pad="SIDEWAYS"),
    "conv_attribute_of_another_type": lambda: conv(strides="two"),
    "conv_attribute_a_float": lambda: conv(group=1.5),
    "conv_without_weights": lambda: one("Conv", [IMAGE]),
    "conv_of_a_vector": lambda: one("Conv", [info("x", [4]), "w"], [KERNEL]),
    "conv_of_integers": lambda: one("Conv", [info("x", [1, 4, 8, 8], INT64), "w"], [KERNEL]),
    "conv_a_million_pads": lambda: conv(pads=[0] * 1_000_000),
    "pool_kernel_zero": lambda: pool(kernel_shape=[0, 0]),
    "pool_kernel_huge": lambda: pool(kernel_shape=[1 << 62, 1 << 62]),
    "pool_kernel_missing": lambda: one("MaxPool", [IMAGE]),
    "pool_strides_zero": lambda: pool(strides=[0, 1]),
    "pool_pads_huge": lambda: pool(kernel_shape=[1 << 40, 1], pads=[1 << 39, 0, 1 << 39, 0]),
    "average_pool_kernel_negative": lambda: pool("AveragePool", kernel_shape=[-2, 2]),
    "conv_transpose_output_shape_2_40": lambda: one("ConvTranspose", [IMAGE, "w"], [KERNEL], output_shape=[1 << 40, 8]),
    "conv_transpose_strides_2_40": lambda: one("ConvTranspose", [IMAGE, "w"], [KERNEL], strides=[1 << 40, 1]),
    "reshape_overflow": lambda: one("Reshape", ["x", "s"], [weight("s", [1 << 32, 1 << 32])]),
    "reshape_two_unknowns": lambda: one("Reshape", ["x", "s"], [weight("s", [-1, -1])]),
    "reshape_does_not_divide": lambda: one("Reshape", ["x", "s"], [weight("s", [4, -1])]),
    "reshape_minus_five": lambda: one("Reshape", ["x", "s"], [weight("s", [-5, 3])]),
    "reshape_zero_and_unknown": lambda: one("Reshape", ["x", "s"], [weight("s", [0, -1])], allowzero=1),
    "reshape_rank_1000": lambda: one("Reshape", ["x", "s"], [weight("s", [1] * 999 + [6])]),
    "concat_axis_outside": lambda: one("Concat", ["x"], axis=9),
    "concat_axis_missing": lambda: one("Concat", ["x"]),
    "gather_axis_outside": lambda: one("Gather", ["x", "i"], [weight("i", [0])], axis=9),
    "gather_index_outside": lambda: one("Gather", ["x", "i"], [weight("i", [1 << 62])]),
    "gather_of_floats": lambda: one("Gather", ["x", "x"]),
    "scatter_index_outside": lambda: one(
        "ScatterElements", ["x", "i", "u"], [weight("i", [[99]]), weight("u", [[1]], np.float32)]
    ),
    "transpose_repeats": lambda: one("Transpose", perm=[0, 0]),
    "transpose_outside": lambda: one("Transpose", perm=[0, 9]),
    "transpose_a_million": lambda: one("Transpose", perm=list(range(1_000_000))),
    "squeeze_outside": lambda: one("Squeeze", ["x", "a"], [weight("a", [7])]),
    "squeeze_of_two": lambda: one("Squeeze", ["x", "a"], [weight("a", [0])]),
    "unsqueeze_outside": lambda: one("Unsqueeze", ["x", "a"], [weight("a", [99])]),
    "unsqueeze_repeats": lambda: one("Unsqueeze", ["x", "a"], [weight("a", [0, 0])]),
    "slice_step_zero": lambda: one(
        "Slice", ["x", "b", "e", "a", "s"], [weight("b", [0]), weight("e", [1]), weight("a", [0]), weight("s", [0])]
    ),
    "slice_axis_outside": lambda: one(
        "Slice", ["x", "b", "e", "a"], [weight("b", [0]), weight("e", [1]), weight("a", [5])]
    ),
    "slice_lengths_differ": lambda: one("Slice", ["x", "b", "e"], [weight("b", [0, 0]), weight("e", [1])]),
    "split_into_zero": lambda: one("Split", num_outputs=0),
    "split_sizes_wrong": lambda: one("Split", ["x", "s"], [weight("s", [5, 5])], n=2),
    "split_sizes_negative": lambda: one("Split", ["x", "s"], [weight("s", [-1, 3])], n=2),
    "softmax_axis_outside": lambda: one("Softmax", axis=100),
    "flatten_axis_outside": lambda: one("Flatten", axis=100),
    "cast_to_nothing": lambda: one("Cast", to=999),
    "cast_without_to": lambda: one("Cast"),
    "einsum_garbage": lambda: one("Einsum", equation="((((->"),
    "einsum_too_many_terms": lambda: one("Einsum", equation="ij,jk->ik"),
    "einsum_repeats_output": lambda: one("Einsum", equation="ij->zz"),
    "top_k_negative": lambda: one("TopK", ["x", "k"], [weight("k", [-1])], n=2),
    "top_k_2_62": lambda: one("TopK", ["x", "k"], [weight("k", [1 << 62])], n=2),
    "matmul_does_not_fit": lambda: one("MatMul", ["x", "x"]),
    "gemm_of_a_tensor": lambda: one("Gemm", [IMAGE, IMAGE]),
    "add_does_not_fit": lambda: one("Add", ["x", "w"], [weight("w", [1, 2, 3, 4], np.float32)]),
    "add_types_differ": lambda: one("Add", ["x", "w"], [weight("w", [1])]),
    "depth_to_space_zero": lambda: one("DepthToSpace", [IMAGE], blocksize=0),
    "space_to_depth_zero": lambda: one("SpaceToDepth", [IMAGE], blocksize=0),
    "group_norm_zero_groups": lambda: one(
        "GroupNormalization",
        [IMAGE, "s", "b"],
        [weight("s", [1] * 4, np.float32), weight("b", [1] * 4, np.float32)],
        num_groups=0,
    ),
    "one_hot_depth_negative": lambda: one(
        "OneHot", [info("i", [2], INT64), "d", "v"], [weight("d", -1), weight("v", [0.0, 1.0], np.float32)]
    ),
    "pad_more_than_there_is": lambda: one("Pad", ["x", "s"], [weight("s", [-9, 0, 0, 0])]),
    "pad_mode_unknown": lambda: one("Pad", ["x", "s"], [weight("s", [1, 1, 1, 1])], mode="sideways"),
    "resize_mode_unknown": lambda: one("Resize", ["x", "", "s"], [weight("s", [2, 2], np.float32)], mode="sideways"),
    "lstm_hidden_size_2_40": lambda: one(
        "LSTM",
        [info("x", [2, 1, 3]), "w", "r"],
        [weight("w", np.ones((1, 8, 3)), np.float32), weight("r", np.ones((1, 8, 2)), np.float32)],
        hidden_size=1 << 40,
    ),
    "lstm_hidden_size_missing_weights": lambda: one("LSTM", [info("x", [2, 1, 3])], hidden_size=2),
    "lstm_direction_unknown": lambda: one(
        "LSTM",
        [info("x", [2, 1, 3]), "w", "r"],
        [weight("w", np.ones((1, 8, 3)), np.float32), weight("r", np.ones((1, 8, 2)), np.float32)],
        hidden_size=2,
        direction="up",
    ),
    "batch_norm_wrong_length": lambda: one(
        "BatchNormalization", [IMAGE, "a", "b", "c", "d"], [weight(n, [1, 1], np.float32) for n in "abcd"]
    ),
    "quantize_axis_outside": lambda: one("QuantizeLinear", ["x", "s"], [weight("s", [1, 1, 1], np.float32)], axis=9),
    "string_normalizer_garbage": lambda: one("StringNormalizer", ["x"], case_change_action="LOUD"),
    "col2im_2_40": lambda: one(
        "Col2Im", [info("x", [1, 4, 4]), "i", "b"], [weight("i", [1 << 20, 1 << 20]), weight("b", [2, 2])]
    ),
    "center_crop_pad_2_40": lambda: one("CenterCropPad", ["x", "s"], [weight("s", [1 << 40])], axes=[0]),
    "affine_grid_2_40": lambda: one("AffineGrid", [info("t", [1, 2, 3]), "s"], [weight("s", [1, 3, 1 << 20, 1 << 20])]),
    "max_unpool_2_40": lambda: one(
        "MaxUnpool",
        [IMAGE, info("i", [1, 4, 8, 8], INT64), "s"],
        [weight("s", [1, 4, 1 << 20, 1 << 20])],
        kernel_shape=[2, 2],
    ),
    "mel_weights_2_40": lambda: one(
        "MelWeightMatrix",
        list("abcde"),
        [
            weight("a", 1 << 20),
            weight("b", 1 << 21),
            weight("c", 8000),
            weight("d", 0.0, np.float32),
            weight("e", 4000.0, np.float32),
        ],
    ),
    "dft_length_2_40": lambda: one("DFT", [info("x", [1, 8, 1]), "n"], [weight("n", 1 << 40)]),
    "tf_idf_of_2_62_grams": lambda: one(
        "TfIdfVectorizer",
        [info("x", [4], INT64)],
        mode="TF",
        min_gram_length=1,
        max_gram_length=1 << 62,
        max_skip_count=0,
        ngram_counts=[0, 2],
        ngram_indexes=[0, 1],
        pool_int64s=[1, 2],
    ),
    "eye_like_of_nothing": lambda: one("EyeLike", [info("x", [1, 2, 3])]),
    "attribute_without_type": lambda: _without_type(),
    "attribute_given_twice": lambda: _given_twice(),
    "constant_without_value": lambda: one("Constant", []),
    "constant_of_wrong_kind": lambda: one("Constant", [], value=3),
    "too_many_inputs": lambda: one("Relu", ["x"] * 1000),
    "too_few_inputs": lambda: one("Add", ["x"]),
    "too_many_outputs": lambda: one("Relu", n=100),
    "empty_input": lambda: one("Relu", [""]),
}


def _without_type() -> onnx.ModelProto:
    model = one("Softmax")
    model.graph.node[0].attribute.add(name="axis")
    return model


def _given_twice() -> onnx.ModelProto:
    model = one("Softmax", axis=1)
    model.graph.node[0].attribute.add().CopyFrom(model.graph.node[0].attribute[0])
    return model


for _name, _build in STRANGE.items():
    CASES.append(Case(_name, lambda folder, secret, build=_build: build().SerializeToString(), "bad", 1.0))  # type: ignore[misc]
