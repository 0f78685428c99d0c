"""Light and trained models, cut into at least three parts over two devices, give what one device gives."""

from __future__ import annotations

from typing import Any

import light_models
import minilm
import numpy as np
import pytest
from model_inputs import CASES

from tunewright import Core
from tunewright.frontend.model import Model
from tunewright.ir.graph import Graph
from tunewright.plugins.hetero import Hetero, PlacementTask
from tunewright.runtime.several.hetero import HeteroModel

#: in the short form: If inside If, convolutions and an LSTM, a decoder with attention
SHORT = {"silero-vad-silero_vad", "silero-vad-silero_vad_16k_op15", "pythainlp-thai2rom_decoder"}
#: Quantised: where a part ends, a value is rounded that was not before, or the other way round, and later layers move
#: by several steps of their grid (see test_real_models).
QUANTISED = {"common_old.onnx", "slim_93%_accuracy_72.7390%_qint8.onnx"}
DEVICES = ("CPU", "CPU.HOST")
BOTH = f"HETERO:{','.join(DEVICES)}"


def marked(name: str, *values: str) -> Any:
    return pytest.param(*values, id=name, marks=[] if name in SHORT else pytest.mark.soak)


def prepared(core: Core, model: Model) -> Graph:
    """What is placed."""
    return PlacementTask(Hetero(DEVICES, core.settings), model, core.settings).graph


def check(source: Any, feeds: dict[str, Any], quantised: bool = False) -> None:
    core = Core({"JOIN_LAUNCHES": "NO"})
    model = core.read_model(source)
    expected = core.compile_model(model, "CPU")(feeds)
    # Shapes and constants that are known are nobody's: what is left is put on the devices by turns, in four pieces.
    left = [n.name for n in prepared(core, model).nodes]
    size = max(1, -(-len(left) // 4))
    model.affinity = {name: DEVICES[i // size % 2] for i, name in enumerate(left)}
    parted = core.compile_model(model, BOTH)
    assert isinstance(parted, HeteroModel)
    assert {s.device for s in parted.subgraphs} == set(DEVICES)
    assert len(parted.subgraphs) >= min(3, len(left))  # one model is but a comparison and an If
    assert model.affinity.items() <= parted.affinity.items()
    got = parted(feeds)
    assert list(got) == list(expected)
    for name, one in expected.items():
        other = got[name]
        assert other.shape == one.shape and other.dtype == one.dtype, name
        if one.dtype.kind != "f":
            np.testing.assert_array_equal(other, one)
            continue
        a, b = one.ravel().astype(np.float64), other.ravel().astype(np.float64)
        if quantised:
            assert a @ b / np.sqrt((a @ a) * (b @ b)) > 0.99, name
        else:
            assert np.abs(a - b).max() <= 1e-4 * np.abs(a).max(), name


@pytest.mark.parametrize("name", [marked(name, name) for name in light_models.NAMES])
def test_light_model(name: str) -> None:
    check(*light_models.load(name))


@pytest.mark.parametrize(
    ("package", "file"), [marked(f"{p}-{f.removesuffix('.onnx')}", p, f) for p, files in CASES.items() for f in files]
)
def test_trained_model(folder: Any, package: str, file: str) -> None:
    path = next(p for p in sorted(folder(package).rglob("*")) if p.name == file)
    source = minilm.build(path) if path.suffix == ".safetensors" else str(path)
    rng = np.random.default_rng(0)
    check(source, {name: make(rng) for name, make in CASES[package][file][0].items()}, file in QUANTISED)
