"""Kernels of Triton compiled for sm_90 without a GPU: the pool, the kernel cache, and what the driver is given."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from tunewright.devices import kernel_cache
from tunewright.devices.cuda.driver import Driver, LoadedCubin, Unloadable
from tunewright.devices.kernel_cache import Gathered
from tunewright.errors import ExecutionError
from tunewright.solvers.triton.source import compile
from tunewright.solvers.triton.source.compile import ABOUT, BINARY, Wanted, describe, values

TESTS = Path(__file__).parents[2]


def start(folder: Path, code: str, *arguments: str, **more: Any) -> subprocess.Popen[str]:
    """A process with the devices of `faults.gpus`, in which Triton compiles: others in this one may be interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(TESTS / "faults" / "gpus"), *(p or os.getcwd() for p in sys.path)]),
        "XDG_CONFIG_HOME": str(folder / "config"), "TUNEWRIGHT_CACHE_DIR": str(folder / "cache"),
        "TRITON_CACHE_DIR": str(folder / "triton"), "TUNEWRIGHT_USER_DB_PATH": str(folder / "user"),
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env=environment | more, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def run(folder: Path, code: str, *arguments: str) -> dict[str, Any]:
    process = start(folder, code, *arguments)
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return dict(json.loads(out.splitlines()[-1]))


MODEL = """
import json, sys, logging
sys.modules["pyopencl"] = None  # else OpenCL devices are tried, and what becomes of that is stored too
from pathlib import Path
import numpy as np, onnx
from onnx import TensorProto, helper
import tunewright
from tunewright.devices.kernel_cache import KernelCache
from tunewright.settings import Settings
from tunewright.solvers.triton.source import compile, compile_many as pool

def model():
    rng = np.random.default_rng(0)
    w = helper.make_tensor("w", TensorProto.FLOAT, (16, 16, 3, 3), rng.standard_normal(2304).astype(np.float32))
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]), helper.make_node("Relu", ["c"], ["r"]),
             helper.make_node("Tanh", ["x"], ["t"]), helper.make_node("Add", ["r", "t"], ["y"])]
    tensors = [helper.make_tensor_value_info(n, TensorProto.FLOAT, (1, 16, 6, 6)) for n in "xy"]
    graph = helper.make_graph(nodes, "small", tensors[:1], tensors[1:], [w])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

def compiled():
    before = cache.counted()
    tunewright.Core().compile_model(model(), "GPU.80")
    return (cache.counted() - before).as_dict()

cache = KernelCache.of(Settings.from_environment())
"""
COLD = (
    MODEL
    + """
records = []
pool._log.setLevel(logging.INFO)
pool._log.addHandler(type("", (logging.Handler,), {"emit": lambda self, record: records.append(record.getMessage())})())
pool.cores = lambda: 2
print(json.dumps({"counted": compiled(), "records": records, "triton": Path(sys.argv[1]).exists()}))
"""
)
WARM = (
    MODEL
    + """
from tunewright.solvers.triton.source.text import load_alone
def forbidden(wanted):
    raise AssertionError(f"{wanted} is compiled")
built, compile.build = compile.build, forbidden
pool.cores = lambda: 1
warm = compiled()
load_alone.cache_clear()
for entry in cache.entries():
    data = bytearray(entry.path.read_bytes())
    data[len(data) // 2] ^= 1
    entry.path.write_bytes(data)
compile.build = built
print(json.dumps({"warm": warm, "damaged": compiled()}))
"""
)


def test_a_model_is_compiled_at_once_and_found_by_the_next_process(tmp_path: Path) -> None:
    cold = run(tmp_path, COLD, str(tmp_path / "triton"))
    count = cold["counted"]["stores"]
    assert count >= 2 and cold["counted"]["misses"] == count and not cold["counted"]["errors"]
    first, last = cold["records"]
    assert first == f"compiling {count} kernels in 2 processes"  # all of them, before any is launched
    assert last.startswith(f"compiled {count} kernels in ")
    assert not cold["triton"]  # its own cache has no part in it
    warm = run(tmp_path, WARM)
    assert warm["warm"]["hits"] == count and warm["warm"]["misses"] == warm["warm"]["stores"] == 0
    assert warm["damaged"]["rejected"] == warm["damaged"]["stores"] == count and not warm["damaged"]["hits"]


POOL = """
import json, sys, threading, time
from tunewright.errors import ExecutionError
from tunewright.solvers.triton.source import compile_many as pool
from tunewright.solvers.triton.source.compile import Wanted
pool.cores = lambda: 2
from tunewright.solvers.triton.source.text import HEAD
HEAD += "@triton.jit\\ndef kernel(x, y):\\n    at = tl.arange(0, 64)\\n"
def wanted(body):
    return Wanted(HEAD + f"    tl.store(y + at, {body})\\n", "kernel", ("*fp32 16", "*fp32 16"), (), (), 90)
def sides():
    return [side._child.pid for side in made]
made, init = [], pool._Side.__init__
def noted(self):
    init(self)
    made.append(self)
pool._Side.__init__ = noted
"""
WRONG = (
    POOL
    + """
kept = {}
try:
    pool.build_all([wanted("tl.nothing(x, x, x)"), wanted("tl.load(x)"), wanted("tl.load(x) + 1")], kept.__setitem__)
except ExecutionError as error:
    found = {"why": str(error), "sides": sides(), "threads": threading.active_count(), "kept": len(kept)}
    print(json.dumps(found))
"""
)
LONG = (
    POOL
    + """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # the jobs of a shell's background ignore it
def told():
    while len(made) < 2:
        time.sleep(0.01)
    print(json.dumps(sides()), flush=True)
threading.Thread(target=told).start()
try:
    pool.build_all([wanted(f"tl.load(x + at) + {k}") for k in range(200)], {}.__setitem__)
except KeyboardInterrupt:
    print("interrupted", sum(t.name == "compiling" for t in threading.enumerate()), flush=True)
    raise SystemExit(7)
"""
)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_one_that_cannot_be_compiled_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    found = run(tmp_path, WRONG)
    assert found["why"].startswith("Triton cannot compile a kernel:") and "nothing" in found["why"]
    assert len(found["sides"]) == 2 and all(map(is_gone, found["sides"])) and found["threads"] == 1
    assert found["kept"] == 2  # the others are not lost


def test_an_interrupted_pool_leaves_nothing(tmp_path: Path) -> None:
    with start(tmp_path, LONG) as process:
        assert process.stdout is not None
        pids = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted 0\n"
        assert process.wait(30) == 7 and len(pids) == 2 and all(map(is_gone, pids))


@pytest.mark.soak
def test_a_killed_parent_takes_its_processes_along(tmp_path: Path) -> None:
    with start(tmp_path, LONG) as process:
        assert process.stdout is not None
        pids = json.loads(process.stdout.readline())
        process.kill()
    late = time.monotonic() + 60  # each ends its kernel first
    while not all(map(is_gone, pids)) and time.monotonic() < late:
        time.sleep(0.05)
    assert all(map(is_gone, pids))


# ---- what the driver is given -------------------------------------------------------------------------------------


class Library:
    """Notes what it is asked, as libcuda would see it. It answers with handles, or with an error."""

    def __init__(self, status: int = 0) -> None:
        self.asked: list[tuple[str, list[Any]]] = []
        self.context: dict[int, int] = {}
        self.status = status

    def cuCtxGetCurrent(self, out: Any) -> int:
        out._obj.value = self.context.get(threading.get_ident())
        return 0

    def cuDeviceGet(self, out: Any, number: Any) -> int:
        out._obj.value = number.value
        return 0

    def cuDevicePrimaryCtxRetain(self, out: Any, device: Any) -> int:
        out._obj.value = 70 + device.value
        self.asked.append(("retain", [device.value]))
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.context[threading.get_ident()] = context.value
        return 0

    def cuModuleLoadData(self, out: Any, data: Any) -> int:
        self.asked.append(("load", [data.value]))
        out._obj.value = 5
        return self.status

    def cuModuleGetFunction(self, out: Any, module: Any, name: Any) -> int:
        self.asked.append(("function", [module.value, name.value]))
        out._obj.value = 6
        return 0

    def cuFuncSetAttribute(self, function: Any, which: Any, value: Any) -> int:
        self.asked.append(("attribute", [function.value, which.value, value.value]))
        return 0

    def cuLaunchKernel(self, function: Any, *given: Any) -> int:
        *sizes, stream, pointers, extra = given
        self.asked.append(("launch", [function.value, *(s.value for s in sizes), stream.value, extra.value]))
        types = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_float, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
        self.asked.append(("values", [t.from_address(p).value for t, p in zip(types, pointers, strict=True)]))
        return self.status

    def cuLaunchKernelEx(self, config: Any, function: Any, pointers: Any, extra: Any) -> int:
        given = config._obj
        attribute = given.attributes[0]
        assert given.count == 1 and (attribute.id, attribute.value) == (6, 1)  # may begin before the last one is over
        sizes, stream = map(ctypes.c_uint, given.sizes), ctypes.c_void_p(given.stream)
        return self.cuLaunchKernel(function, *sizes, stream, pointers, extra)

    def cuGetErrorString(self, status: Any, out: Any) -> int:
        out._obj.value = b"an illegal memory access was encountered"
        return 0


class Tensor:
    def data_ptr(self) -> int:
        return 0x7F0000001000


@pytest.mark.parametrize("overlaps", [False, True])
def test_what_a_launch_gives_to_the_driver(overlaps: bool) -> None:
    library = Library()
    driver = Driver(library)
    kernel = driver.load(b"cubin", "kernel", warps=4, shared=100_000, scratch=64, device=1, overlaps=overlaps)
    assert library.asked == [
        ("retain", [1]), ("load", [b"cubin"]), ("function", [5, b"kernel"]), ("attribute", [6, 8, 100_000])
    ]  # fmt: skip
    assert kernel == LoadedCubin(6, 4, 100_000, 64, overlaps) and set(library.context.values()) == {71}
    library.asked.clear()
    given = values(("*fp16 16", "none", "i32", "fp32", "i64"), [Tensor(), None, -3, 0.5, 1 << 40])
    driver.launch(kernel, (7, 2), 99, given, 0x1234, device=1)
    assert library.asked == [
        ("launch", [6, 7, 2, 1, 128, 1, 1, 100_000, 99, None]),
        ("values", [0x7F0000001000, -3, 0.5, 1 << 40, 0x1234, None]),
    ]
    library.asked.clear()
    driver.launch(kernel, (0, 2), 99, given, 0, device=1)
    assert library.asked == []


def test_another_thread_gets_the_same_context() -> None:
    library = Library()
    driver = Driver(library)
    for _ in range(2):
        thread = threading.Thread(target=driver.load, args=(b"cubin", "kernel", 4, 0, 0, 0))
        thread.start()
        thread.join()
    assert [name for name, _ in library.asked].count("retain") == 1 and set(library.context.values()) == {70}


def test_the_driver_says_what_is_wrong() -> None:
    with pytest.raises(ExecutionError, match="cuModuleLoadData: CUDA error 700, an illegal memory access"):
        Driver(Library(700)).load(b"cubin", "kernel", 4, 0, 0, 0)


def test_what_the_driver_does_not_load_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Wanted("text", "kernel", ("*fp16 16",), (), (), 90)
    good, stale = ({BINARY: b"\x7fELF" + rest, ABOUT: json.dumps(RIGHT).encode()} for rest in (b"good", b"stale"))

    class Picky(Library):
        def cuModuleLoadData(self, out: Any, data: Any) -> int:
            return 209 if data.value.endswith(b"stale") else super().cuModuleLoadData(out, data)

    built: list[Wanted] = []
    driver = Driver(Picky())
    monkeypatch.setattr(compile, "driver", lambda: driver)
    monkeypatch.setattr(compile, "build", lambda wanted: built.append(wanted) or good)
    cache, kernel = Gathered(), compile.Compiled("text", "kernel")
    cache.put(wanted.key(), stale)
    with kernel_cache.using(cache):
        assert kernel._load(wanted, 0).warps == 4
        assert built == [wanted] and cache.get(wanted.key()) == good
        monkeypatch.setattr(compile, "build", lambda wanted: stale)
        with pytest.raises(Unloadable, match="CUDA error 209"):  # a compiler that does so is not asked for ever
            compile.Compiled("text", "kernel")._load(Wanted("text", "kernel", ("*fp16",), (), (), 90), 0)


RIGHT = {"name": "kernel", "num_warps": 4, "shared": 0, "global_scratch_size": 0, "overlaps": 1}


@pytest.mark.parametrize(
    "files",
    [
        {}, {BINARY: b"\x7fELF"}, {BINARY: b"\x7fELF", ABOUT: b"{}"},
        {BINARY: b"text", ABOUT: json.dumps(RIGHT).encode()},
        {BINARY: b"\x7fELF", ABOUT: b"[]"}, {BINARY: b"\x7fELF", ABOUT: b"\xff"},
        *({BINARY: b"\x7fELF", ABOUT: json.dumps(RIGHT | bad).encode()}
          for bad in ({"shared": -1}, {"num_warps": "4"}, {"name": 3}, {"shared": True})),
    ],
)  # fmt: skip
def test_an_entry_that_says_too_little_is_refused(files: dict[str, bytes]) -> None:
    assert describe({BINARY: b"\x7fELF", ABOUT: json.dumps(RIGHT).encode()}) == RIGHT
    with pytest.raises(ValueError, match="no compiled kernel"):
        describe(files)


def test_a_key_tells_everything_apart() -> None:
    first = Wanted("text", "kernel", ("*fp16 16",), (("BLOCK", 64),), (("num_warps", 4),), 90)
    assert Wanted.of(json.loads(json.dumps(first.to_json()))) == first
    others = [
        Wanted("texts", "kernel", ("*fp16 16",), (("BLOCK", 64),), (("num_warps", 4),), 90),
        Wanted("text", "other", ("*fp16 16",), (("BLOCK", 64),), (("num_warps", 4),), 90),
        Wanted("text", "kernel", ("*fp16",), (("BLOCK", 64),), (("num_warps", 4),), 90),
        Wanted("text", "kernel", ("*fp16 16",), (("BLOCK", 32),), (("num_warps", 4),), 90),
        Wanted("text", "kernel", ("*fp16 16",), (("BLOCK", 64),), (("num_warps", 8),), 90),
        Wanted("text", "kernel", ("*fp16 16",), (("BLOCK", 64),), (("num_warps", 4),), 80),
    ]
    keys = [json.dumps(wanted.key(), sort_keys=True) for wanted in [first, *others]]
    assert len(set(keys)) == len(keys)
    assert {"triton", "ptxas", "target", "source", "environment"} <= set(first.key())


# ---- on a GPU -----------------------------------------------------------------------------------------------------

GPU = """
import json, sys
import numpy as np, torch
from tunewright.devices import kernel_cache
from tunewright.devices.cuda.device import CudaDevice
from tunewright.devices.kernel_cache import KernelCache
from tunewright.ir.types import DType, TensorType
from tunewright.settings import Settings
from tunewright.solvers.base import Problem, solvers
from tunewright.solvers.triton.source import compile, compile_many as pool
if sys.argv[1] == "warm":
    compile.build = None
device = CudaDevice("GPU.0")
type = TensorType(DType.FLOAT32, (1000,))
problem = Problem("Tanh", (type,), (type,), {}, constant=(False,))
(solver,) = [s for s in solvers() if s.id == "triton.elementwise"]
kernel = solver.compile(problem, solver.default(problem, device.target), device)
queue, x, y = device.queue(), device.new(type), device.new(type)
given = np.linspace(-3, 3, 1000, dtype=np.float32)
queue.put(given, x)
kernel.prepare()
kernel.run(queue, [x], [y])
(found,) = queue.fetch([y])
assert np.abs(found - np.tanh(given)).max() < 1e-6
again = queue.capture(lambda: kernel.run(queue, [x], [y]))
again()
assert (queue.fetch([y])[0] == found).all()
print(json.dumps(KernelCache.of(Settings.from_environment()).counted().as_dict()))
"""


def test_a_gpu_launches_from_the_cache(tmp_path: Path) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    assert run(tmp_path, GPU, "cold")["stores"] == 1
    assert run(tmp_path, GPU, "warm")["hits"] == 1
