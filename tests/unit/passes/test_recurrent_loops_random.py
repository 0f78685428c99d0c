"""Loops with random changes: whether one is still a recurrent layer or not, its results are those of the loop."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import tunewright
from helpers.recurrent_forms import CELLS, LOOPS, Form
from tunewright.errors import TunewrightError

SWAPS = [
    ["Add", "Sub", "Mul"], ["Sigmoid", "Tanh", "Relu", "HardSigmoid", "Softsign", "Neg"], ["Less", "LessOrEqual"],
    ["MatMul", "Add"],
]  # fmt: skip


def body_of(model: onnx.ModelProto) -> tuple[onnx.NodeProto, onnx.GraphProto]:
    node = next(n for n in model.graph.node if n.op_type in ("Loop", "Scan"))
    return node, next(a.g for a in node.attribute if a.name == "body")


def change(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    """One operand, operation, result or operand of the loop becomes another."""
    loop, body = body_of(model)
    kind = rng.integers(4)
    k = int(rng.integers(len(body.node)))
    node = body.node[k]
    known = [v.name for v in body.input] + [o for n in body.node[:k] for o in n.output]
    if kind == 0:
        i = int(rng.integers(len(node.input)))
        node.input[i] = str(rng.choice(known))
        return f"input {i} of {node.op_type} {node.output[0]} is {node.input[i]}"
    if kind == 1:
        others = [op for row in SWAPS for op in row if node.op_type in row and op != node.op_type]
        node.op_type = str(rng.choice(others)) if others else node.op_type
        return f"{node.output[0]} is made by {node.op_type}"
    if kind == 2:
        i = int(rng.integers(len(body.output)))
        made = [o for n in body.node for o in n.output] + known
        name = str(rng.choice(made))
        source = next((v.name for v in body.input if v.name == name), None)
        body.node.append(onnx.helper.make_node("Identity", [name], [f"{name}_again"]))
        body.output[i].name = f"{name}_again"
        return f"output {i} is {name}{'' if source is None else ', an input'}"
    first = [n.name for n in model.graph.input] + [o for n in model.graph.node for o in n.output if n is not loop][:6]
    i = int(rng.integers(len(loop.input)))
    loop.input[i] = str(rng.choice(first))
    return f"input {i} of the loop is {loop.input[i]}"


def outcome(model: onnx.ModelProto, form: Form, time: int, **config: str) -> list[np.ndarray] | None:
    try:
        compiled = tunewright.Core({"MAX_ITERATIONS": "100", **config}).compile_model(model, "CPU.HOST")
        results = compiled(form.inputs(time, 3))
        return [results[o.name] for o in model.graph.output if isinstance(results[o.name], np.ndarray)]
    except TunewrightError:
        return None


def agree(form: Form, seed: int) -> bool:
    """Whether it still became a layer."""
    rng = np.random.default_rng(seed)
    model = form.model()
    what = [change(model, rng) for _ in range(int(rng.integers(1, 3)))]
    del model.graph.value_info[:]
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        return False
    for time in (5, 1, 0):
        want = outcome(model, form, time, DISABLED_PASSES="recurrent-loops,hoist-invariants")
        if want is None:
            continue
        got = outcome(model, form, time)
        assert got is not None, what
        for a, b in zip(got, want, strict=True):
            if a.size or b.size:
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=str((form, time, what)))
    graph = tunewright.Core().compile_model(model, "CPU.HOST").graph if want is not None else None
    return graph is not None and any(n.op in ("LSTM", "GRU", "RNN") for n in graph.nodes)


@pytest.mark.parametrize("cell", CELLS)
def test_random_changes(cell: str) -> None:
    for seed, loop in enumerate(LOOPS):
        agree(Form(cell, loop, seed=seed), seed)


@pytest.mark.soak
def test_many_random_changes() -> None:
    layers = 0
    for seed in range(4000):
        rng = np.random.default_rng(seed)
        form = Form(str(rng.choice(list(CELLS))), str(rng.choice(list(LOOPS))), seed=seed)
        layers += agree(form, seed)
    assert layers > 200  # some changes leave a recurrent layer
