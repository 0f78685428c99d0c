"""Kernels of LSTM, GRU and RNN against their references."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conformance.short_form import every_other
from tunewright.plugins.single import open_device
from tunewright.solvers.base import solvers
from tunewright.testing.kernelcheck import Case, check

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
WEIGHTS = frozenset({1, 2, 3})


def normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float32, scale: float = 0.4) -> np.ndarray[Any, Any]:
    return (scale * rng.standard_normal(shape)).astype(dtype)


def make(
    rng: np.random.Generator,
    op: str,
    steps: int = 5,
    batch: int = 3,
    features: int = 4,
    hidden: int = 6,
    dtype: Any = np.float32,
    full: bool = True,
    lengths: bool = False,
    constant: frozenset[int] = frozenset(),
    outputs: int | None = None,
    **attrs: Any,
) -> Case:
    """``full``: with bias, initial states and (LSTM) peepholes."""
    count = 2 if attrs.get("direction") == "bidirectional" else 1
    gates, layout = GATES[op], attrs.get("layout", 0)
    sized = (batch, steps) if layout else (steps, batch)
    state = (batch, count, hidden) if layout else (count, batch, hidden)
    inputs: list[Any] = [
        normal(rng, *sized, features, dtype=dtype, scale=1.0),
        normal(rng, count, gates * hidden, features, dtype=dtype),
        normal(rng, count, gates * hidden, hidden, dtype=dtype),
        normal(rng, count, 2 * gates * hidden, dtype=dtype) if full else None,
        rng.integers(0, steps + 1, batch).astype(np.int32) if lengths else None,
    ]
    if full:
        inputs.append(normal(rng, *state, dtype=dtype))
        if op == "LSTM":
            inputs += [normal(rng, *state, dtype=dtype), normal(rng, count, 3 * hidden, dtype=dtype)]
    outputs = outputs or (3 if op == "LSTM" else 2)
    return Case(op, inputs, {"hidden_size": hidden, **attrs}, outputs, constant=constant)


def agrees(case: Case) -> None:
    """The generic kernels alone: `test_configs` has the others, which are the same text with sizes as literals."""
    assert not check(case, "opencl.recurrent", configs=0, specialised=False)


@every_other(("op", GATES), ("direction", ["forward", "reverse", "bidirectional"]))
def test_directions(rng: np.random.Generator, op: str, direction: str) -> None:
    agrees(make(rng, op, lengths=True, constant=WEIGHTS, direction=direction))


@pytest.mark.parametrize("op", GATES)
def test_nothing_optional(rng: np.random.Generator, op: str) -> None:
    """Weights come at run time, too."""
    agrees(make(rng, op, full=False))


@pytest.mark.parametrize("op", GATES)
def test_configs(rng: np.random.Generator, op: str) -> None:
    """Generic and specialised, with tiles of other sizes."""
    case = make(rng, op, batch=5, hidden=40, lengths=True, constant=WEIGHTS, direction="bidirectional")
    assert not check(case, "opencl.recurrent", configs=1)


@pytest.mark.parametrize(
    ("op", "dtype"),
    [("LSTM", np.float64), ("LSTM", np.float16), ("LSTM", ml_dtypes.bfloat16), ("RNN", np.float64)],
)
def test_types(rng: np.random.Generator, op: str, dtype: Any) -> None:
    agrees(make(rng, op, dtype=dtype, lengths=True, constant=WEIGHTS))


def test_narrow_weights_at_run_time(rng: np.random.Generator) -> None:
    agrees(make(rng, "GRU", dtype=np.float16))


@pytest.mark.parametrize("op", GATES)
def test_layout(rng: np.random.Generator, op: str) -> None:
    case = make(rng, op, steps=7, layout=1, lengths=True, direction="bidirectional", constant=WEIGHTS)
    agrees(case)


@every_other(("hidden", [1, 33, 70]), ("batch", [1, 3, 9]))
def test_sizes(rng: np.random.Generator, hidden: int, batch: int) -> None:
    """Tiles of sequences and blocks of hidden units that are not full; the weights of long sums are small."""
    case = make(rng, "LSTM", steps=4, batch=batch, features=hidden + 2, hidden=hidden, constant=WEIGHTS)
    case.inputs[2][:] /= hidden**0.5
    agrees(case)


@every_other(("op", GATES), ("batch", [1, 5]))
def test_single_step(rng: np.random.Generator, op: str, batch: int) -> None:
    """Hidden units are shared out among work-items."""
    case = make(rng, op, steps=1, batch=batch, features=200, hidden=150, constant=WEIGHTS)
    case.inputs[1][:] /= 14
    case.inputs[2][:] /= 12
    agrees(case)
    agrees(make(rng, op, steps=1, batch=batch, lengths=True, direction="reverse"))


@pytest.mark.parametrize("linear", [0, 1])
@pytest.mark.parametrize("steps", [1, 6])
def test_reset(rng: np.random.Generator, linear: int, steps: int) -> None:
    case = make(rng, "GRU", steps=steps, hidden=20, linear_before_reset=linear, constant=WEIGHTS)
    agrees(case)


def test_lstm_variants(rng: np.random.Generator) -> None:
    for attrs in ({"clip": 0.3}, {"clip": 0.5, "input_forget": 1}):
        agrees(make(rng, "LSTM", constant=WEIGHTS, **attrs))
    agrees(make(rng, "LSTM", constant=WEIGHTS, outputs=1))
    agrees(make(rng, "LSTM", constant=WEIGHTS, outputs=2))


#: names, alphas, betas; parameters go in order to the functions that take one
ACTIVATIONS = [
    (("HardSigmoid", "Softsign", "Relu"), (0.3125,), (0.375,)),
    (("Affine", "LeakyRelu", "ThresholdedRelu"), (0.3, 0.1, 0.2), (0.05,)),
    (("Softplus", "Elu", "ScaledTanh"), (0.7, 0.9), (0.4,)),
    (("sigmoid", "TANH", "Tanh"), (), ()),
]


@pytest.mark.parametrize(("names", "alphas", "betas"), ACTIVATIONS)
def test_activations(
    rng: np.random.Generator, names: tuple[str, ...], alphas: tuple[float, ...], betas: tuple[float, ...]
) -> None:
    parameters = {"activations": names, "activation_alpha": alphas, "activation_beta": betas}
    agrees(make(rng, "LSTM", constant=WEIGHTS, **parameters))
    if "Softplus" in names:
        agrees(make(rng, "LSTM", dtype=np.float64, constant=WEIGHTS, **parameters))


def test_each_direction_has_its_own_activations(rng: np.random.Generator) -> None:
    names = ("HardSigmoid", "LeakyRelu", "Sigmoid", "Tanh")
    case = make(rng, "GRU", direction="bidirectional", activations=names, activation_alpha=(0.3, 0.2))
    agrees(case)
    case = make(rng, "RNN", direction="bidirectional", activations=("Relu", "Affine"), activation_alpha=(0.5,))
    agrees(case)


def test_edges(rng: np.random.Generator) -> None:
    empty = make(rng, "LSTM", batch=0, constant=WEIGHTS)
    agrees(empty)
    odd = make(rng, "LSTM", batch=2, constant=WEIGHTS)
    odd.inputs[0][1, 0, 0] = np.nan
    odd.inputs[0][2, 1, :] = 1e30
    agrees(odd)


def test_no_steps_keep_the_initial_state(rng: np.random.Generator) -> None:
    agrees(make(rng, "LSTM", steps=0, constant=WEIGHTS))


def test_refusals(rng: np.random.Generator) -> None:
    problem = make(rng, "LSTM", full=False).problem()
    solver = next(s for s in solvers() if s.id == "opencl.recurrent")
    target = open_device("CPU").target
    unknown = replace(problem, attrs={**problem.attrs, "activations": ("Sine",) * 3})
    assert solver.why_not(unknown, target) == "no activation Sine"
    assert solver.why_not(replace(problem, attrs={"direction": "bidirectional"}), target) is not None
    assert solver.why_not(replace(problem, attrs={"direction": "sideways"}), target) == "no direction sideways"


# -- all gates of a few units at a time ------------------------------------------------------------------------------


def usual(rng: np.random.Generator, configs: int = 1, specialised: bool = False, **how: Any) -> None:
    """An LSTM without peepholes, by the solver that is made for it alone."""
    case = make(rng, "LSTM", constant=WEIGHTS, **how)
    case = replace(case, inputs=case.inputs[:7])
    assert not check(case, "opencl.recurrent_gates", configs=configs, specialised=specialised)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_gates_directions(rng: np.random.Generator, direction: str) -> None:
    usual(rng, lengths=True, direction=direction, hidden=20, specialised=direction == "bidirectional")


@every_other(("hidden", [1, 33, 70]), ("batch", [1, 3, 9]))
def test_gates_sizes(rng: np.random.Generator, hidden: int, batch: int) -> None:
    """Tiles of sequences and blocks of units that are not full; an odd and an even number of steps."""
    usual(rng, steps=4 + batch % 2, batch=batch, hidden=hidden, features=hidden + 2)


def test_gates_single_step(rng: np.random.Generator) -> None:
    usual(rng, configs=0, steps=1, batch=1, features=200, hidden=150)
    usual(rng, configs=0, steps=1, batch=3, lengths=True, direction="reverse")


def test_gates_variants(rng: np.random.Generator) -> None:
    usual(rng, configs=0, full=False)
    usual(rng, configs=0, steps=7, layout=1, lengths=True, direction="bidirectional")
    usual(rng, configs=0, outputs=1, activations=("sigmoid", "TANH", "Tanh"))
    usual(rng, configs=0, steps=0)
    usual(rng, configs=0, batch=0)


def test_gates_of_any_size(rng: np.random.Generator) -> None:
    """Where activations are flat, and where they are not numbers."""
    case = make(rng, "LSTM", batch=2, hidden=16, constant=WEIGHTS)
    case = replace(case, inputs=case.inputs[:7])
    case.inputs[0][1, 0, 0] = np.nan
    case.inputs[0][2, 1, :] = 1e30
    case.inputs[0][3] *= 40
    assert not check(case, "opencl.recurrent_gates", configs=0, specialised=False)


def test_gates_refuses_what_it_does_not_compute(rng: np.random.Generator) -> None:
    solver, target = next(s for s in solvers() if s.id == "opencl.recurrent_gates"), open_device("CPU").target
    peepholes = make(rng, "LSTM", constant=WEIGHTS)
    plain = replace(peepholes, inputs=peepholes.inputs[:7])
    assert solver.why_not(plain.problem(), target) is None
    others = [
        peepholes, replace(plain, attrs={**plain.attrs, "clip": 0.5}),
        replace(plain, attrs={**plain.attrs, "input_forget": 1}), replace(plain, constant=frozenset({1, 2})),
        replace(plain, attrs={**plain.attrs, "activations": ("Sigmoid", "Tanh", "Relu")}),
    ]  # fmt: skip
    assert all(solver.why_not(case.problem(), target) for case in others)
