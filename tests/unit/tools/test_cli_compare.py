"""`tunewright compare`: it must see what is wrong, and only that."""

from __future__ import annotations

import math
from importlib.util import find_spec

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tunewright import Core, Preprocess, tools
from tunewright.ir.types import DType, TensorType
from tunewright.testing.models import resnet, transformer
from tunewright.tools.compare import compare_layers, difference, differences, run_reference
from tunewright.tools.compare_pictures import prepared

NAN, INF = math.nan, math.inf


def test_an_error_of_one_percent_fails_and_noise_passes():
    want = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    assert difference("y", want * np.float32(1 + 1e-7), want).why == ""
    wrong = difference("y", want * np.float32(1.01), want)
    assert "above 1e-04" in wrong.why
    assert wrong.relative == pytest.approx(0.01, rel=1e-3)
    assert wrong.cosine == pytest.approx(1.0)
    assert difference("y", want * np.float32(1.01), want, tolerance=0.02).why == ""
    assert difference("y", -want, want).cosine == pytest.approx(-1.0)
    assert difference("y", want + np.float32(1e-6), want, tolerance=0).why


@pytest.mark.parametrize(
    ("mine", "theirs", "good"),
    [
        ([1.0, NAN], [1.0, NAN], True),
        ([1.0, NAN], [1.0, 2.0], False),
        ([1.0, INF], [1.0, INF], True),
        ([1.0, INF], [1.0, -INF], False),
        ([1.0, INF], [1.0, 5.0], False),
        ([0.0, 0.0], [0.0, 0.0], True),
        ([1e-30, 0.0], [0.0, 0.0], False),
        ([], [], True),
        ([INF, 1.0], [INF, 1.01], False),
    ],
)
def test_values_that_are_not_finite(mine, theirs, good):
    found = difference("y", np.asarray(mine, np.float32), np.asarray(theirs, np.float32))
    assert (found.why == "") is good


def test_integers_are_equal_or_wrong_but_quantised_ones_may_differ_by_a_step():
    want = np.arange(2000, dtype=np.int64)
    assert difference("y", want, want).why == ""
    assert difference("y", want + (want == 7), want).why == "not equal"
    bytes_ = (want % 200).astype(np.uint8)
    one_step = bytes_ + (want == 7).astype(np.uint8)
    assert difference("y", one_step, bytes_).why == ""
    assert difference("y", bytes_ + (want == 7).astype(np.uint8) * 2, bytes_).why
    assert difference("y", bytes_ + (want < 10).astype(np.uint8), bytes_).why


def test_shapes_types_strings_and_sequences():
    a = np.zeros((2, 3), np.float32)
    assert "shape" in difference("y", a, a.T).why
    assert "type" in difference("y", a, a.astype(np.float64)).why
    words = np.asarray(["a", "b"], object)
    assert difference("y", words, np.asarray(["a", "b"])).why == ""
    assert difference("y", words, np.asarray(["a", "c"])).why == "1 strings differ"
    assert [d.name for d in differences("s", [a, a], [a, a])] == ["s[0]", "s[1]"]
    assert differences("s", [a], [a, a])[0].why
    assert differences("s", None, None)[0].why == ""
    assert differences("s", None, a)[0].why
    assert differences("m", [{"a": 1.0}], [{"a": 1.0}])[0].why == ""


def test_the_first_wrong_layer_is_found(tmp_path):
    """The oracle computes a network in which one weight in the middle differs."""
    proto = resnet(18, size=32, width=8, classes=10)
    path = tmp_path / "m.onnx"
    onnx.save(proto, path)
    convs = [n for n in proto.graph.node if n.op_type == "Conv"]
    victim = convs[7]

    def crooked(model, where, inputs):
        for tensor in model.graph.initializer:
            if tensor.name == victim.input[1]:
                tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1.01), tensor.name))
        return run_reference(model, where, inputs)

    x = np.random.default_rng(0).standard_normal((1, 3, 32, 32)).astype(np.float32)
    found = compare_layers(Core(), proto, path, {"x": x}, "CPU", crooked, None)
    assert len(found) == len(proto.graph.node)
    assert next(d.name for d in found if d.why) == victim.output[0]
    assert not [d for d in compare_layers(Core(), proto, path, {"x": x}, "CPU", run_reference, None) if d.why]


@pytest.mark.parametrize("against", ["onnxruntime", "reference"])
def test_compare_agrees_on_a_whole_network(tmp_path, capsys, against):
    if against == "onnxruntime" and find_spec("onnxruntime") is None:
        pytest.skip("ONNX Runtime is not installed")
    path = tmp_path / "m.onnx"
    onnx.save(transformer(layers=1), path)
    assert tools.execute(["compare", str(path), "--layers", "--against", against]) == 0
    out = capsys.readouterr().out
    assert "the output agrees" in out and "layers agree" in out


def test_a_difference_is_exit_code_1(tmp_path, capsys):
    """Noise without a seed: two engines never make the same."""
    nodes = [
        helper.make_node("RandomNormalLike", ["x"], ["noise"], name="noise"),
        helper.make_node("Add", ["x", "noise"], ["y"], name="add"),
    ]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [64]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    assert tools.execute(["compare", str(path), "--against", "reference", "--layers"]) == 1
    out = capsys.readouterr().out
    assert "the outputs differ" in out
    assert "2 of 2 layers differ; the first is RandomNormalLike 'noise'" in " ".join(out.split())


def test_weights_outside_the_file(tmp_path, capsys):
    path, rng = tmp_path / "m.onnx", np.random.default_rng(0)
    weights = [rng.standard_normal(shape).astype(np.float32) for shape in ((4, 3, 3, 3), (5, 4, 1, 1))]
    nodes = [helper.make_node("Conv", ["x", "w0"], ["c"], "one"), helper.make_node("Conv", ["c", "w1"], ["y"], "two")]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 9, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    kept = [numpy_helper.from_array(weight, f"w{i}") for i, weight in enumerate(weights)]
    graph = helper.make_graph(nodes, "g", [x], [y], kept)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path, save_as_external_data=True, size_threshold=16)
    assert len(list(tmp_path.iterdir())) == 2, "the weights are elsewhere"
    assert tools.execute(["compare", str(path), "--layers", "--against", "reference"]) == 0, capsys.readouterr()
    assert "all 2 layers agree" in capsys.readouterr().out
    assert sorted(f.suffix for f in tmp_path.iterdir() if f.suffix == ".onnx") == [".onnx"]


@pytest.mark.parametrize(
    ("how", "shape"),
    [
        ("u8,nhwc,reverse,mean=123.7:116.3:103.5,scale=57.4", [1, 16, 12, 3]),
        ("u8,hwc,resize=linear,scale=255", [21, 9, 3]),
        ("u8,nhwc,resize=cubic", [1, 40, 30, 3]),
        ("f32,nchw,resize=nearest,mean=0.5", [1, 3, 7, 25]),
        ("u8,chw", [3, 16, 12]),
    ],
)
def test_pictures_as_they_come(how, shape, tmp_path, capsys):
    """The other engine gets what numpy makes of them: both agree."""
    rng = np.random.default_rng(0)
    weight = numpy_helper.from_array(rng.standard_normal((4, 3, 3, 3)).astype(np.float32), "w")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 16, 12])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], "conv"), helper.make_node("Relu", ["c"], ["y"], "relu")]
    graph = helper.make_graph(nodes, "g", [x], [y], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9), tmp_path / "m.onnx")
    picture = rng.integers(0, 256, shape).astype(np.uint8 if how.startswith("u8") else np.float32)
    np.save(tmp_path / "x.npy", picture)
    command = ["compare", str(tmp_path / "m.onnx"), "-i", f"x={tmp_path / 'x.npy'}", "--preprocess", f"x={how}"]
    assert tools.execute([*command, "--layers", "--against", "reference"]) == 0, capsys.readouterr()
    assert "all 2 layers agree" in capsys.readouterr().out
    if "reverse" in how:
        same = prepared(Preprocess.parse(how), picture, TensorType(DType.FLOAT32, (1, 3, 16, 12)))
        want = (picture[0, :, :, ::-1].transpose(2, 0, 1).astype("d") - [[[123.7]], [[116.3]], [[103.5]]]) / 57.4
        np.testing.assert_allclose(same[0], want, rtol=1e-6)


def test_a_resize_of_numpy_is_that_of_the_standard(tmp_path):
    rng = np.random.default_rng(1)
    x = rng.random((1, 2, 5, 9)).astype(np.float32)
    for mode, attrs in (
        ("linear", {"coordinate_transformation_mode": "half_pixel"}),
        ("cubic", {"coordinate_transformation_mode": "half_pixel", "cubic_coeff_a": -0.75}),
        ("nearest", {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
    ):
        node = helper.make_node("Resize", ["x", "", "", "s"], ["y"], mode=mode, **attrs)
        sizes = numpy_helper.from_array(np.array([1, 2, 8, 4]), "s")
        values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "xy"]
        proto = helper.make_model(helper.make_graph([node], "g", values[:1], values[1:], [sizes]),
                                  opset_imports=[helper.make_opsetid("", 19)])  # fmt: skip
        [want] = run_reference(proto, tmp_path / "m.onnx", {"x": x}).values()
        how = Preprocess(dtype="f32", layout="NCHW", resize=mode)
        got = prepared(how, x, TensorType(DType.FLOAT32, (1, 2, 8, 4)))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
