"""Shapes for which something was measured get plans of their own, beside the requests that run meanwhile."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import tunewright
from native.harness import native
from tunewright.runtime.plans.program import Program
from tunewright.tuning.lookup import Lookup

pytestmark = native
FIRST, MEASURED = 32, 48


def network() -> bytes:
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.standard_normal((16, 3, 3, 3)).astype(np.float32), "w")]
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], pads=[1] * 4), helper.make_node("Relu", ["c"], ["y"])]
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, "h", 20])]
    made = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "open", given, made, weights)
    opsets = [helper.make_opsetid("", 18)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString())


def measured_at(self: Lookup, problem: Any, target: Any) -> frozenset[tuple[int, ...]]:
    return frozenset({tuple(MEASURED if d == FIRST else d for d in problem.sizes)})


def test_a_measured_shape_gets_a_plan_of_its_own_beside_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lookup, "measured_sizes", measured_at)
    begun: list[int] = []
    beside, go = Program.beside, threading.Event()

    def slow(self: Program, *arguments: Any) -> Any:
        begun.append(1)
        assert go.wait(120)
        return beside(self, *arguments)

    monkeypatch.setattr(Program, "beside", slow)
    compiled = tunewright.Core().compile_model(network(), "CPU")
    request, rng = compiled.create_infer_request(), np.random.default_rng(1)
    request.infer({"x": rng.standard_normal((1, 3, FIRST, 20)).astype(np.float32)})
    x = rng.standard_normal((1, 3, MEASURED, 20)).astype(np.float32)
    first = request.infer({"x": x})["y"]
    assert len(compiled.program.plans) == 1  # it did not wait for another plan
    go.set()
    deadline = time.monotonic() + 60
    while len(compiled.program.plans) == 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    plan = compiled.program.plan_for([x])
    assert plan.template is None and len(compiled.program.plans) == 2 and len(begun) == 1
    found = request.infer({"x": x})["y"]
    np.testing.assert_allclose(found, first, rtol=1e-5, atol=1e-5)  # another text, which may sum in another order
    assert compiled.program.plan_for([x[:, :, :FIRST]]).template is not None
    assert len(begun) == 1


def test_nothing_is_made_for_shapes_that_were_not_measured() -> None:
    compiled = tunewright.Core().compile_model(network(), "CPU")
    request = compiled.create_infer_request()
    for height in (FIRST, MEASURED, 50, 3):
        request.infer({"x": np.ones((1, 3, height, 20), np.float32)})
    time.sleep(0.1)
    assert not [plan for plan in compiled.program.plans if plan.template is None]
