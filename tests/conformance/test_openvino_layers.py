"""Layers of ``org.openvinotoolkit`` against OpenVINO: pooling of regions, normalisation, activations, movement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from conformance.openvino_oracle import (
    by_front_end,
    by_operation_set,
    by_reference,
    check,
    create,
    f32,
    feeds_of,
    one_node,
    ops,
    ours,
    rng_of,
    same,
)


def compare(
    op: str,
    opset: int,
    inputs: Sequence[np.ndarray],
    attrs: Mapping[str, Any],
    theirs: Mapping[str, Any] | None = None,
    n: int = 1,
    constant: Sequence[int] = (),
    their_op: str = "",
    trim: bool = False,
) -> None:
    """Our operator against a node of an operation set. ``trim``: theirs leaves what is behind our rows undefined."""
    got = ours(one_node(op, inputs, attrs, n, constant), feeds_of(inputs, constant))
    free = [v for k, v in enumerate(inputs) if k not in constant]

    def build(*parameters: Any) -> Any:
        rest = iter(parameters)
        return create(
            opset,
            their_op or op,
            [v if k in constant else next(rest) for k, v in enumerate(inputs)],
            attrs if theirs is None else theirs,
        )

    expected = by_operation_set(build, free)[:n]
    if trim:
        expected = [e[: len(g)] for e, g in zip(expected, got, strict=True)]
    same(got, expected)


def rois_of(rng: np.random.Generator, count: int, batch: int, width: float, height: float) -> np.ndarray:
    near = rng.uniform(0, 0.6, (count, 2)) * [width, height]
    far = near + rng.uniform(0.1, 0.38, (count, 2)) * [width, height]
    return np.concatenate([rng.integers(0, batch, (count, 1)), near, far], axis=1).astype(np.float32)


# --- regions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooled", [(1, 1), (3, 5), (7, 7)], ids=str)
@pytest.mark.parametrize("method", ["max", "bilinear"])
def test_roi_pooling(method: str, pooled: tuple[int, int]) -> None:
    rng = rng_of("roi", method, pooled)
    rois = rois_of(rng, 6, 2, *((17 / 0.25, 13 / 0.25) if method == "max" else (1, 1)))
    attrs = {"pooled_h": pooled[0], "pooled_w": pooled[1], "spatial_scale": 0.25, "method": method}
    theirs = {"output_roi": list(pooled), "spatial_scale": 0.25, "method": method}
    compare("ROIPooling", 2, [f32(rng, 2, 5, 13, 17), rois], attrs, theirs)


@pytest.mark.parametrize("bins", [1, 3])
def test_psroi_pooling_average(bins: int) -> None:
    rng = rng_of("psroi", bins)
    attrs = {
        "output_dim": 4,
        "group_size": bins,
        "spatial_scale": 0.125,
        "mode": "average",
        "spatial_bins_x": 1,
        "spatial_bins_y": 1,
    }
    compare("PSROIPooling", 1, [f32(rng, 2, 4 * bins * bins, 13, 17), rois_of(rng, 6, 2, 17 * 8, 13 * 8)], attrs)


@pytest.mark.parametrize("bins", [1, 3])
def test_psroi_pooling_bilinear(bins: int) -> None:
    rng = rng_of("psroi-bilinear", bins)
    attrs = {
        "output_dim": 4,
        "group_size": bins,
        "spatial_scale": 1.0,
        "mode": "bilinear",
        "spatial_bins_x": 3,
        "spatial_bins_y": 2,
    }
    compare("PSROIPooling", 1, [f32(rng, 2, 24, 13, 17), rois_of(rng, 6, 2, 1, 1)], attrs)


@pytest.mark.parametrize("offsets", [False, True])
def test_deformable_psroi_pooling(offsets: bool) -> None:
    rng = rng_of("dpsroi", offsets)
    attrs = {
        "output_dim": 4,
        "group_size": 3,
        "spatial_scale": 0.125,
        "mode": "bilinear_deformable",
        "spatial_bins_x": 4,
        "spatial_bins_y": 3,
        "trans_std": 0.1,
        "part_size": 3,
    }
    inputs = [f32(rng, 2, 36, 13, 17), rois_of(rng, 6, 2, 17 * 8, 13 * 8)]
    if offsets:
        inputs.append(f32(rng, 6, 4, 3, 3))
    compare("DeformablePSROIPooling", 1, inputs, attrs)


@pytest.mark.parametrize(
    "attrs",
    [{}, {"aligned": 1, "output_size": 5}, {"sampling_ratio": 0, "output_size": 3, "pyramid_scales": [4, 8, 16, 32]}],
    ids=str,
)
def test_roi_feature_extractor(attrs: dict[str, Any]) -> None:
    rng = rng_of("features", attrs)
    near = rng.uniform(0, 300, (9, 2))
    rois = np.concatenate([near, near + rng.uniform(5, 600, (9, 2))], axis=1).astype(np.float32)
    maps = [f32(rng, 1, 3, size, size + 5) for size in (96, 48, 24, 12)]
    check("ExperimentalDetectronROIFeatureExtractor", [rois, *maps], attrs, 2)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize(
    "attrs",
    [
        {},
        {"strides": [2, 1], "pads": [1, 0, 1, 2]},
        {"dilations": [1, 2], "group": 2, "deformable_groups": 2, "pads": [1, 1, 1, 1]},
        {"auto_pad": "SAME_UPPER"},
    ],
    ids=str,
)
def test_deformable_convolution(attrs: dict[str, Any], mask: bool) -> None:
    rng = rng_of("deformable", attrs, mask)
    group, shared = attrs.get("group", 1), attrs.get("deformable_groups", 1)
    strides, pads, dilations = (
        attrs.get("strides", [1, 1]),
        attrs.get("pads", [0, 0, 0, 0]),
        attrs.get("dilations", [1, 1]),
    )
    size = [(n + pads[k] + pads[k + 2] - 2 * dilations[k] - 1) // strides[k] + 1 for k, n in enumerate((9, 11))]
    if "auto_pad" in attrs:
        size = [9, 11]
    inputs = [f32(rng, 2, 4, 9, 11), f32(rng, 2, 18 * shared, *size, low=-2, high=2), f32(rng, 6, 4 // group, 3, 3)]
    if mask:
        inputs.append(f32(rng, 2, 9 * shared, *size, low=0, high=1))
    check("DeformableConv2D", inputs, {"kernel_shape": [3, 3], **attrs})


# --- normalisation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("across", [0, 1])
@pytest.mark.parametrize("shared", [0, 1])
def test_normalize(across: int, shared: int) -> None:
    rng = rng_of("normalize", across, shared)
    attrs = {"eps": 1e-6, "across_spatial": across, "channel_shared": shared}
    check("Normalize", [f32(rng, 2, 5, 7, 3), f32(rng, 1 if shared else 5)], attrs, constant=(1,))


@pytest.mark.parametrize("axes", [[1], [1, 2, 3], [-1]], ids=str)
@pytest.mark.parametrize("mode", ["add", "max"])
def test_normalize_l2(axes: list[int], mode: str) -> None:
    rng = rng_of("l2", axes, mode)
    compare(
        "NormalizeL2",
        1,
        [f32(rng, 2, 5, 7, 3), np.asarray(axes, np.int64)],
        {"eps": 0.01, "eps_mode": mode},
        constant=(1,),
    )


def test_grn() -> None:
    compare("GRN", 1, [f32(rng_of("grn"), 2, 5, 7, 3)], {"bias": 0.5})


@pytest.mark.parametrize("across", [0, 1])
@pytest.mark.parametrize("variance", [0, 1])
def test_mvn_over_spatial_axes(across: int, variance: int) -> None:
    attrs = {"across_channels": across, "normalize_variance": variance, "eps": 1e-5}
    theirs = {"across_channels": bool(across), "normalize_variance": bool(variance), "eps": 1e-5}
    compare("MVN", 2, [f32(rng_of("mvn", across), 2, 5, 7, 3)], attrs, theirs)


@pytest.mark.parametrize("mode", ["inside_sqrt", "outside_sqrt"])
def test_mvn_over_axes(mode: str) -> None:
    inputs = [f32(rng_of("mvn6", mode), 2, 5, 7, 3), np.asarray([-1, 2], np.int64)]
    attrs = {"normalize_variance": 1, "eps": 1e-3, "eps_mode": mode}
    compare("MVN", 6, inputs, attrs, {**attrs, "normalize_variance": True}, constant=(1,))


@pytest.mark.parametrize("op", ["GroupNorm", "ExperimentalDetectronGroupNorm"])
@pytest.mark.parametrize("shape", [(6,), (1, 6, 1, 1)], ids=str)
def test_group_norm(op: str, shape: tuple[int, ...]) -> None:
    rng = rng_of("gn", op, shape)
    check(op, [f32(rng, 2, 6, 5, 7), f32(rng, *shape), f32(rng, *shape)], {"num_groups": 3, "eps": 1e-5})


# --- simple layers ----------------------------------------------------------------------------------------------------


def test_swish() -> None:
    rng = rng_of("swish")
    check("Swish", [f32(rng, 3, 7, low=-4, high=4)], {})
    check("Swish", [f32(rng, 3, 7, low=-4, high=4), np.asarray([1.7], np.float32)], {})


UNARY = {
    "Clamp": ("Clamp", {"min": -0.5, "max": 2.25}),
    "ELU": ("Elu", {"alpha": 0.7}),
    "HSwish": ("HSwish", {}),
    "HSigmoid": ("HSigmoid", {}),
    "Mish": ("Mish", {}),
    "ReLU": ("Relu", {}),
    "Sigmoid": ("Sigmoid", {}),
    "SoftPlus": ("SoftPlus", {}),
    "TanH": ("Tanh", {}),
}


def test_hard_sigmoid() -> None:
    x = f32(rng_of("hard"), 3, 5, 7, low=-6, high=6)
    scalars = [np.asarray(0.3, np.float32), np.asarray(0.4, np.float32)]
    compare("HardSigmoid", 1, [x, *scalars], {}, constant=(1, 2))
    against("HardSigmoid", [x], {"alpha": 0.3, "beta": 0.4}, lambda x: create(1, "HardSigmoid", [x, *scalars], {}))


HALVES: dict[str, tuple[Sequence[tuple[int, ...]], dict[str, Any]]] = {
    "Swish": ([(3, 7), (1,)], {}),
    "GroupNorm": ([(2, 6, 5, 7), (6,), (6,)], {"num_groups": 3, "eps": 1e-3}),
    "Normalize": ([(2, 5, 7, 3), (5,)], {"eps": 1e-3}),
    "DeformableConv2D": ([(1, 4, 7, 7), (1, 18, 5, 5), (6, 4, 3, 3)], {"kernel_shape": [3, 3]}),
    "FakeQuantize": ([(2, 3, 5), (3, 1), (3, 1), (3, 1), (3, 1)], {"levels": 16}),
}


@pytest.mark.parametrize("op", HALVES)
def test_half_precision(op: str) -> None:
    """fp16 in and out; in between OpenVINO and we compute in fp32."""
    shapes, attrs = HALVES[op]
    rng = rng_of("half", op)
    inputs = [f32(rng, *shape).astype(np.float16) for shape in shapes]
    if op == "FakeQuantize":
        inputs[1:] = [np.full((3, 1), v, np.float16) for v in (-0.5, 0.75, -0.5, 0.75)]
    model, feeds = one_node(op, inputs, attrs), feeds_of(inputs)
    same(ours(model, feeds), by_front_end(model, feeds), tolerance=1e-3)


@pytest.mark.parametrize("op", UNARY)
def test_activation(op: str) -> None:
    theirs, attrs = UNARY[op]
    inputs = [f32(rng_of(op), 3, 5, 7, low=-6, high=6)]
    compare(op, 8, inputs, attrs, their_op=theirs)
    compare("Activation", 8, inputs, {"type": op.lower(), **attrs}, attrs, their_op=theirs)


def against(op: str, inputs: Sequence[np.ndarray], attrs: Mapping[str, Any], build: Any) -> None:
    """A layer that OpenVINO no longer has, against what it is composed of."""
    same(ours(one_node(op, inputs, attrs), feeds_of(inputs)), by_operation_set(build, inputs))


def per_channel(parameter: Any) -> Any:
    return ops.unsqueeze(parameter, np.asarray([0, 2, 3]))


def test_scale_shift_prelu_and_leaky_relu() -> None:
    rng = rng_of("scale")
    x, scale, shift = f32(rng, 2, 5, 7, 3), f32(rng, 5), f32(rng, 5)
    against(
        "ScaleShift", [x, scale, shift], {}, lambda x, a, b: ops.add(ops.multiply(x, per_channel(a)), per_channel(b))
    )
    against("ScaleShift", [x, scale], {}, lambda x, a: ops.multiply(x, per_channel(a)))
    against("PReLU", [x, scale], {}, ops.prelu)
    against("PReLU", [x, scale[:1]], {"channel_shared": 1}, ops.prelu)
    against("ReLU", [x], {"negative_slope": 0.1}, lambda x: ops.prelu(x, np.asarray([0.1], np.float32)))
    against("ReLU6", [10 * x], {}, lambda x: ops.clamp(x, 0.0, 6.0))


def test_power() -> None:
    x = f32(rng_of("power"), 3, 5, 7)
    affine = lambda x: ops.add(ops.multiply(x, np.float32(0.5)), np.float32(2))  # noqa: E731
    against("Power", [x], {"power": 3.0, "scale": 0.5, "shift": 2.0}, lambda x: ops.power(affine(x), np.float32(3)))
    against("Power", [x], {"scale": 0.5, "shift": 2.0}, affine)


def test_eltwise() -> None:
    rng = rng_of("eltwise")
    a, b, c = (f32(rng, *shape, low=0.5, high=2) for shape in ((2, 3, 5), (2, 3, 5), (3, 1)))
    against("Eltwise", [a, b, c], {"operation": "sum"}, lambda a, b, c: ops.add(ops.add(a, b), c))
    weigh = lambda v, k: ops.multiply(v, np.float32(k))  # noqa: E731
    against("Eltwise", [a, b], {"operation": "sum", "coeff": [1.0, -2.0]}, lambda a, b: ops.add(a, weigh(b, -2)))
    for word, build in {
        "mul": ops.multiply,
        "prod": ops.multiply,
        "max": ops.maximum,
        "min": ops.minimum,
        "sub": ops.subtract,
        "div": ops.divide,
        "pow": ops.power,
        "squared_diff": ops.squared_difference,
    }.items():
        against("Eltwise", [a, c], {"operation": word}, build)


@pytest.mark.parametrize("op", ["FullyConnected", "InnerProduct"])
def test_fully_connected(op: str) -> None:
    rng = rng_of(op)
    x, weights, bias = f32(rng, 3, 2, 5), f32(rng, 7, 10), f32(rng, 7)
    flat = lambda x: ops.reshape(x, np.asarray([3, 10]), False)  # noqa: E731
    against(op, [x, weights], {"num_output": 7}, lambda x, w: ops.matmul(flat(x), w, False, True))
    against(op, [x, weights, bias], {"out-size": 7}, lambda x, w, b: ops.add(ops.matmul(flat(x), w, False, True), b))


# --- movement ---------------------------------------------------------------------------------------------------------


def test_crop_copy_and_tile() -> None:
    rng = rng_of("crop")
    x, like = f32(rng, 2, 5, 9, 11), f32(rng, 2, 5, 4, 6)
    cut = lambda b, e: lambda x, *_: ops.slice(x, np.asarray(b), np.asarray(e), np.ones(4, np.int64))  # noqa: E731
    against("Crop", [x], {"axis": [2, 3], "offset": [1, 2], "dim": [5, 7]}, cut([0, 0, 1, 2], [2, 5, 6, 9]))
    against("Crop", [x], {"axis": [1, -1], "crop_begin": [1, 2], "crop_end": [0, 3]}, cut([0, 1, 0, 2], [2, 5, 9, 8]))
    [got] = ours(one_node("Crop", [x, like], {"axis": 2, "offset": [3, 4]}), feeds_of([x, like]))
    np.testing.assert_array_equal(got, x[:, :, 3:7, 4:10])
    [got] = ours(one_node("Copy", [x], {}), feeds_of([x]))
    np.testing.assert_array_equal(got, x)
    against("Tile", [x], {"axis": 1, "tiles": 3}, lambda x: ops.tile(x, np.asarray([1, 3, 1, 1])))
    compare("Tile", 1, [x, np.asarray([2, 1, 1, 1, 2], np.int64)], {}, constant=(1,))


@pytest.mark.parametrize("axis", [1, -1])
def test_shuffle_channels(axis: int) -> None:
    compare("ShuffleChannels", 3, [f32(rng_of("shuffle", axis), 2, 6, 3, 6)], {"axis": axis, "group": 3})


def test_space_to_batch_and_back() -> None:
    rng = rng_of("blocks")
    block, begin, end = (np.asarray(v, np.int64) for v in ([1, 1, 2, 3], [0, 0, 1, 0], [0, 0, 0, 2]))
    compare("SpaceToBatch", 2, [f32(rng, 2, 3, 5, 7), block, begin, end], {}, constant=(1, 2, 3))
    compare("BatchToSpace", 2, [f32(rng, 12, 3, 4, 5), block, begin, end], {}, constant=(1, 2, 3))


@pytest.mark.parametrize(
    ("begin", "end", "step", "masks"),
    [
        ([0, 1, 2, 0], [2, 4, 9, 5], [1, 1, 2, 1], {}),
        ([1, 0, -1, 0], [2, 0, 0, 0], [1, 1, -2, 1], {"begin_mask": [0, 1, 0, 1], "end_mask": [0, 1, 0, 1]}),
        (
            [0, 1, 0],
            [0, 2, 0],
            [1, 1, 1],
            {"begin_mask": [1, 0, 1], "end_mask": [1, 0, 1], "shrink_axis_mask": [0, 1, 0]},
        ),
        ([0, 0, 1], [0, 0, 3], [1, 1, 1], {"new_axis_mask": [1, 0, 0], "ellipsis_mask": [0, 1, 0]}),
    ],
)
def test_strided_slice(begin: list[int], end: list[int], step: list[int], masks: dict[str, list[int]]) -> None:
    inputs = [f32(rng_of("slice", begin), 2, 5, 9, 6), *(np.asarray(v, np.int64) for v in (begin, end, step))]
    attrs = {"begin_mask": [0] * len(begin), "end_mask": [0] * len(begin), **masks}
    compare("StridedSlice", 1, inputs, attrs, constant=(1, 2, 3))


@pytest.mark.parametrize("stride", [2, 3])
def test_reorg_yolo(stride: int) -> None:
    compare("ReorgYolo", 2, [f32(rng_of("reorg", stride), 2, 36, 6, 12)], {"stride": stride}, {"stride": [stride]})


# --- heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "attrs",
    [
        {"axis": 1, "end_axis": 3, "coords": 4, "classes": 3, "num": 5, "do_softmax": 1},
        {"axis": 1, "end_axis": 2, "coords": 4, "classes": 3, "num": 5, "do_softmax": 1},
        {"axis": 1, "end_axis": 3, "coords": 4, "classes": 3, "num": 9, "do_softmax": 0, "mask": [0, 1, 2]},
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [1, 2])
def test_region_yolo(attrs: dict[str, Any], batch: int) -> None:
    regions = attrs["num"] if attrs["do_softmax"] else 3
    x = f32(rng_of("region", attrs), batch, regions * 8, 5, 7, low=-3, high=3)
    compare("RegionYolo", 1, [x], attrs, {"mask": [], **attrs, "do_softmax": bool(attrs["do_softmax"])})


@pytest.mark.parametrize("merge", [0, 1])
def test_ctc_greedy_decoder(merge: int) -> None:
    rng = rng_of("ctc", merge)
    mask = np.ones((11, 3), np.float32)
    mask[7:, 1] = 0
    mask[0:1, 2] = 1
    data = f32(rng, 11, 3, 4)
    compare("CTCGreedyDecoder", 1, [data, mask], {"ctc_merge_repeated": merge}, {"ctc_merge_repeated": bool(merge)})


# --- resizing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [[9, 13], [3, 4], [1, 20]], ids=str)
@pytest.mark.parametrize("mode", ["nearest", "linear", "linear_onnx", "cubic"])
@pytest.mark.parametrize(
    "where", ["half_pixel", "pytorch_half_pixel", "asymmetric", "tf_half_pixel_for_nn", "align_corners"]
)
def test_interpolate(where: str, mode: str, size: list[int]) -> None:
    rng = rng_of("interpolate", where, mode, size)
    inputs = [f32(rng, 2, 3, 6, 8), np.asarray(size, np.int64), np.asarray([2, 3], np.int64)]
    attrs = {"mode": mode, "shape_calculation_mode": "sizes", "coordinate_transformation_mode": where}
    compare("Interpolate", 11, inputs, attrs, constant=(1, 2))


@pytest.mark.parametrize("rounding", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil", "simple"])
def test_interpolate_nearest(rounding: str) -> None:
    inputs = [f32(rng_of(rounding), 2, 3, 6, 8), np.asarray([2.5, 0.5], np.float32), np.asarray([2, 3], np.int64)]
    attrs = {"mode": "nearest", "shape_calculation_mode": "scales", "nearest_mode": rounding}
    compare("Interpolate", 11, inputs, attrs, constant=(1, 2))


def test_interpolate_with_padding() -> None:
    sizes, scales, axes = np.asarray([4, 5], np.int64), np.ones(2, np.float32), np.asarray([2, 3], np.int64)
    attrs = {
        "shape_calculation_mode": "sizes",
        "mode": "linear_onnx",
        "pads_begin": [0, 0, 1, 2],
        "pads_end": [0, 0, 0, 1],
    }
    compare("Interpolate", 4, [f32(rng_of("padding"), 2, 3, 6, 8), sizes, scales, axes], attrs, constant=(1, 2, 3))


def test_interpolate_with_antialiasing() -> None:
    """Against OpenVINO's reference: its CPU device differs from it here."""
    x, rest = (
        f32(rng_of("antialias"), 2, 3, 6, 8),
        (np.asarray([4, 5], np.int64), np.ones(2, np.float32), np.asarray([2, 3], np.int64)),
    )
    attrs = {"shape_calculation_mode": "sizes", "mode": "linear", "antialias": 1}
    got = ours(one_node("Interpolate", [x, *rest], attrs, constant=(1, 2, 3)), {"i0": x})
    same(got, by_reference(lambda p: create(4, "Interpolate", [p, *rest], {**attrs, "antialias": True}), [x]))


def test_interp() -> None:
    x = f32(rng_of("interp"), 2, 3, 5, 7)
    size, axes = np.asarray([9, 13]), np.asarray([2, 3])
    for corners, word in ((1, "align_corners"), (0, "asymmetric")):
        attrs = {"mode": "linear_onnx", "shape_calculation_mode": "sizes", "coordinate_transformation_mode": word}
        build = lambda x, attrs=attrs: create(11, "Interpolate", [x, size, axes], attrs)  # noqa: E731
        against("Interp", [x], {"height": 9, "width": 13, "align_corners": corners}, build)
    against(
        "Interp",
        [x],
        {"zoom_factor": 2},
        lambda x: create(
            11, "Interpolate", [x, size, axes], {**attrs, "coordinate_transformation_mode": "align_corners"}
        ),
    )


# --- suppression ------------------------------------------------------------------------------------------------------


def boxes_of(rng: np.random.Generator, *shape: int) -> np.ndarray:
    near = rng.uniform(0, 0.6, (*shape, 2))
    return np.concatenate([near, near + rng.uniform(0.1, 0.4, (*shape, 2))], axis=-1).astype(np.float32)


@pytest.mark.parametrize("sigma", [0.0, 0.5])
@pytest.mark.parametrize("encoding", ["corner", "center"])
@pytest.mark.parametrize("ordered", [0, 1])
def test_non_max_suppression(ordered: int, encoding: str, sigma: float) -> None:
    rng = rng_of("nms", ordered, encoding, sigma)
    scalars = [np.asarray(v, t) for v, t in ((6, np.int64), (0.4, np.float32), (0.2, np.float32), (sigma, np.float32))]
    inputs = [boxes_of(rng, 2, 23), f32(rng, 2, 3, 23, low=0, high=1), *scalars]
    attrs = {"box_encoding": encoding, "sort_result_descending": ordered, "output_type": "i64"}
    theirs = {**attrs, "sort_result_descending": bool(ordered)}
    compare("NonMaxSuppression", 9, inputs, attrs, theirs, n=3, constant=(2, 3, 4, 5), trim=True)


NMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "score": {"sort_result_type": "score"},
    "class": {"sort_result_type": "classid", "output_type": "i32"},
    "across": {"sort_result_type": "score", "sort_result_across_batch": 1},
    "class-across": {"sort_result_type": "classid", "sort_result_across_batch": 1},
    "limits": {"nms_top_k": 9, "keep_top_k": 11, "background_class": 0},
    "pixels": {"normalized": 0},
}


@pytest.mark.parametrize("case", NMS)
@pytest.mark.parametrize("op", ["MulticlassNms", "MatrixNms"])
def test_multiclass(op: str, case: str) -> None:
    rng = rng_of(op, case)
    attrs = {"score_threshold": 0.3, **NMS[case]}
    if op == "MulticlassNms":
        attrs["iou_threshold"] = 0.4
    boxes = boxes_of(rng, 2, 23) * (1 if attrs.get("normalized", 1) else 60)
    theirs = {k: bool(v) if k in ("normalized", "sort_result_across_batch") else v for k, v in attrs.items()}
    compare(op, 8, [boxes, f32(rng, 2, 3, 23, low=0, high=1)], attrs, theirs, n=3, trim=True)


def test_matrix_nms_gaussian() -> None:
    rng = rng_of("gaussian")
    attrs = {
        "score_threshold": 0.1,
        "decay_function": "gaussian",
        "gaussian_sigma": 1.5,
        "post_threshold": 0.2,
        "sort_result_type": "score",
    }
    compare("MatrixNms", 8, [boxes_of(rng, 2, 23), f32(rng, 2, 3, 23, low=0, high=1)], attrs, n=3, trim=True)


def test_multiclass_nms_with_adaptive_threshold_and_boxes_per_class() -> None:
    rng = rng_of("adaptive")
    attrs = {"score_threshold": 0.1, "iou_threshold": 0.7, "nms_eta": 0.8}
    compare("MulticlassNms", 9, [boxes_of(rng, 2, 23), f32(rng, 2, 3, 23, low=0, high=1)], attrs, n=3, trim=True)
    inputs = [boxes_of(rng, 3, 23), f32(rng, 3, 23, low=0, high=1), np.asarray([9, 14], np.int64)]
    compare("MulticlassNms", 9, inputs, attrs, n=3, trim=True)
