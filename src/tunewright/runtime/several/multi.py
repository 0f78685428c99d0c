"""A pool of devices that serve one model. A free device takes the next request; another device repeats a failed one.

A `DevicePool` knows the devices in order of preference and how many inferences each takes at a time. With MULTI all
devices share the requests. With AUTO the best ready device serves alone, and the others stand by. A device may join
while others serve: the pool compiles for it and tries it out in the background.

If a device fails, the other devices run the request again before the caller learns of it. If one of them succeeds, the
failed device is to blame. The pool leaves it out after an error of the device itself, or after `STRIKES` failures in a
row where an operation refused. If no device can run the request, the request is to blame. The pool then leaves out a
device only if the device reports that it is broken.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tunewright.errors import DeviceError, InputError, TunewrightError
from tunewright.ir.types import DType, TensorType

from ..insight.counters import CounterRow, Totals
from ..requests.compiled import CompiledModel, InferRequest
from ..requests.remote_tensors import is_lent
from .batch import BatchModel

LOG = logging.getLogger("tunewright")

#: A device is left out after this many failures in a row, counting requests that others could serve.
STRIKES = 3


class DeviceState(enum.Enum):
    """The state of a device in a pool."""

    WAITING = "waiting"  # compiled when it is needed
    COMPILING = "compiling"
    READY = "ready"
    LOST = "lost"  # could not compile the model, or failed
    GONE = "gone"  # removed from the pool


@dataclass(frozen=True)
class CandidateDevice:
    """A device that may serve."""

    name: str
    #: requests that keep it busy; ``fixed``: the user chose that number, otherwise the compiled model decides
    requests: int
    fixed: bool
    compile: Callable[[], CompiledModel]
    #: why the device cannot be used any more; empty: it can
    broken: Callable[[], str]


@dataclass(eq=False)
class Member:
    """A device of a pool, and its state. A thread that changes it holds the pool's lock."""

    candidate: CandidateDevice
    #: requests that keep it busy, and inferences that it takes at a time
    requests: int
    slots: int
    state: DeviceState = DeviceState.WAITING
    model: CompiledModel | None = None
    #: why it is lost, and the error if it could not compile the model
    why: str = ""
    error: Exception | None = None
    busy: int = 0
    served: int = 0
    strikes: int = 0
    #: requests that are not in use
    idle: list[InferRequest] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.candidate.name

    def request(self) -> InferRequest:
        """Take one of the device's requests for one inference. Several threads may call it at the same time."""
        try:
            return self.idle.pop()
        except IndexError:
            assert self.model is not None
            return self.model.create_infer_request()


@dataclass(frozen=True)
class Served:
    """A finished inference."""

    results: dict[str, Any]
    device: str
    totals: Totals
    rows: list[CounterRow]


@dataclass(eq=False)
class _Waiter:
    """A request that waits for a device which has not failed it yet."""

    failed: Mapping[Member, Exception]
    #: held until ``member`` is decided
    known: threading.Lock = field(default_factory=threading.Lock)
    member: Member | None = None


class DevicePool:
    """The devices of one model."""

    def __init__(self, name: str, candidates: Sequence[CandidateDevice], together: bool) -> None:
        self.name, self.together = name, together
        self._lock = threading.Lock()
        self._members = [_member(c) for c in candidates]
        #: the order in which devices are asked: those left to other models come last
        self._ranked = list(self._members)
        self._left: frozenset[str] = frozenset()
        self._waiting: deque[_Waiter] = deque()
        #: shapes and types of the last request's inputs, recorded while a device compiles: a new device is tried with
        #: such
        self._like: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        self._compiling = 0
        #: settings changed since the models were compiled
        self._config: dict[str, Any] = {}
        #: requests that keep the devices busy
        self.count = 1
        with self._lock:
            self._changed()

    # state of the devices

    def devices(self) -> list[str]:
        """The devices that serve now, the preferred one first."""
        with self._lock:
            ready = [m.name for m in self._ranked if m.state is DeviceState.READY]
        return ready if self.together else ready[:1]

    def served(self) -> dict[str, int]:
        """How many inferences each device has done, lost devices included."""
        with self._lock:
            return {m.name: m.served for m in self._members}

    def states(self) -> dict[str, str]:
        """The state of every device, with the reason if it is lost."""
        with self._lock:
            return {m.name: f"lost: {m.why}" if m.state is DeviceState.LOST else m.state.value for m in self._members}

    def models(self) -> list[CompiledModel]:
        """The model on each ready device, the preferred one first."""
        with self._lock:
            return [m.model for m in self._ranked if m.model is not None]

    def model(self) -> CompiledModel:
        """The model on the preferred device."""
        found = self.models()
        if not found:
            raise self._verdict({})
        return found[0]

    def set_property(self, config: Mapping[str, Any]) -> None:
        """Change settings of the models on all devices, and of models that are compiled later."""
        with self._lock:
            self._config |= config
            for member in self._members:
                if member.model is not None:
                    member.model.set_property(config)
                    member.idle.clear()

    # adding and removing devices

    def compile_all(self) -> None:
        """Compile for all devices at the same time. Raise an error if none of them can serve."""
        with self._lock:
            threads = [self._start(member, tried_out=False) for member in self._members]
        for thread in threads:
            thread.join()
        self.model()

    def compile_first(self, name: str | None) -> None:
        """Compile for one device, or else for the best. Start the other wanted devices in the background.

        Returns when a device can serve, and raises an error if none can.
        """
        with self._lock:
            chosen = [m for m in self._members if m.name == name]
            for member in chosen:
                self._start(member, tried_out=False)
            if not chosen:
                self._want_more({})
        ready = self._take({})
        if ready is None:
            raise self._verdict({})
        self._give_back(ready, None)
        with self._lock:
            self._want_more({})

    def _want_more(self, failed: Mapping[Member, Exception]) -> None:
        for member in self._ranked:
            if member.state is DeviceState.WAITING and member not in failed:
                self._start(member, tried_out=True)
            if not self.together and member.state is not DeviceState.LOST and member not in failed:
                return

    def _start(self, member: Member, tried_out: bool) -> threading.Thread:
        member.state = DeviceState.COMPILING
        self._compiling += 1
        self._recount()
        # Not a daemon: the process could otherwise end while a compiler works.
        thread = threading.Thread(target=self._compile, args=(member, tried_out), name=f"tunewright-{member.name}")
        thread.start()
        return thread

    def _compile(self, member: Member, tried_out: bool) -> None:
        """Compile for a device, on a thread of its own. The device is then ready or lost."""
        try:
            LOG.info("%s: compiling for %s", self.name, member.name)
            model = member.candidate.compile()
            model.set_property(self._config)
            first = self._try_out(model) if tried_out else None
        except Exception as error:  # the other devices continue after any error
            with self._lock:
                self._compiling -= 1
                member.error = error
                self._lose(member, f"cannot run the model: {error}")
            return
        with self._lock:
            self._compiling -= 1
            if member.state is DeviceState.COMPILING:  # otherwise the device was removed meanwhile
                member.model, member.state = model, DeviceState.READY
                member.requests = model.optimal_requests
                # A request that waits for its batch leaves the device free.
                member.slots = member.requests if isinstance(model, BatchModel) else model.streams.count
                member.idle += [first] if first is not None else []
                LOG.info("%s: %s is ready", self.name, member.name)
            self._changed()

    def _try_out(self, model: CompiledModel) -> InferRequest:
        """Run once with inputs like those of recent requests, so that the first real one is not delayed."""
        request, like = model.create_infer_request(), dict(self._like)
        for name, type in model.inputs.items():
            if isinstance(type, TensorType) and type.is_static and type.dtype is not DType.STRING:
                like.setdefault(name, (type.dims, type.dtype.numpy))
        if like.keys() >= model.inputs.keys():
            try:
                request.run({name: np.zeros(shape, dtype) for name, (shape, dtype) in like.items()})
            except DeviceError:
                raise
            except TunewrightError as error:  # the model may reject zeros
                LOG.debug("%s: zeros on %s: %s", self.name, model.device_name, error)
            request.results = {}
        return request

    def arrange(self, candidates: Sequence[CandidateDevice]) -> None:
        """Serve with these devices from now on, in this order. Compile for new and lost ones in the background.

        A removed device finishes the inferences that run on it.
        """
        with self._lock:
            known = {m.name: m for m in self._members if m.state is not DeviceState.LOST}
            self._members = [known.pop(c.name) if c.name in known else _member(c) for c in candidates]
            for member, candidate in zip(self._members, candidates, strict=True):
                if candidate.fixed:
                    member.requests = member.slots = candidate.requests
            for member in known.values():
                member.state, member.model = DeviceState.GONE, None
                member.idle.clear()
                LOG.info("%s: %s was taken away", self.name, member.name)
            self._rank()
            self._want_more({})
            self._changed()

    def leave_to_others(self, names: frozenset[str]) -> None:
        """Use these devices only if no other can serve, because more important models use them."""
        with self._lock:
            if names != self._left:
                self._left = names
                before = next((m for m in self._ranked if m.state is DeviceState.READY), None)
                self._rank()
                after = next((m for m in self._ranked if m.state is DeviceState.READY), None)
                if before is not after and after is not None:
                    LOG.info("%s: %s serves from now on", self.name, after.name)
                if any(m.state is not DeviceState.WAITING for m in self._members):  # the pool is in use
                    self._want_more({})
                self._changed()

    def wanted(self, taken: frozenset[str]) -> str:
        """The best device if ``taken`` are in use elsewhere: the first that is not lost."""
        with self._lock:
            usable = [m.name for m in self._members if m.state is not DeviceState.LOST]
        return next((name for name in usable if name not in taken), usable[0] if usable else "")

    def _rank(self) -> None:
        self._ranked = sorted(self._members, key=lambda m: m.name in self._left)

    def _lose(self, member: Member, why: str) -> None:
        if member.state not in (DeviceState.LOST, DeviceState.GONE):
            member.state, member.why, member.model = DeviceState.LOST, why, None
            member.idle.clear()
            others = ", ".join(m.name for m in self._ranked if m.state is DeviceState.READY)
            LOG.warning("%s: %s is left out, it %s; %s", self.name, member.name, why,
                        f"{others} goes on" if others else "no other is ready")  # fmt: skip
            self._want_more({})
        self._changed()

    def _changed(self) -> None:
        """Recount the requests and serve the waiting ones, after a device came, went or changed its rank."""
        self._recount()
        self._serve_waiting()

    def _recount(self) -> None:
        usable = [m for m in self._ranked if m.state in (DeviceState.READY, DeviceState.COMPILING)]
        if self.together:
            self.count = max(1, sum(m.requests for m in usable))
        else:
            self.count = max((m.requests for m in usable[:1] + [m for m in usable if m.state is DeviceState.READY][:1]),
                             default=1)  # fmt: skip

    # requests

    def infer(self, inputs: Any, remote: bool, outputs: Mapping[str, Any] | None) -> Served:
        """Run an inference on the best free device; wait while none is free."""
        if self._compiling and isinstance(inputs, Mapping):
            self._like = {k: (v.shape, v.dtype) for k, v in inputs.items() if isinstance(v, np.ndarray)}
        failed: dict[Member, Exception] = {}
        while True:
            member = self._take(failed)
            if member is None:
                raise self._verdict(failed)
            request = None
            try:
                request = member.request()
                results = request.run(inputs, remote, outputs)
                rows = request.get_profiling_info()
                for row in rows:
                    row.device = member.name
                served = Served(results, member.name, request.get_totals(), rows)
                request.results = {}  # the caller owns the results
            except Exception as error:
                self._give_back(member, None)
                if isinstance(error, InputError) and not _somewhere(inputs, outputs):
                    raise
                LOG.debug("%s: %s failed: %s", self.name, member.name, error)
                failed[member] = error
                self._examine(member)
                continue
            except BaseException:
                self._give_back(member, None)
                raise
            self._give_back(member, request)
            if failed:
                self._blame(failed, member)
                # the errors refer to this frame, which would keep the model alive until the next garbage collection
                failed.clear()
            return served

    def _take(self, failed: Mapping[Member, Exception]) -> Member | None:
        """Take the best device that is free and has not failed this request. None: no such device is left."""
        with self._lock:
            # This overtakes no waiting request: a freed device serves those at once.
            member = self._pick(failed)
            if member is not None or not self._will_be(failed):
                return member
            waiter = _Waiter(failed)
            waiter.known.acquire()
            # A request that has waited and then failed goes first.
            self._waiting.appendleft(waiter) if failed else self._waiting.append(waiter)
        try:
            waiter.known.acquire()
        except BaseException:  # Ctrl-C: no device may be assigned to a request that has gone
            with self._lock:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
                    raise
            if waiter.member is not None:
                self._give_back(waiter.member, None)
            raise
        return waiter.member

    def _pick(self, failed: Mapping[Member, Exception]) -> Member | None:
        for member in self._ranked:
            if member.state is DeviceState.READY and member not in failed:
                if self.together and member.busy >= member.slots:
                    continue
                member.busy += 1
                return member
        return None

    def _will_be(self, failed: Mapping[Member, Exception]) -> bool:
        """Whether a device that has not failed may become free. Starts to compile one if none is ready."""
        there = [m for m in self._ranked if m not in failed]
        if not any(m.state in (DeviceState.READY, DeviceState.COMPILING) for m in there):
            self._want_more(failed)
        return any(m.state in (DeviceState.READY, DeviceState.COMPILING) for m in there)

    def _serve_waiting(self) -> None:
        still: deque[_Waiter] = deque()
        waiting, self._waiting = self._waiting, still
        for waiter in waiting:
            waiter.member = self._pick(waiter.failed)
            if waiter.member is None and self._will_be(waiter.failed):
                still.append(waiter)
            else:
                waiter.known.release()

    def _give_back(self, member: Member, request: InferRequest | None) -> None:
        """End an inference on a device. ``request`` None: it failed, or its request is in an unknown state."""
        with self._lock:
            member.busy -= 1
            if request is not None:
                member.served += 1
                member.strikes = 0
                if member.state is DeviceState.READY:
                    member.idle.append(request)
            if self._waiting:
                self._serve_waiting()

    def _examine(self, member: Member) -> None:
        """Ask a failed device whether it is broken, and leave it out if so."""
        try:
            why = member.candidate.broken()
        except Exception as error:
            why = str(error) or type(error).__name__
        if why:
            with self._lock:
                self._lose(member, f"is broken: {why}")

    def _blame(self, failed: Mapping[Member, Exception], other: Member) -> None:
        """Count the failures against those devices, since another device served the request."""
        with self._lock:
            for member, error in failed.items():
                if isinstance(error, InputError):
                    continue  # a tensor that only the other device can reach
                own = isinstance(error, DeviceError) or not isinstance(error, TunewrightError)
                member.strikes = STRIKES if own else member.strikes + 1
                if member.strikes >= STRIKES:
                    self._lose(member, f"failed where {other.name} did not: {error}")

    def _verdict(self, failed: Mapping[Member, Exception]) -> Exception:
        """Choose the error for the caller: one of an operation rather than one of a device."""
        if not failed:
            with self._lock:
                return self._none_left()
        errors = list(failed.values())
        return next((e for e in errors if isinstance(e, TunewrightError) and not isinstance(e, DeviceError)), errors[0])

    def _none_left(self) -> Exception:
        first = self._members[0].error
        if first is not None and all(m.error is not None for m in self._members):
            return first  # no device could compile the model, so the model is the reason
        reasons = "; ".join(f"{m.name} {m.why}" for m in self._members if m.state is DeviceState.LOST)
        return DeviceError(f"{self.name}: no device is left: {reasons}")


def _member(candidate: CandidateDevice) -> Member:
    return Member(candidate, candidate.requests, candidate.requests)


def _somewhere(inputs: Any, outputs: Mapping[str, Any] | None) -> bool:
    """Whether a tensor lies in memory that some devices may not reach."""
    given = inputs if isinstance(inputs, (list, tuple)) else [inputs]
    if isinstance(inputs, Mapping):
        given = list(inputs.values())
    return any(map(is_lent, [*given, *(outputs or {}).values()]))
