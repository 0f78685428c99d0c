"""Kernels that count how often each item ran, tables of them, and a pool with more threads than there are cores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tunewright.devices.native import compiler, usable_cores
from tunewright.devices.native import table_format as steps
from tunewright.devices.native.objects import SharedObject
from tunewright.devices.native.pool import ThreadPool
from tunewright.devices.native.processor import thread_pool
from tunewright.plugins.single import open_device

HERE = Path(__file__).parent
POOL = [Path(compiler.__file__).with_name(name) for name in ("launch_table.c", "pool.c")]
native = pytest.mark.skipif(open_device("CPU").family != "native", reason="needs the native CPU device")

KERNELS = r"""
typedef unsigned long long u64;
#define EXPORT __attribute__((visibility("default")))
/* counts[item]++, and so many turns of nothing */
EXPORT void count(const u64* a, int begin, int end, int x, int y) {
  for (; begin < end; begin++) {
    __atomic_add_fetch((int*)a[0] + begin, 1, __ATOMIC_RELAXED);
    for (volatile u64 k = 0; k < a[1]; k++) {}
  }
}
/* where[item] = where in the grid */
EXPORT void place(const u64* a, int begin, int end, int x, int y) {
  for (; begin < end; begin++) ((int*)a[0])[begin] = begin % x + 1000 * (begin / x % y) + 1000000 * (begin / x / y);
}
/* out[item] = in[item] * a[2] + in[other item] */
EXPORT void mix(const u64* a, int begin, int end, int x, int y) {
  const float* in = (const float*)a[0];
  unsigned bits = (unsigned)a[2];
  float by;
  __builtin_memcpy(&by, &bits, 4);
  for (; begin < end; begin++) ((float*)a[1])[begin] = in[begin] * by + in[(begin * 7919ll + 13) % (x * y)];
}
"""
#: sets the mode of floating point of the thread that calls it
MODE = r"""
#if defined(__x86_64__)
__attribute__((visibility("default"))) unsigned get_mode(void) { return __builtin_ia32_stmxcsr() & 0xffc0; }
__attribute__((visibility("default"))) void set_mode(unsigned mode) { __builtin_ia32_ldmxcsr(mode); }
#else
__attribute__((visibility("default"))) unsigned get_mode(void) { return 0; }
__attribute__((visibility("default"))) void set_mode(unsigned mode) {}
#endif
"""


@cache
def loaded(text: str = KERNELS) -> SharedObject:
    return SharedObject(compiler.find().build(text, ["-Wno-everything"]))


@cache
def crowded(cores_: int = 8) -> ThreadPool:
    """A pool of eight threads, however many cores there are. Its workers stay until the process ends."""
    with mock.patch.object(usable_cores, "count", lambda: cores_):
        pool = ThreadPool(thread_pool, "NO")
    pool.start()
    return pool


def table_of(
    kernels: Sequence[tuple[int, Sequence[int], int]], participants: int
) -> tuple[np.ndarray[Any, Any], list[int]]:
    """A table of kernel steps (entry point, grid, number of arguments), and where each one's arguments begin."""
    listing = steps.Listing()
    for entry, grid, arguments in kernels:
        listing.kernel(entry, grid, arguments)
    linked = listing.link(participants)
    return linked.table, [begin + steps.ROW for begin in linked.begins]


class Table:
    """Steps of kernels, and what they write."""

    def __init__(self, grids: list[tuple[int, ...]], limit: int = 8, kernel: str = "count", burn: int = 0) -> None:
        entry = loaded().address(kernel)
        self.words, self.begins = table_of([(entry, grid, 3) for grid in grids], limit)
        self.written = [np.zeros(max(1, int(np.prod(grid))), np.int32) for grid in grids]
        for begin, array in zip(self.begins, self.written, strict=True):
            self.words[begin : begin + 2] = array.ctypes.data, burn

    @property
    def costs(self) -> np.ndarray[Any, Any]:
        """The cost of each step, as far as it is known."""
        return self.words[[begin - 1 for begin in self.begins]]

    def know(self, cost: int) -> None:
        for begin in self.begins:
            self.words[begin - 1] = cost

    def each_ran(self, times: int) -> bool:
        steps = zip(self.begins, self.written, strict=True)
        return all((array == (times if self.words[begin - 2] else 0)).all() for begin, array in steps)


def stress_text(slots: int = 64) -> str:
    """The pool with so many slots, and what stresses it."""
    text = "".join(path.read_text("utf-8") for path in POOL)
    assert "#define SLOTS 64\n" in text
    text = text.replace("#define SLOTS 64\n", f"#define SLOTS {slots}\n")
    return text + "".join((HERE / name).read_text("utf-8") for name in ("pool_stress.c", "control_stress.c"))
