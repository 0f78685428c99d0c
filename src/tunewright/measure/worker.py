"""The process that runs candidates: ``python -m tunewright.measure.worker``, started by `isolated.Isolated`.

It answers requests one by one until its parent closes the channel or dies. The parent handles everything that a
candidate does to this process: crash, hang, exhaust memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import resource
import signal
import socket
import sys
import time
from typing import Any

from .. import discovery
from ..devices import build_options, kernel_cache
from ..devices.base import Device
from ..devices.kernel_cache import Gathered
from ..errors import DeviceError
from ..search.base import Status
from ..settings import Settings
from ..solvers import problem_json
from . import protocol
from .base import Attempt, Candidate
from .local import Broke, LocalMeasurer
from .request_activity import ActivityGate

#: Seconds between two signs of life.
ALIVE = 0.05
#: saved before any candidate could replace it
_now = time.monotonic


class Channel:
    """The worker's end of the socket."""

    def __init__(self, raw: socket.socket) -> None:
        self._raw, self._reader, self._waiting = raw, protocol.Reader(), list[protocol.Message]()

    def send(self, **message: Any) -> None:
        self._raw.sendall(protocol.pack(message))

    def receive(self) -> protocol.Message:
        """Return the next message. Exits if the parent is gone."""
        while not self._waiting:
            data = self._raw.recv(1 << 16)
            if not data:
                raise SystemExit(0)
            self._waiting.extend(self._reader.feed(data))
        return self._waiting.pop(0)


class Announced:
    """Callback around timed stretches: measures their time, and sends the parent signs of life."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._told = channel, _now()
        self.stretches, self.stamped = 0, 0.0
        self._begun = 0.0

    def alive(self) -> None:
        """Send the parent a sign of life, unless the last one was just sent."""
        if _now() > self._told + ALIVE:
            self._channel.send(kind="alive")
            self._told = _now()

    def __call__(self, what: str) -> None:
        if what == "begin":
            self.alive()
            self._begun = _now()
        else:
            self.stamped += _now() - self._begun
            self.stretches += 1

    def clear(self) -> None:
        self.stretches, self.stamped = 0, 0.0


def main(arguments: list[str]) -> None:
    """Serve requests.

    Arguments: the device's name, maximum bytes of memory, the descriptors of the channel and the lifeline.

    Before these two there may be the descriptor of an `activity.Activity` and the number of its pause word. Nothing is
    then timed while a request runs.
    """
    name, memory, *activity, channel_number, lifeline = arguments
    channel = Channel(socket.socket(fileno=int(channel_number)))
    die_with_parent(int(lifeline))
    limit(int(memory))
    build_options.stay_together()
    announced = Announced(channel)
    try:
        device = open_device(name)
        gate = ActivityGate(*map(int, activity)) if activity else None
        local = LocalMeasurer(device, timing=announced, gate=gate, waiting=announced.alive)
    except Exception as error:  # a driver may raise anything; the parent decides what to do
        channel.send(kind="failed", why=f"{error.__class__.__name__}: {error}")
        return
    kernel_cache.forgo()  # the device has loaded its own programs, such as the thread pool, from the cache
    gc.collect()
    gc.freeze()  # these objects stay for the whole life of the process
    channel.send(kind="ready", target=repr(device.target))
    while True:
        request = channel.receive()
        began, timed = _now(), local.timed
        announced.clear()
        value = _answer(local, request)
        claimed = local.timed - timed
        # On a device with its own memory, work queued before a stretch ends within it, so the clocks cannot be
        # compared.
        stamped = announced.stamped if device.shares_memory else claimed
        clock = protocol.Clock(_now() - began, announced.stretches, stamped, claimed)
        number = request["number"]
        channel.send(kind="answer", number=number, value=value, resident=_resident(), clock=clock.to_json())


def _answer(local: LocalMeasurer, request: protocol.Message) -> protocol.Message:
    what = request["do"]
    if what == "pose":
        refusal = local.pose(problem_json.from_json(request["problem"]), request["seed"], request["regime"])
        return protocol.pose_json(refusal, None if refusal is not None else local.regime())
    candidates = protocol.candidates(request["candidates"])
    if what == "attempt":
        if not request["programs"]:
            return protocol.attempt_json(_attempt(local, candidates[0], request["limit"]))
        gathered = Gathered(protocol.programs(request["programs"]), closed=True)
        with kernel_cache.using(gathered):
            attempt = _attempt(local, candidates[0], request["limit"])
        gathered.groups.clear()  # a compiled program keeps the cache alive that it came from
        return protocol.attempt_json(attempt)
    # in a race it is unknown which candidate broke the device
    return protocol.race_json(local.race(candidates, request["rounds"]))


def _attempt(local: LocalMeasurer, candidate: Candidate, limit: float) -> Attempt:
    """Attempt a candidate. If it breaks the device, report a crash; the parent then replaces this process."""
    try:
        return local.attempt(candidate, limit)
    except Broke as broke:
        return Attempt(Status.CRASHED, str(broke))


def open_device(name: str) -> Device:
    """Open the device of exactly this name, with the implementation that the parent uses for it."""
    families: dict[str, type[Device]] = discovery.find("tunewright.devices", key=lambda d: d.family)
    reasons, kind = list[str](), name.partition(".")[0]
    unlikely = {family: device.kinds is not None and kind not in device.kinds for family, device in families.items()}
    for family, device in sorted(families.items(), key=lambda item: (unlikely[item[0]], -item[1].priority)):
        names = device.available()
        if not isinstance(names, str) and name in names:
            return device(name).configured(Settings.from_environment())
        reasons += [f"{family}: {names}"] if isinstance(names, str) else []
    raise DeviceError(f"there is no device {name!r}" + (f" ({'; '.join(reasons)})" if reasons else ""))


def die_with_parent(lifeline: int) -> None:
    """Have the system kill this process group when the parent dies, even if a thread hangs or holds the GIL.

    Only the parent holds the other end of the pipe and never writes to it, so the pipe reports only its end. A signal
    at the parent's death (PR_SET_PDEATHSIG) is unsuitable: it comes when the *thread* ends that started this process.
    """
    os.set_inheritable(lifeline, False)
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            if not os.read(lifeline, 1):  # the parent died before this process listened
                raise SystemExit(0)


def limit(memory: int) -> None:
    """Limit memory: a request for too much fails.

    Also forbid core dumps, and be the first to be killed when memory is short.

    The limit counts data, not addresses, because drivers reserve far more addresses than they use.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    bound = memory if most == resource.RLIM_INFINITY else min(memory, most)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")


def _resident() -> int:
    """Return the bytes of memory in use; 0 if the system does not report them."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


if __name__ == "__main__":
    main(sys.argv[1:])
