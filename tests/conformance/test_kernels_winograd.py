"""Winograd convolutions, fused and split, against the reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conformance.short_form import every_other, needs_results
from tunewright.devices.c_device import CDevice
from tunewright.devices.executable import Part
from tunewright.ir.graph import Fused
from tunewright.ir.types import PLAIN, TensorType, blocked
from tunewright.measure.judge import Judge, examine, pack, physical
from tunewright.ops.internal.reorder import from_plain, to_plain
from tunewright.ops.tolerance import compare
from tunewright.plugins.single import open_device
from tunewright.solvers.base import Config, Problem, Solver, solvers
from tunewright.solvers.c.convolution import conv_winograd
from tunewright.solvers.c.convolution.conv_winograd import MOST_SCRATCH, SURELY, WinogradSizes, scratch_bytes, speedup
from tunewright.solvers.c.source.base import CKernel, CSolver
from tunewright.solvers.c.source.emit import EmittedLaunch
from tunewright.solvers.host.reference import HostKernel
from tunewright.testing.kernelcheck import Case, check, run_one

#: draws the tables of this module, once, when it is imported; tests draw from their own (the fixture rng)
TABLES = np.random.default_rng(0)
SEED = 1000
DEVICE = open_device("CPU")
TARGET = DEVICE.target
BLOCK = blocked(TARGET.vector_bytes // 4)
ID = "opencl.conv_winograd"
FORMS = [(tile, form) for tile in (2, 4) for form in ("fused", "split")]


def solver(id: str = ID) -> Solver:
    return next(s for s in solvers() if s.id == id)


def config(problem: Problem, tile: int, form: str, **more: int) -> Config:
    usual = {k: v for k, v in solver().default(problem, TARGET).items() if k in ("nb", "ur")}
    found = {"tile": tile, "form": form, **usual, "band": 8, "items": 4, **more}
    assert found in solver().space(problem, TARGET)
    return found


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def conv(rng: np.random.Generator, 
    shape: tuple[int, ...], out: int, pads: tuple[int, ...] = (1, 1, 1, 1), *, bias: bool = True,
    epilogue: tuple[Fused, ...] = (), operands: tuple[np.ndarray, ...] = (), **attrs: Any,
) -> Case:  # fmt: skip
    inputs = [normal(rng, *shape), normal(rng, out, shape[1], 3, 3), normal(rng, out) if bias else None, *operands]
    return Case(
        "Conv", inputs, {"kernel_shape": (3, 3), "pads": pads, **attrs}, constant=frozenset({1, 2}),
        epilogue=epilogue, operands=len(operands), layouts=(BLOCK, BLOCK),
    )  # fmt: skip


def test_units_keep_their_memory(rng: np.random.Generator) -> None:
    """A unit has one work-item of the fused form, and finds its memory in its own cache (records of what ships say
    four). The other form has no memory to keep."""
    problem = conv(rng, (1, 16, 55, 55), 64).problem()
    items = [WinogradSizes.of(problem, config(problem, 4, form), TARGET).items for form in ("fused", "split")]
    assert items[0] == TARGET.units < items[1]


def wanted(case: Case) -> list[Any]:
    """What the reference makes, as it lies in the output's layout."""
    problem = case.problem()
    inputs = [None if a is None else from_plain(a, t) for a, t in zip(case.inputs, problem.inputs, strict=True)]
    return list(HostKernel(problem).run(open_device("CPU.HOST").queue(), inputs, [None]))


def failures(case: Case, configs: list[tuple[int, str]], **more: int) -> list[str]:
    problem, right = case.problem(), wanted(case)
    assert solver().why_not(problem, TARGET) is None
    return [
        f"F({tile}, 3), {form}: {wrong}"
        for tile, form in configs
        if (wrong := run_one(case, problem, solver(), config(problem, tile, form, **more), DEVICE, right))
    ]


CASES = {
    "one block": conv(TABLES, (1, 8, 8, 8), 8),
    "no bias": conv(TABLES, (1, 16, 9, 11), 32, bias=False),
    "no padding": conv(TABLES, (1, 16, 10, 7), 24, (0, 0, 0, 0)),
    "asymmetric padding": conv(TABLES, (1, 16, 7, 9), 16, (2, 0, 1, 3)),
    "one side": conv(TABLES, (1, 16, 7, 9), 16, (0, 2, 0, 0)),
    "more padding than window": conv(TABLES, (1, 8, 3, 2), 8, (4, 5, 6, 3)),
    "same upper": replace(conv(TABLES, (1, 8, 6, 7), 16), attrs={"kernel_shape": (3, 3), "auto_pad": "SAME_UPPER"}),
    "ragged channels": conv(TABLES, (1, 21, 9, 10), 13),
    "few channels": conv(TABLES, (1, 3, 6, 6), 5),
    "one channel": conv(TABLES, (1, 1, 5, 5), 1),
    "last slab not full": conv(TABLES, (1, 40, 6, 6), 72),
    "batch": conv(TABLES, (3, 19, 7, 5), 20),
    "one pixel": conv(TABLES, (2, 9, 1, 1), 16),
    "one row": conv(TABLES, (1, 16, 1, 30), 16),
    "one column": conv(TABLES, (1, 16, 30, 1), 16),
    "deep": conv(TABLES, (1, 130, 5, 6), 24),
    "relu": conv(TABLES, (1, 16, 6, 6), 24, epilogue=(Fused("Relu", (~0,)),)),
    "silu": conv(TABLES, (1, 16, 6, 7), 17, epilogue=(Fused("Sigmoid", (~0,)), Fused("Mul", (~0, ~1)))),
    "residual, relu": conv(TABLES, 
        (2, 8, 5, 7), 13, epilogue=(Fused("Add", (~0, 3)), Fused("Relu", (~1,))),
        operands=(normal(TABLES, 2, 13, 5, 7),)
    ),
    "per channel and scalar": conv(TABLES, 
        (1, 8, 5, 6), 11, epilogue=(Fused("Mul", (~0, 3)), Fused("Add", (~1, 4))),
        operands=(normal(TABLES, 11, 1, 1), normal(TABLES, 1)),
    ),
}  # fmt: skip


@every_other(("name", [name for name in CASES if not CASES[name].epilogue]), ("tile, form", FORMS))
def test_it_is_the_reference(name: str, tile: int, form: str) -> None:
    assert not failures(CASES[name], [(tile, form)])


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].epilogue])
def test_epilogues(name: str) -> None:
    assert not failures(CASES[name], [(2, "split"), (4, "fused")])


@pytest.mark.parametrize("height", range(1, 18))
def test_every_size_and_its_edges(rng: np.random.Generator, height: int) -> None:
    """Tiles at the right and at the bottom are cut off in every way."""
    case = conv(rng, (1, 8, height, 18 - height), 8, bias=False)
    assert not failures(case, FORMS)


@pytest.mark.parametrize(("lanes", "registers"), [(4, 16), (16, 32)])
def test_vectors_of_other_widths(lanes: int, registers: int) -> None:
    """Compilers take any width: so texts for other processors can be checked on this one."""
    target = replace(TARGET, vector_bytes=4 * lanes, registers=registers)
    case = replace(CASES["batch"], layouts=(blocked(lanes), blocked(lanes)))
    problem, chosen = case.problem(), solver()
    assert isinstance(chosen, CSolver) and isinstance(DEVICE, CDevice)
    assert chosen.why_not(problem, target) is None
    found = chosen.default(problem, target)
    assert found in chosen.space(problem, target)
    kernel = CKernel(ID, problem, DEVICE, chosen.calls(problem, found, target), chosen.packings(problem, found, target))
    given = physical(problem, case.inputs)
    assert not examine(kernel, problem, DEVICE, DEVICE.queue(), given, wanted(case)).wrong


def test_other_configs() -> None:
    for name in ("ragged channels", "batch"):
        assert not check(CASES[name], ID, configs=3)


@pytest.mark.soak
def test_every_config(rng: np.random.Generator) -> None:
    case = conv(rng, (2, 19, 15, 13), 70, epilogue=(Fused("Relu", (~0,)),))
    problem, right = case.problem(), wanted(case)
    for each in solver().space(problem, TARGET):
        assert not run_one(case, problem, solver(), each, DEVICE, right), each


@pytest.mark.parametrize("channels", [8, 64, 256])
@pytest.mark.parametrize("tile", [2, 4])
def test_the_judge_of_candidates_accepts_it(rng: np.random.Generator, tile: int, channels: int) -> None:
    problem = conv(rng, (1, channels, 12, 12), 16).problem()
    kernel = solver().compile(problem, config(problem, tile, "fused"), DEVICE)
    verdict = Judge(problem, DEVICE).check(kernel, DEVICE.queue())
    assert not verdict.wrong


class Faulty(conv_winograd.ConvWinograd):
    """With a mistake in its text."""

    def __init__(self, right: str, wrong: str) -> None:
        super().__init__()
        self.right, self.wrong = right, wrong

    def calls(self, problem: Problem, config: Config, target: Any) -> list[EmittedLaunch]:
        calls = super().calls(problem, config, target)
        assert any(self.right in call.text for call in calls)
        return [replace(c, head=self.spoil(c.head), body=self.spoil(c.body)) for c in calls]

    def spoil(self, text: str) -> str:
        return text.replace(self.right, self.wrong)


MISTAKES = {
    "a column beyond the image": ("x0[u] + SIDE <= IW", "x0[u] + SIDE <= IW + 1"),
    "a row beyond the image": ("INSIDE(y0[u] + i, IH)", "INSIDE(y0[u] + i, IH + 1)"),
    "a result beyond the image": ("ox + k < OW", "ox + k < OW + 1"),
    "a last row is missing": ("oy + i < OH", "oy + i < OH - 1"),
    "lanes of no channel": ("i < IC - ic", "i < (IC > ic ? W : 0)"),
    "a point": ("0.6875f", "0.6876f"),
    "the bias": ("+ start", "+ 0 * start"),
}


@needs_results
@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_kernel_fails(name: str) -> None:
    case = CASES["one block" if "column" in name else "batch"]
    problem = case.problem()
    faulty = Faulty(*MISTAKES[name])
    try:
        wrong = run_one(case, problem, faulty, config(problem, 4, "fused"), DEVICE, wanted(case))
    except AssertionError as fault:  # of a device that guards its buffers
        wrong = str(fault)
    assert wrong


@needs_results
@pytest.mark.parametrize("wrong", [0.99, 1.01])
def test_a_kernel_wrong_by_one_per_cent_fails(wrong: float) -> None:
    case = CASES["one block"]
    problem, right = case.problem(), wanted(case)
    for tile, form in FORMS:
        off = [right[0] * np.float32(wrong)]
        assert run_one(case, problem, solver(), config(problem, tile, form), DEVICE, off)


def test_kernels_of_a_queue_share_scratch_memory() -> None:
    """The larger one is bound first; then they run in turns, twice each, and both stay right."""
    queue, runs = DEVICE.queue(), []
    for name in ("last slab not full", "one block"):
        case = CASES[name]
        problem = case.problem()
        kernel = solver().compile(problem, config(problem, 4, "split"), DEVICE)
        out = np.empty(problem.outputs[0].physical, np.float32)  # type: ignore[union-attr]
        given = [*pack(kernel, problem, physical(problem, case.inputs)), out]
        bound = DEVICE.link([Part.alone(kernel, len(given) - 1, 1)]).bind(queue, given)
        runs.append((bound, out, problem.outputs[0], wanted(case)[0]))
    memory = queue.borrow(DEVICE, 0, 1)  # type: ignore[attr-defined]
    assert memory is queue.borrow(DEVICE, 0, memory.nbytes)  # type: ignore[attr-defined]
    for bound, out, type, right in [*runs, *runs]:
        memory[:] = 0xFF
        out.fill(np.nan)
        bound.invoke({})
        queue.finish()
        assert not compare(to_plain(out, type), to_plain(right, type))


# ---- accuracy -------------------------------------------------------------------------------------------------------


def error(problem: Problem, given: list[Any], id: str, config: Config) -> float:
    """Root of the mean square of the differences from f64."""
    kernel, queue = solver(id).compile(problem, config, DEVICE), DEVICE.queue()
    lies = [from_plain(a, t) for a, t in zip(given, problem.inputs, strict=True)]
    made = queue.fetch(kernel.run(queue, pack(kernel, problem, lies), [None]))[0]
    x = np.pad(given[0].astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (2, 3))
    right = np.einsum("nchwij,ocij->nohw", windows, given[1].astype(np.float64), optimize=True)
    return float(np.sqrt(np.square(to_plain(made, problem.outputs[0]) - right).mean()))


@pytest.mark.parametrize("channels", [16, 128])
def test_how_exact_it_is(rng: np.random.Generator, channels: int) -> None:
    """F(2, 3) is better than direct summation, so it is not called inexact; F(4, 3) is at most three times worse."""
    case = conv(rng, (1, channels, 16, 16), 16, bias=False)
    problem, given = case.problem(), [case.inputs[0], case.inputs[1], None]
    direct = solver("opencl.conv_blocked")
    least = error(problem, given, direct.id, direct.default(problem, TARGET))
    two, four = config(problem, 2, "fused"), config(problem, 4, "fused")
    assert error(problem, given, ID, two) <= least and solver().inexact(problem, two) is None
    assert error(problem, given, ID, four) <= 3 * least and "F(4,3)" in str(solver().inexact(problem, four))


# ---- untuned --------------------------------------------------------------------------------------------------------

TWO, FOUR = "opencl.conv_winograd_two", "opencl.conv_winograd_four"
#: input and output channels, size, with how many times as fast as the direct kernel it was measured (processor time)
MEASURED = {
    (16, 16, 112): 1.56, (24, 24, 104): 1.63, (12, 24, 208): 1.28, (48, 48, 52): 1.88, (64, 64, 112): 1.93,
    (96, 96, 13): 1.45, (192, 192, 13): 1.57, (16, 64, 55): 1.79, (64, 256, 13): 1.40, (64, 8, 56): 1.44,
    (64, 16, 28): 1.40, (128, 128, 7): 1.42, (32, 32, 28): 1.62, (512, 512, 14): 1.67, (243, 61, 10): 1.54,
    (64, 64, 56): 1.92, (128, 128, 28): 2.00, (256, 256, 14): 2.05, (512, 512, 7): 1.19, (96, 96, 26): 1.80,
}  # fmt: skip


#: channels and size, with how many times as fast as F(2,3) F(4,3) was measured
FOUR_OVER_TWO = {
    (32, 112): 1.55, (64, 56): 1.52, (128, 28): 1.40, (128, 56): 1.59, (256, 14): 1.02, (256, 28): 1.40,
    (256, 56): 1.61, (512, 14): 1.08, (512, 28): 1.47, (96, 28): 1.47, (192, 13): 1.02, (48, 60): 1.61, (64, 24): 1.62,
    (128, 14): 1.08, (32, 40): 1.54, (64, 14): 1.05,
}  # fmt: skip


def layer(inputs: int, outputs: int, size: int) -> Problem:
    f32 = TensorType.of(np.zeros(1, np.float32))
    x, w, y = (1, inputs, size, size), (outputs, inputs, 3, 3), (1, outputs, size, size)
    return Problem(
        "Conv", (replace(f32, shape=x, layout=BLOCK), replace(f32, shape=w)), (replace(f32, shape=y, layout=BLOCK),),
        {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1)}, constant=(False, True),
    )  # fmt: skip


@pytest.mark.parametrize(("shape", "gain"), MEASURED.items())
def test_what_is_expected_was_measured(shape: tuple[int, int, int], gain: float) -> None:
    """On two cores with AVX2; it may expect less, and a tenth more."""
    problem, two = layer(*shape), solver(TWO)
    target = replace(TARGET, units=2, vector_bytes=32, registers=16)
    problem = problem.in_layout(blocked(8), [0])
    assert speedup(problem, two.default(problem, target), target) < 1.1 * gain


@pytest.mark.parametrize(("shape", "gain"), FOUR_OVER_TWO.items())
def test_larger_tiles_are_the_default_where_they_were_measured_to_win(shape: tuple[int, int], gain: float) -> None:
    """On two cores with AVX2, six different layers behind each other."""
    target = replace(TARGET, units=2, vector_bytes=32, registers=16)
    problem = layer(shape[0], *shape).in_layout(blocked(8), [0])
    assert (solver(FOUR).why_not(problem, target) is None) == (gain > 1.3)


UNTUNED = pytest.mark.parametrize(
    "case",
    [
        conv(TABLES, (1, 64, 41, 37), 72, epilogue=(Fused("Relu", (~0,)),)),
        conv(TABLES, (2, 67, 30, 31), 24),
        conv(TABLES, (1, 130, 13, 12), 130, bias=False),
        conv(TABLES, (1, 48, 33, 70), 21),
    ],
    ids=["relu", "three blocks", "deep", "ragged"],
)


@UNTUNED
def test_larger_tiles_are_right_and_barred_for_accuracy(case: Case) -> None:
    problem, four = case.problem(), solver(FOUR)
    assert four.rank < solver(TWO).rank and not four.tuned_only
    assert "F(4,3)" in str(four.inexact(problem, four.default(problem, TARGET)))
    assert four.default(problem, TARGET) in solver().space(problem, TARGET)
    if four.why_not(problem, TARGET) is None:
        assert not check(case, FOUR, configs=1)
    else:
        assert "not surely faster than F(2,3)" in str(four.why_not(problem, TARGET))


@UNTUNED
def test_it_is_the_default_where_it_surely_pays(case: Case) -> None:
    problem = case.problem()
    two, direct = solver(TWO), solver("opencl.conv_blocked")
    assert two.why_not(problem, TARGET) is None and two.rank < direct.rank and not two.tuned_only
    assert two.inexact(problem, two.default(problem, TARGET)) is None
    assert list(two.space(problem, TARGET)) == [two.default(problem, TARGET)]
    assert two.default(problem, TARGET) in solver().space(problem, TARGET)  # where tuning goes on from it
    assert not check(case, TWO, configs=1)


def test_where_it_is_not(rng: np.random.Generator) -> None:
    two = solver(TWO)
    assert "too little" in str(two.why_not(layer(32, 32, 14), TARGET))
    assert "not surely faster" in str(two.why_not(layer(8, 8, 128), TARGET))
    assert "processors" in str(two.why_not(layer(64, 64, 56), replace(TARGET, device="gpu")))
    many = replace(TARGET, units=64)  # fewer tasks than units: most would wait
    assert speedup(layer(64, 64, 14), two.default(layer(64, 64, 14), many), many) < SURELY
    open_ = conv(rng, (1, 64, 56, 56), 64).problem()
    x = replace(open_.inputs[0], shape=(1, 64, None, None))  # type: ignore[type-var]
    assert "not known" in str(two.why_not(replace(open_, inputs=(x, *open_.inputs[1:])), TARGET))


# ---- what it takes --------------------------------------------------------------------------------------------------


def test_it_is_never_the_default() -> None:
    assert solver().tuned_only and solver().rank > solver("opencl.conv_blocked").rank


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("strides", {"strides": (2, 1)}),
        ("dilations", {"dilations": (1, 2), "pads": (2, 2, 2, 2)}),
        ("not 3 x 3", {"kernel": (3, 1)}),
        ("groups", {"group": 2}),
        ("blocks", {"layouts": (PLAIN, BLOCK)}),
        ("blocks", {"layouts": (BLOCK, PLAIN)}),
        ("constant", {"constant": frozenset({2})}),
        ("constant", {"constant": frozenset({1})}),
        ("empty", {"shape": (0, 16, 8, 8)}),
    ],
)
def test_what_it_refuses(rng: np.random.Generator, reason: str, change: Mapping[str, Any]) -> None:
    group, kernel = change.get("group", 1), change.get("kernel", (3, 3))
    attrs = {"kernel_shape": kernel, "pads": (1, 1, 1, 1), "group": group}
    attrs |= {k: v for k, v in change.items() if k in ("strides", "dilations", "pads")}
    case = Case(
        "Conv", [normal(rng, *change.get("shape", (1, 16, 8, 8))), normal(rng, 16, 16 // group, *kernel),
            normal(rng, 16)], attrs,
        constant=change.get("constant", frozenset({1, 2})), layouts=change.get("layouts", (BLOCK, BLOCK)),
    )  # fmt: skip
    assert reason in str(solver().why_not(case.problem(), TARGET))


def test_other_ranks_and_types_are_refused(rng: np.random.Generator) -> None:
    line = Case("Conv", [normal(rng, 1, 8, 9), normal(rng, 8, 8, 3)], {"kernel_shape": (3,)}, constant=frozenset({1}))
    assert "3 x 3" in str(solver().why_not(line.problem(), TARGET))
    half = conv(rng, (1, 8, 4, 4), 8)
    half = replace(half, inputs=[None if a is None else a.astype(np.float16) for a in half.inputs])
    assert "float16" in str(solver().why_not(half.problem(), TARGET))


def test_spaces_are_small_and_scratch_memory_is_bounded(rng: np.random.Generator) -> None:
    small = conv(rng, (1, 16, 8, 8), 16).problem()
    assert 50 < len(list(solver().space(small, TARGET))) < 450
    x, w, y = ((1, 64, 1100, 1100), (64, 64, 3, 3), (1, 64, 1100, 1100))
    f32 = TensorType.of(np.zeros(1, np.float32))
    large = Problem(
        "Conv", (replace(f32, shape=x, layout=BLOCK), replace(f32, shape=w)), (replace(f32, shape=y, layout=BLOCK),),
        {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1)}, constant=(False, True),
    )  # fmt: skip
    allowed = list(solver().space(large, TARGET))
    assert allowed and all(sum(scratch_bytes(large, c, TARGET)) <= MOST_SCRATCH for c in allowed)
    assert {c["form"] for c in allowed} == {"fused"}  # split, it would hold more than twice the input at once
    assert solver().default(large, TARGET) in allowed
