"""A process that compiles candidates for a worker: ``python -m tunewright.tuning.compiler``, started by `ahead.Ahead`.

It answers with the programs of a candidate as the kernel cache keeps them. Some runtimes make machine code only when a
kernel is launched, so where there is nothing to give after compiling, the kernel runs once, on data that nobody looks
at: but not on a device with memory of its own, where others are timed at the same time. What goes wrong here is of no
account: the worker finds it out by itself.
"""

from __future__ import annotations

import contextlib
import socket
import sys

import numpy as np

from ..devices import kernel_cache
from ..devices.base import Device
from ..devices.kernel_cache import Gathered
from ..ir.types import TensorType
from ..solvers import serial
from ..solvers.base import Array, Kernel, Problem
from . import inputs, wire
from .bench import compile_candidate
from .judge import Guarded, pack, physical
from .worker import Channel, die_with_parent, limit, open_device


class Compiler:
    """Compiles candidates of one problem after the other on one device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._text: object = None
        self._problem: Problem | None = None
        self._inputs: list[Array | None] | None = None

    def programs(self, request: wire.Message) -> wire.Programs:
        """The compiled programs of a candidate; none where it has none, or cannot be compiled."""
        gathered = Gathered()
        with contextlib.suppress(Exception), kernel_cache.using(gathered):  # a candidate may fail in any way
            if request["problem"] != self._text:
                self._problem, self._inputs = serial.from_json(request["problem"]), None
                self._text = request["problem"]
            assert self._problem is not None
            kernel = compile_candidate(wire.candidates(request["candidates"])[0], self._problem, self.device)
            self._build(kernel, self._problem, gathered)
        return gathered.groups

    def _build(self, kernel: Kernel, problem: Problem, gathered: Gathered) -> None:
        """Programs are built when a kernel is prepared, or bound to its arguments; then it runs, unless they are
        complete.
        """
        kernel.prepare()
        if gathered.groups or not self.device.shares_memory:
            return
        if self._inputs is None:
            self._inputs = physical(problem, inputs.make(problem, np.random.default_rng(0), "tame"))
        device, queue = self.device, self.device.queue()
        given = [None if a is None else Guarded.holding(device, queue, a) for a in pack(kernel, problem, self._inputs)]
        outs = [Guarded(device, t) for t in problem.outputs if isinstance(t, TensorType)]
        run = kernel.bind(queue, [None if g is None else g.view for g in given], [out.view for out in outs])
        if not gathered.groups:
            run()
            queue.finish()
            kernel_cache.flush()


def main(arguments: list[str]) -> None:
    """Arguments: as those of a worker."""
    name, memory, channel_number, lifeline = arguments
    channel = Channel(socket.socket(fileno=int(channel_number)))
    die_with_parent(int(lifeline))
    limit(int(memory))
    try:
        device = open_device(name)
    except Exception as error:  # a driver may raise anything
        channel.send(kind="failed", why=f"{error.__class__.__name__}: {error}")
        return
    compiler = Compiler(device)
    channel.send(kind="ready", target=repr(device.target))
    while True:
        request = channel.receive()
        found = compiler.programs(request)
        channel.send(kind="answer", number=request["number"], programs=wire.programs_json(found))


if __name__ == "__main__":
    main(sys.argv[1:])
