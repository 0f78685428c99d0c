"""The CPU device under several threads of the caller, in forks, and when somebody presses Ctrl-C."""

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
from onnx import parser

from tunewright import AsyncInferQueue, Core
from tunewright.plugins.single import open_device
from tunewright.testing import models

pytestmark = pytest.mark.skipif(open_device("CPU").family != "native", reason="needs the native CPU device")

#: some steps are shared among threads, some run in the caller alone
SHARED = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[192, 192] x, float[192, 192] w) => (float[192, 192] y, float[192] m)
{
    a = MatMul(x, w)
    b = Softmax(a)
    c = MatMul(w, b)
    y = Tanh(c)
    axes = Constant <value_ints = [1]> ()
    m = ReduceSum <keepdims = 0> (y, axes)
}
"""
#: too short for more than one thread
SHORT = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[3, 8] x, float[8, 8] w) => (float[3, 8] y) { a = MatMul(x, w)  y = Add(a, x) }
"""


def feeds(compiled, count):
    rng = np.random.default_rng(7)
    return [
        {name: rng.standard_normal(type.dims).astype(np.float32) / 8 for name, type in compiled.inputs.items()}
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def compiled():
    """Three models with some inputs, and their results one after the other."""
    protos = [parser.parse_model(SHARED), parser.parse_model(SHORT), models.transformer(layers=2, length=33)]
    found = []
    for proto in protos:
        model = Core().compile_model(proto, "CPU")
        inputs = feeds(model, 4)
        found.append((model, inputs, [model(each) for each in inputs]))
    return found


def same(got, want):
    return all(np.array_equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("how", ["infer", "shared", "async", "queue"])
def test_eight_threads_and_three_models(compiled, how):
    """To the bit what they are one after the other, whoever shares the cores."""
    wrong, done = [], []

    def work(number):
        rng = np.random.default_rng(number)
        requests = [model.create_infer_request() for model, _, _ in compiled]
        queues = [AsyncInferQueue(model, 2) for model, _, _ in compiled] if how == "queue" else []
        for _ in range(150):
            which, k = int(rng.integers(3)), int(rng.integers(4))
            model, inputs, wanted = compiled[which]
            if how == "queue":
                queues[which].set_callback(lambda r, want: wrong.append(1) if not same(r.results, want) else None)
                queues[which].start_async(inputs[k], wanted[k])
                queues[which].wait_all()
                continue
            if how == "infer":
                got = requests[which].infer(inputs[k])
            elif how == "shared":
                got = model(inputs[k])
            else:
                requests[which].start_async(inputs[k])
                requests[which].wait()
                got = requests[which].results
            if not same(got, wanted[k]):
                wrong.append((which, k))
        done.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert sorted(done) == list(range(8)) and not wrong


def test_a_load_beside_inferences(compiled):
    """Who compiles and who infers do not wait for each other for ever, and harm nobody."""
    stop, wrong = threading.Event(), []

    def infer():
        request, (_, inputs, wanted) = compiled[0][0].create_infer_request(), compiled[0]
        while not stop.is_set():
            wrong.extend(1 for each, want in zip(inputs, wanted, strict=True) if not same(request.infer(each), want))

    beside = [threading.Thread(target=infer) for _ in range(3)]
    for thread in beside:
        thread.start()
    try:
        for rows in range(1, 6):
            model = Core().compile_model(parser.parse_model(SHORT.replace("3, 8", f"{rows}, 8")), "CPU")
            (given,) = feeds(model, 1)
            np.testing.assert_allclose(model(given)["y"], given["x"] @ given["w"] + given["x"], rtol=1e-4, atol=1e-5)
    finally:
        stop.set()
        for thread in beside:
            thread.join(120)
    assert not wrong and not any(thread.is_alive() for thread in beside)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
@pytest.mark.parametrize("busy", [False, True])
def test_a_fork_infers(compiled, busy):
    """Its thread pool is its own; also where the parent's threads were in the middle of something."""
    stop = threading.Event()

    def infer():
        request = compiled[0][0].create_infer_request()
        while not stop.is_set():
            request.infer(compiled[0][1][0])

    beside = [threading.Thread(target=infer) for _ in range(2 if busy else 0)]
    for thread in beside:
        thread.start()
    requests = [model.create_infer_request() for model, _, _ in compiled]
    try:
        for request, (_, inputs, wanted) in zip(requests, compiled, strict=True):
            assert same(request.infer(inputs[0]), wanted[0])
        for _ in range(3):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # there are threads: that is what is tried
                child = os.fork()
            if not child:
                os._exit(_in_child(requests, compiled))
            assert _exit_code(child) == 0
            for request, (_, inputs, wanted) in zip(requests, compiled, strict=True):
                assert same(request.infer(inputs[1]), wanted[1])
    finally:
        stop.set()
        for thread in beside:
            thread.join(60)


def _in_child(requests, compiled):
    """The exit code of a child that infers with what it has of its parent."""
    signal.alarm(200)
    try:
        for request, (model, inputs, wanted) in zip(requests, compiled, strict=True):
            for given, want in zip(inputs, wanted, strict=True):
                request.start_async(given)
                if not request.wait() or not same(request.results, want):
                    return 2
                if not same(request.infer(given), want) or not same(model(given), want):
                    return 2
        return 0 if open_device("CPU").pool.cores == 1 or len(os.listdir("/proc/self/task")) > 1 else 3
    except BaseException:
        return 4


def _exit_code(child):
    end = time.monotonic() + 250
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "it did not end"


LONG = """<ir_version: 8, opset_import: ["" : 17]>
g (float[768, 768] x) => (float[768, 768] y) {{
    {steps}
    y = Tanh(a{last})
}}"""
INTERRUPTED = """
import json
import os
import signal
import sys
import threading
import time

import numpy as np
from onnx import parser

from tunewright import AsyncInferQueue, Core

how, compiled = sys.argv[2], Core().compile_model(parser.parse_model(sys.argv[1]), "CPU")
x = np.eye(768, dtype=np.float32)
want = compiled(x)["y"]
begin = time.perf_counter()
compiled(x)
seconds = time.perf_counter() - begin
request, pressed, delays = compiled.create_infer_request(), [], []
queue = AsyncInferQueue(compiled, 1)


def queued():
    # seconds that the first thread has waited for a core: the work of other processes, not ours
    try:
        return int(open(f"/proc/self/task/{os.getpid()}/schedstat").read().split()[1]) / 1e9
    except OSError:
        return 0.0


def press():
    time.sleep(seconds / 4)
    pressed.append((time.perf_counter(), queued()))
    os.kill(os.getpid(), signal.SIGINT)


for _ in range(5):
    pressing = threading.Thread(target=press)
    try:
        pressing.start()
        while True:  # until it comes, however busy the machine is
            if how == "infer":
                request.infer(x)
            elif how == "wait":
                request.start_async(x)
                request.wait()
            else:
                queue.start_async(x)
                queue.wait_all()
    except KeyboardInterrupt:
        at, before = pressed[-1]
        delays.append(time.perf_counter() - at - (queued() - before))
    pressing.join()
    if how == "infer":
        assert np.array_equal(request.infer(x)["y"], want)
        continue
    try:
        request.wait() if how == "wait" else queue.wait_all()  # where a stream runs it, it runs on
    except KeyboardInterrupt:
        pass
    if how == "wait":
        request.start_async(x)
        request.wait()
        assert np.array_equal(request.results["y"], want)
    else:
        queue.start_async(x)
        queue.wait_all()
        assert np.array_equal(next(iter(queue)).results["y"], want)
print(json.dumps({"seconds": seconds, "delays": delays}))
"""


#: products of an inference that somebody interrupts
COUNT = 90


@pytest.mark.parametrize("how", ["infer", "wait", "queue"])
def test_ctrl_c_comes_through(how):
    """Within 100 ms in the middle of an inference, and what was interrupted works again."""
    steps = "\n    ".join(f"a{k} = MatMul({f'a{k - 1}' if k else 'x'}, x)" for k in range(COUNT))
    text = LONG.format(steps=steps, last=COUNT - 1)
    command = [sys.executable, "-c", INTERRUPTED, text, how]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["seconds"] > 0.1, "long beside what is measured"
    assert statistics.median(found["delays"]) < 0.1, found
