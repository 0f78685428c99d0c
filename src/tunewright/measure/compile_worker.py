"""Process that compiles candidates for a worker: ``python -m tunewright.measure.compile_worker``, started by
`ahead.Ahead`.

It answers with the programs of a candidate in the form of the kernel cache. Errors here are ignored, because the worker
meets the same error itself.
"""

from __future__ import annotations

import contextlib
import socket
import sys

from ..devices import build_options, kernel_cache
from ..devices.base import Device
from ..devices.kernel_cache import Gathered
from ..solvers import problem_json
from ..solvers.base import Problem
from . import protocol
from .local import compile_candidate
from .worker import Channel, die_with_parent, limit, open_device


class CandidateCompiler:
    """Compiles candidates on one device, for one problem at a time."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._text: object = None
        self._problem: Problem | None = None

    def programs(self, request: protocol.Message) -> protocol.Programs:
        """Return the compiled programs of a candidate; empty if it has none or cannot be compiled."""
        gathered = Gathered()
        with contextlib.suppress(Exception), kernel_cache.using(gathered):  # a candidate may fail in any way
            if request["problem"] != self._text:
                self._problem, self._text = problem_json.from_json(request["problem"]), request["problem"]
            assert self._problem is not None
            compile_candidate(protocol.candidates(request["candidates"])[0], self._problem, self.device).prepare()
        return gathered.groups


def main(arguments: list[str]) -> None:
    """Serve requests. ``arguments``: those of a worker."""
    name, memory, channel_number, lifeline = arguments
    channel = Channel(socket.socket(fileno=int(channel_number)))
    die_with_parent(int(lifeline))
    limit(int(memory))
    build_options.stay_together()
    try:
        device = open_device(name)
    except Exception as error:  # a driver may raise anything
        channel.send(kind="failed", why=f"{error.__class__.__name__}: {error}")
        return
    kernel_cache.forgo()
    compiler = CandidateCompiler(device)
    channel.send(kind="ready", target=repr(device.target))
    while True:
        request = channel.receive()
        found = compiler.programs(request)
        channel.send(kind="answer", number=request["number"], programs=protocol.programs_json(found))


if __name__ == "__main__":
    main(sys.argv[1:])
