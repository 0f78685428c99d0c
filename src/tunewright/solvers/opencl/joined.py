"""Many kernels as one launch: a kernel that interprets a list of steps. A launch for each of them costs 5 to 10 us.

The text has every kernel's own text once, as a function, and depends on nothing but the set of them. A table says which
one runs next, over which grid, with which arguments; so a plan for another shape, or one that does the same things in
another order, compiles nothing.

On a device with threads every work-item is a worker. Workers take chunks of a step's grid until none is left, then wait
until those that others took are done. Each begins with a part of the grid that is its own in every step, and then helps
the others: much of what it reads it made itself in the step before, so it is in its core's own cache. Nobody ever waits
for a worker that has not begun: where the runtime runs workers one after the other, the first does everything and the
others find nothing to do. There are no more of them than cores that the process may use: whoever waits would keep the
others from working.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np

from ...devices.base import Chained, Queue, address
from ...devices.host import cpu_flags
from ...devices.opencl import OpenCLDevice, OpenCLQueue
from ...devices.unlocked import Held
from ...errors import ExecutionError
from ..base import Array, Kernel, Launcher, Library
from .base import CKernel
from .emit import Call, In, Out, Scratch, Table
from .prelude import PRELUDE

#: Numbers in the table before the steps' places (how many, and the workers; in the calling thread where the next table
#: is); before a step's arguments: which kernel, grid, parts, chunks of a part, how many workers share one.
HEAD, STEP = 2, 7
NEXT = 1
#: A part's work is handed out in rounds, to each who shares it one chunk of each: half of it in the first, half of the
#: rest in the next, ... Few chunks are taken quickly (a counter that cores fight for costs 0.1 us), small ones end
#: together. So many parts at most: who is done with one looks at the counters of all others.
ROUNDS, MOST_PARTS = 5, 16
#: kernels in one program: the time to compile it grows faster than their number
MOST_TEXTS = 40
#: flags of a processor whose clock never changes its pace, and seconds over which that is measured
EVEN, CALIBRATION = frozenset({"constant_tsc", "nonstop_tsc"}), 0.02
#: ints of the counters of one step: each in a cache line of its own
LINE = 16


class Joined(Library):
    """A kernel that runs any of some kernels; as many of those given as one program should hold."""

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        first = kernels[0]
        assert isinstance(first, CKernel)
        self.device = first.device
        self.workers = self.device.workers
        self.parts = min(self.workers, MOST_PARTS)
        calls: dict[str, Call] = {}
        for kernel in kernels:
            if isinstance(kernel, CKernel) and kernel.device is self.device:
                more = calls | {call.text: call for call in kernel.calls}
                calls = more if len(more) <= MOST_TEXTS else calls
        #: the texts, with their numbers: equal sets make equal programs
        self.texts = {text: n for n, text in enumerate(sorted(calls))}
        self._calls = calls

    def timed(self) -> bool:
        return tick(self.device) > 0

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
        main = _LINKED if self.device.alone else _ALONE if self.workers == 1 else _SHARED
        main = main.replace("@CASES@", cases).replace("@PARTS@", str(self.parts))
        return "\n".join([PRELUDE, _POSITION, *functions, _EACH, _CLOCK, main])

    def table(self, calls: Sequence[Call]) -> tuple[Array, list[int]]:
        """The numbers that do not change, and where the arguments of each launch begin."""
        workers = self.workers
        begins, rows = [], [len(calls), 0 if self.device.alone else workers, *[0] * len(calls)]
        for i, call in enumerate(calls):
            grid = [*call.grid, 1, 1][:3]
            rows[HEAD + i] = len(rows)
            items = math.prod(grid)
            parts = max(1, min(self.parts, items))
            shares = min(workers, items) // parts
            chunks = shares * ROUNDS if items > parts * shares and workers > 1 else shares
            rows += [self.texts[call.text], *grid, parts, chunks, shares]
            begins.append(len(rows))
            rows += [_bits(arg) if isinstance(arg, np.generic) else 0 for arg in call.args]
        return np.array(rows, np.uint64), begins


class JoinedLauncher(Launcher, Held, Chained):
    """One request's table."""

    def __init__(self, joined: Joined, kernels: Sequence[CKernel], queue: OpenCLQueue) -> None:
        calls = [(k, call) for k, kernel in enumerate(kernels) for call in kernel.calls]
        table, begins = joined.table([call for _, call in calls])
        self.queue, self._table, self._joined, self._made_of = queue, table, joined, kernels
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
                    table[at] = address(held[kernel, arg.name])
                elif isinstance(arg, Table):
                    self._kept.append(arg.array)
                    table[at] = address(arg.array)
        self._kept += held.values()
        #: time of the beginning, and of the end of each launch that would be
        self._stamps = np.zeros(1 + len(calls), np.uint64)
        self._kernels, self._tick = [kernel for kernel, _ in calls], partial(tick, joined.device)
        self._launch = joined.device.launch(queue, joined.program, "joined", (joined.workers,)) if calls else None
        if self._launch is None:
            return
        self._launch.set(0, table)
        self._launch.set(1, self._stamps)
        #: what another table is told of this one
        self._link = np.array([address(table), address(self._stamps)], np.uint64)
        self._where, self.program = address(self._link), joined.program
        if joined.workers > 1:
            counters = np.zeros(LINE * ((joined.parts + 1) * len(calls) + 1), np.int32)
            self._launch.set(2, counters)

    def set(self, kernel: int, output: bool, index: int, array: Any) -> None:
        self.setter([(kernel, output, index)])(array)

    def places(self, uses: Sequence[tuple[int, bool, int]]) -> tuple[Any, list[int]]:
        # A memoryview takes a number sooner than an array does.
        return self._table.data, [at for use in uses for at in self._places.get(use, ())]

    def setter(self, uses: Sequence[tuple[int, bool, int]]) -> Callable[[Any], None]:
        table, places = self.places(uses)
        queue = self.queue

        def set(array: Any) -> None:
            if self._enqueued == queue.waits:
                queue.finish()
            where = address(array)
            for at in places:
                table[at] = where

        return set

    def chain(self, others: Sequence[Callable[[], object]]) -> JoinedLauncher | None:
        row = [self, *(o for o in others if isinstance(o, JoinedLauncher) and o._joined is self._joined)]
        if len(row) <= len(others):
            return None
        made = JoinedLauncher(self._joined, [kernel for one in row for kernel in one._made_of], self.queue)
        first = 0
        for one in row:
            for (kernel, output, index), places in one._places.items():
                for at, to in zip(places, made._places[first + kernel, output, index], strict=True):
                    made._table[to] = one._table[at]
            first += len(one._made_of)
        made._kept.append(row)
        return made

    def __call__(self) -> None:
        if self._launch is None:
            return
        if self.queue.holding:
            self.queue.hold(self)
        else:
            self._launch()
        self._enqueued = self.queue.waits

    def begin(self, others: Sequence[Held] = ()) -> None:
        assert self._launch is not None, "it was held"
        row = [self, *(other for other in others if isinstance(other, JoinedLauncher))]
        try:
            for one, next in pairwise(row):
                one._table.data[NEXT] = next._where
            self._launch()
        finally:  # also of Ctrl-C: a table that led to another's would make it run again, with addresses of the past
            for one in row:
                one._table.data[NEXT] = 0

    def seconds(self) -> list[float]:
        times = np.diff(self._stamps.astype(np.int64)).clip(0) * self._tick()
        count = len(self._made_of)
        return np.bincount(self._kernels, times, count).tolist() if self._kernels else [0.0] * count


class SharedOut:
    """A kernel's launches for one request where it shares its work out (`CKernel.shares_out`): one of so many workers.

    Else it is as `Bound`.
    """

    def __init__(self, kernel: CKernel, queue: Queue) -> None:
        self.kernel, self.launcher = kernel, kernel.shared_out.launcher([kernel], queue)
        counts = ((False, len(kernel.problem.inputs)), (True, len(kernel.problem.outputs)))
        self._setters = [[self.launcher.setter([(0, output, i)]) for i in range(count)] for output, count in counts]
        self.kept: Sequence[Any] = ()

    def fix(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[[], object]:
        """With these arguments for good."""
        self._set(inputs, outputs)
        return self.launcher

    def __call__(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Sequence[Any]:
        """With these arguments now; outputs that are None are made."""
        outputs = [self.kernel.new(i) if out is None else out for i, out in enumerate(outputs)]
        self._set(inputs, outputs)
        self.launcher()
        return outputs

    def _set(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        for setters, arrays in zip(self._setters, (inputs, outputs), strict=True):
            for set, array in zip(setters, arrays, strict=False):
                if array is not None:
                    set(array)
        self.kept = (inputs, outputs)  # a launch is asynchronous: the bytes must live until it is over


@cache
def tick(device: OpenCLDevice) -> float:
    """Seconds of one step of the clock that kernels read; 0 where there is none, or it does not go evenly."""
    if device.target.device != "cpu" or not cpu_flags() >= EVEN:
        return 0.0
    stamp, queue = np.zeros(1, np.uint64), device.queue()
    try:
        launch = device.launch(queue, device.build(PRELUDE + _CLOCK + _STAMP), "stamp", (1,))
    except ExecutionError:  # its compiler takes no assembly
        return 0.0
    launch.set(0, stamp)

    def point() -> tuple[float, int]:
        """Our time and the kernel's, from the launch that was over soonest."""
        found = []
        for _ in range(10):
            begin = queue.now()
            launch()
            end = queue.now()
            found.append((end - begin, (begin + end) / 2, int(stamp[0])))
        return min(found)[1:]

    first = point()
    time.sleep(CALIBRATION)
    last = point()
    return (last[0] - first[0]) / (last[1] - first[1]) if last[1] > first[1] else 0.0


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
        # "_of_": with "_" alone activate0 of kernel 1 would become activate0_1, which is a name, too
        [f"#define {name} {name}_of_{number}" for name in names]
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

# A step's time ends when its last chunk does. Reading the clock takes some 10 ns, so all launches do.
_CLOCK = """
#if defined(__x86_64__)
INLINE u64 joined_clock(void) {
  u32 low, high;
  __asm__ volatile("rdtsc" : "=a"(low), "=d"(high));
  return (u64)high << 32 | low;
}
#else
#define joined_clock() 0
#endif
"""

_STAMP = "KERNEL stamp(GLOBAL u64* stamps) { stamps[0] = joined_clock(); }"

_RUN = """  stamps[0] = joined_clock();
  for (int s = 0, steps = (int)t[0]; s < steps; s++) {
    GLOBAL const u64* a = t + t[2 + s];
    int x = (int)a[1], y = (int)a[2], i = 0, end = x * y * (int)a[3];
    switch ((int)a[0]) {
@CASES@
    }
    stamps[s + 1] = joined_clock();
  }
"""

_HEADER = "KERNEL joined(GLOBAL const u64* t, GLOBAL u64* stamps) {"
_ALONE = f"\n{_HEADER}\n{_RUN}}}\n"

# In the calling thread tables of several requests may be one launch: where the next one is, and where its stamps are.
_LINKED = f"""
{_HEADER}
  for (;;) {{
{_RUN}
    GLOBAL const u64* next = (GLOBAL const u64*)t[1];
    if (!next) break;
    t = (GLOBAL const u64*)next[0];
    stamps = (GLOBAL u64*)next[1];
  }}
}}
"""

# Volatile reads and atomics order nothing but themselves to the compiler; the fences keep data on its side. A worker
# that waits for milliseconds gives its core away (sched_yield, a system call of Linux): somebody else has the core of
# the one that it waits for. Workers number themselves as they come: where a kernel asks for get_global_id, PoCL splits
# vectors that `devices/programs.py` keeps whole.
_SHARED = """
#define LINES (@PARTS@ + 1)  /* of counters for a step */
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
KERNEL joined(GLOBAL const u64* t, GLOBAL u64* stamps, GLOBAL volatile int* counters) {
  int steps = (int)t[0], workers = (int)t[1], me = atomic_inc(counters + 1);
  GLOBAL const u64* final = t + t[1 + steps];
  int over = counters[16 * LINES * steps] == (int)(final[4] * final[5]);  /* the last step is done */
  if (me == 0) stamps[0] = joined_clock();
  for (int s = over ? steps : 0; s < steps; s++) {
    GLOBAL const u64* a = t + t[2 + s];
    int x = (int)a[1], y = (int)a[2], all = x * y * (int)a[3], parts = (int)a[4], chunks = (int)a[5];
    int shares = (int)a[6], mine = 0;
    GLOBAL volatile int *counter = counters + 16 * (LINES * s + 1), *done = counter + 16 * @PARTS@;
    for (int k = 0; k < parts; k++) {
      int part = (me + k) % parts, begin = (int)((i64)all * part / parts);
      int size = (int)((i64)all * (part + 1) / parts) - begin;
      GLOBAL volatile int* taken = counter + 16 * part;
      while (*taken < chunks) {
        int chunk = atomic_inc(taken);
        if (chunk >= chunks) break;
        mine++;
        int round = chunk / shares, rest = size >> round, share = chunk - round * shares;
        int length = chunks - shares * round > shares ? rest - (rest >> 1) : rest;  /* of the round: all in the last */
        int i = begin + size - rest + (int)((i64)length * share / shares);
        int end = begin + size - rest + (int)((i64)length * (share + 1) / shares);
        switch ((int)a[0]) {
@CASES@
        }
      }
    }
    FENCE
    if (mine && atomic_add(done, mine) + mine == chunks * parts) stamps[s + 1] = joined_clock();
    for (int spins = 0; *done < chunks * parts; spins++) {
      if (spins < SPINS) { PAUSE; } else { YIELD; }
    }
    FENCE
  }
  if (atomic_inc(counters) == workers - 1) {
    counters[1] = 0;
    for (int s = 0; s <= LINES * steps; s++) counters[16 * s] = 0;
  }
}
"""
