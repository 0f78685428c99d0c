"""Many kernels as one launch: a kernel that interprets a list of steps. A launch for each of them costs 5 to 10 us.

The text has every kernel's own text once, as a function, and depends on nothing but the set of them. A table says which
one runs next, over which grid, with which arguments; so a plan for another shape, or one that does the same things in
another order, compiles nothing.

On a device with threads every work-item is a worker. Workers take chunks of a step's grid until none is left, then wait
until those that others took are done. Nobody ever waits for a worker that has not begun: where the runtime runs workers
one after the other, the first does everything and the others find nothing to do. There are no more of them than cores
that the process may use: whoever waits would keep the others from working.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ...devices.base import Queue
from ...devices.host import cpu_count
from ...devices.opencl import OpenCLQueue
from ..base import Array, Kernel, Launcher, Library
from .base import CKernel
from .emit import Call, In, Out, Scratch, Table
from .prelude import PRELUDE

#: numbers in the table before the steps' places; before a step's arguments: which kernel, grid, chunks
HEAD, STEP = 2, 5
#: A step's work is handed out in rounds, to each thread one chunk of each: half of it in the first, half of the rest in
#: the next, ... Few chunks are taken quickly (a counter that cores fight for costs 0.1 us), small ones end together.
FEW_THREADS, ROUNDS_OF_FEW, ROUNDS = 4, 5, 4
#: kernels in one program: the time to compile it grows faster than their number
MOST_TEXTS = 40
#: ints of the counters of one step: each in a cache line of its own
LINE = 16


class Joined(Library):
    """A kernel that runs any of some kernels; as many of those given as one program should hold."""

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        first = kernels[0]
        assert isinstance(first, CKernel)
        self.device = first.device
        self.workers = 1 if self.device.alone else max(1, min(self.device.target.units, cpu_count()))
        calls: dict[str, Call] = {}
        for kernel in kernels:
            if isinstance(kernel, CKernel) and kernel.device is self.device:
                more = calls | {call.text: call for call in kernel.calls}
                calls = more if len(more) <= MOST_TEXTS else calls
        #: the texts, with their numbers: equal sets make equal programs
        self.texts = {text: n for n, text in enumerate(sorted(calls))}
        self._calls = calls

    def prepare(self) -> None:
        _ = self.program

    @cached_property
    def program(self) -> Any:
        return self.device.build(self.source())

    def holds(self, kernel: Kernel) -> bool:
        if not isinstance(kernel, CKernel) or kernel.device is not self.device:
            return False
        return all(call.text in self.texts for call in kernel.calls)

    def launcher(self, kernels: Sequence[Kernel], queue: Queue) -> JoinedLauncher:
        assert isinstance(queue, OpenCLQueue)
        return JoinedLauncher(self, [k for k in kernels if isinstance(k, CKernel)], queue)

    def source(self) -> str:
        """The text of the kernel."""
        functions = [_function(self._calls[text], n) for text, n in self.texts.items()]
        cases = "\n".join(f"case {n}: EACH {_apply(self._calls[text], n)} break;" for text, n in self.texts.items())
        main = _ALONE if self.workers == 1 else _SHARED
        return "\n".join([PRELUDE, _POSITION, *functions, _EACH, main.replace("@CASES@", cases)])

    def table(self, calls: Sequence[Call]) -> tuple[Array, list[int]]:
        """The numbers that do not change, and where the arguments of each launch begin."""
        workers = self.workers
        rounds = ROUNDS_OF_FEW if workers <= FEW_THREADS else ROUNDS
        begins, rows = [], [len(calls), workers, *[0] * len(calls)]
        for i, call in enumerate(calls):
            grid = [*call.grid, 1, 1][:3]
            rows[HEAD + i] = len(rows)
            rows += [self.texts[call.text], *grid, workers * rounds if math.prod(grid) > workers else workers]
            begins.append(len(rows))
            rows += [_bits(arg) if isinstance(arg, np.generic) else 0 for arg in call.args]
        return np.array(rows, np.uint64), begins


class JoinedLauncher(Launcher):
    """One request's table."""

    def __init__(self, joined: Joined, kernels: Sequence[CKernel], queue: OpenCLQueue) -> None:
        calls = [(k, call) for k, kernel in enumerate(kernels) for call in kernel.calls]
        table, begins = joined.table([call for _, call in calls])
        self.queue, self._table = queue, table
        #: where each tensor's address stands
        self._places: dict[tuple[int, bool, int], list[int]] = {}
        self._kept: list[Any] = []
        #: the queue's number of waits when this was last enqueued: until the next one the table is being read
        self._enqueued = -1
        held: dict[tuple[int, str], Any] = {}
        for (kernel, call), begin in zip(calls, begins, strict=True):
            numbers = len({name for k, name in held if k == kernel})
            for at, arg in enumerate(call.args, begin):
                if isinstance(arg, In | Out):
                    self._places.setdefault((kernel, isinstance(arg, Out), arg.index), []).append(at)
                elif isinstance(arg, Scratch):
                    if (kernel, arg.name) not in held:
                        held[kernel, arg.name] = queue.borrow(joined.device, numbers, arg.nbytes)
                        numbers += 1
                    table[at] = _address(held[kernel, arg.name])
                elif isinstance(arg, Table):
                    self._kept.append(arg.array)
                    table[at] = _address(arg.array)
        self._kept += held.values()
        self._launch = joined.device.launch(queue, joined.program, "joined", (joined.workers,))
        self._launch.set(0, table)
        if joined.workers > 1:
            counters = np.zeros(LINE * (2 * len(calls) + 1), np.int32)
            self._launch.set(1, counters)

    def set(self, kernel: int, output: bool, index: int, array: Any) -> None:
        if self._enqueued == self.queue.waits:
            self.queue.finish()
        for at in self._places.get((kernel, output, index), ()):
            self._table[at] = _address(array)

    def __call__(self) -> None:
        self._launch()
        self._enqueued = self.queue.waits


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _bits(number: np.generic) -> int:
    """A number as it stands in the table."""
    if isinstance(number, np.floating):
        return int(np.float32(number).view(np.uint32))
    return int(number) & 0xFFFFFFFFFFFFFFFF


# ---- text -----------------------------------------------------------------------------------------------------------

#: names that a kernel's head declares: functions, types, vectors
_DECLARED = (
    re.compile(r"\bINLINE\s+[\w\s*]+?\b(\w+)\s*\("),
    re.compile(r"\bvector_of\(\s*\w+\s*,[^,()]+,\s*(\w+)\s*\)"),
    re.compile(r"\btypedef\b[^;]*?\b(\w+)\s*(?:__attribute__\s*\(\(.*?\)\)\s*)?;"),
)
_DEFINED = re.compile(r"^\s*#\s*define\s+(\w+)", re.MULTILINE)


def _function(call: Call, number: int) -> str:
    """A kernel as a function of its position and parameters; its names are its own, and its macros end with it."""
    names = sorted({name for pattern in _DECLARED for name in pattern.findall(call.head)})
    macros = _DEFINED.findall(call.head)
    params = ", ".join(["const int g0", "const int g1", "const int g2", *call.params])
    return "\n".join(
        [f"#define {name} {name}_{number}" for name in names]
        + [call.head, f"static void step_{number}({params}) {{", call.body, "}"]
        + [f"#undef {name}" for name in dict.fromkeys([*names, *macros])]
    )


def _apply(call: Call, number: int) -> str:
    """The function applied to the arguments in the table."""
    args = []
    for at, param in enumerate(call.params):
        value = f"a[{STEP + at}]"
        if "*" in param:
            kind = param.rpartition("*")[0].replace("restrict", "")
            args.append(f"({kind}*){value}")
        else:
            args.append(f"as_f32((u32){value})" if "f32" in param else f"(int){value}")
    return f"step_{number}({', '.join(['GX', 'GY', 'GZ', *args])});"


_POSITION = """
#undef GID
#define GID(n) GID_##n
#define GID_0 g0
#define GID_1 g1
#define GID_2 g2
"""

# after the kernels' functions, which may have macros of these names
_EACH = """
#define GX (i % x)
#define GY (i / x % y)
#define GZ (i / x / y)
#define EACH for (; i < end; i++)
"""

_ALONE = """
KERNEL joined(GLOBAL const u64* t) {
  for (int s = 0, steps = (int)t[0]; s < steps; s++) {
    GLOBAL const u64* a = t + t[2 + s];
    int x = (int)a[1], y = (int)a[2], i = 0, end = x * y * (int)a[3];
    switch ((int)a[0]) {
@CASES@
    }
  }
}
"""

# Volatile reads and atomics order nothing but themselves to the compiler; the fences keep data on its side. A worker
# that waits for milliseconds gives its core away (sched_yield, a system call of Linux): somebody else has the core of
# the one that it waits for.
_SHARED = """
#define FENCE { mem_fence(CLK_GLOBAL_MEM_FENCE); __asm__ volatile("" ::: "memory"); }
#if defined(__x86_64__) && defined(__linux__)
#define SPINS 10000
#define PAUSE __asm__ volatile("pause")
#define YIELD { long call = 24; __asm__ volatile("syscall" : "+a"(call) : : "rcx", "r11", "memory"); }
#else
#define SPINS 1
#define PAUSE
#define YIELD
#endif
KERNEL joined(GLOBAL const u64* t, GLOBAL volatile int* counters) {
  int steps = (int)t[0], workers = (int)t[1];
  int over = counters[16 * 2 * steps] == (int)t[t[1 + steps] + 4];  /* the last step is done */
  for (int s = over ? steps : 0; s < steps; s++) {
    GLOBAL const u64* a = t + t[2 + s];
    int x = (int)a[1], y = (int)a[2], all = x * y * (int)a[3], chunks = (int)a[4], mine = 0;
    GLOBAL volatile int *taken = counters + 16 * (2 * s + 1), *done = taken + 16;
    while (*taken < chunks) {
      int chunk = atomic_inc(taken);
      if (chunk >= chunks) break;
      mine++;
      int round = chunk / workers, rest = all >> round, part = chunk - round * workers;
      int length = chunks - workers * round > workers ? rest - (rest >> 1) : rest;  /* of the round: all in the last */
      int i = all - rest + (int)((i64)length * part / workers);
      int end = all - rest + (int)((i64)length * (part + 1) / workers);
      switch ((int)a[0]) {
@CASES@
      }
    }
    FENCE
    if (mine) atomic_add(done, mine);
    for (int spins = 0; *done < chunks; spins++) {
      if (spins < SPINS) PAUSE; else YIELD
    }
    FENCE
  }
  if (atomic_inc(counters) == workers - 1) {
    for (int s = 0; s <= 2 * steps; s++) counters[16 * s] = 0;
  }
}
"""
