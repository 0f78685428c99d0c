"""CPU_THREADS_NUM: how many threads an inference uses, told by their processor time, and what a key says of it."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tunewright import Core
from tunewright.errors import DeviceError, SettingsError
from tunewright.ir.types import DType, TensorType
from tunewright.knowledge.key import Where
from tunewright.measure.isolated import Isolated, measurer_for
from tunewright.plugins.single import open_device
from tunewright.settings import Settings
from tunewright.solvers.base import Problem

pytestmark = [
    pytest.mark.skipif(open_device("CPU").family == "host", reason="needs a CPU device with kernels"),
    pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not tell times of threads"),
]
several = pytest.mark.skipif(open_device("CPU").target.units < 2, reason="needs two cores")


NETWORK = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[256, 256] x, float[256, 256] w) => (float[256, 256] y)
{
    a = MatMul(x, w)
    b = Softmax(a)
    c = MatMul(w, b)
    d = Tanh(c)
    y = MatMul(d, a)
}
"""


ONE = """
import sys
import time
from pathlib import Path
import numpy as np
from onnx import parser
from tunewright import Core
from tunewright.plugins.single import open_device

def spent():
    # nanoseconds of processor time of each thread so far
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0])
        except OSError:  # it has just ended
            continue
    return found

x, w = (np.random.default_rng(seed).standard_normal((256, 256)).astype(np.float32) / 16 for seed in (0, 1))
feed, join = {"x": x, "w": w}, sys.argv[2]
device = open_device("CPU")
one = device.with_threads(1)
assert one.target.units == 1 and one is device.with_threads(1) is not device

def request(**config):
    # without a kernel cache: a thread of its own would fill it
    model = Core().read_model(parser.parse_model(sys.argv[1]))
    return Core({"CACHE_DIR": ""}).compile_model(model, "CPU", config).create_infer_request()

made, every = request(CPU_THREADS_NUM=1, JOIN_LAUNCHES=join), request()
assert made.model.env.device is one
want, got = every.infer(feed), made.infer(feed)
for name in want:
    np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-5)
time.sleep(0.2)  # what workers looked for work
before, begin = spent(), time.perf_counter()
while time.perf_counter() - begin < 20 and sum(spent().values()) - sum(before.values()) < 0.3e9:
    for _ in range(20):
        made.infer(feed)
delta = {task: ns - before.get(task, 0) for task, ns in spent().items()}
wall = (time.perf_counter() - begin) * 1e9  # last: to ask many threads takes milliseconds of this one's time
mine = delta.pop(int(Path("/proc/thread-self").resolve().name))
others = sum(delta.values())
assert others < 0.1 * mine and mine < 1.05 * wall, (mine, others, wall)
"""


@several
@pytest.mark.parametrize("join", ["YES", "NO"])
def test_one_thread_is_the_callers(join):
    """In a process of its own: here there are threads of other tests."""
    _python(ONE, join)


PER_MODEL = """
import sys
import threading
import numpy as np
from onnx import parser
from tunewright.devices.native import usable_cores as cores
cores.count = lambda: 4
from tunewright import AsyncInferQueue, Core
model, x = parser.parse_model(sys.argv[1]), np.full((256, 256), 1 / 16, np.float32)
want, models = Core().compile_model(model, "CPU.HOST")([x, x])["y"], []
for config, units in [
    ({}, 4), ({"CPU_THREADS_NUM": 3}, 3), ({"CPU_THREADS_NUM": 1}, 1), ({"CPU_THREADS_NUM": 99}, 4),
    ({"NUM_STREAMS": 2}, 2), ({"NUM_STREAMS": 3}, 1), ({"NUM_STREAMS": 2, "CPU_THREADS_NUM": 3}, 1),
    ({"PERFORMANCE_HINT": "THROUGHPUT"}, 1),
]:
    compiled = Core().compile_model(model, "CPU", config)
    request = compiled.create_infer_request()
    for _ in range(3):
        np.testing.assert_allclose(request.infer([x, x])["y"], want, rtol=1e-4, atol=1e-5)
    ((plan, frame),) = request.executor.frames()
    threads = int(frame.segments[0].bound.table[1])
    assert compiled.env.device.target.units == threads == units, (config, threads, units)
    assert compiled.streams.count == (4 if "PERFORMANCE_HINT" in config else config.get("NUM_STREAMS", 1))
    models.append(compiled)

wrong = []
def work(compiled):
    queue = AsyncInferQueue(compiled)
    queue.set_callback(lambda request, _: np.testing.assert_allclose(request.results["y"], want, rtol=1e-4, atol=1e-5))
    try:
        for _ in range(20):
            queue.start_async([x, x])
        queue.wait_all()
    except BaseException as error:
        wrong.append(error)
threads = [threading.Thread(target=work, args=(each,)) for each in models]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(280)
assert not wrong and not any(thread.is_alive() for thread in threads), wrong
"""


@pytest.mark.skipif(open_device("CPU").family != "native", reason="needs the native CPU device")
def test_each_model_has_its_own_number_of_threads():
    """Of four, on however many cores; and they run side by side."""
    _python(PER_MODEL)


def test_the_variable_of_the_environment_limits_all_models():
    _python(
        """
from tunewright import Core
from onnx import parser
import sys
made = Core().compile_model(parser.parse_model(sys.argv[1]))
assert made.env.device.target.units == 1, made.env.device.target
""",
        TUNEWRIGHT_CPU_THREADS_NUM="1",
    )


@several
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")
def test_cores_that_the_process_may_not_use_do_not_count():
    _python("""
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from tunewright.plugins.single import open_device
assert open_device("CPU").target.units == 1, open_device("CPU").target
""")


def _python(text, *arguments, **variables):
    command = [sys.executable, "-c", textwrap.dedent(text), NETWORK, *arguments]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def confined(threads):
    return open_device("CPU", Settings.make({"CPU_THREADS_NUM": threads}))


@several
def test_a_key_tells_the_number_of_threads():
    every, one = confined(0), confined(1)
    assert one is confined(1) and every is confined(10**6) and one is not every
    a, b = (vars(Where.of(device.target)) for device in (every, one))
    assert {name for name in a if a[name] != b[name]} == {"units"} and b["units"] == 1


@several
def test_what_is_tuned_is_tuned_with_as_many_threads():
    """The worker has them too: else its target would be another one, and it would not be asked."""
    settings, type = Settings.make({"CPU_THREADS_NUM": 1}), TensorType(DType.FLOAT32, (64, 64))
    device = confined(1)
    softmax = Problem("Softmax", (type,), (type,), {"axis": -1}, constant=(False,))
    with Isolated(device.name, 20.0, settings=settings, target=device.target) as right:
        assert right.pose(softmax) is None
    settings = Settings.make({"CPU_THREADS_NUM": 0})
    wrong = Isolated(device.name, 20.0, settings=settings, target=device.target)
    with wrong, pytest.raises(DeviceError, match="opened another device"):
        wrong.pose(softmax)
    # one of several streams: its share of the threads, whatever the settings give the whole device
    shared = measurer_for(device, settings)
    assert isinstance(shared, Isolated) and shared.pose(softmax) is None
    assert measurer_for(device, settings) is shared
    shared.close()


@pytest.mark.parametrize("wrong", ["-1", "some", "1.5"])
def test_wrong_numbers_are_refused(wrong):
    with pytest.raises(SettingsError, match="CPU_THREADS_NUM"):
        Core({"CPU_THREADS_NUM": wrong})
