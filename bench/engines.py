"""Engines under one interface, and interleaved measurement: what the demo and the benchmarks share.

Engines take turns, inference by inference, in one process: noise of the machine then hits all of them alike. The
garbage collector rests meanwhile, and what is reported is the median with the quartiles around it.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np
import onnx

Arrays = dict[str, np.ndarray[Any, Any]]
THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class Engine:
    """A compiled model: its name, what compiling took, and a call."""

    name: str
    version: str
    compile_seconds: float
    run: Callable[[Arrays], Arrays]
    #: what else is worth a column
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Times:
    """Latencies in seconds, one per round."""

    all: Sequence[float]

    @property
    def median(self) -> float:
        return float(np.median(self.all))

    @property
    def quartiles(self) -> tuple[float, float]:
        low, high = np.percentile(self.all, [25, 75])
        return float(low), float(high)

    def ratio(self, other: Times) -> Times:
        """Our time over the other's, round by round: both saw the same noise, so it varies less than either."""
        return Times([mine / theirs for mine, theirs in zip(self.all, other.all, strict=True)])


def tunewright(model: onnx.ModelProto, name: str = "Tunewright", config: Mapping[str, Any] | None = None) -> Engine:
    """Our engine."""
    from tunewright import Core, __version__

    core = Core(config)
    begin = time.perf_counter()
    compiled = core.compile_model(core.read_model(model), "CPU")
    took = time.perf_counter() - begin
    plans = compiled.program.plans
    facts = {
        "steps": sum(not s.optimized_out for p in plans for s in p.steps),
        "memory": sum(p.arena_bytes for p in plans),
        "log": compiled.env.context.log,
    }
    return Engine(name, __version__, took, compiled, facts)


def every_optimisation() -> str:
    """DISABLED_PASSES with all passes but those that a graph cannot do without (types, and the check of operators)."""
    from tunewright.passes.standard import DEVICE, NEUTRAL, SPECIALISE

    needed = {"unknown-ops", "propagate"}
    groups = [getattr(p, "passes", (p,)) for p in [*NEUTRAL, *DEVICE, *SPECIALISE]]
    return ",".join(sorted({p.name for group in groups for p in group} - needed))


def onnxruntime(model: onnx.ModelProto) -> Engine:
    """ONNX Runtime as a user runs it: all optimisations, a thread per core."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.log_severity_level = 4
    begin = time.perf_counter()
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    took = time.perf_counter() - begin
    names = [o.name for o in session.get_outputs()]
    return Engine(
        "ONNX Runtime", version("onnxruntime"), took, lambda x: dict(zip(names, session.run(names, x), strict=True))
    )


def openvino(model: onnx.ModelProto) -> Engine:
    """OpenVINO in its latency mode, fp32."""
    import openvino as ov

    core = ov.Core()
    begin = time.perf_counter()
    config = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": THREADS, "INFERENCE_PRECISION_HINT": "f32"}
    compiled = core.compile_model(core.read_model(model.SerializeToString()), "CPU", config)
    took = time.perf_counter() - begin
    request = compiled.create_infer_request()
    names = [o.name for o in model.graph.output]

    def run(inputs: Arrays) -> Arrays:
        request.infer(inputs, share_inputs=True)
        return {name: request.get_output_tensor(i).data.copy() for i, name in enumerate(names)}

    return Engine("OpenVINO", version("openvino").partition("-")[0], took, run)


def peers(model: onnx.ModelProto, inputs: Arrays) -> Iterator[Engine]:
    """The other engines that are installed here and can run the model."""
    for package, make in (("onnxruntime", onnxruntime), ("openvino", openvino)):
        if find_spec(package) is None:
            continue
        try:
            engine = make(model)
            engine.run(inputs)
        except Exception as error:  # somebody else's native code: it raises what it likes
            print(f"{package} cannot run {model.graph.name}: {' '.join(str(error).split())[:200]}", file=sys.stderr)
            continue
        yield engine


def interleave(engines: Sequence[Engine], inputs: Arrays, rounds: int, seconds: float = float("inf")) -> list[Times]:
    """``rounds`` inferences of each engine in turn, after one that does not count; fewer when the time is over."""
    for engine in engines:
        engine.run(inputs)
    times: list[list[float]] = [[] for _ in engines]
    deadline = time.perf_counter() + seconds
    gc.collect()
    gc.disable()
    try:
        for done in range(rounds):
            if done >= 3 and time.perf_counter() > deadline:
                break
            # A different engine begins each round: nobody always runs right after the same neighbour.
            for k in range(len(engines)):
                i = (k + done) % len(engines)
                begin = time.perf_counter()
                engines[i].run(inputs)
                times[i].append(time.perf_counter() - begin)
    finally:
        gc.enable()
    return [Times(t) for t in times]


def error(mine: Arrays, theirs: Arrays) -> float:
    """The largest absolute error over all outputs, each as a part of the expected output's scale."""
    worst = 0.0
    for name, want in theirs.items():
        have = mine[name]
        if have.shape != want.shape:
            return float("inf")
        if want.size:
            scale = float(np.abs(want.astype(np.float64)).max()) or 1.0
            worst = max(worst, float(np.abs(have.astype(np.float64) - want.astype(np.float64)).max()) / scale)
    return worst


def machine() -> str:
    """What the figures were measured on."""
    from tunewright.devices.host import cpu_name

    return f"{cpu_name()}, {THREADS} cores"
