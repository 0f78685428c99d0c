"""Every config key of documents 001 and 003 has its effect, and docs/config-keys.md names the test of it."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import parser

from helpers import opencl_runtime
from tunewright import Core, settings
from tunewright.devices import build_options
from tunewright.devices.base import Hints
from tunewright.devices.native import usable_cores as cores
from tunewright.errors import InputError, SettingsError
from tunewright.ir.types import DType, TensorType
from tunewright.measure import compile_pool
from tunewright.plugins.metrics import supported
from tunewright.plugins.single import open_device
from tunewright.runtime.requests.request import DeviceModel
from tunewright.settings import Settings
from tunewright.solvers.triton.source import compile_many

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "config-keys.md"
#: the keys as they stand in the documents
DOCUMENT_001 = {
    "CACHE_DIR", "PERF_COUNT", "CONFIG_FILE", "GPU_MODEL_PRIORITY", "GPU_PLUGIN_PRIORITY", "GPU_PLUGIN_THROTTLE",
    "CLDNN_ENABLE_FP16_FOR_QUANTIZED_MODELS", "GPU_NV12_TWO_INPUTS", "GPU_THROUGHPUT_STREAMS",
    "EXCLUSIVE_ASYNC_REQUESTS", "GPU_MAX_NUM_THREADS", "GPU_ENABLE_LOOP_UNROLLING", "CLDNN_PLUGIN_PRIORITY",
    "CLDNN_PLUGIN_THROTTLE", "CLDNN_GRAPH_DUMPS_DIR", "CLDNN_SOURCES_DUMPS_DIR", "DUMP_KERNELS", "TUNING_MODE",
    "TUNING_FILE",
}  # fmt: skip
DOCUMENT_003 = {"CPU_THREADS_NUM", "CLDND_PLUGIN_THROTTLE", "EXCLUSIVE_ASYNC_REQUESTS", "OMP_NUM_THREADS",
                "KMP_BLOCKTIME", "HETERO_DUMP_GRAPH_DOT"}  # fmt: skip

kernels = pytest.mark.skipif(open_device("CPU").family == "host", reason="needs a CPU device with kernels")
several = pytest.mark.skipif(open_device("CPU").target.units < 2, reason="needs two cores")


def network(text: str, opset: int = 17) -> Any:
    return parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]>\n{text}')


ADD = "g (float[4, 6] x) => (float[4, 6] y) { y = Add(x, x) }"
X = np.arange(24, dtype=np.float32).reshape(4, 6) - 12


def compiled(text: str = ADD, device: str = "CPU.HOST", opset: int = 17, **config: Any) -> DeviceModel:
    found = Core().compile_model(network(text, opset), device, config)
    assert isinstance(found, DeviceModel)
    return found


# ---- the page ----------------------------------------------------------------------------------------------------


def rows() -> list[tuple[str, str, str, str]]:
    """(document's key, ours, what it does or why not, test) of every row of the page's tables."""
    found = re.findall(r"^\| `(\w+)` \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    return [tuple(re.sub("`", "", part).strip() for part in row) for row in found]  # type: ignore[misc]


def test_the_page_has_every_key_of_the_documents_and_every_old_name() -> None:
    keys = [row[0] for row in rows()]
    assert len(keys) == len(set(keys)) and DOCUMENT_001 | DOCUMENT_003 | set(Settings.deprecated()) <= set(keys)


def test_the_page_agrees_with_what_is_supported() -> None:
    known = supported(open_device("CPU.HOST"))
    for key, ours, what, _ in rows():
        if ours == "-":
            assert what.startswith("not applicable") and any(kind in what for kind in ("OpenMP", "VPU", "FPGA")), key
            with pytest.raises(SettingsError, match="is not applicable"):
                Settings.make({key: "1"})
            continue
        assert ours in known and Settings.key(key) == ours, key
        assert key == ours or key in known[ours]["aliases"], key
        assert ("deprecated" in what) == (key in Settings.deprecated()), key


def test_every_key_of_the_page_has_a_test() -> None:
    there = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M)
    }
    for key, _, _, tests in rows():
        names = tests.split(", ")
        assert names and set(names) <= there, (key, set(names) - there)


# ---- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", sorted(Settings.deprecated()))
def test_an_old_name_is_understood_with_a_warning_that_names_the_new_one(old, caplog, monkeypatch) -> None:
    monkeypatch.setattr(settings, "_warned", set())
    new = Settings.deprecated()[old]
    kind = next(row["type"] for row in Settings.describe() if row["key"] == new)
    value = {"bool": "NO", "int": "2", "str": "folder" if new.endswith("DIR") else "LOW"}[kind]
    with caplog.at_level(logging.WARNING):
        found = [Settings.make({f"{prefix}{old}": value}).get(new) for prefix in ("KEY_", "")]
    assert found[0] == found[1] == Settings.make({new: value}).get(new)
    (told,) = caplog.records  # once
    assert old in told.getMessage() and new in told.getMessage()


def test_a_new_name_says_nothing(caplog) -> None:
    Settings.make({"NUM_STREAMS": 2, "THROUGHPUT_STREAMS": 2, "GPU_MODEL_PRIORITY": "LOW"})
    assert not caplog.records


# ---- streams, threads, order -------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["NUM_STREAMS", "THROUGHPUT_STREAMS", "GPU_THROUGHPUT_STREAMS"])
def test_streams_are_as_many_as_are_asked_for(key) -> None:
    made = compiled(**{key: 3})
    assert made.streams.count == 3 == made.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")


@pytest.mark.parametrize("word", ["AUTO", "auto", "GPU_THROUGHPUT_AUTO", "CPU_THROUGHPUT_AUTO", "-1"])
def test_streams_may_be_left_to_measurement(word) -> None:
    assert Settings.make({"NUM_STREAMS": word}).num_streams == -1


def test_streams_may_be_one_for_each_node() -> None:
    found = Settings.make({"CPU_THROUGHPUT_STREAMS": "CPU_THROUGHPUT_NUMA"}).num_streams
    assert found >= 1 and found in (1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))))


@several
def test_no_more_streams_than_the_application_has_requests() -> None:
    assert compiled(PERFORMANCE_HINT="THROUGHPUT").streams.count > 1
    few = compiled(PERFORMANCE_HINT="THROUGHPUT", PERFORMANCE_HINT_NUM_REQUESTS=1)
    assert few.streams.count == 1 == few.optimal_requests
    assert compiled(NUM_STREAMS=2, PERFORMANCE_HINT_NUM_REQUESTS=1).streams.count == 2  # who counts himself knows


def overlapping(config: dict[str, Any], meet: threading.Barrier | None = None) -> int:
    """The most callbacks that two models have at the same time; each takes a while, or until another is there."""
    now, most, lock = 0, 0, threading.Lock()

    def callback(request: Any, userdata: Any) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        if meet is None:
            time.sleep(0.03)
        else:
            meet.wait(60)
        with lock:
            now -= 1

    models = [compiled(NUM_STREAMS=2, **config) for _ in range(2)]
    requests = [model.create_infer_request() for model in models for _ in range(2)]
    for request in requests:
        request.set_callback(callback)
        request.start_async({"x": X})
    for request in requests:
        request.wait()
        np.testing.assert_array_equal(request.results["y"], 2 * X)
    return most


def test_exclusive_requests_of_all_models_run_one_after_the_other() -> None:
    assert overlapping({"EXCLUSIVE_ASYNC_REQUESTS": "YES"}) == 1
    assert overlapping({}, threading.Barrier(2)) > 1


BOUND = """
import json, os, sys
from pathlib import Path
import numpy as np
from onnx import parser
from tunewright import Core
def named(task):
    try:
        return (task / "comm").read_text()
    except OSError:  # a compiler's thread that has just ended
        return ""
def threads():
    tasks = Path("/proc/self/task").iterdir()
    return {int(task.name) for task in tasks if named(task).startswith("tunewright-0")}
before = threads()
core, model = Core({"CACHE_DIR": ""}), parser.parse_model(sys.argv[1])
compiled = core.compile_model(model, "CPU")
compiled({"x": np.zeros((512, 2048), np.float32)})
new = sorted(threads() - before)
found = [[sorted(os.sched_getaffinity(n)) for n in new]]
for mode in ("NO", "YES"):
    core.compile_model(model, "CPU", {"CPU_BIND_THREADS": mode})
    found.append([sorted(os.sched_getaffinity(n)) for n in new])
print(json.dumps(found))
"""


@kernels
@several
@pytest.mark.skipif(open_device("CPU").target.units != os.cpu_count(), reason="needs all cores")
@pytest.mark.parametrize("mode", ["YES", "NO", "NUMA"])
def test_threads_stay_where_they_are_bound_to(mode) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]>\ng (float[512, 2048] x) => (float[512, 2048] y) { y = Exp(x) }'
    child = subprocess.run(
        [sys.executable, "-c", BOUND, text], env={**os.environ, "TUNEWRIGHT_CPU_BIND_THREADS": mode},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    found, *later = json.loads(child.stdout)
    everywhere = sorted(os.sched_getaffinity(0))
    if mode == "NO":
        assert found and all(cores == everywhere for cores in found)
    elif mode == "NUMA" and len(cores.nodes()) > 1:
        assert found and all(set(cores) in cores.nodes() for cores in found)
    else:
        assert [core for (core,) in found] == everywhere
    assert later == [[everywhere] * len(found), [[core] for core in everywhere]], "as the last model says"


@several
def test_threads_are_spread_over_nodes(tmp_path: Path, monkeypatch) -> None:
    mine = sorted(os.sched_getaffinity(0))
    for number, text in enumerate([f"{mine[0]}", f"{mine[1]}-{mine[1]}", "4000-4001"]):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(f"{text}\n")
    nodes = cores.nodes(tmp_path)
    assert nodes == [{mine[0]}, {mine[1]}], "a node whose cores the process may not use is none"
    monkeypatch.setattr(cores, "nodes", lambda: nodes)
    assert [usable for _, usable in cores.places("NUMA", 3)] == [nodes[0], nodes[1], nodes[0]]


def test_kernels_are_built_on_as_many_threads_as_are_allowed(monkeypatch) -> None:
    monkeypatch.setattr(build_options, "cpu_count", lambda: 4)
    monkeypatch.setattr("tunewright.solvers.triton.source.compile_many.free_bytes", lambda: None)
    monkeypatch.setattr(compile_pool, "free_bytes", lambda: None)
    for key in ("COMPILATION_NUM_THREADS", "MAX_NUM_THREADS", "GPU_MAX_NUM_THREADS"):
        for given, want in ((3, 3), (0, 4), (-2, 4), (99, 4), (1, 1)):
            made = Settings.make({key: given})
            with build_options.using(made):
                assert compile_many.cores() == want
            assert compile_pool.useful(True, made.compilation_num_threads) == want
    assert compile_many.cores() == 4  # outside


@pytest.mark.skipif(not hasattr(os, "getpriority"), reason="the system has no niceness")
def test_what_builds_kernels_with_low_priority_gives_way() -> None:
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    for priority, want in (("LOW", min(19, mine + build_options.GIVES_WAY)), ("ANY", mine), ("HIGH", mine)):
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
            build_options.settle(child.pid, Settings.make({"HOST_TASK_PRIORITY": priority}).gpu_host_task_priority)
            assert os.getpriority(os.PRIO_PROCESS, child.pid) == want
            child.communicate(b"\n")


def test_cores_of_a_hybrid_processor_are_chosen_by_kind(tmp_path: Path, monkeypatch) -> None:
    first = min(os.sched_getaffinity(0))
    (tmp_path / "atom").write_text(f"{first}\n")
    monkeypatch.setattr(build_options, "_KINDS", {"LOW": tmp_path / "atom"})
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        build_options.settle(child.pid, "LOW")
        assert os.sched_getaffinity(child.pid) == {first}
        child.communicate(b"\n")


def asked(**config: Any) -> Hints:
    """What a request asks of its queue."""
    return compiled(**config).create_infer_request().executor._hints


PRIORITIES = [
    ({"MODEL_PRIORITY": "HIGH"}, "HIGH", "HIGH", "HIGH"),
    ({"GPU_MODEL_PRIORITY": "GPU_MODEL_PRIORITY_LOW"}, "LOW", "LOW", "LOW"),
    ({"GPU_MODEL_PRIORITY": "GPU_QUEUE_PRIORITY_HIGH|GPU_HOST_TASK_PRIORITY_LOW"}, "MEDIUM", "HIGH", "LOW"),
    ({"GPU_MODEL_PRIORITY": "GPU_QUEUE_PRIORITY_DEFAULT|GPU_HOST_TASK_PRIORITY_ANY"}, "MEDIUM", "MEDIUM", "ANY"),
    ({"GPU_MODEL_PRIORITY": "GPU_QUEUE_PRIORITY_MED"}, "MEDIUM", "MEDIUM", "ANY"),
    ({"MODEL_PRIORITY": "HIGH", "GPU_QUEUE_PRIORITY": "LOW"}, "HIGH", "LOW", "HIGH"),
    ({"GPU_QUEUE_PRIORITY": "LOW", "MODEL_PRIORITY": "HIGH"}, "HIGH", "LOW", "HIGH"),
]


@pytest.mark.parametrize(("config", "model", "queue", "task"), PRIORITIES)
def test_a_models_priority_is_its_queues_and_its_builds(config, model, queue, task) -> None:
    made = Settings.make(config)
    assert (made.model_priority, made.gpu_queue_priority, made.gpu_host_task_priority) == (model, queue, task)
    assert asked(**config).priority == queue


@pytest.mark.parametrize("key", ["GPU_PLUGIN_THROTTLE", "CLDNN_PLUGIN_THROTTLE", "PLUGIN_THROTTLE"])
def test_throttling_is_asked_of_the_queue(key) -> None:
    assert [asked(**{key: number}).throttle for number in "0123"] == ["MEDIUM", "LOW", "MEDIUM", "HIGH"]


@pytest.mark.parametrize("wrong", ["URGENT", "GPU_QUEUE_PRIORITY_URGENT", "HIGH|LOWEST", ""])
def test_a_wrong_priority_is_refused(wrong) -> None:
    with pytest.raises(SettingsError, match="PRIORITY"):
        Settings.make({"GPU_MODEL_PRIORITY": wrong})


# ---- what is compiled --------------------------------------------------------------------------------------------


def test_a_device_is_chosen_by_its_number() -> None:
    found = Core().compile_model(network(ADD), "CPU", {"DEVICE_ID": "HOST"})
    assert found.device_name == "CPU.HOST" == found.get_property("EXECUTION_DEVICES")[0]
    assert Core({"DEVICE_ID": "HOST"}).get_property("CPU", "DEVICE_ARCHITECTURE") == open_device("CPU.HOST").target.arch


def test_counters_are_collected_when_asked_for() -> None:
    counted = compiled(PERF_COUNT="YES").create_infer_request()
    counted.infer({"x": X})
    assert [row.type for row in counted.get_profiling_info()] == ["Add"]
    plain = compiled(PERF_COUNT="NO").create_infer_request()
    plain.infer({"x": X})
    assert plain.get_profiling_info() == []


LOOP = """
g (float[2] x) => (float[2] y)
<int64 trips = {3}, bool go = {1}>
{
    y = Loop (trips, go, x) <body = body (int64 i, bool c, float[2] a) => (bool d, float[2] b) {
        d = Identity(c)
        b = Add(a, a)
    }>
}
"""


@pytest.mark.parametrize("key", ["ENABLE_LOOP_UNROLLING", "GPU_ENABLE_LOOP_UNROLLING"])
def test_loops_are_unrolled_or_not(key) -> None:
    for value in ("YES", "NO"):
        made = compiled(LOOP, **{key: value})
        assert any(node.op == "Loop" for node in made.graph.nodes) == (value == "NO")
        np.testing.assert_array_equal(made({"x": X[0, :2]})["y"], 8 * X[0, :2])


QUANTISED = """
g (float16[4, 8] x, float16[8, 8] w) => (float16[4, 8] y)
<float16 s = {12288}, uint8 z = {128}>
{
    q = QuantizeLinear(x, s, z)
    d = DequantizeLinear(q, s, z)
    e = Exp(d)
    y = MatMul(e, w)
}
"""
PLAIN = "g (float16[4, 8] x, float16[8, 8] w) => (float16[4, 8] y) { e = Exp(x)\n y = MatMul(e, w) }"


def computed_in(text: str, value: str) -> tuple[set[DType], np.ndarray[Any, Any]]:
    """What its numbers are between inputs and outputs, and what it gives."""
    made = compiled(text, opset=21, CLDNN_ENABLE_FP16_FOR_QUANTIZED_MODELS=value)
    types = [v.type for node in made.graph.nodes if node.op == "MatMul" for v in node.main_inputs if v is not None]
    rng = np.random.default_rng(0)
    given = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in (("x", (4, 8)), ("w", (8, 8)))}
    found = made(given)["y"]
    assert found.dtype == np.float16
    return {t.dtype for t in types if isinstance(t, TensorType)}, found


def test_quantised_models_are_computed_in_half_precision_or_not() -> None:
    half, single = computed_in(QUANTISED, "YES"), computed_in(QUANTISED, "NO")
    assert half[0] == {DType.FLOAT16} and single[0] == {DType.FLOAT32}
    np.testing.assert_allclose(half[1], single[1], rtol=0.02, atol=0.02)
    assert computed_in(PLAIN, "YES")[0] == computed_in(PLAIN, "NO")[0] == {DType.FLOAT16}, "others are not meant"


PICTURE = "g (float[1, 3, 4, 6] x) => (float[1, 3, 4, 6] y) { y = Neg(x) }"


@pytest.mark.parametrize("device", ["CPU", "CPU.HOST"])
def test_frames_of_video_come_in_two_planes(device) -> None:
    made = compiled(PICTURE, device, GPU_NV12_TWO_INPUTS="YES")
    assert [(n, str(t)) for n, t in made.inputs.items()] == [("x/y", "uint8[1,4,6,1]"), ("x/uv", "uint8[1,2,3,2]")]
    rng = np.random.default_rng(0)
    light, colour = (rng.integers(0, 256, shape, dtype=np.uint8) for shape in ((1, 4, 6, 1), (1, 2, 3, 2)))
    y = light[..., 0].astype(np.float64) - 16
    u, v = (colour[..., i].astype(np.float64).repeat(2, 1).repeat(2, 2) - 128 for i in (0, 1))
    blue, green, red = 1.164 * y + 2.018 * u, 1.164 * y - 0.391 * u - 0.813 * v, 1.164 * y + 1.596 * v
    want = -np.stack([blue, green, red], 1).clip(0, 255)
    np.testing.assert_allclose(made({"x/y": light, "x/uv": colour})["y"], want, atol=1e-3)


@pytest.mark.parametrize(("text", "why"), [(ADD, "no input is a picture"), (PICTURE.replace("4, 6", "5, 6"), "even")])
def test_what_is_no_frame_of_video_is_told(text, why) -> None:
    with pytest.raises(SettingsError, match=why):
        compiled(text, NV12_TWO_INPUTS="YES")


def test_a_dynamic_batch_takes_fewer_examples_and_no_more() -> None:
    made = compiled(DYN_BATCH_ENABLED="YES")
    for count in (1, 4, 3):
        np.testing.assert_array_equal(made({"x": X[:count]})["y"], 2 * X[:count])
    with pytest.raises(InputError, match="batch<=4"):
        made({"x": np.zeros((5, 6), np.float32)})
    with pytest.raises(InputError, match="takes"):
        compiled()({"x": X[:2]})
    with pytest.raises(SettingsError, match="no fixed batch"):
        compiled("g (float[4, 6] x, float[3, 6] z) => (float[4, 6] y) { y = Identity(x) }", DYN_BATCH_ENABLED="YES")


# ---- what is kept and written ------------------------------------------------------------------------------------


@kernels
def test_compiled_kernels_are_kept_in_the_folder(tmp_path: Path) -> None:
    made = compiled("g (float[3, 5] x) => (float[3, 5] y) { y = Erf(x) }", "CPU", CACHE_DIR=str(tmp_path))
    made({"x": np.zeros((3, 5), np.float32)})
    assert any(path.is_file() and path.stat().st_size > 1000 for path in tmp_path.rglob("*"))


STEPS = "g (float[4, 6] x) => (float[4, 6] y) { a = Identity(x)\n b = Add(a, a)\n c = Identity(b)\n y = Relu(c) }"


@pytest.mark.parametrize("key", ["GRAPH_DUMPS_DIR", "CLDNN_GRAPH_DUMPS_DIR"])
def test_the_graph_is_drawn_after_each_pass(key, tmp_path: Path) -> None:
    compiled(STEPS, **{key: str(tmp_path / "new" / "graphs")})
    found = sorted((tmp_path / "new" / "graphs").iterdir())
    first, *others = [path for path in found if path.suffix == ".dot"]
    assert first.name == "g.000.given.dot" and len({path.stem for path in found}) * 2 == len(found) > 4
    assert first.read_text().count("Identity") == 2 and first.read_text().startswith("digraph")
    assert any("identities" in path.name and "Identity" not in path.read_text() for path in others)
    assert "Relu" in found[-1].read_text() and found[-1].suffix == ".txt"


@kernels
@pytest.mark.parametrize("key", ["SOURCES_DUMPS_DIR", "CLDNN_SOURCES_DUMPS_DIR"])
@pytest.mark.parametrize(
    ("device", "suffix", "words"),
    [("CPU", ".c", ("EXPORT void", "GID(0)")),
     pytest.param(opencl_runtime.NAME, ".cl", ("__kernel", "get_global_id"), marks=opencl_runtime.needs_opencl)],
)  # fmt: skip
def test_sources_of_kernels_are_written(key, device, suffix, words, tmp_path: Path) -> None:
    for _ in range(2):  # also when the kernel is in memory, or in the cache
        folder = tmp_path / str(_)
        compiled(STEPS, device, **{key: str(folder)})
        found = list(folder.iterdir())
        assert found and all(path.suffix == suffix for path in found)
        assert any(all(word in path.read_text() for word in words) for path in found)
        assert not any(path.name.startswith("program") for path in found), "they are named by their kernels"


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="GRAPH_DUMPS_DIR"):
        compiled(STEPS, GRAPH_DUMPS_DIR=str(tmp_path / "file"))


KERNEL = """
__kernel void leaky(const __global INPUT0_TYPE* x, __global OUTPUT0_TYPE* y)
{
    const size_t i = get_global_id(0) + INPUT0_PITCHES[0] * get_global_id(1);
    y[i] = x[i] < 0 ? x[i] * slope : x[i] + INPUT0_DIMS[1] * MORE;
}
"""
LAYER = """<?xml version="1.0"?>
<CustomLayer name="LeakyRelu" type="SimpleGPU" version="1">
  <Kernel entry="leaky">
    <Source filename="leaky.cl"/>
    <Define name="slope" type="float" param="alpha" default="0.01"/>
  </Kernel>
  <Buffers>
    <Tensor arg-index="0" type="input" port-index="0" format="BFYX"/>
    <Tensor arg-index="1" type="output" port-index="0" format="BFYX"/>
  </Buffers>
  <CompilerOptions options="-DMORE=1000"/>
  <WorkSizes global="F*(Y+X)/2,B" local="2,1"/>
</CustomLayer>
"""
LEAKY = "g (float[4, 6] x) => (float[4, 6] y) { a = Add(x, x)\n b = LeakyRelu<alpha = 0.25>(a)\n y = Neg(b) }"


def custom(folder: Path, layer: str = LAYER) -> str:
    (folder / "leaky.cl").write_text(KERNEL)
    (folder / "a layer.xml").write_text(layer)
    return f"'{folder / 'a layer.xml'}'"


@kernels
@pytest.mark.parametrize("config", [{}, {"CPU_THREADS_NUM": 1}, {"JOIN_LAUNCHES": "NO"}])
def test_kernels_of_the_users_own_are_used(config, tmp_path: Path) -> None:
    given = {"CONFIG_FILE": custom(tmp_path), "PERF_COUNT": "YES", **config}
    request = compiled(LEAKY, "CPU", **given).create_infer_request()
    found = request.infer({"x": X})["y"]
    np.testing.assert_array_equal(found, -np.where(X < 0, X / 2, 2 * X + 6000))
    assert "custom.LeakyRelu" in [row.kernel for row in request.get_profiling_info()]
    np.testing.assert_array_equal(request.infer({"x": X + 1})["y"][0], -(X[0] + 1) / 2)


@kernels
@pytest.mark.parametrize("wanted", ["YES", "NO"])
def test_the_users_kernels_are_written_as_they_are_built(wanted, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    compiled(LEAKY, "CPU", CONFIG_FILE=custom(tmp_path), DUMP_KERNELS=wanted)
    found = list(tmp_path.glob("LeakyRelu*.cl"))
    assert len(found) == (wanted == "YES")
    if found:
        text = found[0].read_text()
        assert "#define slope 0.25" in text and "#define MORE 1000" in text and KERNEL in text


WRONG_LAYERS = [
    ("<CustomLayer", "<CustomLayer name='x'><Kernel/></CustomLayer><CustomLayer", "needs a name"),
    ("leaky.cl", "missing.cl", "No such file"),
    ("SimpleGPU", "MKLDNN", "SimpleGPU"),
    ('format="BFYX"', 'format="BYXF"', "BYXF"),
    ('arg-index="1"', 'arg-index="4"', "arg-indices"),
    ("</CustomLayer>", "", "cannot be used"),
    ("F*(Y+X)/2", "F*(Y+X", "cannot be read"),
    ("F*(Y+X)/2", "__import__('os')", "may use integers"),
    ('<?xml version="1.0"?>', "<!DOCTYPE a [<!ENTITY b 'c'>]>", "entities"),
]


@kernels
@pytest.mark.parametrize(("old", "new", "why"), WRONG_LAYERS)
def test_a_file_of_kernels_that_cannot_be_used_is_told(old, new, why, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=why) as caught:
        compiled(LEAKY, "CPU", CONFIG_FILE=custom(tmp_path, LAYER.replace(old, new)))
    assert "CONFIG_FILE" in str(caught.value)


def test_a_kernel_that_does_not_take_the_tensors_leaves_them_to_others(tmp_path: Path) -> None:
    halves = LEAKY.replace("float[4, 6]", "float16[4, 6]")
    made = compiled(halves, "CPU", CONFIG_FILE=custom(tmp_path) if open_device("CPU").family != "host" else "")
    np.testing.assert_allclose(made({"x": X.astype(np.float16)})["y"], -np.where(X < 0, X / 2, 2 * X), rtol=1e-3)


@kernels
def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "custom-kernels.md").read_text(encoding="utf-8")
    for language, name in (("xml", "leaky.xml"), ("c", "leaky.cl")):
        (block,) = re.findall(rf"^```{language}\n(.*?)^```", page, re.M | re.S)
        (tmp_path / name).write_text(block)
    text = "g (float[2, 3, 4, 5] x) => (float[2, 3, 4, 5] y) { y = LeakyRelu<alpha = 0.25>(x) }"
    made = compiled(text, "CPU", CONFIG_FILE=str(tmp_path / "leaky.xml"), PERF_COUNT="YES")
    request, x = made.create_infer_request(), np.linspace(-1, 1, 120, dtype=np.float32).reshape(2, 3, 4, 5)
    np.testing.assert_allclose(request.infer({"x": x})["y"], np.where(x < 0, x / 4, x), rtol=1e-6)
    assert [row.kernel for row in request.get_profiling_info()] == ["custom.LeakyRelu"]


@kernels
def test_what_a_users_kernel_may_not_use_is_told_with_its_place(tmp_path: Path) -> None:
    file = custom(tmp_path)
    (tmp_path / "leaky.cl").write_text(KERNEL.replace("slope", "frobnicate(slope)"))
    with pytest.raises(SettingsError, match=r"(?s)CONFIG_FILE: .*leaky\.cl:5.*frobnicate"):
        compiled(LEAKY, "CPU", CONFIG_FILE=file)({"x": X})


def test_a_users_kernels_need_no_opencl() -> None:
    text = "import sys; import tunewright.solvers.custom; sys.exit('pyopencl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0
