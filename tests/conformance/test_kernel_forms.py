"""Kernel conformance in other forms than users have it (see `kernel_forms`), and that those find what they are for.

The short form runs a test of every module in each form (two at each level); soak runs all tests in each.
"""

from __future__ import annotations

import numpy as np
import pytest

from conformance import again, qemu
from conformance.guarded import GuardedDevice, SanitisedDevice
from conformance.strict import StrictDevice
from tunewright.devices.c_device import CDevice
from tunewright.devices.native import isa
from tunewright.devices.native.device import NativeDevice
from tunewright.devices.native.processor import processor
from tunewright.errors import ExecutionError
from tunewright.ir.types import DType
from tunewright.solvers.c.source.base import CKernel
from tunewright.solvers.c.source.emit import EmittedLaunch, In, Out, Source
from tunewright.testing.kernelcheck import Case

LEVELS = [level.name.upper() for levels in isa.LEVELS.values() for level in levels]
#: a device, and what CPU_ISA says
FORMS = [
    *(("CPU.STRICT", level) for level in LEVELS), ("CPU.GUARDED", ""), ("CPU.SANITISED", ""), ("CPU.QEMU", ""),
    *((f"CPU.SYNTAX.{level}", "") for level in LEVELS),
]  # fmt: skip
GROUPS = 4

each_form = pytest.mark.parametrize(
    ("device", "level"), FORMS, ids=["-".join(filter(None, form)).removeprefix("CPU.") for form in FORMS]
)
needs_native = pytest.mark.skipif(
    "not config.getoption('--cpu') is None or isinstance(NativeDevice.available(), str)", reason="CPU is another device"
)


def skip_without(device: str, level: str) -> None:
    """Skip the test where the machine does not run such a form."""
    if device == "CPU.QEMU" and qemu.why_not():
        pytest.skip(qemu.why_not())
    if level and level not in [found.name.upper() for found in processor().levels]:
        pytest.skip(f"this processor does not execute {level.lower()}")


@needs_native
@each_form
def test_some_kernels_of_every_family(device: str, level: str) -> None:
    skip_without(device, level)
    again.run(again.KERNELS, device, "-m", "not soak", "--most", "2" if level else "1", level=level, least=25)


@needs_native
@pytest.mark.soak
@pytest.mark.parametrize("group", range(GROUPS))
@each_form
def test_all_kernels(device: str, level: str, group: int) -> None:
    skip_without(device, level)
    again.run(again.KERNELS[group::GROUPS], device, level=level, least=300)


def kernel(text: str, count: int = 100) -> EmittedLaunch:
    """Of two buffers of so many numbers, x and y."""
    source = Source("kernel")
    source.buffer("x", DType.INT32, In(0))
    source.buffer("y", DType.INT32, Out())
    source.dims(COUNT=count)
    source.add("(void)x; (void)y; (void)COUNT;\n" + text)
    return source.call([1])


def run(device: CDevice, text: str, count: int = 100) -> np.ndarray:
    """What such a kernel makes of 0, 1, 2 and so on."""
    call, x, y = kernel(text, count), np.arange(count, dtype=np.int32), np.zeros(count, np.int32)
    problem = Case("Neg", [x]).problem()
    CKernel("kernel", problem, device, [call], {}).run(device.queue(), [x], [y])
    return y


@pytest.mark.parametrize(("text", "said"), [
    ("y[0] = x[COUNT];", "SIGSEGV, 0 bytes behind the end of x"),
    ("y[0] = x[-1];", "SIGSEGV, 4 bytes in front of x"),
    ("y[COUNT + 2] = 1;", "SIGSEGV, 8 bytes behind the end of y"),
    ("y[-2] = 1;", "SIGSEGV, 8 bytes in front of y"),
    ("__builtin_trap();", "SIGILL"),
    ("y[0] = (int)((size_t)y / 16 % 16);", "y depends on where it lies"),
])  # fmt: skip
def test_what_guards_find(text: str, said: str) -> None:
    device = GuardedDevice()
    assert np.array_equal(run(device, "for (int i = 0; i < COUNT; i++) y[i] = x[i];"), np.arange(100))
    for _ in range(2):
        with pytest.raises(AssertionError, match=f"kernel: {said}"):
            run(device, text)


@pytest.mark.parametrize("text", [
    "y[0] = x[99] + (2147483647 - 98);", "y[0] = 1 << (x[99] - 60);", "y[0] = 1 / x[0];", "y[0] = (int)(x[99] * 1e9f);",
    "y[0] = *(GLOBAL const i32*)((GLOBAL const u8*)x + 1);",
], ids=["overflow", "shift", "division", "conversion", "alignment"])  # fmt: skip
def test_what_traps_find(text: str) -> None:
    device = SanitisedDevice()
    assert np.array_equal(run(device, "for (int i = 0; i < COUNT; i++) y[i] = x[i];"), np.arange(100))
    with pytest.raises(AssertionError, match="kernel: SIGILL"):
        run(device, text)


@needs_native
@pytest.mark.parametrize("form", [NativeDevice, StrictDevice])
def test_undefined_symbols(form: type[NativeDevice]) -> None:
    """In the tests of this folder."""
    device = form("CPU")
    device.build(kernel("y[0] = (int)f64_exp((f64)x[0]);").program("c"))
    with pytest.raises(AssertionError, match=r"^abs, puts: what kernels call must be in their own text"):
        device.build(kernel('extern int abs(int), puts(const char*); y[0] = abs(x[0]) + puts("");').program("c"))


@needs_native
@pytest.mark.parametrize(("text", "said"), [
    ("int unused = 1;", "unused variable"), ("y[0] = x[0] < 1u;", "different signs"),
    ("int n; y[0] = n;", "uninitialized"),
])  # fmt: skip
def test_what_warnings_find(text: str, said: str) -> None:
    NativeDevice("CPU").build(kernel(text).program("c"))
    with pytest.raises(ExecutionError, match=said):
        StrictDevice("CPU.STRICT").build(kernel(text).program("c"))
