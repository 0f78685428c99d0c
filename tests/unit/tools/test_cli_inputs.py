"""Inputs from the command line: shapes, literals, files, random values."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tunewright import Core, InputError, Settings
from tunewright.frontend.model import Model
from tunewright.ir.graph import Graph
from tunewright.ir.types import DType, OptionalType, SequenceType, TensorType
from tunewright.tools.shared.inputs import DimensionSizes, concrete, make_feed, parse_shapes, random_tensor, read_value


def model_of(**inputs):
    graph = Graph("g")
    for name, type in inputs.items():
        graph.add_input(name, type)
    return Model(graph)


def feed(model, given=(), shapes=(), seed=0):
    return make_feed(model, list(given), list(shapes), seed, Settings())


def test_equal_symbols_get_equal_sizes():
    model = model_of(a=TensorType(DType.FLOAT32, ("n", 2)), b=TensorType(DType.INT64, (3, "n")))
    made = feed(model, shapes=["a=5x2"])
    assert made.values["a"].shape == (5, 2) and made.values["b"].shape == (3, 5)
    assert made.notes == []
    made = feed(model, given=["b=[[1, 2], [1, 2], [1, 2]]"])
    assert made.values["a"].shape == (2, 2)
    made = feed(model, given=["b=1"], shapes=["n=4"])
    assert made.values["a"].shape == (4, 2) and made.values["b"].shape == (3, 4)


def test_what_is_assumed_is_said():
    made = feed(model_of(a=TensorType(DType.FLOAT32, ("n", None, 7))))
    assert made.values["a"].shape == (1, 1, 7)
    assert made.notes == ["a: n, ? taken as 1; set with --shape a=1x1x7"]


def test_a_question_mark_keeps_the_name_of_a_dimension():
    model = model_of(a=TensorType(DType.FLOAT32, ("n", "m")))
    shapes, symbols = parse_shapes(model, ["a=?x3", "n=2"])
    assert shapes == {"a": ["n", 3]} and symbols == {"m": 3, "n": 2}


def test_a_scalar_shape():
    made = feed(model_of(a=TensorType(DType.FLOAT32, ())))
    assert made.values["a"].shape == () and isinstance(made.values["a"], np.ndarray)


def test_names_with_equal_signs_and_colons():
    made = feed(model_of(**{"a=b:0": TensorType(DType.INT32, (2,))}), given=["a=b:0=[4, 5]"])
    assert made.values["a=b:0"].tolist() == [4, 5]


@pytest.mark.parametrize("dtype", [d for d in DType if d.numpy.kind != "V" or d.numpy.itemsize], ids=str)
def test_random_values_suit_every_type(dtype):
    value = random_tensor(np.random.default_rng(0), TensorType(dtype, (400,)))
    assert value.shape == (400,) and value.dtype == dtype.numpy
    if dtype is DType.STRING:
        assert all(isinstance(v, str) for v in value)
    elif dtype is DType.UINT8:
        assert value.max() > 200
    elif dtype.is_integer:
        assert int(value.astype(np.int64).min()) >= 0 and 1 <= int(value.astype(np.int64).max()) <= 9
    elif dtype.is_float and dtype is not DType.FLOAT8E8M0:  # E8M0 has no sign
        assert value.astype(np.float32).min() < 0 < value.astype(np.float32).max()


def test_sequences_and_optionals():
    elem = TensorType(DType.FLOAT32, (2,))
    made = feed(model_of(s=SequenceType(elem), o=OptionalType(elem)))
    assert [v.shape for v in made.values["s"]] == [(2,), (2,)]
    assert "o" not in made.values


def test_an_unknown_rank_needs_a_shape():
    with pytest.raises(InputError, match="give a shape: --shape a="):
        feed(model_of(a=TensorType(DType.FLOAT32, None)))
    assert feed(model_of(a=TensorType(DType.FLOAT32, None)), shapes=["a=2x2"]).values["a"].shape == (2, 2)


@pytest.mark.parametrize(
    ("text", "type", "want"),
    [
        ("16000", TensorType(DType.INT64, ()), np.asarray(16000)),
        ("3", TensorType(DType.INT64, (2, "n")), np.full((2, 1), 3)),
        ("[1, 2.5]", TensorType(DType.FLOAT32, (2,)), np.asarray([1, 2.5], np.float32)),
        ("true", TensorType(DType.BOOL, (1,)), np.asarray([True])),
        ('"word"', TensorType(DType.STRING, (2,)), np.asarray(["word", "word"], object)),
    ],
)
def test_literals(text, type, want):
    value = read_value(text, type, "x", DimensionSizes(Settings()))
    assert value.dtype == type.dtype.numpy
    np.testing.assert_array_equal(value, want)


@pytest.mark.parametrize("text", ["1.5", "[[1], [2, 3]]", '"a"', "{}"])
def test_literals_that_do_not_fit(text):
    with pytest.raises(InputError):
        read_value(text, TensorType(DType.INT64, (2,)), "x", DimensionSizes(Settings()))


def test_files(tmp_path):
    x = np.asarray([[1, 2]], np.float32)
    type = TensorType(DType.FLOAT32, (1, 2))
    np.savez(tmp_path / "many.npz", x=x, other=x + 1)
    np.savez(tmp_path / "one.npz", other=x + 1)
    (tmp_path / "t.pb").write_bytes(numpy_helper.from_array(x).SerializeToString())
    settings = DimensionSizes(Settings())
    np.testing.assert_array_equal(read_value(str(tmp_path / "many.npz"), type, "x", settings), x)
    np.testing.assert_array_equal(read_value(str(tmp_path / "one.npz"), type, "x", settings), x + 1)
    np.testing.assert_array_equal(read_value(str(tmp_path / "t.pb"), type, "x", settings), x)
    with pytest.raises(InputError, match="no 'y'"):
        read_value(str(tmp_path / "many.npz"), type, "y", settings)


def test_a_pickle_is_not_opened(tmp_path):
    np.save(tmp_path / "evil.npy", np.asarray([{}], object), allow_pickle=True)
    with pytest.raises(InputError, match="cannot be read as an array"):
        read_value(str(tmp_path / "evil.npy"), TensorType(DType.FLOAT32, (1,)), "x", DimensionSizes(Settings()))


@pytest.mark.parametrize("data", [b"", b"\x93NUMPY", b"PK\x03\x04 broken", b"\xff" * 64])
@pytest.mark.parametrize("ending", ["npy", "npz", "pb"])
def test_broken_files(tmp_path, data, ending):
    path = tmp_path / f"x.{ending}"
    path.write_bytes(data)
    try:
        read_value(str(path), TensorType(DType.FLOAT32, (1,)), "x", DimensionSizes(Settings()))
    except InputError:
        return
    assert ending == "pb" and data == b""  # an empty message is an empty tensor; the request refuses it


def test_compiling_the_concrete_model_plans_it():
    node = helper.make_node("Relu", ["x"], ["y"])
    info = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])
    proto: onnx.ModelProto = helper.make_model(
        helper.make_graph([node], "g", [info], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]),
        opset_imports=[helper.make_opsetid("", 17)],
    )
    core = Core()
    made = make_feed(core.read_model(proto), None, ["n=2"], 0, core.settings)
    compiled = core.compile_model(concrete(made))
    assert len(compiled.program.plans) == 1
    assert compiled(made.values)["y"].shape == (2, 3)
    assert len(compiled.program.plans) == 1


# ---- inputs that come in another way --------------------------------------------------------------------------------

PICTURES = ("--preprocess", "x=u8,nhwc,reverse,mean=127.5,scale=57.4")


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """A convolution over three channels."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TUNEWRIGHT_USER_DB_PATH", str(tmp_path / "kb"))
    w = numpy_helper.from_array(np.random.default_rng(0).standard_normal((4, 3, 3, 3), np.float32), "w")
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [1, 3, 8, 8]), ("y", None)))
    graph = helper.make_graph([helper.make_node("Conv", ["x", "w"], ["y"], name="conv")], "g", [x], [y], [w])
    path = tmp_path / "pictures.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_every_command_takes_preprocess_in_one_way(pictures, tmp_path, call):
    code, out, err = call("explain", pictures, *PICTURES, "--no-time", "--json", "-")
    assert code == 0, err
    report = json.loads(out)
    assert report["inputs"] == {"x": "uint8[1,8,8,3]"}
    assert any("uint8[1,8,8,3]" in layer["problem"] for layer in report["layers"])
    code, out, _ = call("query", pictures, *PICTURES, "--json")
    assert code == 0 and {"Cast", "Transpose", "Conv"} <= {row["op"] for row in json.loads(out)}
    code, out, _ = call("graph", pictures, *PICTURES, "--stage", "read")
    assert code == 0 and "uint8[1,8,8,3]" in out and "Conv" in out
    code, out, _ = call("place", pictures, *PICTURES, "-d", "HETERO:CPU,CPU.HOST", "--json")
    assert code == 0 and len(json.loads(out)["subgraphs"][0]["nodes"]) > 1
    code, _, err = call("tune", pictures, *PICTURES, "-b", "2", "--result", tmp_path / "results")
    assert code == 0, err
    (result,) = (tmp_path / "results").iterdir()
    assert any("uint8[1,8,8,3]" in str(layer["problem"]) for layer in json.loads(result.read_text())["layers"])
    assert call("run", pictures, *PICTURES, "--frozen", "--no-save")[0] == 2
    assert call("lock", pictures, *PICTURES)[0] == 0
    assert call("run", pictures, *PICTURES, "--frozen", "--no-save")[0] == 0
    for command in ("run", "benchmark", "explain", "tune", "lock", "graph", "query"):
        code, _, err = call(command, pictures, "--preprocess", "x=u8,sideways")
        assert code == 2 and "'sideways' is not a part of a preprocessing" in err, command


def test_preprocess_in_python(pictures):
    import tunewright
    from tunewright import Preprocess

    how = Preprocess(dtype="u8", layout="NHWC", scale=255)
    frame = np.zeros((1, 8, 8, 3), np.uint8)
    layers = tunewright.explain(pictures, {"x": frame}, preprocess=how, count=0)
    assert any("uint8[1,8,8,3]" in layer.problem for layer in layers)
    result = tunewright.tune(pictures, {"x": frame}, budget=1, preprocess={"x": how})
    assert any("uint8[1,8,8,3]" in layer.problem.key() for layer in result.layers)
    report = tunewright.benchmark(pictures, {"x": frame}, preprocess=how, count=2)
    assert report["inputs"] == {"x": "uint8[1,8,8,3]"}


def test_advice_names_the_options_that_the_model_ran_with(pictures):
    from tunewright.tools.benchmark.run import Bench, BenchmarkOptions, _again

    how = "x=u8,hwc,mean=1:2:3"
    wish = BenchmarkOptions(str(pictures), "CPU", {}, None, None, 0, None, None, 1, 0, [50.0], preprocess=[how])
    read = Core().read_model(pictures)
    bench, made = Bench(Core(), read, 0.0, wish), Core().compile_model(read, "CPU.HOST")
    assert _again(bench, read, made).options == ["--preprocess", how]
    assert _again(bench, read.reshape({"x": [2, 3, 8, 8]}), made).options == ["-s", "x=2x3x8x8", "--preprocess", how]


def test_dumps_take_no_inputs(tmp_path, call):
    (tmp_path / "dump.jsonl").write_text("{}\n")
    code, _, err = call("tune", tmp_path / "dump.jsonl", "--preprocess", "x=u8")
    assert code == 2 and "--preprocess: apply to models, not to dumps of problems" in err
