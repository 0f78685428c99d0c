"""Our rows of the GPU benchmark: untuned, with what ships, tuned; and how long a load takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from gpu_sources import Arrays, Refused
from gpu_turns import Ready
from tunewright import Core
from tunewright.plugins.single import SingleDevice, open_device
from tunewright.runtime.requests.request import DeviceModel, DeviceRequest
from tunewright.tuning.result_file import ratio_json

#: a folder that does not exist is a knowledge base with nothing in it
NOTHING = "/nonexistent"
EMPTY = {"USER_DB_PATH": NOTHING, "SYSTEM_DB_PATH": NOTHING, "HEURISTIC_PATH": ""}
#: what each row is told
KNOWS: dict[str, dict[str, str]] = {"ours": EMPTY, "shipped": {"USER_DB_PATH": NOTHING}, "tuned": {}}
#: the same kernels on the processor, one after the other in Python: for a machine without a GPU
INTERPRETER = "interpreter"
#: inferences with copies from and to the host that are timed at most, and seconds after which no further one begins
COPIED, COPYING = 50, 0.2
#: points kept of what a search promised as it went
POINTS = 200


@dataclass
class Ours:
    """A network's file and how we run it."""

    file: Path
    inputs: Arrays
    device: str
    #: settings of every row
    config: Mapping[str, str]
    #: where what is tuned goes
    kb: Path
    #: tune from nothing, not from what ships
    from_nothing: bool = False
    #: seconds of tuning so far, and what the search promised as it went: seconds, milliseconds
    spent: float = 0.0
    curve: list[list[float]] = field(default_factory=list)

    def settings(self, row: str) -> dict[str, str]:
        known = EMPTY if row == "tuned" and self.from_nothing else KNOWS[row]
        own = {"USER_DB_PATH": str(self.kb)} if row == "tuned" else {}
        return {**self.config, **known, **own}

    def row(self, label: str, kind: str) -> Ready:
        """The network as one of `KNOWS` compiles it."""
        begin = time.perf_counter()
        compiled = compile_model(self.file, self.device, self.settings(kind))
        loaded = time.perf_counter() - begin
        request = compiled.create_infer_request()
        request.infer(self.inputs)
        facts = {"load_seconds": loaded, "first_seconds": time.perf_counter() - begin - loaded, **about(compiled)}
        copied: list[float] = []
        while len(copied) < COPIED and sum(copied) < COPYING:
            begin = time.perf_counter()
            request.infer(self.inputs)
            copied.append(time.perf_counter() - begin)
        facts["with_copies_ms"] = 1e3 * sorted(copied)[len(copied) // 2]
        call, stream = repeat(request, self.inputs)
        return Ready(label, call, lambda: request.infer(self.inputs), stream=stream, facts=facts)

    def tune(self, seconds: float) -> dict[str, Any]:
        """Tune for a while, going on from what is known; what came of it."""
        if self.device == INTERPRETER:
            raise Refused("tuning needs a real device: a worker opens it by its name")
        try:
            from tunewright.tools.tune.view import promised
        except ImportError:  # what the command line is made of need not be on a GPU machine
            promised = None
        before = self.spent
        begin = time.perf_counter()

        def report(state: Any) -> None:
            if promised is not None and any(layer.seconds for layer in state.layers):
                now = sum(y.seconds / promised(y, state.progress if y is state.at else None) for y in state.layers)
                self.curve.append([round(before + state.elapsed, 3), round(1e3 * now, 6)])

        core = Core({**self.settings("tuned"), "TUNE_RESULT_PATH": str(self.kb / "results")})
        result = core.tune(core.read_model(self.file), self.inputs, self.device, seconds, report=report)
        self.spent += time.perf_counter() - begin
        return {
            "tuning_seconds": self.spent, "phases": dict(result.seconds), "layers": len(result.layers),
            "changed": sum(layer.chosen is not None for layer in result.layers),
            "searched": sum(layer.outcome is not None for layer in result.layers),
            "trials": sum(len(layer.outcome.trials) for layer in result.layers if layer.outcome is not None),
            "gain": ratio_json(result.gain),
            "promised": thinned(self.curve), "result": str(result.path) if result.path else None,
        }  # fmt: skip

    def load(self, kind: str, seconds: float) -> dict[str, Any]:
        """Reading, compiling and first inference in a process of its own, in which torch and the device's context are
        up already. It is done twice: the first one fills the cache of kernels."""
        found: dict[str, Any] = {}
        # An installed package has its bytecode: to compile all of its modules takes half a second.
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
        for name in ("first", "again"):
            command = [sys.executable, str(Path(__file__).with_name("gpu_load.py")), str(self.file), self.device]
            command.append(json.dumps(self.settings(kind)))
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, check=False, timeout=seconds, env=environment
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return found | {"failed": f"not done after {seconds:.0f} s"}
            if done.returncode:
                return found | {"failed": " ".join(done.stderr.split())[-300:]}
            found[name] = json.loads(done.stdout.splitlines()[-1])
        return found


@cache
def plugin(device: str) -> SingleDevice:
    if device != INTERPRETER:
        return SingleDevice(open_device(device))
    from tunewright.devices.cuda.device import CudaDevice

    return SingleDevice(CudaDevice("GPU.0", raw="cpu"))


def compile_model(file: Path, device: str, config: Mapping[str, str]) -> DeviceModel:
    core = Core(config)
    return plugin(device).compile(core.read_model(file), core.settings)


def repeat(request: DeviceRequest, inputs: Arrays) -> tuple[Callable[[], object], Any]:
    """A call that runs a request's plan once more on what it was given last, without copies from and to the host, and
    the stream that it is enqueued on. Where host and device share memory there are none: an inference as it is."""
    executor, program = request.executor, request.model.program
    values = [inputs[v.name] for v in request.model.graph.inputs]
    plan = program.plan_for(values)
    frame = dict(executor.frames())[plan]
    if plan.device.shares_memory or plan.rest is not None:
        return lambda: request.infer(inputs), None
    slots = dict(zip(plan.inputs, values, strict=True))

    def call() -> None:
        executor.invoke(frame, dict(slots))

    return call, getattr(frame.queue, "stream", None)


def about(compiled: DeviceModel) -> dict[str, Any]:
    """Kernels by solver, where they come from, launches, and what runs on the host and why."""
    steps = [s for plan in compiled.program.plans for s in plan.steps if not s.optimized_out]
    chosen = [s.choice for s in steps if s.choice is not None]
    on_host = [s for s in steps if s.on_host and compiled.env.device.family != "host"]
    return {
        "steps": len(steps),
        "launches": sum(len(plan.segments) for plan in compiled.program.plans),
        "arena": sum(plan.arena_bytes for plan in compiled.program.plans),
        "solvers": dict(Counter(c.solver.id for c in chosen).most_common()),
        "origins": dict(Counter(c.origin.value for c in chosen).most_common()),
        "host": [{"op": s.node.op, "node": s.node.name, "why": refusals(s)} for s in on_host],
    }


def refusals(step: Any) -> str:
    """What solvers that know the operation said, else that none does."""
    if step.choice is None:
        return "control flow"
    said = [f"{who}: {why}" for who, why in step.choice.rejected.items() if not why.startswith(("solves", "is for"))]
    return "; ".join(said[:3]) or "no solver of the device takes the operation"


def thinned(points: list[list[float]]) -> list[list[float]]:
    """Where it changed, evenly spread where that is too much."""
    kept = [p for k, p in enumerate(points) if not k or p[1] != points[k - 1][1]] + points[-1:]
    step = max(1, -(-len(kept) // POINTS))
    return kept[::step] + (kept[-1:] if (len(kept) - 1) % step else [])
