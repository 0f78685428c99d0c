"""The contract between a plan and a processor (`devices/executable.py`), on every device that is here."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from conformance import interpreter
from helpers import opencl_runtime
from tunewright.devices.base import Device, Queue
from tunewright.devices.executable import HostCall, Kernel, Part
from tunewright.devices.host import HostDevice
from tunewright.devices.reports import KernelError
from tunewright.ir.types import DType, TensorType
from tunewright.plugins.single import open_device
from tunewright.solvers.base import Problem, solvers
from tunewright.solvers.host.reference import HostKernel

TYPE = TensorType(DType.FLOAT32, (3, 5))


def devices() -> Iterator[Any]:
    yield pytest.param(lambda: open_device("CPU"), id="CPU")
    yield pytest.param(HostDevice, id="host")
    for id, shares in (("OpenCL", True), ("OpenCL apart", False)):

        def made(shares: bool = shares) -> Device:
            return opencl_runtime.device(shares_memory=shares)

        yield pytest.param(made, id=id, marks=opencl_runtime.needs_opencl)
    missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
    yield pytest.param(_cuda, id="CUDA", marks=pytest.mark.skipif(bool(missing), reason=f"{missing} not here"))


def _cuda() -> Device:
    from tunewright.devices.cuda.device import CudaDevice

    return CudaDevice("GPU.0", raw=interpreter.RAW)


@pytest.fixture(params=devices(), scope="module")
def device(request: pytest.FixtureRequest) -> Device:
    made: Device = request.param()
    return made


def kernel(device: Device, op: str) -> Kernel:
    """The default kernel of an operation over one or two tensors."""
    problem = Problem(op, (TYPE,) * (2 if op == "Add" else 1), (TYPE,), {}, constant=(False,) * 2)
    if device.family == "host":
        return HostKernel(problem)
    language = device.target.language
    for solver in solvers(language, op):
        if not solver.host and solver.language == language and solver.why_not(problem, device.target) is None:
            return solver.compile(problem, solver.default(problem, device.target), device)
    raise AssertionError(f"nothing solves {op}")


def memory(device: Device, queue: Queue, array: np.ndarray[Any, Any] | None = None) -> Any:
    made = device.view(device.alloc(TYPE.nbytes), 0, TYPE)
    if array is not None:
        queue.put(array, made)
    return made


def floats(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(TYPE.dims).astype(np.float32)


def links(device: Device) -> bool:
    return kernel(device, "Neg").is_linkable


def test_tensors_that_stay(device: Device) -> None:
    """0 is -1; 2 is 0 + 1, which nobody but the executable writes."""
    if not links(device):
        pytest.skip("kernels are called one by one")
    queue = device.queue()
    parts = [Part(kernel(device, "Neg"), (0,), (1,)), Part(kernel(device, "Add"), (0, 1), (2,))]
    executable = device.link(parts)
    assert [*executable.parts] == parts
    slots = [memory(device, queue, floats(0)), memory(device, queue), memory(device, queue)]
    bound = executable.bind(queue, slots)
    for seed in range(3):
        queue.put(floats(seed), slots[0])
        bound.invoke({})
        negative, zero = queue.fetch(slots[1:])
        np.testing.assert_array_equal(negative, -floats(seed))
        assert not zero.any()


def test_tensors_of_an_inference(device: Device) -> None:
    """Input and result come with each call."""
    queue, part = device.queue(), Part(kernel(device, "Neg"), (4,), (2,))
    executable = device.link([part]) if links(device) else HostCall(part)
    bound = executable.bind(queue, [None] * 5)
    for seed in range(3):
        values = {4: memory(device, queue, floats(seed)), 2: memory(device, queue)}
        bound.invoke(values)
        np.testing.assert_array_equal(queue.fetch([values[2]])[0], -floats(seed))


def test_addresses_do_as_well(device: Device) -> None:
    part = Part(kernel(device, "Neg"), (0,), (1,))
    executable = device.link([part]) if links(device) else HostCall(part)
    assert executable.takes_addresses == (device.shares_memory and device.family in ("native", "opencl"))
    if executable.takes_addresses:
        queue, x, y = device.queue(), floats(1), np.empty(TYPE.dims, np.float32)
        executable.bind(queue, [None, None]).invoke({0: x.ctypes.data, 1: y.ctypes.data})
        queue.finish()
        np.testing.assert_array_equal(y, -x)


def test_requests_share_an_executable(device: Device) -> None:
    """Each has its own memory, and is not disturbed by others."""
    if not links(device):
        pytest.skip("kernels are called one by one")
    executable = device.link([Part(kernel(device, "Neg"), (0,), (1,))])
    requests = []
    for seed in range(3):
        queue = device.queue()
        slots = [memory(device, queue, floats(seed)), memory(device, queue)]
        requests.append((queue, slots, executable.bind(queue, slots)))
    for _ in range(2):
        for _, _, bound in requests:
            bound.invoke({})
        for seed, (queue, slots, _) in enumerate(requests):
            np.testing.assert_array_equal(queue.fetch(slots[1:])[0], -floats(seed))


def test_times_of_parts(device: Device) -> None:
    if not links(device):
        pytest.skip("kernels are called one by one")
    queue = device.queue()
    executable = device.link([Part(kernel(device, "Neg"), (0,), (1,)), Part(kernel(device, "Neg"), (1,), (0,))])
    if not executable.timed:
        pytest.skip("a launch does not tell the times of its parts")
    bound = executable.bind(queue, [memory(device, queue, floats(0)), memory(device, queue)], clocked=True)
    bound.invoke({})
    queue.finish()
    assert len(bound.seconds()) == 2 and all(0 < seconds < 10 for seconds in bound.seconds())


def test_a_report_names_its_part(device: Device) -> None:
    if device.target.language != "c":
        pytest.skip("its kernels report nothing")
    indices, out = TensorType(DType.INT64, (1,)), TensorType(DType.FLOAT32, (1, 5))
    problem = Problem("Gather", (TYPE, indices), (out,), {}, constant=(False, False))
    gather = next(s for s in solvers("c", "Gather") if s.id == "opencl.gather")
    made, queue = gather.compile(problem, gather.default(problem, device.target), device), device.queue()
    parts = [Part(kernel(device, "Neg"), (0,), (1,), "first"), Part(made, (1, 2), (3,), "second")]
    bound = device.link(parts).bind(queue, [None] * 4)
    for index in (2, 7, 1):
        at = device.view(device.alloc(8), 0, indices)
        queue.put(np.array([index]), at)
        result = device.view(device.alloc(out.nbytes), 0, out)
        values = {0: memory(device, queue, floats(0)), 1: memory(device, queue), 2: at, 3: result}
        if index < 3:
            bound.invoke(values)
            queue.check()
            np.testing.assert_array_equal(queue.fetch([result])[0][0], -floats(0)[index])
            continue
        with pytest.raises(KernelError) as error:
            bound.invoke(values)
            queue.check()
        assert error.value.subject == "second"


def test_a_reference_makes_its_results(device: Device) -> None:
    """A kernel of the host among those of a device, with memory for its result or without."""
    queue, problem = device.queue(), Problem("Neg", (TYPE,), (TYPE,), {}, constant=(False,))
    asked: list[int] = []
    call = HostCall(Part(HostKernel(problem), (0,), (1,)), True, not device.shares_memory, lambda ins: asked.append(1))
    planned = memory(device, queue)
    call.bind(queue, [memory(device, queue, floats(2)), planned]).invoke({})
    np.testing.assert_array_equal(queue.fetch([planned])[0], -floats(2))
    assert not asked
    values: dict[int, Any] = {}
    call.bind(queue, [memory(device, queue, floats(2)), None]).invoke(values)
    np.testing.assert_array_equal(values[1], -floats(2))
    assert asked == [1]
