"""Engines under one interface: what a worker runs (see `turns`)."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
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


def tunewright(
    model: onnx.ModelProto, name: str = "Tunewright", config: Mapping[str, Any] | None = None, device: str = "CPU"
) -> Engine:
    """Our engine."""
    from tunewright import Core, __version__

    core = Core(config)
    begin = time.perf_counter()
    compiled = core.compile_model(core.read_model(model), device)
    took = time.perf_counter() - begin
    plans = compiled.program.plans
    facts = {
        "steps": sum(not s.optimized_out for p in plans for s in p.steps),
        "memory": sum(p.arena_bytes for p in plans),
        "rewrites": Counter(e.rule for e in compiled.env.context.log.entries if not e.reason),
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


PEERS = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}


def installed() -> list[str]:
    """Packages of other engines that are here."""
    return [name for name in PEERS if find_spec(name) is not None]


def make(name: str, model: onnx.ModelProto, config: Mapping[str, Any]) -> Engine:
    """An engine by the name of its package."""
    if name == "tunewright":
        settings = {key: value for key, value in config.items() if key != "device"}
        return tunewright(model, config=settings, device=str(config.get("device", "CPU")))
    return {"onnxruntime": onnxruntime, "openvino": openvino}[name](model)


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
