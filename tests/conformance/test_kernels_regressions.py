"""Kernels among others in a process: memory that callers own, interrupts, forks, threads, layouts side by side.

What went wrong once, and what came close to it. References are the host's (see `ops`).
"""

import mmap
import multiprocessing
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from onnx import numpy_helper, parser

import tunewright
from conformance.short_form import needs_results
from tunewright.devices.kernel_cache import KernelCache
from tunewright.ops.tolerance import compare
from tunewright.plugins.single import open_device

pytestmark = pytest.mark.skipif(open_device("CPU").family == "host", reason="needs a CPU device with kernels")


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def model(text, version=20, **weights):
    made = parser.parse_model(f'<ir_version: 9, opset_import: ["" : {version}]>\n' + text)
    made.graph.initializer.extend(numpy_helper.from_array(np.asarray(w), name) for name, w in weights.items())
    return made


def pair(made):
    """The model on the device alone, and on the host."""
    core = tunewright.Core()
    return core.compile_model(made, "CPU", {"HOST_FALLBACK": "NO"}), core.compile_model(made, "CPU.HOST")


def differences(mine, want):
    assert mine.keys() == want.keys()
    return [f"{name}: {text}" for name in want if (text := compare(mine[name], want[name]))]


@pytest.fixture(scope="module")
def residual():
    """Convolutions in the blocked layout with a residual, a concatenation, a slice, and most values as outputs."""
    weights = np.random.default_rng(1).standard_normal((16, 16, 3, 3)).astype(np.float32) * np.float32(0.1)
    made = model(
        """net (float[N,16,H,W] x) => (float[?,?,?,?] a, float[?,?,?,?] s, float[?,?,?,?] d, float[?,?,?,?] v,
                                        float[?,?,?,?] cut, float[?,?,?,?] wide, float[?,?,?] flat) {
            c = Conv <pads = [1, 1, 1, 1]> (x, w)
            a = Relu(c)
            b = Conv <pads = [1, 1, 1, 1]> (a, w)
            s = Add(b, a)
            d = Add(s, s)
            v = Identity(d)
            cut = Slice(a, eight, sixteen, one)
            wide = Concat <axis = 1> (a, cut, d)
            flat = Reshape(d, shape)
        }""",
        w=weights, eight=[8], sixteen=[16], one=[1], shape=[0, 16, -1],
    )  # fmt: skip
    return pair(made)


@pytest.mark.parametrize("shape", [(1, 16, 6, 6), (3, 16, 5, 9), (2, 16, 1, 1), (0, 16, 4, 4)])
def test_values_in_several_layouts_that_are_results_too(rng, residual, shape):
    mine, host = residual
    x = normal(rng, *shape)
    assert not differences(mine({"x": x}), host({"x": x}))


def test_results_are_the_callers_alone(rng, residual):
    mine, _ = residual
    x = normal(rng, 1, 16, 6, 6)
    first = mine({"x": x})
    kept = {name: y.copy() for name, y in first.items()}
    names = list(first)
    shared = [(a, b) for i, a in enumerate(names) for b in names[:i] if np.shares_memory(first[a], first[b])]
    assert not shared
    for y in first.values():
        y[...] = 7
    second = mine({"x": x})
    mine({"x": normal(rng, 1, 16, 6, 6)})
    assert all(np.array_equal(kept[name], second[name]) for name in kept)


def test_arrays_of_every_kind_as_inputs(rng, residual):
    mine, host = residual
    x = normal(rng, 2, 16, 5, 9)
    want = host({"x": x})
    locked = x.copy()
    locked.flags.writeable = False
    given = {"locked": locked, "columns first": np.asfortranarray(x), "every second": np.repeat(x, 2, axis=3)[..., ::2]}
    for offset in (1, 2, 4, 12):  # bytes: vectors of kernels must not expect alignment
        given[f"{offset} bytes off"] = np.frombuffer(bytes(offset) + x.tobytes(), np.float32, offset=offset).reshape(
            x.shape
        )
    for kind, array in given.items():
        assert not differences(mine({"x": array}), want), kind
    assert np.array_equal(locked, x)


def test_a_host_result_of_unknown_shape_feeds_kernels(rng):
    made = model(
        """net (float[A,B] x, bool[B] keep) => (float[?,?] y, int64[?,?] at) {
            some = Compress <axis = 1> (x, keep)
            turned = Transpose(some)
            y = MatMul(turned, x)
            found = NonZero(some)
            at = Transpose(found)
        }"""
    )
    mine = tunewright.Core().compile_model(made, "CPU")
    host = tunewright.Core().compile_model(made, "CPU.HOST")
    for rows, columns in ((3, 5), (7, 4), (1, 1)):
        feed = {"x": np.round(normal(rng, rows, columns)), "keep": np.arange(columns) % 2 == 0}
        assert not differences(mine(feed), host(feed))


# Ctrl-C


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no timers")
def test_a_request_that_was_interrupted_can_be_used_again(rng):
    """No kernel is left running, and no argument half set: several of these share one kernel object."""
    made = model(
        """net (float[N,64] x) => (float[?,?] y) {
            a = MatMul(x, w)
            b = Tanh(a)
            c = MatMul(b, v)
            d = Tanh(c)
            e = MatMul(d, w)
            f = Tanh(e)
            y = MatMul(f, v)
        }""",
        w=normal(rng, 64, 96) / 8, v=normal(rng, 96, 64) / 8,
    )  # fmt: skip
    mine, host = pair(made)
    request = mine.create_infer_request()
    x = normal(rng, 60, 64)
    want = host({"x": x})

    def stop(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    try:
        request.infer({"x": x})
        interrupted = 0
        for delay in rng.uniform(2e-5, 1e-3, 100):
            try:
                signal.setitimer(signal.ITIMER_REAL, delay)
                request.infer({"x": x})
                time.sleep(1e-3)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            pending = request.executor.queue.pending
            assert not pending, "kernels still write to memory that was given up"
            assert not differences(request.infer({"x": x}), want)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted


# Processes and threads


def _in_a_fork(results, compiled, made):
    signal.alarm(60)
    x = np.random.default_rng(2).standard_normal(1 << 20).astype(np.float32)  # enough to be shared among threads
    for use in (lambda: compiled, lambda: tunewright.Core().compile_model(made, "CPU")):
        results.put(bool(np.array_equal(use()({"x": x})["y"], np.maximum(x, 0))))
    other = model("net (float[N] x) => (float[N] y) { y = Neg(x) }")  # a kernel that nobody has loaded
    results.put(bool(np.array_equal(tunewright.Core().compile_model(other, "CPU")({"x": x})["y"], -x)))


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_works_and_does_not_hang(rng):
    """As servers fork workers that share a model, in the midst of what other threads do."""
    if open_device("CPU").family == "opencl":  # told in test_opencl_device.py
        pytest.skip("the threads of OpenCL's runtimes stay where they were")
    made = model("net (float[N] x) => (float[N] y) { y = Relu(x) }")
    compiled = tunewright.Core().compile_model(made, "CPU")
    compiled({"x": normal(rng, 1 << 20)})
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=_in_a_fork, args=(results, compiled, made))
    # as if other threads compiled and stored kernels just now: nobody lets go of their locks in the fork
    with compiled.env.device._programs._lock, KernelCache.of(compiled.settings)._lock:
        child.start()
    child.join(60)
    assert child.exitcode == 0
    assert [results.get() for _ in range(3)] == [True] * 3
    assert np.array_equal(compiled({"x": -np.ones(3, np.float32)})["y"], np.zeros(3)), "and the parent goes on"


@needs_results
def test_many_threads_with_many_shapes(rng, residual):
    mine, host = residual
    cases = [normal(rng, n, 16, h, w) for n, h, w in ((1, 8, 8), (2, 5, 7), (3, 3, 11))]
    wanted = [host({"x": x}) for x in cases]
    failures: list[str] = []

    def work(seed):
        generator = np.random.default_rng(seed)
        try:
            for _ in range(20):
                i = int(generator.integers(len(cases)))
                failures.extend(differences(mine({"x": cases[i]}), wanted[i]))
        except Exception as error:
            failures.append(repr(error))
            raise

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    assert not failures


def test_new_shapes_do_not_add_up_in_memory(rng):
    status = Path("/proc/self/statm")
    if not status.exists():
        pytest.skip("the system does not tell how much memory a process has")
    made = model(
        """net (float[N,8,H,W] x) => (float[?,?,?,?] y) {
            a = Conv <pads = [1, 1, 1, 1]> (x, w)
            b = Relu(a)
            y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (b)
        }""",
        w=normal(rng, 32, 8, 3, 3),
    )
    compiled = tunewright.Core().compile_model(made, "CPU", {"PLAN_CACHE_SIZE": 4})

    def resident():
        return int(status.read_text().split()[1]) * mmap.PAGESIZE

    def run(count, first):
        for i in range(first, first + count):
            compiled({"x": np.zeros((1, 8, 60 + i % 41, 60 + i % 37), np.float32)})

    run(20, 0)
    before = resident()
    run(150, 20)
    assert resident() - before < 40 << 20, "150 shapes with half a megabyte each, of which 4 plans are kept"
