"""Engines under one interface: what a worker runs (see `turns`).

Every engine gets the path of the model, as its users would give it: what it needs of memory then is its own.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray[Any, Any]]
THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class Engine:
    """A compiled model: its version, what reading and compiling took, and a call."""

    version: str
    compile_seconds: float
    run: Callable[[Arrays], Arrays]
    #: what else is worth a column
    facts: dict[str, Any] = field(default_factory=dict)


def tunewright(model: Path, outputs: Sequence[str], config: Mapping[str, Any]) -> Engine:
    """Our engine; ``device`` is beside the settings in ``config``."""
    from tunewright import Core, __version__

    if "CACHE_DIR" in config:  # the thread pool and the probe, which no model owns, are kept where the environment says
        os.environ["TUNEWRIGHT_CACHE_DIR"] = str(config["CACHE_DIR"])
    settings = {key: value for key, value in config.items() if key != "device"}
    begin = time.perf_counter()
    core = Core(settings)
    compiled = core.compile_model(model, str(config.get("device", "CPU")))
    took = time.perf_counter() - begin
    plans = compiled.program.plans
    facts = {
        "steps": sum(not s.optimized_out for p in plans for s in p.steps),
        "arena": sum(p.arena_bytes for p in plans),
        "rewrites": Counter(e.rule for e in compiled.env.context.log.entries if not e.reason),
    }
    return Engine(__version__, took, compiled, facts)


def onnxruntime(model: Path, outputs: Sequence[str], config: Mapping[str, Any]) -> Engine:
    """ONNX Runtime as a user runs it: all optimisations, a thread per core, or ``threads`` of ``config``."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = config.get("threads", THREADS)
    options.log_severity_level = 4
    begin = time.perf_counter()
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    took = time.perf_counter() - begin
    names = list(outputs)
    return Engine(version("onnxruntime"), took, lambda x: dict(zip(names, session.run(names, x), strict=True)))


def openvino(model: Path, outputs: Sequence[str], config: Mapping[str, Any]) -> Engine:
    """OpenVINO in its latency mode, fp32 (quantised layers stay quantised); ``config`` may choose the pinning."""
    import openvino as ov

    fixed = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": THREADS, "INFERENCE_PRECISION_HINT": "f32"}
    begin = time.perf_counter()
    core = ov.Core()
    compiled = core.compile_model(core.read_model(str(model)), "CPU", {**fixed, **config})
    took = time.perf_counter() - begin
    request = compiled.create_infer_request()

    def run(inputs: Arrays) -> Arrays:
        request.infer(inputs, share_inputs=True)
        return {name: request.get_output_tensor(i).data.copy() for i, name in enumerate(outputs)}

    facts = {"pinning": bool(compiled.get_property("ENABLE_CPU_PINNING"))}
    return Engine(version("openvino").partition("-")[0], took, run, facts)


PEERS = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
MAKERS = {"tunewright": tunewright, "onnxruntime": onnxruntime, "openvino": openvino}


def installed() -> list[str]:
    """Packages of other engines that are here."""
    return [name for name in PEERS if find_spec(name) is not None]


def make(name: str, model: Path, outputs: Sequence[str], config: Mapping[str, Any]) -> Engine:
    """An engine by the name of its package, with a model whose outputs have these names."""
    return MAKERS[name](model, outputs, config)


def error(mine: Arrays, theirs: Arrays) -> float:
    """The largest absolute error over all outputs, each as a part of the expected output's scale. What cannot be
    compared (another shape, a number where the other has none) is infinitely wrong."""
    worst = 0.0
    for name, want in theirs.items():
        have = mine[name]
        if have.shape != want.shape:
            return float("inf")
        if want.dtype.kind not in "fiub":
            worst = max(worst, 0.0 if np.array_equal(have, want) else float("inf"))
            continue
        have, want = have.astype(np.float64), want.astype(np.float64)
        same = (have == want) | (np.isnan(have) & np.isnan(want))
        if same.all():
            continue
        if not (np.isfinite(have) & np.isfinite(want))[~same].all():
            return float("inf")
        scale = float(np.abs(want[np.isfinite(want)]).max()) or 1.0  # where they differ there are numbers
        worst = max(worst, float(np.abs(have[~same] - want[~same]).max()) / scale)
    return worst


def machine() -> str:
    """What the figures were measured on."""
    from tunewright.devices.host import cpu_name

    return f"{cpu_name()}, {THREADS} cores"
