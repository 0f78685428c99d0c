"""A worker process that reads, compiles and runs models, so that a crash or a hang is an answer.

Run as a script it is the worker: one JSON object per line in, one out. It notes every file that is opened while a model
is handled, and limits its own memory, so that a model that asks for everything cannot take the machine with it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[2] / "src"
MEMORY_BYTES = 8 << 30


class Worker:
    """Talks to one worker process, and starts another when it died."""

    def __init__(self, *arguments: str, seconds: float = 30.0) -> None:
        self.arguments, self.seconds = arguments, seconds
        self.process: subprocess.Popen[bytes] | None = None

    def call(self, **job: Any) -> dict[str, Any]:
        """The worker's answer; ``outcome`` is ``crashed`` or ``hung`` when there is none."""
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return self._dead(process)
        return self._answer(process, self.seconds)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            environment = {
                **os.environ,
                "PYTHONPATH": f"{SOURCE}{os.pathsep}{Path(__file__).parents[1]}",
                "OMP_NUM_THREADS": "1",
            }
            self.process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", *self.arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
            )  # fmt: skip
            ready = self._answer(self.process, 60.0)
            assert ready == {"outcome": "ready"}, ready
        return self.process

    def _answer(self, process: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], seconds)
        if not readable:
            process.send_signal(signal.SIGABRT)  # faulthandler then says where it hangs
            return {**self._dead(process), "outcome": "hung"}
        line = process.stdout.readline()
        return json.loads(line) if line else self._dead(process)

    def _dead(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        _, errors = process.communicate()
        self.process = None
        return {
            "outcome": "crashed",
            "message": f"exit status {process.returncode}: {errors[-2000:].decode(errors='replace')}",
        }


class Handler:
    """What the worker does with a model: the whole way from bytes to outputs."""

    def __init__(self, limits: dict[str, int]) -> None:
        import resource

        from tunewright import Core

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        self.core = Core(limits)
        self.opened: list[str] = []
        tempfile.gettempdir()  # finds out once in a process, by writing a file, where temporary files may be
        sys.addaudithook(self._audit)
        self.warm()

    def warm(self) -> None:
        """Bring in what is imported on first use: the time limits are for the models."""
        import numpy as np
        import onnx

        nodes = [onnx.helper.make_node("Relu", ["x"], ["y"]), onnx.helper.make_node("Det", ["y"], ["z"])]
        x, z = (onnx.helper.make_tensor_value_info(n, 1, d) for n, d in (("x", ["a", "a"]), ("z", None)))
        model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "warm", [x], [z]))
        self.core.compile_model(model)({"x": np.zeros((2, 2), np.float32)})

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            self.opened.append(os.fsdecode(arguments[0]))

    def handle(self, model: Any, run: bool = True) -> dict[str, Any]:
        """Load, compile, run. ``outcome``: ok, refused (one of our errors) or leaked (any other exception)."""
        from tunewright import TunewrightError

        self.opened.clear()
        begin = time.process_time()  # of the processor: how busy the machine is with others must not decide a test
        stage = "load"
        answer: dict[str, Any] = {}
        try:
            loaded = self.core.read_model(model)
            stage = "query"
            self.core.query_model(loaded)
            stage = "compile"
            compiled = self.core.compile_model(loaded)
            stage = "run"
            inputs = sample_inputs(compiled.inputs) if run else None
            if inputs is not None:
                compiled(inputs)
            answer = {"outcome": "ok", "ran": inputs is not None}
        except TunewrightError as error:
            answer = {"outcome": "refused", "error": type(error).__name__, "message": str(error)}
        except Exception as error:  # what this is here to find
            import traceback

            answer = {"outcome": "leaked", "error": type(error).__name__, "message": traceback.format_exc()[-3000:]}
        return {**answer, "stage": stage, "seconds": time.process_time() - begin, "opened": list(self.opened)}


def sample_inputs(types: dict[str, Any]) -> dict[str, Any] | None:
    """Small arrays that fit the inputs, open dimensions being 2; None where they would be large."""
    from tunewright.ir.types import TensorType

    values, total = {}, 0
    for name, type in types.items():
        dims: list[int] = []
        if isinstance(type, TensorType) and type.shape is not None:
            dims = [d if isinstance(d, int) else 2 for d in type.shape]
        total += array_size(dims)
        if total > 1 << 20:
            return None
        values[name] = sample(type, dims)
    return values


def array_size(dims: list[int]) -> int:
    size = 1
    for d in dims:
        size *= d
    return size


def sample(type: Any, dims: list[int]) -> Any:
    import numpy as np

    from tunewright.ir.types import DType, OptionalType, SequenceType, TensorType

    if isinstance(type, SequenceType):
        return [sample(type.elem, [2, 2])] * 2
    if isinstance(type, OptionalType):
        return sample(type.elem, [2, 2])
    if not isinstance(type, TensorType):
        return np.zeros(dims, np.float32)
    if type.dtype is DType.STRING:
        return np.full(dims, "text", object)
    return (np.arange(array_size(dims)) % 3).reshape(dims).astype(type.dtype.numpy)


def main() -> None:
    handler = Handler({"MAX_ITERATIONS": 2000})
    print(json.dumps({"outcome": "ready"}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(handler.handle(job["path"], job.get("run", True))), flush=True)


if __name__ == "__main__":
    main()
