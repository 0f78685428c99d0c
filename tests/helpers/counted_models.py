"""Models whose sizes depend on data, beside ONNX Runtime: what tests of them share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

from tunewright import Core
from tunewright.runtime.control.row_counts import GATHERED
from tunewright.runtime.plans.plan import Step

ort = pytest.importorskip("onnxruntime")
HEAD = '<ir_version: 8, opset_import: ["" : 18]>\n'
Feeds = dict[str, np.ndarray]


def steps(one: Any) -> list[Step]:
    return [step for plan in one.program.plans for step in plan.steps]


def inside(one: Any) -> list[list[str]]:
    """For each plan the operations whose sizes depend on data and that are part of its launch."""
    found = [step.node for step in steps(one) if step.node.op == GATHERED and step.block is not None]
    return [[inner.op for inner in node.bodies["otherwise"].nodes] for node in found]


def check(text: str | onnx.ModelProto, feeds: Sequence[Feeds], **config: Any) -> Any:
    """One request serves all feeds, twice; results of earlier inferences stay what they are."""
    model = parser.parse_model(HEAD + text) if isinstance(text, str) else text
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    core = Core(config)
    one = core.compile_model(core.read_model(model), "CPU")
    request, kept = one.create_infer_request(), []
    for feed in (*feeds, *feeds):
        kept.append((request.infer(feed), session.run(None, feed), feed))
    for found, expected, feed in kept:
        for value, wanted in zip(model.graph.output, expected, strict=True):
            where = f"{value.name}, {[v.shape for v in feed.values()]}"
            assert found[value.name].shape == wanted.shape and found[value.name].dtype == wanted.dtype, where
            if wanted.dtype.kind == "f":
                np.testing.assert_allclose(found[value.name], wanted, rtol=1e-4, atol=1e-5, err_msg=where)
            else:
                np.testing.assert_array_equal(found[value.name], wanted, err_msg=where)
    return one


def launches(one: Any, feeds: Sequence[Feeds]) -> list[int]:
    """How many launches the inference of each feed is."""
    request, found = one.create_infer_request(), []
    for feed in feeds:
        request.infer(feed)
        found.append(request.get_totals().launches)
    return found


def masks(*shape: int) -> list[Feeds]:
    """Numbers of which many, all, none, few and one are above a half."""
    rng = np.random.default_rng(1)
    few = np.zeros(shape, np.float32)
    few.reshape(-1)[:: max(1, few.size // 5)] = 0.75
    one = np.zeros(shape, np.float32)
    one.reshape(-1)[few.size // 2] = 0.75
    some = [rng.random(shape).astype(np.float32), np.ones(shape, np.float32), np.zeros(shape, np.float32)]
    return [{"x": x} for x in (*some, few, one)]


HALF = "half = Constant <value = float {0.5}> () m = Greater(x, half) "
SELECTED = HALF + "at = NonZero(m) turned = Transpose <perm = [1, 0]> (at) picked = GatherND(x, turned) "
