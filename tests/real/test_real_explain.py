"""`explain` on light and trained models: every layer has an origin, every solver of its operation is accounted for."""

import light_models
import minilm
import numpy as np
import onnx
import pytest
from model_inputs import CASES

from helpers.explained import check
from tunewright import Core
from tunewright.runtime.insight.explain import explain

pytestmark = pytest.mark.soak
TRAINED = [
    pytest.param(package, file, id=f"{package}-{file.removesuffix('.onnx')}")
    for package, files in CASES.items()
    for file in files
]


@pytest.mark.parametrize("name", light_models.NAMES)
def test_light_model(name):
    explained(*light_models.load(name))


@pytest.mark.parametrize(("package", "file"), TRAINED)
def test_trained_model(folder, package, file):
    for path in [p for p in folder(package).rglob("*") if p.name == file]:
        model = minilm.build(path) if path.suffix == ".safetensors" else onnx.load(path)
        rng = np.random.default_rng(0)
        explained(model, {name: make(rng) for name, make in CASES[package][file][0].items()})


def explained(model, inputs):
    compiled = Core().compile_model(model)
    layers = explain(compiled, inputs, count=1)
    check(layers, compiled)
    known = {name for each in layers for name in each.nodes} | {each.name for each in layers}
    assert known & {name for name, _ in compiled.nodes}, "layers stand for nodes of the model"
    # Data in caches and fast algorithms lie above the roofline; work that is miscounted would lie far above.
    assert all(each.roofline.share < 20 for each in layers if each.roofline.share is not None)
