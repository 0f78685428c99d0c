"""Finds the OpenCL devices: every device of every runtime, and whether it compiles a kernel and runs it correctly.

A driver may refuse every kernel, compute wrong results or crash. So a separate process tries each device before it is
offered (``python -m tunewright.devices.opencl.probe``). The kernel cache remembers the outcome.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from functools import cache
from typing import Any

import numpy as np

from tunewright.settings import Settings, child_environment, export

from ..kernel_cache import KernelCache
from . import icd
from .naming import is_cpu, shares_memory
from .programs import OPTIONS, identity, quietly
from .svm import Memory

#: compiled and run with numbers whose results are known
TEXT = "kernel void probe(global int* x, int y) { x[get_global_id(0)] = 3 * x[get_global_id(0)] + y; }"
COUNT = 64
#: seconds that a device has to run the kernel, and seconds until a failed device is tried again
PATIENCE, AGAIN = 60, 3600
#: how much is kept of the output when nothing else explains a failure
_WORDS = 300


@cache
def devices() -> list[Any] | str:
    """Return all OpenCL devices, or why there are none."""
    # It would keep pickles in the user's cache folder: they run as code when read, and are slower than making them
    # again.
    export("PYOPENCL_NO_CACHE", "1")
    try:
        import pyopencl as cl
    except ModuleNotFoundError:
        return "pyopencl is not installed: pip install 'tunewright[opencl]'"
    except ImportError as error:
        return f"pyopencl cannot be imported ({error}): pip install --force-reinstall pyopencl"
    try:
        with icd.runtimes():
            platforms = cl.get_platforms()
            # A runtime may be found twice; a platform may have several devices of one name.
            found = {
                (p.name, p.version, number): device for p in platforms for number, device in enumerate(p.get_devices())
            }
    except (cl.Error, OSError) as error:
        return f"there is no OpenCL runtime ({error}): install the driver of the GPU, or 'tunewright[intel]'"
    return list(found.values()) or "the OpenCL runtimes here have no device"


def why_not(raw: Any) -> str:
    """Return what is wrong with one of `devices`, and what to do; empty if it runs kernels correctly."""
    known, key = KernelCache.of(Settings.from_environment()), _key(raw)
    said = _remembered(known, key)
    if said is None:
        said = _try(raw)
        if known is not None:
            files = {"why": said.encode(), "time": str(int(time.time())).encode()}
            known.put(key, files, f"probe: {raw.platform.name}: {raw.name}")
    if not said:
        return ""
    remedy = "update that runtime, or do without: CPU needs none" if is_cpu(raw) else "update its driver"
    return f"it does not run kernels right: {said}; {remedy}"


def _key(raw: Any) -> dict[str, str]:
    return {**identity(raw, OPTIONS), "probe": TEXT, "kernel": platform.release()}


def _remembered(known: KernelCache | None, key: dict[str, str]) -> str | None:
    """Return the last result; None if it is unknown, or failed long ago."""
    files = None if known is None else known.peek(key)
    if files is None:
        return None
    try:
        said, at = files["why"].decode(), int(files["time"])
    except (KeyError, ValueError):
        return None
    return None if said and not 0 <= time.time() - at < AGAIN else said


def _try(raw: Any) -> str:
    """Return what goes wrong when a separate process uses a device; empty for nothing."""
    found = devices()
    number = next(k for k, each in enumerate(found) if each == raw)
    command = [sys.executable or "python3", "-P", "-m", __name__, str(number), raw.name]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE, check=False,
            env=child_environment(Settings.from_environment()), start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"a kernel of one line took more than {PATIENCE} s"
    except OSError as error:
        return f"no process could be started to try it ({error})"
    if done.returncode < 0:
        return f"a process that used it ended with {signal.Signals(-done.returncode).name}"
    if not done.returncode:
        return ""
    words = (done.stdout or done.stderr).decode("utf-8", "replace").strip()
    return words.splitlines()[-1][-_WORDS:] if words else f"a process that used it ended with {done.returncode}"


# In the separate process


def run(raw: Any) -> str:
    """Compile the kernel for a device and run it in this process. Returns what is wrong, or empty."""
    import pyopencl as cl

    want = 3 * np.arange(COUNT, dtype=np.int32) + 5
    try:
        context = cl.Context([raw])
        with quietly():
            program = cl.Program(context, TEXT).build(options=OPTIONS.split(), cache_dir=False)
            kernel = cl.Kernel(program, "probe")
        queue, numbers = cl.CommandQueue(context, raw), np.arange(COUNT, dtype=np.int32)
        if shares_memory(raw):
            memory = cl.SVM(numbers)
        else:
            there = Memory(context, raw).constant(numbers)
            memory = cl.SVM(there.memory)
        kernel.set_args(memory, np.int32(5))
        cl.enqueue_nd_range_kernel(queue, kernel, (COUNT,), (1,))
        if not shares_memory(raw):
            cl.enqueue_copy(queue, numbers, memory, is_blocking=False)
        queue.finish()
    except (cl.Error, MemoryError) as error:
        return _in_a_line(str(error))
    return "" if (numbers == want).all() else "its results are wrong"


def _in_a_line(said: str) -> str:
    """Return the line of a compiler's output that names an error, else the first line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["it failed"]
    found = next((line for line in lines[1:] if "error" in line.lower()), lines[0])
    return found.removeprefix("error: ")[:_WORDS]


def main(arguments: list[str]) -> int:
    """Arguments: the device's number among `devices`, and its name."""
    number, name = arguments
    answer = os.dup(1)
    os.dup2(2, 1)  # sends a driver's output to stderr
    found = devices()
    if isinstance(found, str) or not int(number) < len(found) or found[int(number)].name != name:
        said = "another process finds no such device"
    else:
        said = run(found[int(number)])
    os.write(answer, said.encode())
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
