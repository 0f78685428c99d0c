"""Kernels of DynamicQuantizeLSTM against its reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conformance.short_form import every_other
from tunewright.ops.microsoft import lstm
from tunewright.plugins.single import open_device
from tunewright.solvers.base import solvers
from tunewright.solvers.c.source import dot
from tunewright.solvers.host.reference import HostKernel
from tunewright.testing.kernelcheck import Case, check

SEED = 1
OP = "com.microsoft::DynamicQuantizeLSTM"
#: with pairs of products, and where there is an instruction for it with four
FAMILY, PAIRS, QUADS = "opencl.recurrent_", "opencl.recurrent_quantised", "opencl.recurrent_bytes"
WEIGHTS = frozenset({1, 2, 3, 8, 9, 10, 11})


def normal(rng: np.random.Generator, *shape: int, scale: float = 0.4) -> np.ndarray[Any, Any]:
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def make(
    rng: np.random.Generator,
    steps: int = 5,
    batch: int = 3,
    features: int = 5,
    hidden: int = 7,
    dtype: Any = np.int8,
    per_column: bool = False,
    full: bool = True,
    lengths: Any = None,
    constant: frozenset[int] = WEIGHTS,
    outputs: int = 3,
    **attrs: Any,
) -> Case:
    """``full``: with bias, initial states and peepholes."""
    count = 2 if attrs.get("direction") == "bidirectional" else 1
    limits = np.iinfo(dtype)

    def weights(depth: int) -> np.ndarray[Any, Any]:
        return rng.integers(limits.min, limits.max, (count, depth, 4 * hidden), endpoint=True).astype(dtype)

    def parameters(depth: int) -> list[np.ndarray[Any, Any]]:
        shape = (count, 4 * hidden) if per_column else (count,)
        middle = (int(limits.min) + int(limits.max)) // 2
        scale = rng.uniform(0.5, 1.0, shape) / (128 * depth**0.5)
        return [scale.astype(np.float32), rng.integers(middle - 9, middle + 9, shape).astype(dtype)]

    state = (count, batch, hidden)
    inputs = [
        normal(rng, steps, batch, features, scale=1.0), weights(features), weights(hidden),
        normal(rng, count, 8 * hidden) if full else None,
        None if lengths is None else np.array(lengths, np.int32),
        normal(rng, *state) if full else None, normal(rng, *state) if full else None,
        normal(rng, count, 3 * hidden) if full else None, *parameters(features), *parameters(hidden),
    ]  # fmt: skip
    return Case(OP, inputs, {"hidden_size": hidden, **attrs}, outputs, constant)


def nearest_tie(case: Case) -> float:
    """How near a state that is computed comes to the middle between the two integers that it could be quantised to."""
    found, quantize = [1.0], lstm.dynamic_quantize
    given = [] if case.inputs[5] is None else list(case.inputs[5])

    def noted(x: np.ndarray[Any, Any]) -> Any:
        quantised, scale, zero = quantize(x)
        if x.shape[-1] == case.attrs["hidden_size"] and not any(np.array_equal(x, state) for state in given):
            places = np.append(x.reshape(-1).astype(np.float64), x.min(initial=0.0)) / scale
            found.append(float(np.abs(places - np.floor(places) - 0.5).min()))
        return quantised, scale, zero

    with pytest.MonkeyPatch.context() as patched, np.errstate(all="ignore"):
        patched.setattr(lstm, "dynamic_quantize", noted)
        HostKernel(case.problem()).run(open_device("CPU.HOST").queue(), case.inputs, [None] * case.outputs)
    return np.nanmin(found)


def settled(case: Case) -> Case:
    """The case, with other scales where rounding of any arithmetic would decide which integer a state becomes."""
    for _ in range(100):
        if nearest_tie(case) > 5e-4:
            return case
        case.inputs[10] = 0.97 * case.inputs[10]  # type: ignore[operator]
    raise AssertionError("no scale of the recurrent weights will do")


def agrees(case: Case) -> None:
    """The generic kernels alone: `test_configs` has the others, which are the same text with sizes as literals."""
    assert not check(settled(case), FAMILY, configs=0, specialised=False)


@every_other(("direction", ["forward", "reverse", "bidirectional"]), ("lengths", [None, [3, 5, 1], [2, 0, 4]]))
def test_directions(rng: np.random.Generator, direction: str, lengths: Any) -> None:
    """The range of the input is that of the longest sequence, whatever stands behind its end."""
    case = make(rng, direction=direction, lengths=lengths)
    if lengths is not None:
        case.inputs[0][4, :, 0] = 40.0  # type: ignore[index]
    agrees(case)


@every_other(("dtype", [np.int8, np.uint8]), ("per_column", [False, True]))
def test_weights(rng: np.random.Generator, dtype: Any, per_column: bool) -> None:
    agrees(make(rng, dtype=dtype, per_column=per_column, direction="bidirectional"))


def test_nothing_optional(rng: np.random.Generator) -> None:
    """Weights come at run time, too."""
    agrees(make(rng, full=False, constant=frozenset(), outputs=1))
    agrees(make(rng, full=False, constant=frozenset(), outputs=2, direction="bidirectional", dtype=np.uint8))


@pytest.mark.parametrize(("batch", "configs"), [(5, 1), *(pytest.param(b, 2, marks=pytest.mark.soak) for b in (1, 5))])
def test_configs(rng: np.random.Generator, batch: int, configs: int) -> None:
    """Generic and specialised, with tiles of other sizes."""
    case = make(rng, batch=batch, hidden=40, lengths=[5, 2, 4, 0, 3][:batch], direction="bidirectional")
    assert not check(settled(case), FAMILY, configs=configs)


@every_other(("hidden", [1, 33, 70]), ("batch", [1, 2, 9]))
def test_sizes(rng: np.random.Generator, hidden: int, batch: int) -> None:
    agrees(make(rng, steps=3, batch=batch, features=hidden + 2, hidden=hidden))


def test_long_input(rng: np.random.Generator) -> None:
    """Its range is found in parts, and its product is shared out; the second time up to the longest sequence."""
    agrees(make(rng, steps=40, batch=4, features=300, hidden=9))
    case = make(rng, steps=40, batch=4, features=300, hidden=9, lengths=[20, 3, 18, 7])
    case.inputs[0][20:] = 99.0  # type: ignore[index]
    agrees(case)


def test_variants(rng: np.random.Generator) -> None:
    agrees(make(rng, clip=0.3))
    agrees(make(rng, input_forget=1, clip=0.5))


#: names, alphas, betas; parameters go in order to the functions that take one
ACTIVATIONS = [
    (("HardSigmoid", "Softsign", "Relu"), (0.3125,), (0.375,)),
    (("Affine", "LeakyRelu", "ThresholdedRelu"), (0.3, 0.1, 0.2), (0.05,)),
    (("Softplus", "Elu", "ScaledTanh"), (0.7, 0.9), (0.4,)),
]


@pytest.mark.parametrize(("names", "alphas", "betas"), ACTIVATIONS)
def test_activations(
    rng: np.random.Generator, names: tuple[str, ...], alphas: tuple[float, ...], betas: tuple[float, ...]
) -> None:
    agrees(make(rng, activations=names, activation_alpha=alphas, activation_beta=betas))


def test_edges(rng: np.random.Generator) -> None:
    agrees(make(rng, batch=0))
    agrees(make(rng, steps=0))
    agrees(make(rng, steps=1, batch=1))
    flat = make(rng, full=False)
    flat.inputs[0][:] = 0.0  # type: ignore[index]
    agrees(flat)
    for value in (np.nan, np.inf, -np.inf):
        odd = make(rng, batch=2)
        odd.inputs[0][1, 0, 0] = value  # type: ignore[index]
        agrees(odd)


def test_refusals(rng: np.random.Generator) -> None:
    problem = make(rng, full=False).problem()
    solver, quads = (next(s for s in solvers() if s.id == name) for name in (PAIRS, QUADS))
    target = open_device("CPU").target
    assert solver.why_not(problem, target) is None
    assert (quads.why_not(problem, target) is None) == dot.has_dot4(target)
    assert quads.why_not(make(rng, full=False, constant=frozenset()).problem(), target) is not None
    unknown = replace(problem, attrs={**problem.attrs, "activations": ("Sine",) * 3})
    assert solver.why_not(unknown, target) == "no activation Sine"
    assert solver.why_not(replace(problem, attrs={"direction": "bidirectional"}), target) is not None
    narrow = [replace(t, dtype=problem.inputs[8].dtype) if i == 1 else t for i, t in enumerate(problem.inputs)]  # type: ignore
    assert solver.why_not(replace(problem, inputs=tuple(narrow)), target) == "input 1 is float32"
