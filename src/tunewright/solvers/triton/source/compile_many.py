"""Compiling many kernels at once, in processes that Triton alone is loaded into: one for each core, while it takes.

Triton holds the GIL while it compiles, so threads would not help. A process (``python -m
tunewright.solvers.triton.source.compile_many``) reads a kernel per line from its input and writes a line for each:
JSON, the cubin in base 64. It ends when its input does, so it cannot outlive its parent by more than one kernel.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO

from tunewright.devices import build_options
from tunewright.devices.host import free_bytes
from tunewright.errors import ExecutionError
from tunewright.settings import Settings, child_environment

from .compile import Files, Keep, Wanted, build, build_each

#: memory that each process should find free
EACH_BYTES = 512 << 20
#: seconds that one kernel may take
MOST_SECONDS = 300.0

_log = logging.getLogger("tunewright")


def cores() -> int:
    """How many processes are worth having (COMPILATION_NUM_THREADS)."""
    found = build_options.threads(build_options.current().compilation_num_threads)
    free = free_bytes()
    return max(1, found if free is None else min(found, int(free / 2 / EACH_BYTES)))


def build_all(wanted: Sequence[Wanted], keep: Keep) -> None:
    """Compile kernels on all cores. ExecutionError when one cannot be compiled, once all others are."""
    count = min(cores(), len(wanted))
    priority = build_options.current().gpu_host_task_priority
    if count < 2 and (priority == "ANY" or not wanted):  # another priority takes a process of its own
        build_each(wanted, keep)
        return
    began = time.perf_counter()
    _log.info("compiling %d kernels in %d processes", len(wanted), count)
    _Pool(wanted, count, keep, priority).run()
    _log.info("compiled %d kernels in %.1f s", len(wanted), time.perf_counter() - began)


class CompilerRefusal(ExecutionError):
    """What the compiler says of a kernel."""


class _Pool:
    """Processes from start to end of `run`; whatever interrupts it, none is left."""

    def __init__(self, wanted: Sequence[Wanted], count: int, keep: Keep, priority: str = "ANY") -> None:
        # Long texts first, since they take longest: else the last core works alone.
        self._waiting = deque(sorted(wanted, key=lambda one: -len(one.text)))
        self._count, self._keep, self._priority = count, keep, priority
        self._errors: list[Exception] = []
        self._sides: list[_Side] = []
        self._lock, self._over = threading.Lock(), False

    def run(self) -> None:
        threads = [threading.Thread(target=self._work, name="compiling", daemon=True) for _ in range(self._count)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:  # Ctrl-C too
            with self._lock:
                self._over = True
                sides = list(self._sides)
            for side in sides:
                side.kill()
            for thread in threads:  # which hear of it
                if thread.ident is not None:
                    thread.join()
            for side in sides:
                side.close()
        if self._errors:
            raise self._errors[0]

    def _work(self) -> None:
        """What each thread does: it waits for a process of its own."""
        try:
            side = self._start()
            while side is not None and self._waiting:
                try:
                    wanted = self._waiting.popleft()
                    self._keep(wanted, side.ask(wanted))
                except IndexError:  # another took the last one
                    break
                except CompilerRefusal as error:  # the others are compiled all the same
                    self._errors.append(error)
        except Exception as error:  # told by `run`
            self._errors.append(error)

    def _start(self) -> _Side | None:
        with self._lock:
            if self._over:
                return None
            side = _Side()
            self._sides.append(side)
            side.settle(self._priority)
            return side


class _Side:
    """One process."""

    def __init__(self) -> None:
        self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        try:
            self._child = subprocess.Popen(
                [sys.executable or "python3", "-P", "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=self._words, env=child_environment(Settings.from_environment()), start_new_session=True,
                bufsize=0,
            )  # fmt: skip
        except OSError as error:
            self._words.close()
            raise ExecutionError(f"no process can be started to compile in: {error}") from error
        self._read = bytearray()

    def settle(self, priority: str) -> None:
        """GPU_HOST_TASK_PRIORITY."""
        build_options.settle(self._child.pid, priority)

    def ask(self, wanted: Wanted) -> Files:
        assert self._child.stdin is not None
        line = memoryview(json.dumps(wanted.to_json()).encode() + b"\n")
        try:
            while line:
                line = line[self._child.stdin.write(line) :]
            answer = json.loads(self._line(time.monotonic() + MOST_SECONDS))
            if "error" in answer:
                raise CompilerRefusal(str(answer["error"]))
            return {name: base64.b64decode(data, validate=True) for name, data in answer["files"].items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ExecutionError(f"a process that compiles failed ({error}){self._said()}") from error

    def _line(self, until: float) -> bytes:
        assert self._child.stdout is not None
        number = self._child.stdout.fileno()
        while b"\n" not in self._read:
            ready, _, _ = select.select([number], [], [], max(until - time.monotonic(), 0))
            data = os.read(number, 1 << 20) if ready else b""
            if not data:
                raise OSError("it ended" if ready else f"no answer within {MOST_SECONDS:g} s")
            self._read += data
        line, _, rest = bytes(self._read).partition(b"\n")
        self._read = bytearray(rest)
        return line

    def _said(self) -> str:
        self._words.seek(0)
        lines = self._words.read()[-4096:].decode("utf-8", "replace").strip().splitlines()
        return f"; it printed: {lines[-1][:200]}" if lines else ""

    def kill(self) -> None:
        """Make an end of it, and of what it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def close(self) -> None:
        """Let go of its channels, once nobody listens any more."""
        for stream in (self._child.stdin, self._child.stdout, self._words):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def answer(request: Mapping[str, object]) -> dict[str, object]:
    """What a process says to a kernel."""
    try:
        files = build(Wanted.of(request))
    except ExecutionError as error:
        return {"error": str(error)}
    return {"files": {name: base64.b64encode(data).decode() for name, data in files.items()}}


def main() -> None:
    out = os.dup(1)
    os.dup2(2, 1)  # what compilers print goes where errors go
    for line in sys.stdin.buffer:
        data = memoryview(json.dumps(answer(json.loads(line))).encode() + b"\n")
        while data:
            data = data[os.write(out, data) :]


if __name__ == "__main__":
    main()
