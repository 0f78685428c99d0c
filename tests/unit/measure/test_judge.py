"""The judge catches what a kernel can do wrong; tolerances grow with the length of sums and never hide 1 %."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tunewright.devices.base import Queue
from tunewright.devices.host import HostDevice
from tunewright.ir.types import DType, TensorType, blocked
from tunewright.measure.judge import Judge, examine, terms
from tunewright.ops.tolerance import TOLERANCES, absolute, bias, compare, deviation
from tunewright.plugins.single import open_device
from tunewright.solvers.base import Kernel, Packing, Problem
from tunewright.solvers.host.reference import HostKernel

DEVICE = HostDevice()
Run = Callable[[Any, Sequence[Any], Sequence[Any]], None]


class Python(Kernel):
    """The right result, then whatever is done to it. ``self.runs`` counts."""

    name = "test.python"

    def __init__(self, problem: Problem, spoil: Run | None = None, before: bool = False) -> None:
        self.right, self.spoil, self.before, self.runs = HostKernel(problem), spoil, before, 0

    def run(self, queue: Queue, inputs: Sequence[Any], outputs: Sequence[Any]) -> Sequence[Any]:
        self.runs += 1
        if self.before and self.spoil is not None:
            self.spoil(self, inputs, outputs)
            return outputs
        made = self.right.run(queue, inputs, outputs)
        if self.spoil is not None:
            self.spoil(self, inputs, outputs)
        return made


def binary(op: str = "Add", dtype: DType = DType.FLOAT32, out: DType | None = None) -> Problem:
    t = TensorType(dtype, (5, 33))
    return Problem(op, (t, t), (TensorType(out or dtype, (5, 33)),), {}, constant=(False, False))


def verdict(problem: Problem, spoil: Run | None, before: bool = False) -> str:
    return Judge(problem, DEVICE, 3).check(Python(problem, spoil, before), DEVICE.queue()).wrong


def poke(array: np.ndarray, offset: int) -> None:
    """Change a byte at some distance of an array's first one, as a kernel with a wrong index would."""
    there = ctypes.c_ubyte.from_address(array.ctypes.data + offset)
    there.value ^= 0x3C


def spoil(change: Callable[[Any, Any], None]) -> Run:
    return lambda kernel, inputs, outputs: change(inputs, outputs[0])


def scale(inputs: Any, out: Any) -> None:
    out *= np.float32(1.01)


def one_nan(inputs: Any, out: Any) -> None:
    out[3, 7] = np.nan


def one_element(inputs: Any, out: Any) -> None:
    out[4, 32] += 1e-3 * (1 + abs(out[4, 32]))


FAULTS: dict[str, tuple[Run, str]] = {
    "NaN": (spoil(one_nan), "NaN"),
    "wrong by 1 %": (spoil(scale), "against"),
    "wrong in one element": (spoil(one_element), "against"),
    "write behind an output": (spoil(lambda i, out: poke(out, out.nbytes)), "out of bounds"),
    "write before an output": (spoil(lambda i, out: poke(out, -1)), "out of bounds"),
    "write far behind": (spoil(lambda i, out: poke(out, out.nbytes + 255)), "out of bounds"),
    "write to an input": (spoil(lambda i, out: poke(i[1], 8)), "its input 1"),
    "write behind an input": (spoil(lambda i, out: poke(i[0], i[0].nbytes)), "its input 0"),
    "differs between runs": (
        lambda kernel, i, o: np.copyto(o[0], np.nextafter(o[0], 9)) if kernel.runs == 2 else None,
        "differs between two runs",
    ),
    "right, then wrong": (lambda kernel, i, o: scale(i, o[0]) if kernel.runs >= 2 else None, "run 2"),
    "right, then wrong later": (lambda kernel, i, o: scale(i, o[0]) if kernel.runs >= 3 else None, "edge inputs"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_kernel_is_caught(fault: str) -> None:
    change, says = FAULTS[fault]
    assert verdict(binary(), None) == ""
    assert says in verdict(binary(), change)


def test_a_kernel_that_does_nothing_is_caught() -> None:
    assert "NaN" in verdict(binary(), lambda kernel, i, o: None, before=True)


@pytest.mark.parametrize("dtype", [DType.INT8, DType.INT64, DType.UINT8, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT64])
def test_an_element_that_is_not_written_is_caught_even_where_the_poison_is_right(dtype: DType) -> None:
    """-1 is what integers are poisoned with first: the second poison shows it."""

    def skip(kernel: Any, inputs: Any, outputs: Any) -> None:
        made = inputs[0] + inputs[1]
        keep = made.view(np.uint8).reshape(*made.shape, -1).min(-1) == 0xFF
        keep[2, 5] = True
        np.copyto(outputs[0], made, where=~keep)

    assert verdict(binary(dtype=dtype), skip, before=True)


def test_poison_alone_would_not_do_where_results_equal_it() -> None:
    problem = Problem("Neg", (TensorType(DType.INT32, (9,)),), (TensorType(DType.INT32, (9,)),), {}, constant=(False,))
    ones = np.ones(9, np.int32)
    kernel = Python(problem, lambda kernel, i, o: None, before=True)  # writes nothing; -1 is right
    found = examine(kernel, problem, DEVICE, DEVICE.queue(), [ones], [-ones])
    assert "run 2" in found.wrong


def test_a_truth_value_is_zero_or_one() -> None:
    def sloppy(kernel: Any, inputs: Any, outputs: Any) -> None:
        outputs[0].view(np.uint8)[...] *= 2

    problem = binary("Less", out=DType.BOOL)
    assert verdict(problem, None) == "" and "truth" in verdict(problem, sloppy)


def test_constants_are_packed_and_lanes_of_a_last_block_may_hold_anything() -> None:
    class Doubling(Python):
        """Wants its weights doubled, and halves them."""

        def __init__(self, problem: Problem) -> None:
            super().__init__(problem)
            self.packings = {1: Packing("doubled", lambda a: np.asarray(a * 2))}

        def run(self, queue: Queue, inputs: Sequence[Any], outputs: Sequence[Any]) -> Sequence[Any]:
            return self.right.run(queue, [inputs[0], inputs[1] / 2], outputs)

    x, y = (TensorType(DType.FLOAT32, (1, 5, 4, 4), blocked(8)) for _ in range(2))
    w = TensorType(DType.FLOAT32, (5, 5, 3, 3))
    problem = Problem("Conv", (x, w), (y,), {"pads": (1, 1, 1, 1)}, constant=(False, True))
    judge = Judge(problem, DEVICE)
    given = judge.cases[0].inputs[0]
    assert given is not None and np.isnan(given[..., 5:]).all() and not np.isnan(given[..., :5]).any()
    found = judge.check(Doubling(problem), DEVICE.queue())
    assert found.wrong == "" and found.error < 1e-6
    assert judge.check(Python(problem), DEVICE.queue()).error == 0.0


def test_inputs_depend_on_the_seed_alone() -> None:
    first, again, other = (Judge(binary(), DEVICE, seed).cases for seed in (1, 1, 2))
    assert [c.name for c in first] == ["random", "edge"]
    for a, b, c in zip(first, again, other, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a.inputs, b.inputs, strict=True))
        assert not any(np.array_equal(x, y) for x, y in zip(a.inputs, c.inputs, strict=True))


def test_what_cannot_be_judged_says_why() -> None:
    t = TensorType(DType.FLOAT32, (2, 3))

    def why(op: str, *types: TensorType, out: TensorType = t) -> str:
        return Judge(Problem(op, types, (out,), {}, constant=(False,) * len(types)), DEVICE).unfit or ""

    assert "no static shape" in why("Relu", TensorType(DType.FLOAT32, (2, None)))
    assert "no definition" in why("mine::Absent", t)
    assert "refuses" in why("MatMul", t, t)
    assert "the reference makes" in why("Relu", t, out=TensorType(DType.FLOAT32, (3, 2)))
    big = TensorType(DType.FLOAT32, (1 << 20, 1 << 20))
    assert "bytes" in why("Relu", big, out=big)
    text = TensorType(DType.STRING, (2,))
    assert "strings" in why("Identity", text, out=text)
    assert why("Softmax", TensorType(DType.FLOAT32, ()))  # no reference, no kernel


# ---- tolerances -----------------------------------------------------------------------------------------------------

LENGTHS = [1, 10, 100, 1000, 10**4, 10**5, 10**6]


@pytest.mark.parametrize("dtype", [d for d in TOLERANCES if d.is_float], ids=str)
@pytest.mark.parametrize("length", [*LENGTHS, 10**12])
def test_one_per_cent_fails_however_long_the_sum(dtype: DType, length: int) -> None:
    good = np.random.default_rng(length).standard_normal(2000).astype(dtype.numpy)
    for factor in (0.99, 1.01):
        wrong = (good.astype(np.float64) * factor).astype(dtype.numpy)
        assert compare(wrong, good, length) or bias(wrong, good)
    one = good.copy()
    largest = int(np.argmax(np.abs(good.astype(np.float64))))
    one[largest] = np.float64(good[largest]) * (1.03 if dtype is DType.BFLOAT16 else 1.01)  # a unit is nearly 1 %
    assert compare(one, good, length)


def test_the_absolute_part_grows_with_the_root_of_long_sums_only() -> None:
    for dtype in TOLERANCES:
        assert absolute(dtype) == absolute(dtype, 100) == TOLERANCES[dtype].absolute
        assert absolute(dtype, 1e6) < 5e-3 + TOLERANCES[dtype].absolute
    assert absolute(DType.FLOAT32, 10**4) == pytest.approx(2e-5)
    assert absolute(DType.FLOAT32, 10**6) == pytest.approx(2e-4)
    assert absolute(DType.FLOAT32, 10**30) == absolute(DType.FLOAT32, 10**8) <= 3e-3


@pytest.mark.parametrize("length", LENGTHS[2:])
def test_a_right_sum_in_another_order_passes(length: int) -> None:
    """Sums of random signs, one term after the other in single precision, against the sum in double precision."""
    rng = np.random.default_rng(length)
    rows = max(8, min(200, 10**7 // length))
    values = rng.standard_normal((length, rows)).astype(np.float32)
    naive = np.zeros(rows, np.float32)
    for term in values:
        naive += term
    right = values.astype(np.float64).sum(0).astype(np.float32)
    assert compare(naive, right, length / 2) == ""  # reductions count one operation for each element
    assert deviation(naive, right) < absolute(DType.FLOAT32, length / 2)


def test_rounding_to_the_coarsest_type_is_no_bias() -> None:
    exact = np.random.default_rng(0).standard_normal(1000)
    bf16 = DType.BFLOAT16.numpy
    rounded = exact.astype(bf16)
    down = (exact * (1 - 2**-9)).astype(bf16)  # often a unit in the last place lower
    assert bias(rounded, rounded) == bias(down, rounded) == ""
    assert bias((exact * 1.01).astype(bf16), rounded)


def test_terms_are_those_of_the_sum() -> None:
    f = DType.FLOAT32
    x, w, y = TensorType(f, (1, 64, 56, 56)), TensorType(f, (64, 64, 3, 3)), TensorType(f, (1, 64, 56, 56))
    assert terms(Problem("Conv", (x, w), (y,), {"pads": (1, 1, 1, 1)}, constant=(False, True))) == 576
    a, b, c = TensorType(f, (5, 700)), TensorType(f, (700, 3)), TensorType(f, (5, 3))
    assert terms(Problem("MatMul", (a, b), (c,), {}, constant=(False, False))) == 700
    assert terms(binary()) == 1
    rows = TensorType(f, (4, 3000))
    assert terms(Problem("Softmax", (rows,), (rows,), {"axis": -1}, constant=(False,))) == 3000
    assert terms(Problem("LayerNormalization", (rows,), (rows,), {}, constant=(False,))) == 3000
    total = TensorType(f, (4, 1))
    assert terms(Problem("ReduceSum", (rows,), (total,), {}, constant=(False,))) == 1500


def test_a_large_layer_that_rounds_its_own_state_is_not_judged():
    def layer(hidden):
        def of(dtype, *shape):
            return TensorType(dtype, shape)

        f, q = DType.FLOAT32, DType.INT8
        given = (
            of(f, 20, 1, 64), of(q, 1, 64, 4 * hidden), of(q, 1, hidden, 4 * hidden), of(f, 1, 8 * hidden), None, None,
            None, None, of(f, 1), of(q, 1), of(f, 1), of(q, 1),
        )  # fmt: skip
        outputs = (of(f, 20, 1, 1, hidden), of(f, 1, 1, hidden), of(f, 1, 1, hidden))
        attrs = {"hidden_size": hidden, "direction": "forward"}
        return Problem("com.microsoft::DynamicQuantizeLSTM", given, outputs, attrs, constant=(False,) * len(given))

    device = open_device("CPU.HOST")
    assert "rounds its own state" in str(Judge(layer(256), device, 0).unfit)
    assert Judge(layer(16), device, 0).unfit is None
