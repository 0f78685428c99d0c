"""Kernel conformance in other forms than users have it (see `kernel_forms`), and that those find what they are for."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.guarded import GuardedDevice, SanitisedDevice
from tunewright.devices.native.device import NativeDevice
from tunewright.ir.types import DType
from tunewright.solvers.opencl.emit import In, Out, Source


def run(device: NativeDevice, text: str, count: int = 100) -> np.ndarray:
    """A kernel of two buffers of so many numbers, x and y."""
    source = Source("kernel")
    source.buffer("x", DType.INT32, In(0))
    source.buffer("y", DType.INT32, Out())
    source.dims(COUNT=count)
    source.add("(void)x; (void)y; (void)COUNT;\n" + text)
    call, x, y = source.call([1]), np.arange(count, dtype=np.int32), np.zeros(count, np.int32)
    queue = device.queue()
    launch = device.launch(queue, device.build(call.program("c")), call.name, call.grid)
    for at, value in enumerate([x, y, np.int32(count)]):
        launch.set(at, value)
    launch()
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
    device = GuardedDevice("CPU")
    assert np.array_equal(run(device, "for (int i = 0; i < COUNT; i++) y[i] = x[i];"), np.arange(100))
    for _ in range(2):
        with pytest.raises(AssertionError, match=f"kernel: {said}"):
            run(device, text)


@pytest.mark.parametrize("text", [
    "y[0] = x[99] + (2147483647 - 98);", "y[0] = 1 << (x[99] - 60);", "y[0] = 1 / x[0];", "y[0] = (int)(x[99] * 1e9f);",
    "y[0] = *(GLOBAL const i32*)((GLOBAL const u8*)x + 1);",
], ids=["overflow", "shift", "division", "conversion", "alignment"])  # fmt: skip
def test_what_traps_find(text: str) -> None:
    device = SanitisedDevice("CPU")
    assert np.array_equal(run(device, "for (int i = 0; i < COUNT; i++) y[i] = x[i];"), np.arange(100))
    with pytest.raises(AssertionError, match="kernel: SIGILL"):
        run(device, text)
