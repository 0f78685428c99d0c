"""Loops over recurrent cells become LSTM, GRU and RNN layers, or stay as they are; results are ONNX Runtime's."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import tunewright
from helpers.recurrent_forms import CELLS, LOOPS, Form
from helpers.recurrent_others import OTHERS
from tunewright.frontend.onnx import load
from tunewright.ir.graph import Graph
from tunewright.passes.base import Context, run_passes
from tunewright.passes.control.recurrent_loops import RecurrentLoops
from tunewright.passes.standard import CLEAN_LOOPS, NEUTRAL
from tunewright.settings import Settings

ort = pytest.importorskip("onnxruntime")
LAYERS = {"LSTM", "GRU", "RNN"}
SIZES = [(7, 3), (1, 1), (1, 3), (7, 1), (0, 3)]


def optimised(model: onnx.ModelProto, **config: Any) -> tuple[Graph, Context]:
    context = Context(Settings.make({"VERIFY_PASSES": "YES", **config}, Settings()))
    graph = load(model, context.settings).graph
    run_passes(graph, NEUTRAL, context)
    return graph, context


def ops(graph: Graph) -> set[str]:
    return {n.op for n in graph.nodes}


def check(form: Form, model: onnx.ModelProto, time: int, batch: int, device: str = "CPU.HOST") -> None:
    """Against ONNX Runtime; over nothing, which not every engine runs, the states stay what they were."""
    inputs = form.inputs(time, batch)
    got = tunewright.Core().compile_model(model, device)(inputs)
    if time == 0:
        assert got["y"].size == 0
        for name in form.states if form.last else ():
            np.testing.assert_array_equal(got[f"{name}T"], inputs[f"{name}0"])
        return
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for info, want in zip(model.graph.output, session.run(None, inputs), strict=True):
        np.testing.assert_allclose(got[info.name], want, rtol=1e-5, atol=2e-6, err_msg=info.name)


def agrees(form: Form, device: str = "CPU.HOST") -> None:
    model = form.model()
    for time, batch in SIZES:
        check(form, model, time, batch, device)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_cell_in_a_loop_becomes_a_layer(loop: str, cell: str) -> None:
    form = Form(cell, loop)
    graph, context = optimised(form.model())
    assert not ops(graph) & {"Loop", "Scan"}, [e for e in context.log.entries if e.rule == "recurrent-loops"]
    assert len(ops(graph) & LAYERS) == 1
    agrees(form)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_layer_stays_exactly_as_it_is(name: str) -> None:
    form, reason = OTHERS[name].form, OTHERS[name].reason
    model = form.model()
    context = Context(Settings())
    graph = load(model, context.settings).graph
    run_passes(graph, [CLEAN_LOOPS], context)
    before = str(graph)
    assert not run_passes(graph, [RecurrentLoops()], context)
    assert str(graph) == before
    (entry,) = [e for e in context.log.entries if e.rule == "recurrent-loops"]
    assert reason in entry.reason, entry.reason
    for time, batch in ((7, 3), (2, 1)):
        check(form, model, time, batch)


@pytest.mark.parametrize("cell", ["torch_lstm", "hard_lstm", "other_gru", "relu_rnn"])
def test_kernels_of_a_device_run_the_layer(cell: str) -> None:
    agrees(Form(cell, "torch_reverse"), "CPU")
