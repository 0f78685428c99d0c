"""One load of one model in this process, and where its time went: what `loads` starts, again and again.

python bench/load_once.py '{"engine": "tunewright", "model": "m.onnx", "inputs": "inputs.npz", "config": {}}'

``begun`` in the JSON is what time.monotonic() said before this process was started. The answer is a line of JSON:
seconds and processor time of each phase, one after the other, and every process that was started meanwhile.
"""

from __future__ import annotations

import time

BEGUN = time.monotonic()

import json  # noqa: E402 - what Python itself takes is a phase, too
import os  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402


class Watch:
    """Phases of this process: seconds, and processor time of its own and of the processes that it waited for."""

    def __init__(self, begun: float) -> None:
        self.begun, self.phases = begun, dict[str, dict[str, float]]()
        own, children = processor_time()
        self.phases["python"] = {"at": 0.0, "wall": BEGUN - begun, "own": own, "children": children}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        at, (own, children) = time.monotonic(), processor_time()
        yield
        after = processor_time()
        self.phases[name] = {"at": at - self.begun, "wall": time.monotonic() - at,
                             "own": after[0] - own, "children": after[1] - children}  # fmt: skip


def processor_time() -> tuple[float, float]:
    """Seconds of this process, with all of its threads, and of those that it started and waited for."""
    found = os.times()
    return time.process_time(), found.children_user + found.children_system


class Processes:
    """Every process that is started from now on: when, what, and what it used."""

    def __init__(self, begun: float) -> None:
        self.begun, self.rows = begun, list[dict[str, Any]]()
        running: dict[int, dict[str, Any]] = {}
        plain = subprocess.Popen.__init__

        def start(popen: Any, args: Any, *rest: Any, **more: Any) -> None:
            row = {"begin": time.monotonic() - begun, "what": kind(args)}
            plain(popen, args, *rest, **more)
            row["started"] = time.monotonic() - begun
            running[popen.pid] = row

        def wait(pid: int, options: int) -> tuple[int, int]:
            found, status, used = os.wait4(pid, options)
            row = running.pop(found, None) if found else None
            if row is not None:
                row |= {"end": time.monotonic() - begun, "user": used.ru_utime, "system": used.ru_stime}
                row |= {"faults": used.ru_minflt, "reads": used.ru_majflt, "peak_mb": used.ru_maxrss / 1024}
                self.rows.append(row)
            return found, status

        subprocess.Popen.__init__ = start  # type: ignore[method-assign]
        os.waitpid = wait


def kind(args: Any) -> str:
    """What a process is for, from its command."""
    words = [str(word) for word in ([args] if isinstance(args, (str, bytes, os.PathLike)) else args)]
    if "ld.lld" in words or "-shared" in words:
        return "link"
    return "compile" if "-c" in words else Path(words[0]).name


def tunewright(watch: Watch, told: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    with watch("import"):
        import tunewright
        from tunewright import Core
        from tunewright.plugins.single import open_device
    with watch("open"):  # the compiler, the pool, the probe
        core = Core(told["config"])
        open_device("CPU", core.settings)
    with watch("compile"):
        compiled = core.compile_model(told["model"], "CPU")
    facts = {"version": tunewright.__version__}

    def run(inputs: Any) -> None:
        compiled(inputs)
        facts["compile phases"] = dict(compiled.phases)

    return run, facts


def onnxruntime(watch: Watch, told: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    with watch("import"):
        import onnxruntime as ort
    with watch("compile"):
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = told["config"].get("threads", 0), 4
        session = ort.InferenceSession(told["model"], options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, inputs), {"version": ort.__version__}


def openvino(watch: Watch, told: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    with watch("import"):
        import openvino as ov
    with watch("compile"):
        core = ov.Core()
        wanted = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32", **told["config"]}
        compiled = core.compile_model(core.read_model(told["model"]), "CPU", wanted)
    return compiled, {"version": ov.__version__}


ENGINES = {"tunewright": tunewright, "onnxruntime": onnxruntime, "openvino": openvino}


def main() -> int:
    told = json.loads(sys.argv[1])
    watch = Watch(told.get("begun", BEGUN))
    processes = Processes(watch.begun)
    with watch("numpy"):
        import numpy as np
    with np.load(told["inputs"]) as stored:  # nobody's load: it is between two phases
        inputs = {name: stored[name] for name in stored.files}
    run, facts = ENGINES[told["engine"]](watch, told)
    with watch("inference"):
        run(inputs)
    whole = time.monotonic() - watch.begun
    phases = watch.phases
    load = sum(phases[name]["wall"] for name in ("open", "compile", "inference") if name in phases)
    answer = {**facts, "whole": whole, "load": load, "phases": phases, "processes": processes.rows,
              "modules": len(sys.modules), "own": processor_time()[0], "peak_mb": peak()}  # fmt: skip
    print(json.dumps(answer), flush=True)
    os._exit(0)  # how an engine ends is not measured


def peak() -> float:
    """Megabytes: the most that were resident at a time."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return 0.0
    found = next((line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")), "0")
    return int(found) / 1024


if __name__ == "__main__":
    sys.exit(main())
