"""What a device can do at most, and the least that a problem takes there."""

import dataclasses

import numpy as np
import pytest

from tunewright.devices.c_device import CDevice
from tunewright.devices.null import NullDevice
from tunewright.errors import DeviceError
from tunewright.ir.graph import Fused
from tunewright.ir.types import DType, TensorType
from tunewright.measure import ceilings as module
from tunewright.measure import local
from tunewright.measure.ceilings import Ceilings, best_of, ceilings, work_of
from tunewright.ops.base import Work
from tunewright.plugins.single import open_device, visible
from tunewright.settings import Settings
from tunewright.solvers.base import Problem

CPU = open_device("CPU")
#: what compiles C here: the CPU device, and runtimes of OpenCL
COMPILING = [name for name in visible(alternatives=True) if isinstance(open_device(name), CDevice)]
needs_compiler = pytest.mark.skipif(not isinstance(CPU, CDevice), reason="needs a CPU device that compiles")


def f32(*shape):
    return TensorType(DType.FLOAT32, shape)


def test_the_floor_is_the_larger_of_arithmetic_and_traffic():
    top = Ceilings(100.0, 10.0)
    assert top.floor(Work(300.0, 20.0)) == (3.0, "arithmetic")
    assert top.floor(Work(300.0, 50.0)) == (5.0, "memory")


def test_work_counts_the_epilogue_and_its_operands():
    x, w, y = f32(1, 8, 4, 4), f32(16, 8, 3, 3), f32(1, 16, 4, 4)
    plain = Problem("Conv", (x, w), (y,), {"pads": [1, 1, 1, 1]}, constant=(False, True))
    fused = Problem(
        "Conv", (x, w, y), (y,), {"pads": [1, 1, 1, 1]}, (Fused("Add", (-1, 2)), Fused("Relu", (-2,))), 1,
        (False, True, False),
    )  # fmt: skip
    one, both = work_of(plain), work_of(fused)
    assert one.flops == 2 * 8 * 9 * y.size and one.bytes == x.nbytes + w.nbytes + y.nbytes
    assert both.flops == one.flops + 2 * y.size and both.bytes == one.bytes + y.nbytes


def test_of_a_table_only_what_is_picked_is_read():
    table, at, made = f32(30_000, 384), TensorType(DType.INT64, (1, 8)), f32(1, 8, 384)
    work = work_of(Problem("Gather", (table, at), (made,), {}, constant=(True, False)))
    assert work.bytes == made.nbytes + at.nbytes + made.nbytes


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (Problem("Relu", (f32("n"),), (f32("n"),), {}, constant=(False,)), "shapes depend on data"),
        (Problem("Relu", (None,), (None,), {}, constant=(False,)), "shapes depend on data"),
        (Problem("no::Such", (f32(2),), (f32(2),), {}, constant=(False,)), "is not defined"),
        (
            Problem("Identity", (TensorType(DType.STRING, (2,)),), (f32(2),), {}, constant=(False,)),
            "texts have no fixed size",
        ),
        (Problem("MatMul", (f32(), f32()), (f32(),), {}, constant=(False, True)), "its types do not fit"),
    ],
)
def test_work_that_cannot_be_told_has_a_reason(problem, reason):
    assert reason in work_of(problem)


def test_the_best_of_several_runs_counts_and_the_first_one_does_not():
    times, clock = iter([0.5, 5.0, 3.0, 4.0, 6.0]), [0.0]

    def run():
        clock[0] += next(times, 7.0)

    assert best_of(run, lambda: clock[0]) == 3.0


def test_a_device_that_nobody_can_measure_says_so():
    assert "of null devices" in ceilings(NullDevice()).why


@needs_compiler
def test_a_device_that_fails_says_so(monkeypatch):
    def fail(source):
        raise DeviceError("out of order")

    monkeypatch.setattr(CPU, "build", fail)
    assert module._measure(CPU).why == "measuring it failed: out of order"


@pytest.mark.parametrize("name", ["CPU", "CPU.HOST"])
def test_ceilings_are_measured_once_and_lie_where_hardware_does(name):
    device = open_device(name)
    top = ceilings(device)
    assert ceilings(device) is top and not top.why
    # a kernel whose loop the compiler had dropped would be far above
    most = device.target.traits.bytes_per_clock / 4 * 2 * 2 * local.CLOCK * device.target.units
    assert 1e8 < top.flops < most
    assert 1e8 < top.bandwidth < 2e12


@pytest.mark.parametrize("name", COMPILING)
def test_the_kernels_do_what_is_counted(name):
    device = open_device(name)
    probe = module._Probe(device)
    probe.launch(module.arithmetic(probe.lanes), probe.out)()
    probe.queue.finish()
    made = probe.out.view(np.float32)
    # where a = a / 2 + 1 ends
    np.testing.assert_allclose(made, 2.0 * module.ACCUMULATORS * probe.lanes, rtol=1e-6)
    count = 6 * module.UNROLLED
    data = device.alloc(4 * probe.lanes * count * probe.items)
    numbers = data.view(np.float32)
    numbers[:] = np.arange(numbers.size) % 7
    each = numbers.reshape(probe.items, -1).sum(1)
    for apart, stride in ((count, 1), (1, probe.items)):  # as on a processor, and as on a GPU
        probe.launch(module.memory(probe.lanes, apart, stride, count), probe.out, data)()
        probe.queue.finish()
        assert made.sum() == numbers.sum(), "every element is read once"
        if stride == 1:
            np.testing.assert_array_equal(made, each)


def test_gpus_run_them_in_groups():
    call = dataclasses.replace(module.arithmetic(4).call((512,)), group=256)
    assert "reqd_work_group_size(256, 1, 1)" in call.program("opencl")


@needs_compiler
def test_narrower_vectors_have_a_lower_ceiling():
    """The same arithmetic in half as many lanes; a busy neighbour makes neither look higher."""
    wide = CPU if CPU.family == "native" else None
    if wide is None or wide.target.vector_bytes < 64:
        pytest.skip("needs 512-bit vectors")
    narrow = open_device("CPU", Settings.make({"CPU_ISA": "X86-64-V3"}))
    assert narrow is not wide and ceilings(narrow) is not ceilings(wide)
    assert module._Probe(narrow).lanes * 2 == module._Probe(wide).lanes
