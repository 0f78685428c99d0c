"""Tune a model while it serves: `start` and the handle that it returns (docs/background.md).

A helper process of low priority searches (`background_helper`). A thread of this process does what only this process
can do. It names the layers that matter, swaps winners in, and checks whether requests get faster (`background_swap`).
The thread sleeps while there is no news. No request waits for the helper or the thread.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import DeviceError, InputError, SettingsError, TunewrightError
from ..ir.types import Type
from ..measure import protocol, request_activity
from ..measure.child_process import ChildProcess, Lost
from ..plugins.batching.streams import sample
from ..runtime.insight import background as runtime
from ..runtime.insight.background import BackgroundStatus, BackgroundTuning, Report
from ..runtime.plans.load_phases import yielding
from ..runtime.requests.request import DeviceModel
from ..runtime.requests.request_meter import ModelMeter
from ..settings import Settings, child_environment
from ..solvers import problem_json
from ..tuning.policy import decide
from . import background_swap as swaps
from .background_helper import LEAST_SECONDS
from .background_swap import OwnRuns, PosedProblem, SwapTrial, Winner

LOG = logging.getLogger("tunewright")
#: Maximum number of shapes of a model that are tuned: those that took most time.
MOST_SHAPES = 4
#: Seconds between two checks of the helper; between two checks for new shapes; and without a request before the network
#: runs by itself.
LOOK, NEW_SHAPES, IDLE = 0.1, 5.0, 1.0
#: Seconds that winners wait for others, in order to be tried together.
GATHERING = 15.0
#: Seconds without a turn after which a trial ends undecided.
STALE = 120.0
#: Maximum number of restarts of a helper, and seconds before the first one.
MOST_RESTARTS, RESTART = 3, 1.0
#: Seconds that a helper may take to start.
START_SECONDS = 120.0
#: Seconds that a thread has to end when its process ends.
GOING = 2.0


@dataclass
class _Shape:
    """Relevant types of inputs, and the layers that serve them."""

    types: tuple[Type | None, ...]
    layers: dict[str, PosedProblem]
    #: total seconds of requests with these shapes
    seconds: float
    #: winners to be swapped in, and groups that lost together and are now tried in parts
    waiting: list[Winner] = field(default_factory=list)
    groups: deque[Sequence[Winner]] = field(default_factory=deque)
    #: speed-up so far
    gain: float = 1.0

    #: time at which the first of the waiting winners came
    since: float = 0.0

    def add(self, winner: Winner) -> None:
        """Add a waiting winner."""
        self.since = self.since if self.waiting else time.monotonic()
        self.waiting.append(winner)

    def next(self, at_once: bool) -> Sequence[Winner]:
        """Return the next winners to try: part of a group that lost, or all waiting ones once others had time to come.

        Winners are tried together because a large gain shows sooner than a small one, and every trial needs as many
        requests.
        """
        if self.groups:
            return self.groups.popleft()
        if not at_once and time.monotonic() < self.since + GATHERING:
            return ()
        found, self.waiting = self.waiting, []
        return found

    @property
    def is_open(self) -> bool:
        """Whether winners are waiting."""
        return bool(self.waiting or self.groups)


@dataclass(frozen=True)
class BackgroundOptions:
    """The arguments of `start`."""

    budget: float
    duty: float
    until: float
    again: bool
    report: Report | None


def start(
    model: DeviceModel,
    *,
    budget: float | None = None,
    duty: float | None = None,
    until: float | None = None,
    again: bool = False,
    report: Report | None = None,
) -> BackgroundTuning:
    """Tune a model while it serves. See `CompiledModel.tune_in_background`."""
    settings = model.env.settings
    _check(model, settings)
    most = settings.tune_budget or math.inf
    wish = BackgroundOptions(
        most if budget is None else _number("budget", budget, 0.0), _duty(settings.background_duty, duty) / 100,
        math.inf if until is None else _number("until", until, 1.0),
        again or settings.find_enforce in ("2", "4"), report,
    )  # fmt: skip
    before = model.background
    if before is not None and before.status().phase not in ("done", "stopped", "failed"):
        raise DeviceError("is tuned in the background already", where=f"model {model.name!r}",
                          hint="`stop` the tuning that runs first")  # fmt: skip
    made = model.background = _Tuning(model, wish)
    return made


def _check(model: DeviceModel, settings: Settings) -> None:
    if settings.frozen or settings.lock_file:
        which = "FROZEN = YES" if settings.frozen else "LOCK_FILE"
        raise SettingsError(f"{which}: nothing is tuned", where="settings", hint="load the model without it")
    is_off = settings.tuning_mode == "TUNING_DISABLED"
    if is_off or decide(settings).how == "NO_TUNE":
        why = "TUNING_MODE = TUNING_DISABLED" if is_off else "AUTO_TUNE_MODE = NO_TUNE"
        raise SettingsError(f"{why}: nothing is tuned", where="settings", hint="load the model with another one")
    device = model.env.device
    if not device.compiles or device.runs_references or device.target.traits.is_scripted:
        raise DeviceError("compiles no kernels here, so there is nothing to tune", where=device.name)


def _number(name: str, value: Any, least: float) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > least:
        raise InputError(f"{value!r} is not a number above {least:g}", where=name)
    return float(value)


def _duty(default: float, given: float | None) -> float:
    duty = default if given is None else _number("duty", given, 0.0)
    if not 0 < duty <= 100:
        raise InputError(f"a duty of {duty!r} is not a percentage", where="duty", hint="10 is a good start")
    return duty


class _Tuning(BackgroundTuning):
    """The handle. Its thread holds only a weak reference, so dropping the model ends the tuning."""

    def __init__(self, model: DeviceModel, wish: BackgroundOptions) -> None:
        self._model, self._wish = weakref.ref(model), wish
        self._began, self._pid = time.monotonic(), os.getpid()
        self._activity = request_activity.of_process()
        #: its own words in the activity: a request to pause, and the network when it runs by itself
        self._pause, self._word = self._activity.take(), self._activity.take()
        self._gate = request_activity.ActivityGate(self._activity.descriptor, self._pause)
        #: True if traffic is recorded independently of tuning
        self._is_recorded = model.meter is not None
        meter = model.meter or ModelMeter([v.name for v in model.graph.inputs])
        model.meter = meter.continued(self._activity)
        self._shapes: list[_Shape] = []
        self._swap: tuple[_Shape, SwapTrial] | None = None
        self._own: OwnRuns | None = None
        self._done: set[str] = set()
        self._looked = -math.inf
        #: times: when the network may run by itself again; when a user's request last began or ended; and when the
        #: network last ran by itself
        self._idle_until = self._asked = self._ran = 0.0
        #: turns of the trial so far, and when that number last changed
        self._turns, self._turned = 0, math.inf
        #: keys of the layers that the helper knows
        self._told: set[str] = set()
        self._is_paused, self._rests = False, False
        #: whether the status is final
        self._is_final = False
        self._over, self._stop = threading.Event(), threading.Event()
        self._status = BackgroundStatus("starting", "", 0, 0, 0, 0, 0, 1.0, 0.0, 0.0)
        #: at most one helper; a list, so that the finaliser can refer to it without keeping this object alive
        self._helpers: list[ChildProcess] = []
        self._is_ready, self._restart = False, 0.0
        self._thread = threading.Thread(target=_serve, args=(weakref.ref(self),), name="tunewright-background",
                                        daemon=True)  # fmt: skip
        self._finalizer = weakref.finalize(self, _end, self._helpers, self._stop, self._thread)
        _LIVE.add(self)
        self._thread.start()

    # ---- public methods ----------------------------------------------------------------------------------------------

    def pause(self) -> None:
        self._set_paused(True)

    def resume(self) -> None:
        self._set_paused(False)

    def _set_paused(self, is_paused: bool) -> None:
        if not self._is_final and self._pid == os.getpid():  # otherwise the word may belong to another request
            self._is_paused = is_paused
            self._activity.pause(self._pause, is_paused)

    def status(self) -> BackgroundStatus:
        found = self._status
        if self._pid != os.getpid():
            return replace(found, phase="stopped", why="it belongs to the parent process of this fork", helper=0)
        if self._is_final:
            return found
        phase = "paused" if self._is_paused and found.phase != "starting" else found.phase
        return replace(found, phase=phase, elapsed=time.monotonic() - self._began)

    def stop(self) -> None:
        self._finish("stopped", "it was asked to stop")
        if threading.current_thread() is not self._thread and self._pid == os.getpid():
            self._finalizer()
            self._close()

    def wait(self, timeout: float | None = None) -> bool:
        return self._pid != os.getpid() or self._over.wait(timeout)

    # ---- the thread --------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Do one round of work. Returns False if nothing more is to be done."""
        model = self._model()
        if model is None or self._stop.is_set():
            self._finish("stopped", "the model is gone" if model is None else "the process ends")
            self._close()
            return False
        try:
            self._look_for_shapes(model)
            self._hear(model)
            if self._swap is not None:
                self._judge(model)
            elif not self._is_paused:
                self._begin_swap(model)
            self._conclude()
        except Exception as error:  # the model continues to serve unchanged
            model.trial = None
            LOG.warning("background tuning ends: %s: %s", type(error).__name__, error, exc_info=error)
            self._finish("failed", f"{type(error).__name__}: {error}")
        return not self._over.is_set()

    def _close(self) -> None:
        """Clean up: end the helper and the trial, and stop recording requests."""
        model = self._model()
        if model is not None:
            model.trial = None
        if self._over.is_set():
            return
        while self._helpers:
            self._helpers.pop().end()
        for word in (self._pause, self._word):
            self._activity.give_back(word)
        if model is not None and model.meter is not None:
            model.meter = model.meter.continued(None) if self._is_recorded else None
        self._over.set()
        self._report("phase")

    def _look_for_shapes(self, model: DeviceModel) -> None:
        """Find the shapes that matter and their layers, and tell the helper."""
        if time.monotonic() < self._looked + NEW_SHAPES and self._shapes:
            return
        self._looked = time.monotonic()
        assert model.meter is not None
        rows = {swaps.types_of(model, shapes): row[1] for shapes, row in model.meter.histogram().rows.items()}
        declared = tuple(value.type for value in model.graph.inputs)
        rows.setdefault(declared, 0.0)
        for types, seconds in sorted(rows.items(), key=lambda row: -row[1])[:MOST_SHAPES]:
            known = next((shape for shape in self._shapes if shape.types == types), None)
            if known is not None:
                known.seconds = seconds
            elif (plan := swaps.plan_of(model, types)) is not None and len(self._shapes) < 4 * MOST_SHAPES:
                with yielding():
                    layers = swaps.layers_of(model, types, plan)
                self._shapes.append(_Shape(types, layers, seconds))
        self._shapes.sort(key=lambda shape: -shape.seconds)
        self._tell_layers()

    def _tell_layers(self) -> None:
        if not self._is_ready or not self._helpers or not self._helpers[0].has_sent:
            return
        told: dict[str, tuple[PosedProblem, float]] = {}
        for shape in self._shapes:
            total = sum(layer.hope for layer in shape.layers.values()) or 1.0
            for key, layer in shape.layers.items():
                if key not in self._done:
                    hope = (shape.seconds or 1e-3) * layer.hope / total
                    told[key] = layer, hope + (told[key][1] if key in told else 0.0)
        layers = []
        for layer, hope in told.values():
            (present,) = protocol.candidates_json([layer.present])
            layers.append({"problem": problem_json.to_json(layer.problem), "present": present, "hope": hope})
        if told.keys() <= self._told and self._told:
            return
        self._told |= told.keys()
        self._update(layers_left=len(told), layers_done=len(self._done))
        self._rests = False
        self._helpers[0].begin({"layers": layers}, math.inf)

    # ---- the helper --------------------------------------------------------------------------------------------------

    def _hear(self, model: DeviceModel) -> None:
        """Process the helper's messages. Starts a helper if there is none and there is work."""
        if not self._helpers:
            if time.monotonic() >= self._restart and self._shapes:
                self._start(model)
            else:
                self._stop.wait(LOOK)
            return
        try:
            message = self._helpers[0].answer(LOOK)
            while message is not None:
                self._heard(message)
                message = self._helpers[0].answer(0.0) if self._helpers else None
        except (Lost, protocol.Broken) as lost:
            self._lost(str(lost))

    def _start(self, model: DeviceModel) -> None:
        settings, device = model.env.settings, model.env.device
        if device.target.traits.shares_cores:  # a device of one of several streams has only part of the threads
            settings = replace(settings, cpu_threads_num=device.target.units)
        module = f"{__package__}.background_helper"
        shared = map(str, (self._activity.descriptor, self._pause))
        command = [sys.executable or "python3", "-P", "-m", module, *shared]
        try:
            process = ChildProcess(command, child_environment(settings), self._activity.descriptor)
        except OSError as error:
            self._lost(str(error))
            return
        self._helpers.append(process)
        self._is_ready = False
        self._told.clear()
        left = self._wish.budget - self._status.worked
        process.begin({
            "device": device.name, "target": repr(device.target), "duty": self._wish.duty,
            "memory": settings.background_memory, "priority": settings.background_priority,
            "again": self._wish.again, "budget": 0.0 if left == math.inf else max(left, 1e-3),
        }, START_SECONDS)  # fmt: skip

    def _lost(self, why: str) -> None:
        """Handle the loss of the helper: restart it later, or fail."""
        while self._helpers:
            self._helpers.pop().end()
        restarts = self._status.restarts + 1
        self._restart = time.monotonic() + RESTART * restarts
        self._is_ready = False
        if restarts > MOST_RESTARTS:
            self._finish("failed", f"its helper ended {restarts} times: {why}")
            return
        self._update(restarts=restarts, why=f"its helper ended: {why}", helper=0)
        self._report("restart")

    def _heard(self, message: protocol.Message) -> None:
        handlers = {
            "ready": self._ready, "failed": self._failed, "progress": self._progress, "rest": self._rest,
            "layer": self._layer,
        }  # fmt: skip
        handler = handlers.get(str(message.get("kind")))
        if handler is not None:
            handler(message)

    def _ready(self, message: protocol.Message) -> None:
        self._is_ready = True
        self._update(phase="tuning", helper=self._helpers[0].pid)
        self._tell_layers()

    def _failed(self, message: protocol.Message) -> None:
        self._finish("failed", str(message.get("why"))[:1000])

    def _progress(self, message: protocol.Message) -> None:
        worked = float(message["worked"])
        self._update(candidates=int(message["candidates"]), samples=int(message["samples"]),
                     interrupted=int(message["interrupted"]), worked=worked)  # fmt: skip

    def _rest(self, message: protocol.Message) -> None:
        has_heard = int(message["heard"]) >= len(self._told) > 0
        self._rests = has_heard and (not message["left"] or self._is_spent)

    def _layer(self, message: protocol.Message) -> None:
        """Process the result of a layer. A kernel that is better than the present one waits for its swap."""
        key, state = str(message["problem"]), message["state"]
        if state == "claimed":
            self._update(why="another process tunes some of its layers")
            return
        self._done.add(key)
        if message.get("best") is not None:
            (best,) = protocol.candidates([message["best"]])
            programs = protocol.programs(message.get("programs"))
            for shape in self._shapes:
                layer = shape.layers.get(key)
                if layer is not None and layer.present != best:
                    shape.add(Winner(layer, best, programs))
        keys = {key for shape in self._shapes for key in shape.layers}
        self._update(layers_done=len(self._done & keys), layers_left=len(keys - self._done))
        self._report("layer")

    # ---- swaps -------------------------------------------------------------------------------------------------------

    def _begin_swap(self, model: DeviceModel) -> None:
        """Try winners of the most important shapes: all waiting ones together, or part of a group that lost."""
        at_once = self._rests or not self._status.layers_left
        chosen = ((shape, group) for shape in self._shapes if (group := shape.next(at_once)))
        shape, group = next(chosen, (None, ()))
        if shape is None:
            return
        try:
            found = swaps.begin(model, shape.types, group)
        except TunewrightError as error:
            LOG.warning("a kernel cannot be swapped in: %s", error)
            self._update(why=str(error))
            return
        if found is not None:
            self._swap, self._turns = (shape, found), -1
            self._update(phase="comparing")

    def _judge(self, model: DeviceModel) -> None:
        """Check whether the trial is decided. Runs the network if no requests come."""
        assert self._swap is not None
        shape, swap = self._swap
        found = swap.jury.verdict(swap.trial)
        if found is None:
            if not self._is_paused:
                self._run_idle(model, shape, swap)
            self._give_up(model, swap)
            return
        verdict, gain = found
        self._swap, self._own = None, None
        shape.groups.extend(swaps.end(model, swap, verdict, gain))
        kernels = {w.layer.problem.key(): w.text for w in swap.winners}
        told = runtime.KernelSwap(time.time(), kernels, (gain.median, gain.low, gain.high), gain.pairs)
        if verdict.stays:
            shape.gain *= gain.median if verdict is swaps.TrialVerdict.FASTER else 1.0
            self._update(phase="tuning", last_swap=told, gain=self._gain())
            self._report("swap")
        else:
            self._update(phase="tuning", last_rollback=told)
            self._report("rollback")

    def _give_up(self, model: DeviceModel, swap: SwapTrial) -> None:
        """End a trial without requests, so that another can begin. The next load uses the winners anyway."""
        turns = len(swap.trial.told)
        if turns != self._turns or self._is_paused:
            self._turns, self._turned = turns, time.monotonic()
        elif time.monotonic() > self._turned + STALE:
            model.trial, self._swap, self._own = None, None, None
            self._update(phase="tuning", why="no request had the shapes for which kernels were to be compared")

    def _gain(self) -> float:
        """Return the speed-up of all requests together."""
        before = sum(shape.seconds or 1e-9 for shape in self._shapes)
        after = sum((shape.seconds or 1e-9) / shape.gain for shape in self._shapes)
        return before / after if after else 1.0

    def _run_idle(self, model: DeviceModel, shape: _Shape, swap: SwapTrial) -> None:
        """Run turns of the network if no request came for a while, within the share of time that ``duty`` allows."""
        now, last = time.perf_counter(), self._gate.last
        self._asked = last if last > self._ran else self._asked
        if now < max(self._asked + IDLE, self._idle_until) or self._gate.is_serving:
            return
        if self._own is None:
            types = {v.name: t for v, t in zip(model.graph.inputs, shape.types, strict=True)}
            values = sample(types)
            if values is None:
                self._idle_until = math.inf
                return
            self._own = OwnRuns(model, values)
        self._activity.begin(self._word)
        told: list[tuple[int, float]] = []
        try:
            with self._gate.sample() as taken:
                told = self._own.pair(swap.trial)
        except TunewrightError as error:  # random inputs do not suit every model
            LOG.info("the network cannot be run outside of requests: %s", error)
            self._idle_until = math.inf
            return
        finally:
            self._activity.end(self._word)
            self._ran = time.perf_counter()
        for number, seconds in () if taken.interrupted else told:
            swap.trial.tell(number, seconds)
        self._idle_until = now + (self._ran - now) / self._wish.duty

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _conclude(self) -> None:
        if self._swap is not None or self._is_final:
            return
        waiting = any(shape.is_open for shape in self._shapes)
        if self._status.gain >= self._wish.until and not waiting:
            self._finish("done", f"it is {self._status.gain:.2f} times as fast as before")
        elif self._rests and not waiting:
            if self._is_spent:
                self._finish("done", "the budget is used up")
            elif self._is_static() or self._wish.budget < math.inf:
                self._finish("done", "every layer was tuned")
            else:
                self._update(phase="waiting", why="every layer of the shapes that came was tuned")
        elif self._is_ready and not self._shapes:
            self._update(phase="waiting", why="for requests: their shapes say what is to be tuned")

    @property
    def _is_spent(self) -> bool:
        """Whether the remaining budget is too small for another search."""
        return self._status.worked > self._wish.budget - LEAST_SECONDS

    def _is_static(self) -> bool:
        """Whether no other shapes can come."""
        model = self._model()
        return model is None or all(getattr(v.type, "is_static", False) for v in model.graph.inputs)

    def _finish(self, phase: str, why: str) -> None:
        if self._is_final or self._pid != os.getpid():
            return
        self._update(phase=phase, why=why, helper=0, elapsed=time.monotonic() - self._began)
        self._is_final = True
        self._stop.set()
        if threading.current_thread() is self._thread:
            self._close()

    def _update(self, **changes: Any) -> None:
        if self._is_final:
            return
        before = self._status.phase
        self._status = replace(self._status, **changes)
        if changes.get("phase", before) != before and self._status.phase not in ("done", "stopped", "failed"):
            self._report("phase")

    def _report(self, what: str) -> None:
        if self._wish.report is not None:
            try:
                self._wish.report(what, self.status())
            except Exception:  # an error in the user's callback must not disturb serving
                LOG.warning("a callback of background tuning failed", exc_info=True)

    def abandon(self) -> None:
        """Forget helper and thread in a forked child: they belong to the parent."""
        for helper in self._helpers:
            helper.abandon()
        self._helpers.clear()
        self._finalizer.detach()
        model = self._model()
        if model is not None:
            model.trial, model.meter, model.background = None, None, None
        self._over = threading.Event()
        self._over.set()


def _serve(handle: weakref.ref[_Tuning]) -> None:
    """Main function of the thread."""
    while (tuning := handle()) is not None and tuning.step():
        del tuning


def _end(helpers: list[ChildProcess], stop: threading.Event, thread: threading.Thread) -> None:
    """Finaliser: the handle is gone, or the process ends."""
    stop.set()
    if threading.current_thread() is not thread and thread.is_alive():
        thread.join(GOING)
    while helpers:
        helpers.pop().end()


_LIVE: weakref.WeakSet[_Tuning] = weakref.WeakSet()


def _in_child() -> None:
    for tuning in list(_LIVE):
        tuning.abandon()
    _LIVE.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
