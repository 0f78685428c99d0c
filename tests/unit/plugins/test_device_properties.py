"""Properties of devices and of compiled models: what is answered, and what is told of wrong questions."""

from __future__ import annotations

import gc
import json
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from helpers import opencl_runtime
from tunewright import Core, Model, tools
from tunewright.devices.host import cpu_count
from tunewright.devices.opencl.device import OpenCLDevice
from tunewright.errors import InputError, SettingsError
from tunewright.ir.types import DType
from tunewright.plugins import metrics
from tunewright.plugins.batching import batch_size
from tunewright.plugins.batching.batch_size import Batches, TriedBatch, measure_batches
from tunewright.plugins.single import SingleDevice, open_device, streams
from tunewright.runtime.insight.memory_usage import usage
from tunewright.settings import Settings

kernels = pytest.mark.skipif(open_device("CPU").family == "host", reason="needs a CPU device with kernels")
COUNT = 96


@pytest.fixture
def core() -> Core:
    return Core({"CACHE_DIR": ""})


def product(batch: Any = 1) -> Any:
    """x w + x, with weights of 96 by 96."""
    w = numpy_helper.from_array(np.full((COUNT, COUNT), 0.01, np.float32), "w")
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [batch, COUNT]) for n in "xy")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Add", ["a", "x"], ["y"])]
    graph = helper.make_graph(nodes, "product", [x], [y], [w])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


# ---- devices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["CPU", "CPU.HOST", "NULL", "MULTI:CPU,CPU.HOST", "AUTO", "HETERO:CPU.HOST,CPU"])
def test_what_is_supported_is_answered_and_described(core, device) -> None:
    known = core.get_property(device, "SUPPORTED_PROPERTIES")
    assert json.loads(json.dumps(known)).keys() == known.keys()
    read_only = {name for name, about in known.items() if about["read_only"]}
    assert set(core.get_property(device, "SUPPORTED_METRICS")) == read_only
    assert core.get_property(device, "SUPPORTED_CONFIG_KEYS") == [n for n in known if n not in read_only]
    for name, about in known.items():
        assert about["description"] and about["type"]
        if about["needs"]:
            with pytest.raises(SettingsError, match=about["needs"]):
                core.get_property(device, name)
            continue
        value = core.get_property(device, name)
        kinds = {"int": int, "str": str, "bool": bool, "float": float, "list": list, "dict": dict, "tuple": tuple}
        assert isinstance(value, kinds[about["type"]]) or (value is None and not about["read_only"]), name
        if not about["read_only"]:
            assert core.get_property(device, f"KEY_{name.lower()}") == value == core.settings.get(name)


def test_a_device_tells_what_it_is(core) -> None:
    opened = open_device("CPU")
    for name, want in {
        "FULL_DEVICE_NAME": opened.target.name, "AVAILABLE_DEVICES": core.available_devices,
        "DEVICE_ARCHITECTURE": opened.target.arch, "DEVICE_TYPE": "integrated",
        "DEVICE_TOTAL_MEM_SIZE": opened.memory_bytes, "RANGE_FOR_STREAMS": (1, opened.target.units),
        "RANGE_FOR_ASYNC_INFER_REQUESTS": (1, 2 * opened.target.units, 1),
    }.items():  # fmt: skip
        assert core.get_property("CPU", name) == want
    assert "GPU_EXECUTION_UNITS_COUNT" not in core.get_property("CPU", "SUPPORTED_PROPERTIES")


def test_what_devices_of_a_kind_have_is_a_gpus_alone() -> None:
    class Card(OpenCLDevice):  # a card with a memory and a name, which nothing is run on
        def __init__(self) -> None:
            from tunewright.devices.base import Target

            self.name, self.target = "GPU.0", Target("gpu", "card", "sm_00", 7)
            self.memory_bytes, self.pci, self._memory = 1 << 30, "0000:01:00.0", None

        uuid = "aa-bb"
        is_discrete = True

    card = Card()
    found = {name: metrics.get(card, name, Settings()) for name in metrics.metrics(card) if name[:3] in ("GPU", "DEV")}
    assert found.pop("GPU_MEMORY_STATISTICS") == dict.fromkeys(("constants", "arenas", "staging", "scratch"), 0)
    assert found == {
        "DEVICE_ARCHITECTURE": "sm_00", "DEVICE_TYPE": "discrete", "DEVICE_TOTAL_MEM_SIZE": 1 << 30,
        "DEVICE_UUID": "aa-bb", "DEVICE_PCI_INFO": "0000:01:00.0", "GPU_EXECUTION_UNITS_COUNT": 7,
        "GPU_DEVICE_TOTAL_MEM_SIZE": 1 << 30,
    }  # fmt: skip


@kernels
def test_capabilities_are_what_there_are_kernels_for() -> None:
    mine = metrics.capabilities(open_device("CPU"))
    assert set(mine) == {"FP32", "FP16", "BF16", "INT8", "WINOGRAD"}
    assert "WINOGRAD" not in metrics.capabilities(open_device("CPU.HOST"))
    plugin = SingleDevice(open_device("CPU"))
    for name, kind in (("FP32", DType.FLOAT32), ("FP16", DType.FLOAT16), ("BF16", DType.BFLOAT16)):
        tuner = metrics.Tuner(Settings())
        accepting, _ = tuner.ask(metrics._product(kind), plugin.device)
        assert any(not s.host for s in accepting) == (name in mine)


@pytest.mark.parametrize(
    ("device", "wrong", "meant"),
    [("CPU", "FULL_DEVICE_NAM", "FULL_DEVICE_NAME"), ("CPU", "NUM_STREEMS", "NUM_STREAMS"),
     ("CPU", "RANGE_STREAMS", "RANGE_FOR_STREAMS"), ("MULTI:CPU", "FULL_NAME", "FULL_DEVICE_NAME")],
)  # fmt: skip
def test_an_unknown_property_names_the_closest_one(core, device, wrong, meant) -> None:
    with pytest.raises(SettingsError, match=f"did you mean {meant}"):
        core.get_property(device, wrong)


def test_what_can_only_be_read_is_not_set(core) -> None:
    for set_it in (core.set_property, Core, lambda config: core.compile_model(product(), "CPU.HOST", config)):
        with pytest.raises(SettingsError, match="FULL_DEVICE_NAME can only be read"):
            set_it({"FULL_DEVICE_NAME": "mine"})
    with pytest.raises(SettingsError, match="asked without options"):
        core.get_property("CPU", "FULL_DEVICE_NAME", {"MODEL_PTR": None})


# ---- compiled models ------------------------------------------------------------------------------------------------


def test_a_compiled_model_tells_what_it_is(core) -> None:
    made = core.compile_model(product(), "CPU.HOST", {"NUM_STREAMS": 2})
    known = made.get_property("SUPPORTED_PROPERTIES")
    assert json.loads(json.dumps(known)).keys() == known.keys()
    for name in known:
        made.get_property(name)
    assert made.get_property("NETWORK_NAME") == made.get_property("MODEL_NAME") == "product"
    assert made.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS") == made.get_property("NUM_STREAMS") == 2
    assert made.get_property("EXECUTION_DEVICES") == ["CPU.HOST"]
    assert not known["GPU_QUEUE_PRIORITY"]["read_only"] and known["NUM_STREAMS"]["read_only"]


def test_priorities_of_a_compiled_model_hold_for_requests_to_come(core) -> None:
    made = core.compile_model(product(), "CPU.HOST")
    before = made.create_infer_request()
    made.set_property({"GPU_MODEL_PRIORITY": "GPU_MODEL_PRIORITY_HIGH", "GPU_QUEUE_THROTTLE": "LOW"})
    after = made.create_infer_request()
    assert [r.executor._hints.priority for r in (before, after)] == ["MEDIUM", "HIGH"]
    assert made.get_property("GPU_QUEUE_THROTTLE") == "LOW" and core.settings.gpu_queue_throttle == "MEDIUM"


@pytest.mark.parametrize(
    ("config", "why"),
    [({"NUM_STREAMS": 2}, "give it to compile_model"), ({"THROUGHPUT_STREAMS": 2}, "can only be read"),
     ({"MODEL_NAME": "x"}, "can only be read"), ({"MODEL_NAM": 1}, "did you mean MODEL_NAME"),
     ({"GPU_QUEUE_PRIORITY": "x"}, "is not one of")],
)  # fmt: skip
def test_what_a_compiled_model_cannot_change_is_told(core, config, why) -> None:
    made = core.compile_model(product(), "CPU.HOST")
    with pytest.raises(SettingsError, match=why):
        made.set_property(config)
    with pytest.raises(SettingsError, match="did you mean NETWORK_NAME"):
        made.get_property("NETWRK_NAME")


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_memory_is_counted_while_it_is_held(core) -> None:
    gc.collect()
    before = core.get_property("CPU.HOST", "MEMORY_STATISTICS")
    made = core.compile_model(product(4), "CPU.HOST")
    weights = COUNT * COUNT * 4
    assert made.get_property("MEMORY_STATISTICS") == {"constants": weights, "arenas": 0, "staging": 0, "scratch": 0}
    requests = [made.create_infer_request() for _ in range(3)]
    for request in requests:
        request.infer({"x": np.ones((4, COUNT), np.float32)})
    arenas = made.get_property("MEMORY_STATISTICS")["arenas"]
    assert arenas == 3 * made.program.plans[0].arena_bytes
    now = core.get_property("CPU.HOST", "MEMORY_STATISTICS")
    assert now["constants"] - before["constants"] == weights and now["arenas"] - before["arenas"] == arenas
    del made, requests, request
    gc.collect()
    assert core.get_property("CPU.HOST", "MEMORY_STATISTICS") == before


@opencl_runtime.needs_opencl
def test_memory_of_a_device_of_its_own_is_counted(core) -> None:
    device = opencl_runtime.device(shares_memory=False)
    made = SingleDevice(device).compile(core.read_model(product(4)), core.settings)
    request = made.create_infer_request()
    x = np.ones((4, COUNT), np.float32)
    request.infer({"x": x})
    found = usage([made])
    assert found["staging"] == 2 * x.nbytes, "input and result"
    assert found["arenas"] == made.program.plans[0].arena_bytes and found["constants"] >= COUNT * COUNT * 4
    assert device.held()["constants"] >= COUNT * COUNT * 4
    assert open_device("CPU").held() == {}


# ---- batches --------------------------------------------------------------------------------------------------------


def test_the_largest_and_the_best_batch() -> None:
    rates = [10.0, 19.0, 30.0, 29.5, 29.6, 20.0, 15.0]
    found = Batches(tuple(TriedBatch(1 << k, rate, 0) for k, rate in enumerate(rates)), "")
    assert (found.largest, found.optimal) == (16, 4)


def script(monkeypatch, seconds) -> None:
    """Times of inferences as they would be: by batch."""
    monkeypatch.setattr(batch_size.Timed, "seconds", lambda timed: seconds(timed.batch))
    monkeypatch.setattr(batch_size, "EACH_SECONDS", 0.0)


def test_batches_end_where_they_lose_speed(core, monkeypatch) -> None:
    script(monkeypatch, lambda n: 1.0 + n if n <= 16 else 2.0 * n)
    model = core.read_model(product("n"))
    found = measure_batches(open_device("CPU.HOST"), core.settings, {"MODEL_PTR": model})
    assert [one.batch for one in found.tried] == [1, 2, 4, 8, 16, 32, 64] and "lose speed" in found.ended
    assert (found.largest, found.optimal) == (16, 16)
    assert core.get_property("CPU.HOST", "MAX_BATCH_SIZE", {"MODEL_PTR": model, "MAX_BATCH": 4}) == 4
    script(monkeypatch, lambda n: float(n))
    options = {"KEY_MODEL_PTR": model, "MAX_BATCH": 8, "GPU_THROUGHPUT_STREAMS": 2}
    assert core.get_property("CPU.HOST", "OPTIMAL_BATCH_SIZE", options) == 1
    assert core.get_property("CPU.HOST", "MAX_BATCH_SIZE", options) == 8


def test_batches_end_where_they_do_not_fit(core, monkeypatch) -> None:
    script(monkeypatch, lambda n: 1.0)
    options = {"MODEL_PTR": core.read_model(product()), "AVAILABLE_DEVICE_MEM_SIZE": COUNT * COUNT * 4 + 10_000}
    one = measure_batches(open_device("CPU.HOST"), core.settings, options)
    two = measure_batches(open_device("CPU.HOST"), core.settings, {**options, "NUM_STREAMS": 2})
    assert "does not fit" in one.ended and one.largest == 2 * two.largest > 1
    assert all(tried.nbytes <= options["AVAILABLE_DEVICE_MEM_SIZE"] for tried in (*one.tried, *two.tried))


def test_batches_are_really_measured(core, tmp_path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(product().SerializeToString())
    options = {"MODEL_PTR": path, "MAX_BATCH": 2, "TIME_LIMIT": 5}
    found = measure_batches(open_device("CPU.HOST"), core.settings, options)
    assert [one.batch for one in found.tried] == [1, 2] and all(one.rate > 10 for one in found.tried)
    assert streams(open_device("CPU.HOST"), core.settings) == 1


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"MODEL_PTR": 3}, SettingsError, "is not a model"),
        ({"TIME_LIMIT": 1}, SettingsError, "is not a model"),
        ({"MODEL_PTR": "model", "TIME_LIMIT": 0}, SettingsError, "above 0"),
        ({"MODEL_PTR": "model", "BATCHES": 1}, SettingsError, "unknown setting BATCHES"),
        ({"MODEL_PTR": "open"}, InputError, "other open dimensions"),
    ],
)
def test_wrong_questions_about_batches(core, options, error, why) -> None:
    models: dict[Any, Model] = {"model": core.read_model(product())}
    models["open"] = models["model"].reshape([1, "k"])
    given = options | {"MODEL_PTR": models.get(options.get("MODEL_PTR"), options.get("MODEL_PTR"))}
    with pytest.raises(error, match=why):
        core.get_property("CPU.HOST", "MAX_BATCH_SIZE", given)


# ---- commands -------------------------------------------------------------------------------------------------------


def test_properties_on_the_command_line(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    path = tmp_path / "model.onnx"
    path.write_bytes(product().SerializeToString())
    monkeypatch.setattr(batch_size, "MOST", 2)
    assert tools.execute(["devices", "--device", "CPU.HOST", "--model", str(path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["devices"]
    about = found["properties"]
    assert about["RANGE_FOR_STREAMS"] == [1, cpu_count()] and "FP32" in about["OPTIMIZATION_CAPABILITIES"]
    assert about["MAX_BATCH_SIZE"] in (1, 2) and about["BATCHES"].keys() == {"1", "2"}
    assert tools.execute(["devices", "--properties", "--device", "CPU", "--config", "DEVICE_ID=HOST"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("CPU.HOST") and "OPTIMIZATION_CAPABILITIES" in out and "MEMORY_STATISTICS" in out


def test_one_setting_on_the_command_line(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    assert tools.execute(["settings", "GPU_THROUGHPUT_STREAMS", "CPU_BIND_THREADS"]) == 0
    out = capsys.readouterr().out
    assert "NUM_STREAMS" in out and "a number or AUTO" in out and "YES, NO, NUMA" in out and "old names" in out
    assert tools.execute(["settings", "NUM_STREEMS"]) != 0
    assert "did you mean NUM_STREAMS?" in capsys.readouterr().err
    assert tools.execute(["settings", "MODEL_PRIORITY", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["values"] == ["LOW", "MEDIUM", "HIGH"] and row["aliases"] == ["GPU_MODEL_PRIORITY"]
