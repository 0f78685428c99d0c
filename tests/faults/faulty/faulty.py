"""Solvers with everything that can be wrong with a candidate: an extension, as it would be installed.

A config says what goes wrong (``how``) and how slow it is (``pace``); ``good`` is right. The host's kernels are numpy
and ctypes, those in C run on the device.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tunewright.devices.base import Device, Queue, Target
from tunewright.ir.types import DType
from tunewright.search.space import Space
from tunewright.solvers.base import Array, Config, Kernel, Problem, Solver
from tunewright.solvers.c.source.base import CSolver, tensor
from tunewright.solvers.c.source.emit import EmittedLaunch, In, Out, Source

OP = "Relu"
PACES = (1, 2, 4)
#: runs after which the ones that wear out do so: more than an attempt makes, fewer than a race
WORN = 2000


def segfault(x: Array, y: Array) -> None:
    ctypes.string_at(0)


def abort(x: Array, y: Array) -> None:
    print("something is very wrong", file=sys.stderr, flush=True)
    os.abort()


def leave(x: Array, y: Array) -> None:
    os._exit(3)


def hang(x: Array, y: Array) -> None:
    while True:
        pass


def hold(x: Array, y: Array) -> None:
    """A hang that never gives the interpreter to another thread."""
    ctypes.PyDLL(None).pause()


def sleep(x: Array, y: Array) -> None:
    time.sleep(3600)


def hoard(x: Array, y: Array) -> None:
    """A huge allocation in pieces: a system that promises more than it has refuses none of them."""
    pieces = []
    while True:
        pieces.append(np.zeros(8 << 20))


def flood(x: Array, y: Array) -> None:
    while True:
        os.write(1, b"the same again and again\n" * 1000)


def flood_errors(x: Array, y: Array) -> None:
    while True:
        print("the same again and again", file=sys.stderr)


def garble(x: Array, y: Array) -> None:
    """Writes to descriptors that are not its own."""
    for number in range(3, 64):
        try:
            os.write(number, b"\xff" * 64)
        except OSError:
            continue
    time.sleep(3600)


def orphan(x: Array, y: Array) -> None:
    """Dies, and leaves a process behind that holds all its descriptors."""
    if os.fork():
        ctypes.string_at(0)
    time.sleep(3600)


def nan(x: Array, y: Array) -> None:
    right(x, y)
    y.flat[y.size // 2] = np.nan


def percent(x: Array, y: Array) -> None:
    right(x, y)
    y *= np.float32(1.01)


def nothing(x: Array, y: Array) -> None:
    pass


def beyond(x: Array, y: Array) -> None:
    right(x, y)
    ctypes.memset(y.ctypes.data + y.nbytes, 0, 8)


def later(x: Array, y: Array) -> None:
    """Not done when it says so."""
    threading.Timer(1.0, right, (x, y)).start()


def slow_clock(x: Array, y: Array) -> None:
    """Takes two milliseconds, on a clock that is ten times as slow."""
    if time.perf_counter is _CLOCK:
        start = _CLOCK()
        time.perf_counter = lambda: start + (_CLOCK() - start) / 10
    time.sleep(2e-3)
    right(x, y)


def dead_clock(x: Array, y: Array) -> None:
    time.perf_counter = lambda: 1.0
    right(x, y)


def right(x: Array, y: Array) -> None:
    np.maximum(x, 0, out=y)


_CLOCK = time.perf_counter
HOST: dict[str, Callable[[Array, Array], None]] = {
    "good": right, "segfault": segfault, "abort": abort, "leave": leave, "hang": hang, "hold": hold, "sleep": sleep,
    "hoard": hoard, "flood": flood, "flood_errors": flood_errors, "garble": garble, "orphan": orphan, "nan": nan,
    "percent": percent, "nothing": nothing, "beyond": beyond, "later": later, "slow_clock": slow_clock,
    "dead_clock": dead_clock, "turncoat": right, "worn": right, "worn_out": right,
}  # fmt: skip
#: how many runs it takes before these become that
CHANGES = {"turncoat": (8, percent), "worn": (WORN, percent), "worn_out": (WORN, segfault)}


class FaultyKernel(Kernel):
    name = "faulty.host"

    def __init__(self, how: str, pace: int) -> None:
        self.how, self.pace, self.runs = how, pace, 0

    def run(self, queue: Queue, inputs: Sequence[Any], outputs: Sequence[Any]) -> Sequence[Any]:
        self.runs += 1
        after, what = CHANGES.get(self.how, (0, HOST[self.how]))
        for _ in range(self.pace):
            (what if self.runs > after else right)(inputs[0], outputs[0])
        return outputs


class FaultyHost(Solver):
    id = "faulty.host"
    host = True
    tuned_only = True
    ops = frozenset({OP})

    def why_not(self, problem: Problem, target: Target) -> str | None:
        return None if problem.op == OP and not problem.epilogue else f"solves {OP}"

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({"how": tuple(HOST), "pace": PACES})

    def default(self, problem: Problem, target: Target) -> Config:
        return {"how": "good", "pace": 2}

    def compile(self, problem: Problem, config: Config, device: Device) -> Kernel:
        return FaultyKernel(config["how"], config["pace"])


#: bodies of kernels over N elements; GID(0) is the only index
C = {
    "good": "for (int i = 0; i < N; i++) y[i] = x[i] > 0 ? x[i] : 0;",
    "hang": "volatile int go = 1; while (go) {} y[0] = x[0];",
    "crash": "*(volatile GLOBAL f32*)0 = x[0];",
    "nan": "for (int i = 0; i < N; i++) y[i] = i == 7 ? as_f32(0x7fc00000) : x[i] > 0 ? x[i] : 0;",
    "percent": "for (int i = 0; i < N; i++) y[i] = x[i] > 0 ? x[i] * 1.01f : 0;",
    "nothing": "",
    "beyond": "for (int i = 0; i <= N; i++) y[i] = x[i] > 0 ? x[i] : 0;",
    "before": "for (int i = -1; i < N; i++) y[i] = x[i] > 0 ? x[i] : 0;",
    "half": "for (int i = 0; i < N / 2; i++) y[i] = x[i] > 0 ? x[i] : 0;",
    "syntax": "this is no C",
    "endless": "DOUBLED64",
}
#: no text, but nobody lives to see it preprocessed
ENDLESS = "\n".join(["#define DOUBLED0", *(f"#define DOUBLED{n + 1} DOUBLED{n} DOUBLED{n}" for n in range(64))])


class FaultyC(CSolver):
    family = "faulty"
    ops = frozenset({OP})
    dtypes = frozenset({DType.FLOAT32})

    def __init__(self) -> None:
        super().__init__(specialise=True)

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({"how": tuple(C), "pace": PACES})

    def default(self, problem: Problem, target: Target) -> Config:
        return {"how": "good", "pace": 2}

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        source = Source("faulty", self.specialise)
        source.buffer("x", DType.FLOAT32, In(0))
        source.buffer("y", DType.FLOAT32, Out())
        source.dims(N=tensor(problem.outputs[0]).size)
        if config["how"] == "endless":
            source.function(ENDLESS)
        for _ in range(config["pace"]):
            source.add(f"{{ {C[config['how']]} }}")
        return [source.call([1])]


SOLVERS = (FaultyHost(), FaultyC())
