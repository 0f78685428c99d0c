"""Detection layers and FakeQuantize of ``org.openvinotoolkit`` against OpenVINO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from conformance.openvino_oracle import (
    by_front_end,
    by_operation_set,
    check,
    create,
    f32,
    feeds_of,
    one_node,
    ours,
    rng_of,
    run_openvino,
    same,
)
from tunewright import Core
from tunewright.errors import ModelError

SEEDS = range(3)

# --- FakeQuantize -----------------------------------------------------------------------------------------------------


def away_from_ties(x: np.ndarray, low: np.ndarray, high: np.ndarray, levels: int) -> np.ndarray:
    """OpenVINO's kernels round a precomputed scale: values next to half a step may fall on either side."""
    step = (high - low) / (levels - 1)
    place = (x - low) / step
    near = np.abs(place - np.floor(place) - 0.5) < 0.02
    return np.where(near, x + 0.1 * step, x).astype(np.float32)


@pytest.mark.parametrize("levels", [2, 16, 255, 256])
@pytest.mark.parametrize("ranges", [(), (1,), (1, 3, 1, 1), (3, 1, 1), (1, 3, 5, 7), (1, 1, 1, 7)], ids=str)
def test_fake_quantize(levels: int, ranges: tuple[int, ...]) -> None:
    rng = rng_of("fq", levels, ranges)
    low, high = f32(rng, *ranges, low=-2, high=-0.5), f32(rng, *ranges, low=0.5, high=2)
    out_low, out_high = f32(rng, *ranges, low=-3, high=-1), f32(rng, *ranges, low=1, high=3)
    x = away_from_ties(f32(rng, 2, 3, 5, 7, low=-3, high=3), low, high, levels)
    check("FakeQuantize", [x, low, high, out_low, out_high], {"levels": levels}, constant=(1, 2, 3, 4))


def test_fake_quantize_unsigned_and_per_channel_outputs() -> None:
    rng = rng_of("fq-unsigned")
    zero, six = np.zeros((1, 1, 1, 1), np.float32), np.full((1, 1, 1, 1), 6, np.float32)
    out = f32(rng, 1, 4, 1, 1, low=1, high=9)
    x = away_from_ties(f32(rng, 1, 4, 3, 3, low=-2, high=8), zero, six, 256)
    check("FakeQuantize", [x, zero, six, zero * out, out], {"levels": 256}, constant=(1, 2, 3, 4))


# --- PriorBox ---------------------------------------------------------------------------------------------------------

PRIOR_BOXES: dict[str, dict[str, Any]] = {
    "ssd": {
        "min_size": [30.0],
        "max_size": [60.0],
        "aspect_ratio": [2.0],
        "flip": 1,
        "step": 8.0,
        "offset": 0.5,
        "variance": [0.1, 0.1, 0.2, 0.2],
    },
    "many": {
        "min_size": [10.0, 20.0],
        "max_size": [15.0],
        "aspect_ratio": [2.0, 3.0, 2.0],
        "flip": 1,
        "clip": 1,
        "variance": [0.3],
    },
    "order": {
        "min_size": [10.0, 20.0],
        "max_size": [15.0, 30.0],
        "aspect_ratio": [2.0],
        "min_max_aspect_ratios_order": 0,
    },
    "mxnet": {"min_size": [0.1, 0.2], "aspect_ratio": [2.0, 0.5], "scale_all_sizes": 0, "step": -1.0, "offset": 0.5},
    "mxnet-step": {
        "min_size": [0.1, 0.2],
        "aspect_ratio": [2.0, 0.5],
        "scale_all_sizes": 0,
        "step": 0.25,
        "offset": 0.5,
    },
    "dense": {"fixed_size": [32.0, 64.0], "density": [4.0, 2.0], "fixed_ratio": [1.0], "step": 16.0, "offset": 0.5},
    "dense-plain": {"fixed_size": [33.0], "density": [2.0], "step": 16.0, "offset": 0.5},
    "dense-ratios": {
        "fixed_size": [16.0, 35.0],
        "density": [1.0, 2.0],
        "aspect_ratio": [2.0],
        "flip": 1,
        "step": 16.0,
        "offset": 0.5,
    },
}


@pytest.mark.parametrize("case", PRIOR_BOXES)
@pytest.mark.parametrize(("feature", "image"), [((5, 7), (83, 121)), ((1, 3), (300, 300))], ids=str)
def test_prior_box(case: str, feature: tuple[int, int], image: tuple[int, int]) -> None:
    inputs = [np.zeros((1, 4, *feature), np.float32), np.zeros((1, 3, *image), np.float32)]
    check("PriorBox", inputs, PRIOR_BOXES[case])


@pytest.mark.parametrize("case", PRIOR_BOXES)
def test_prior_box_of_sizes(case: str) -> None:
    attrs = PRIOR_BOXES[case]
    sizes = [np.asarray([4, 6], np.int64), np.asarray([65, 97], np.int64)]
    [got] = ours(one_node("PriorBox", sizes, attrs, constant=(0, 1)), {})
    flags = {
        k: bool(attrs[k]) for k in ("flip", "clip", "scale_all_sizes", "min_max_aspect_ratios_order") if k in attrs
    }
    lists = {k: [float(v) for v in attrs.get(k, [])] for k in ("min_size", "max_size", "aspect_ratio")}
    node = create(8, "PriorBox", sizes, {"offset": 0.0, **attrs, **lists, **flags})
    same([got], run_openvino(node, {}))


CLUSTERED: dict[str, dict[str, Any]] = {
    "steps": {
        "width": [10.0, 20.5, 33.0],
        "height": [12.0, 8.0, 30.5],
        "step": 16.0,
        "offset": 0.5,
        "variance": [0.1, 0.1, 0.2, 0.2],
    },
    "two-steps": {"width": [10.0], "height": [12.0], "step_w": 12.0, "step_h": 9.0, "offset": 0.5, "clip": 1},
    "image-steps": {"width": [10.0, 90.0], "height": [12.0, 80.0], "clip": 1, "variance": [0.2]},
}


@pytest.mark.parametrize("case", CLUSTERED)
def test_prior_box_clustered(case: str) -> None:
    inputs = [np.zeros((2, 4, 5, 7), np.float32), np.zeros((2, 3, 83, 121), np.float32)]
    check("PriorBoxClustered", inputs, CLUSTERED[case])


GRID_INPUTS = [
    f32(rng_of("grid"), 3, 4, low=-20, high=20),
    np.zeros((1, 2, 5, 7), np.float32),
    np.zeros((1, 3, 40, 63), np.float32),
]


@pytest.mark.parametrize("attrs", [{}, {"flatten": 0}, {"h": 5, "w": 7}, {"stride_x": 8.0, "stride_y": 4.0}], ids=str)
def test_prior_grid_generator(attrs: dict[str, Any]) -> None:
    check("ExperimentalDetectronPriorGridGenerator", GRID_INPUTS, attrs)


def test_prior_grid_generator_with_its_own_grid() -> None:
    """OpenVINO computes the attributes' grid, but leaves room for the feature map's."""
    model, feeds = (
        one_node("ExperimentalDetectronPriorGridGenerator", GRID_INPUTS, {"h": 3, "w": 4}),
        feeds_of(GRID_INPUTS),
    )
    [got], [expected] = ours(model, feeds), by_front_end(model, feeds)
    assert got.shape == (3 * 4 * 3, 4)
    same([got], [expected[: len(got)]])


# --- DetectionOutput --------------------------------------------------------------------------------------------------

DETECTION: dict[str, dict[str, Any]] = {
    "corner": {"keep_top_k": 10},
    "center": {"code_type": "CENTER_SIZE", "keep_top_k": 7, "top_k": 9},
    "caffe-name": {"code_type": "caffe.PriorBoxParameter.CENTER_SIZE", "keep_top_k": 50, "confidence_threshold": 0.4},
    "all": {"code_type": "CENTER_SIZE", "keep_top_k": -1},
    "top": {"code_type": "CENTER_SIZE", "keep_top_k": -1, "top_k": 5},
    "own-locations": {"code_type": "CENTER_SIZE", "keep_top_k": 20, "share_location": 0},
    "clip": {"code_type": "CENTER_SIZE", "keep_top_k": 20, "clip_before_nms": 1},
    "clip-after": {"keep_top_k": 20, "clip_after_nms": 1},
    "in-target": {"code_type": "CENTER_SIZE", "keep_top_k": 20, "variance_encoded_in_target": 1},
    "pixels": {"keep_top_k": 20, "normalized": 0, "input_width": 80, "input_height": 60},
    "no-background": {"keep_top_k": 20, "background_label_id": -1},
    "mxnet": {"code_type": "CENTER_SIZE", "keep_top_k": 12, "decrease_label_id": 1, "confidence_threshold": 0.3},
    "mxnet-top": {"code_type": "CENTER_SIZE", "keep_top_k": -1, "top_k": 6, "decrease_label_id": 1},
}


def detection_inputs(
    rng: np.random.Generator, attrs: Mapping[str, Any], batch: int, priors: int, classes: int, shared: bool
) -> list[np.ndarray]:
    groups = 1 if attrs.get("share_location", 1) else classes
    normalized = attrs.get("normalized", 1)
    rows = 1 if attrs.get("variance_encoded_in_target", 0) else 2
    scale = np.asarray([1.0, 1.0] if normalized else [attrs["input_width"], attrs["input_height"]])
    near = rng.uniform(0, 0.6, (1 if shared else batch, priors, 2))
    far = near + rng.uniform(0.1, 0.4, near.shape)
    boxes = np.concatenate([near * scale, far * scale], axis=2)
    if not normalized:
        boxes = np.concatenate([np.zeros((*boxes.shape[:2], 1)), boxes], axis=2)
    flat = boxes.reshape(len(boxes), 1, -1)
    variances = np.full((len(flat), rows - 1, flat.shape[2]), 0.2)
    return [
        f32(rng, batch, priors * groups * 4, low=-0.3, high=0.3),
        f32(rng, batch, priors * classes, low=0, high=1),
        np.concatenate([flat, variances], axis=1).astype(np.float32),
    ]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", DETECTION)
def test_detection_output(case: str, seed: int) -> None:
    attrs = {"nms_threshold": 0.45, **DETECTION[case]}
    rng = rng_of("do", case, seed)
    inputs = detection_inputs(rng, attrs, *((1, 13, 3), (2, 23, 4), (3, 17, 2))[seed], shared=seed != 1)
    [got] = check("DetectionOutput", inputs, attrs)
    assert (got[0, 0, :, 0] == -1).sum() <= 1


def test_detection_output_with_refined_anchors() -> None:
    attrs = {"nms_threshold": 0.45, "keep_top_k": 20, "code_type": "CENTER_SIZE", "objectness_score": 0.3}
    rng = rng_of("arm")
    inputs = detection_inputs(rng, attrs, 2, 19, 3, shared=False)
    inputs += [f32(rng, 2, 19 * 2, low=0, high=1), f32(rng, 2, 19 * 4, low=-0.3, high=0.3)]
    check("DetectionOutput", inputs, attrs)


def test_detection_output_stops_at_the_marker_of_a_proposal() -> None:
    attrs = {"nms_threshold": 0.45, "keep_top_k": 20, "normalized": 0, "input_width": 80, "input_height": 60}
    inputs = detection_inputs(rng_of("marker"), attrs, 1, 15, 3, shared=True)
    inputs[2][0, 0, 5 * 9] = -1
    check("DetectionOutput", inputs, attrs)


def test_detection_output_of_nothing() -> None:
    attrs = {"nms_threshold": 0.45, "keep_top_k": 4, "confidence_threshold": 2.0}
    [got] = check("DetectionOutput", detection_inputs(rng_of("none"), attrs, 1, 5, 3, shared=True), attrs)
    assert got[0, 0, 0, 0] == -1


# --- proposals --------------------------------------------------------------------------------------------------------

PROPOSALS: dict[str, dict[str, Any]] = {
    "caffe": {},
    "tensorflow": {"framework": "tensorflow", "box_coordinate_scale": 10.0, "box_size_scale": 5.0},
    "unclipped": {"clip_before_nms": 0, "clip_after_nms": 1, "normalize": 1},
    "few": {"pre_nms_topn": 20, "post_nms_topn": 60},
}


@pytest.mark.parametrize("sizes", [3, 4])
@pytest.mark.parametrize("case", PROPOSALS)
def test_proposal(case: str, sizes: int) -> None:
    attrs = {
        "base_size": 16,
        "feat_stride": 16,
        "min_size": 1,
        "nms_thresh": 0.6,
        "pre_nms_topn": 100,
        "post_nms_topn": 25,
        "ratio": [0.5, 1.0, 2.0],
        "scale": [1.0, 2.5],
        **PROPOSALS[case],
    }
    rng = rng_of("proposal", case, sizes)
    probabilities = rng.permutation(2 * 12 * 5 * 7).reshape(2, 12, 5, 7).astype(np.float32) / 1000
    info = np.asarray([80.0, 112.0, 1.5, 1.25][:sizes], np.float32)
    inputs = [probabilities, f32(rng, 2, 24, 5, 7, low=-0.4, high=0.4), info]
    got = ours(one_node("Proposal", inputs, attrs, 2), feeds_of(inputs))
    flags = {k: bool(attrs[k]) for k in ("clip_before_nms", "clip_after_nms", "normalize") if k in attrs}
    rois, chances = by_operation_set(lambda *p: create(4, "Proposal", p, {**attrs, **flags}), inputs)
    ended = np.logical_or.accumulate(rois.reshape(2, -1, 5)[..., 0] == -1, axis=1).reshape(-1)
    same(
        got, [rois, np.where(ended, np.float32(0), chances)]
    )  # OpenVINO leaves the probabilities behind the end undefined
    [alone] = ours(one_node("Proposal", inputs, attrs, 1), feeds_of(inputs))
    np.testing.assert_array_equal(alone, got[0])


@pytest.mark.parametrize(
    "attrs",
    [{}, {"nms_thresh": 0.3, "post_nms_topN": 9}, {"legacy_plus_one": 0, "min_size": 4.0, "pre_nms_topN": 30}],
    ids=str,
)
@pytest.mark.parametrize("columns", [3, 4])
def test_generate_proposals(attrs: dict[str, Any], columns: int) -> None:
    rng = rng_of("gp", attrs, columns)
    scores = rng.permutation(2 * 3 * 5 * 7).reshape(2, 3, 5, 7).astype(np.float32) / 300
    info = np.asarray([[60, 70, 1.5, 1.25], [55, 80, 1.0, 1.0]], np.float32)[:, :columns]
    near = f32(rng, 3, 2, low=0, high=30)
    anchors = np.concatenate([near, near + f32(rng, 3, 2, low=10, high=30)], axis=1)
    check("GenerateProposals", [scores, f32(rng, 2, 12, 5, 7, low=-0.5, high=0.5), info, anchors], attrs, 3)


@pytest.mark.parametrize(
    "attrs", [{}, {"nms_threshold": 0.4, "post_nms_count": 12, "pre_nms_count": 40, "min_size": 2.0}], ids=str
)
@pytest.mark.parametrize("seed", SEEDS)
def test_generate_proposals_single_image(attrs: dict[str, Any], seed: int) -> None:
    rng = rng_of("gpsi", attrs, seed)
    near = f32(rng, 105, 2, low=0, high=40)
    anchors = np.concatenate([near, near + f32(rng, 105, 2, low=8, high=30)], axis=1)
    scores = rng.permutation(105).reshape(3, 5, 7).astype(np.float32) / 100 + 0.01
    inputs = [np.asarray([70, 75, 1], np.float32), anchors, f32(rng, 12, 5, 7, low=-0.5, high=0.5), scores]
    check("ExperimentalDetectronGenerateProposalsSingleImage", inputs, attrs, 2)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("limit", [9, 60])
def test_detectron_detection_output(limit: int, seed: int) -> None:
    rng = rng_of("eddo", limit, seed)
    near = f32(rng, 31, 2, low=0, high=40)
    rois = np.concatenate([near, near + f32(rng, 31, 2, low=5, high=30)], axis=1)
    rois[4, 2] = rois[4, 0] - 1
    inputs = [
        rois,
        f32(rng, 31, 20, low=-3, high=3),
        f32(rng, 31, 5, low=0, high=1),
        np.asarray([[70, 75, 1]], np.float32),
    ]
    attrs = {
        "num_classes": 5,
        "max_detections_per_image": limit,
        "nms_threshold": 0.4,
        "score_threshold": 0.2,
        "post_nms_count": 17,
    }
    check("ExperimentalDetectronDetectionOutput", inputs, attrs, 3)


@pytest.mark.parametrize("limit", [5, 13])
def test_top_rois(limit: int) -> None:
    rng = rng_of("topk", limit)
    inputs = [f32(rng, 13, 4), rng.permutation(13).astype(np.float32)]
    check("ExperimentalDetectronTopKROIs", inputs, {"max_rois": limit})


# --- whole models -----------------------------------------------------------------------------------------------------


def ssd() -> onnx.ModelProto:
    """Two scales of an SSD: features, heads, priors from the shapes of features and image, and the detections."""
    rng = rng_of("ssd")
    prior = {"aspect_ratio": [2.0], "flip": 1, "variance": [0.1, 0.1, 0.2, 0.2], "offset": 0.5}
    weights: dict[str, np.ndarray] = {}
    nodes = []
    for k, (below, channels) in enumerate((("image", 3), ("f0", 8))):
        weights |= {
            f"w{k}": f32(rng, 8, channels, 3, 3),
            f"loc_w{k}": f32(rng, 12, 8, 1, 1),
            f"conf_w{k}": f32(rng, 9, 8, 1, 1),
        }
        nodes.append(helper.make_node("Conv", [below, f"w{k}"], [f"f{k}"], strides=[2, 2], pads=[1, 1, 1, 1]))
        for head in ("loc", "conf"):
            nodes.append(helper.make_node("Conv", [f"f{k}", f"{head}_w{k}"], [f"{head}_map{k}"]))
            nodes.append(helper.make_node("Transpose", [f"{head}_map{k}"], [f"{head}_t{k}"], perm=[0, 2, 3, 1]))
            nodes.append(helper.make_node("Flatten", [f"{head}_t{k}"], [f"{head}{k}"]))
        size = {"min_size": [6.0 * (k + 1)], "step": 2.0 * (k + 1)}
        nodes.append(
            helper.make_node(
                "PriorBox", [f"f{k}", "image"], [f"prior{k}"], domain="org.openvinotoolkit", **prior, **size
            )
        )
    weights["grouped"] = np.asarray([0, -1, 3], np.int64)
    nodes += [
        helper.make_node("Concat", ["loc0", "loc1"], ["loc"], axis=1),
        helper.make_node("Concat", ["conf0", "conf1"], ["logits"], axis=1),
        helper.make_node("Reshape", ["logits", "grouped"], ["by_class"]),
        helper.make_node("Softmax", ["by_class"], ["chances"], axis=2),
        helper.make_node("Flatten", ["chances"], ["conf"]),
        helper.make_node("Concat", ["prior0", "prior1"], ["priors"], axis=2),
        helper.make_node(
            "DetectionOutput",
            ["loc", "conf", "priors"],
            ["detections"],
            domain="org.openvinotoolkit",
            code_type="CENTER_SIZE",
            nms_threshold=0.45,
            confidence_threshold=0.2,
            keep_top_k=30,
            top_k=60,
        ),
    ]
    graph = helper.make_graph(
        nodes,
        "ssd",
        [helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, ["n", 3, "h", "w"])],
        [onnx.ValueInfoProto(name="detections")],
        [numpy_helper.from_array(v, k) for k, v in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("org.openvinotoolkit", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def test_ssd_and_its_priors_are_made_at_load_time() -> None:
    model = ssd()
    compiled = Core().compile_model(model)
    for shape in ((1, 3, 21, 30), (2, 3, 16, 17)):  # shapes stay open until a request brings them
        image = f32(rng_of("image", shape), *shape)
        same([compiled({"image": image})["detections"]], by_front_end(model, {"image": image}), tolerance=1e-4)
    executed = {step.node.op for plan in compiled.program.plans for step in plan.steps}
    assert "org.openvinotoolkit::DetectionOutput" in executed
    assert not {op for op in executed if "PriorBox" in op or op == "Shape"}


def test_priors_of_computed_sizes_are_made_at_load_time() -> None:
    """The operation set's form: PriorBox over Shape -> Slice."""
    nodes = [helper.make_node("Relu", ["feature"], ["result"])]
    for name in ("feature", "image"):
        nodes.append(helper.make_node("Shape", [name], [f"{name}_shape"]))
        nodes.append(helper.make_node("Slice", [f"{name}_shape", "two", "four"], [f"{name}_size"]))
    attrs = {"min_size": [4.0], "offset": 0.5, "step": 2.0}
    nodes.append(
        helper.make_node("PriorBox", ["feature_size", "image_size"], ["priors"], domain="org.openvinotoolkit", **attrs)
    )
    inputs = [
        helper.make_tensor_value_info("feature", onnx.TensorProto.FLOAT, [1, 4, 5, 7]),
        helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, [1, 3, 33, 41]),
    ]
    outputs = [onnx.ValueInfoProto(name="result"), onnx.ValueInfoProto(name="priors")]
    bounds = [numpy_helper.from_array(np.asarray([v], np.int64), k) for k, v in (("two", 2), ("four", 4))]
    graph = helper.make_graph(nodes, "sizes", inputs, outputs, bounds)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("org.openvinotoolkit", 1)]
    compiled = Core().compile_model(helper.make_model(graph, opset_imports=opsets, ir_version=9))
    feature, image = np.zeros((1, 4, 5, 7), np.float32), np.zeros((1, 3, 33, 41), np.float32)
    got = compiled({"feature": feature, "image": image})["priors"]
    [expected] = by_front_end(one_node("PriorBox", [feature, image], attrs), {"i0": feature, "i1": image})
    same([got], [expected[0]])
    assert [step.node.op for plan in compiled.program.plans for step in plan.steps] == ["Relu"]


MISTAKES: dict[str, tuple[str, list[np.ndarray], dict[str, Any], str]] = {
    "levels": ("FakeQuantize", [np.zeros(3, np.float32)] * 5, {}, "levels"),
    "range": (
        "FakeQuantize",
        [np.zeros((1, 3), np.float32), *[np.zeros((2, 1), np.float32)] * 4],
        {"levels": 4},
        "does not fit",
    ),
    "threshold": (
        "DetectionOutput",
        [np.zeros((1, 8), np.float32)] * 2 + [np.zeros((1, 2, 8), np.float32)],
        {},
        "nms_threshold",
    ),
    "variance": (
        "PriorBox",
        [np.zeros((1, 1, 2, 2), np.float32)] * 2,
        {"min_size": [1.0], "variance": [0.1, 0.2]},
        "variance",
    ),
    "clusters": (
        "PriorBoxClustered",
        [np.zeros((1, 1, 2, 2), np.float32)] * 2,
        {"width": [1.0], "height": [1.0, 2.0]},
        "height",
    ),
    "code": (
        "DetectionOutput",
        [np.zeros((1, 8), np.float32)] * 2 + [np.zeros((1, 2, 8), np.float32)],
        {"code_type": "X", "nms_threshold": 1.0},
        "code_type",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_in_the_model_names_what_is_wrong(case: str) -> None:
    op, inputs, attrs, word = MISTAKES[case]
    with pytest.raises(ModelError, match=word) as caught:
        Core().compile_model(one_node(op, inputs, attrs))
    assert "'node'" in str(caught.value)
