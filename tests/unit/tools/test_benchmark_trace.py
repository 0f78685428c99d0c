"""Time lines: what is in a trace, that viewers can load it, copies, and ranges of other tools."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, defaultdict

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import tunewright
from helpers import opencl_runtime
from tunewright import tools
from tunewright.errors import InputError
from tunewright.ir.graph import Node
from tunewright.plugins.single import SingleDevice
from tunewright.runtime.insight import profiler_ranges, timeline
from tunewright.runtime.insight.timeline import Trace
from tunewright.settings import Settings


@pytest.fixture
def model():
    """A product with what is fused into it, a softmax, and a node that only the host runs."""
    w = np.random.default_rng(0).standard_normal((16, 8), np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="product"),
        helper.make_node("Relu", ["h"], ["r"], name="relu"),
        helper.make_node("Softmax", ["r"], ["s"], name="softmax"),
        helper.make_node("NonZero", ["s"], ["n"], name="nonzero"),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 16])],
        [helper.make_tensor_value_info("s", TensorProto.FLOAT, [4, 8]),
         helper.make_tensor_value_info("n", TensorProto.INT64, [2, None])],
        [numpy_helper.from_array(w, "w")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


X = {"x": np.ones((4, 16), np.float32)}


def span(event):
    """Nanoseconds, as Perfetto reads them: it multiplies and cuts off."""
    begin = int(event["ts"] * 1000)
    return begin, begin + int(event["dur"] * 1000)


def check_events(events):
    """The rules of the trace-event format (complete events, metadata, flows), and of tracks: events nest, to the
    nanosecond, since Perfetto drops those that do not. Tracks by name.
    """
    names, tracks, titles, flows = {}, defaultdict(list), [], defaultdict(list)
    for event in events:
        assert event["ph"] in "XMsf" and event["pid"] == 1 and isinstance(event["tid"], int)
        assert isinstance(event["name"], str) and event["name"]
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            if event["name"] == "process_name":
                titles.append(event["args"]["name"])
            elif event["name"] == "thread_name":
                names[event["tid"]] = event["args"]["name"]
            else:
                assert isinstance(event["args"]["sort_index"], int)
            continue
        assert isinstance(event["cat"], str) and event["cat"]
        assert isinstance(event["ts"], float) and event["ts"] >= 0
        if event["ph"] == "X":
            assert isinstance(event["dur"], float) and event["dur"] >= 0 and isinstance(event["args"], dict)
            tracks[event["tid"]].append(event)
        else:
            flows[event["id"]].append(event)
    assert len(set(names.values())) == len(names) and len(titles) == bool(tracks) and tracks.keys() == names.keys()
    for found in tracks.values():
        assert [event["ts"] for event in found] == sorted(event["ts"] for event in found)
        around = []
        for event in found:
            begin, end = span(event)
            while around and around[-1] <= begin:
                around.pop()
            assert not around or end <= around[-1], "events overlap without nesting"
            around.append(end)
    for begin, end in flows.values():
        assert (begin["ph"], end["ph"], end["bp"]) == ("s", "f", "e")
        for side in (begin, end):
            assert any(span(e)[0] <= int(side["ts"] * 1000) <= span(e)[1] for e in tracks[side["tid"]])
    return {names[key]: found for key, found in tracks.items()}


def inside(event, outer):
    return span(event)[0] >= span(outer)[0] and span(event)[1] <= span(outer)[1]


def planned(compiled):
    """Names of the steps that run, in the plan and in what follows it."""
    (plan,) = compiled.program.plans
    found = []
    while plan is not None:
        found += [s.node.name or s.node.output.name for s in plan.steps if not s.optimized_out]
        plan = next(iter(plan.rest.plans), None) if plan.rest is not None else None
    return Counter(found)


@pytest.mark.parametrize("device", ["CPU", "CPU.HOST"])
def test_every_kernel_is_there_once_in_each_inference(model, device):
    compiled = tunewright.Core({"PERF_COUNT": "YES"}).compile_model(model, device)
    compiled(X)
    begin = time.perf_counter()
    with Trace() as recorder:
        for _ in range(3):
            compiled(X)
    took = time.perf_counter() - begin
    tracks = check_events(recorder.events())
    inferences, kernels = tracks["main"], tracks[f"main: {device}"]
    assert len(inferences) == 3 and {e["cat"] for e in inferences} == {"inference"}
    assert sum(e["dur"] for e in inferences) <= took * 1e6
    want = planned(compiled)
    assert {"product", "softmax", "nonzero"} <= want.keys()
    for inference in inferences:
        assert Counter(e["args"]["node"] for e in kernels if inside(e, inference)) == want
    assert len(kernels) == 3 * sum(want.values())  # none is outside
    by_name = {e["args"]["node"]: e for e in kernels}
    assert by_name["nonzero"]["cat"] == ("control flow" if device == "CPU" else "host")
    assert by_name["product"]["args"]["op"] == "MatMul"
    assert by_name["product"]["args"]["kernel"] and by_name["product"]["args"]["origin"]


def test_a_body_is_inside_its_node():
    out = helper.make_tensor_value_info("p", TensorProto.FLOAT, [64, 64])
    bodies = [helper.make_graph([helper.make_node(op, ["x"], ["p"], name=op)], op, [], [out]) for op in ("Exp", "Sin")]
    node = helper.make_node("If", ["c"], ["y"], name="choice", then_branch=bodies[0], else_branch=bodies[1])
    graph = helper.make_graph(
        [node], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [64, 64]),
         helper.make_tensor_value_info("c", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [64, 64])],
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    compiled = tunewright.Core({"PERF_COUNT": "YES"}).compile_model(proto, "CPU.HOST")
    with Trace() as recorder:
        compiled({"x": np.ones((64, 64), np.float32), "c": np.asarray(True)})
    (choice, body) = check_events(recorder.events())["main: CPU.HOST"]
    assert (choice["name"], choice["cat"], body["name"]) == ("If choice", "control flow", "Exp")
    assert inside(body, choice)


def test_the_trace_of_a_benchmark(model, tmp_path, capsys):
    """Requests on their tracks, inferences on their streams, kernels below; what a viewer reads of a file."""
    path, target = tmp_path / "model.onnx", tmp_path / "trace.json"
    path.write_bytes(model.SerializeToString())
    code = tools.execute(["benchmark", str(path), "--streams", "2", "--requests", "4", "-n", "9", "--trace",
                          str(target)])  # fmt: skip
    err = capsys.readouterr().err
    assert code == 0 and f"events in {target}" in err
    content = json.loads(target.read_text())
    assert content["otherData"]["streams"] == 2 and content["otherData"]["model"] == str(path)
    tracks = check_events(content["traceEvents"])
    assert content["traceEvents"][0]["args"] == {"name": "model.onnx on CPU"}
    streams = [text for name in ("main", "stream 0", "stream 1") for text in (name, f"{name}: CPU")]
    order = [*(f"request {i}" for i in range(4)), *streams]  # who waits takes part: main
    assert list(tracks) == [name for name in order if name in tracks]  # one may have had nothing to do
    every = [e for found in tracks.values() for e in found]
    held = {e["name"]: e for e in every if e["cat"] == "request"}
    waiting = [e for e in every if e["cat"] == "waiting"]
    ran = {e["name"]: e for e in every if e["cat"] == "inference"}
    assert held.keys() == ran.keys() == {f"inference {i}" for i in range(9)}  # the warm-up is not part of it
    for name, event in ran.items():
        assert inside(event, held[name])
        (waited,) = (e for e in waiting if e["tid"] == held[name]["tid"] and inside(e, held[name]))
        assert span(waited) == (span(held[name])[0], span(event)[0])
    arrows = [e for e in content["traceEvents"] if e["ph"] in "sf"]
    starts, ends = ({e["id"]: (e["tid"], e["ts"]) for e in arrows if e["ph"] == phase} for phase in "sf")
    assert {starts[i]: ends[i] for i in starts} == {
        (held[name]["tid"], held[name]["ts"]): (event["tid"], event["ts"]) for name, event in ran.items()
    }
    for name, found in tracks.items():
        for kernel in found if name.endswith(": CPU") else ():
            assert sum(inside(kernel, inference) for inference in tracks[name.removesuffix(": CPU")]) == 1


def test_devices_that_share_requests_and_models_in_parts(tmp_path, capsys):
    """MULTI: whoever ran it; BATCH: one run for several; HETERO: one part leads to the next."""
    affinity, path, target = tmp_path / "a.json", tmp_path / "m.onnx", tmp_path / "t.json"
    nodes = [
        helper.make_node(op, [a], [b], name=op)
        for op, a, b in (("Exp", "x", "p"), ("Sin", "p", "q"), ("Tanh", "q", "y"))
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 8]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y])
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    )
    affinity.write_text('{"Sin": "CPU.HOST", "Exp": "CPU", "Tanh": "CPU"}')

    def traced(*arguments):
        assert tools.execute(["benchmark", str(path), "-n", "8", "--trace", str(target), *arguments]) == 0
        capsys.readouterr()
        events = json.loads(target.read_text())["traceEvents"]
        tracks = check_events(events)
        held = [e for name, found in tracks.items() if name.startswith("request") for e in found]
        assert sum(e["cat"] == "request" for e in held) == sum(e["cat"] == "waiting" for e in held) == 8
        ran = [e for found in tracks.values() for e in found if e["cat"] == "inference"]
        return Counter(e["name"] for e in ran), sum(e["ph"] == "s" for e in events)

    each = {f"inference {i}": 1 for i in range(8)}
    assert traced("-d", "MULTI:CPU,CPU.HOST") == (each, 8)
    assert traced("-d", "HETERO:CPU,CPU.HOST", "-c", f"HETERO_AFFINITY={affinity}") == (dict.fromkeys(each, 3), 24)
    names, arrows = traced("-d", "BATCH:CPU.HOST(4)", "--requests", "4", "-c", "AUTO_BATCH_TIMEOUT=5000")
    assert names == {"4 inferences": 2} and arrows == 8


@pytest.mark.parametrize(
    ("name", "op", "shown"),
    [
        ("/net/layer1/layer1.0/conv1/Conv", "Conv", "Conv layer1/layer1.0/conv1"),
        ("/net/layer1/layer1.0/conv1/Conv_1", "Conv", "Conv layer1/layer1.0/conv1_1"),
        ("Conv.5", "Conv", "Conv.5"),
        ("/", "Relu", "Relu"),
        ("product", "MatMul", "MatMul product"),
        ("fast", "com.microsoft::FusedMatMul", "FusedMatMul fast"),
    ],
)
def test_names_say_the_operation_first(name, op, shown):
    assert timeline._short(Node(op, name, {})) == shown


@pytest.mark.parametrize("first", [257_000, 531_710_000, 8_724_172_760_000])
def test_microseconds_are_the_same_nanoseconds_again(first):
    numbers = range(first, first + 10_000)
    assert all(int(timeline._microseconds(n) * 1000) == n for n in numbers)
    assert any(int(n / 1000 * 1000) != n for n in numbers), "else a plain division would do"


@opencl_runtime.needs_opencl
def test_copies_are_told_apart(model):
    device = opencl_runtime.device(shares_memory=False)
    read = tunewright.Core().read_model(model)
    compiled = SingleDevice(device).compile(read, Settings.make({"PERF_COUNT": "YES"}))
    request = compiled.create_infer_request()
    request.infer(X)
    with Trace() as recorder:
        request.infer(X)
    totals = request.get_totals()
    assert 0 < totals.copy_seconds < totals.seconds
    tracks = check_events(recorder.events())
    copies = [e for e in tracks[f"main: {device.name}"] if e["cat"] == "copy"]
    assert copies[0]["name"] == "inputs" and copies[0]["args"]["bytes"] == X["x"].nbytes
    assert any(e["name"] == "results" and e["args"]["bytes"] >= 4 * 8 * 4 for e in copies)
    assert sum(e["dur"] for e in copies) == pytest.approx(totals.copy_seconds * 1e6, rel=0.01)
    plain = SingleDevice(device).compile(read, Settings.make({})).create_infer_request()
    plain.infer(X)
    assert plain.get_totals().copy_seconds == 0.0


def test_another_clock_is_brought_to_the_hosts(model):
    """A device whose time began 500 seconds before ours: its kernels lie where the host saw them."""
    compiled = tunewright.Core().compile_model(model, "CPU.HOST")
    step = compiled.program.plans[0].steps[0]
    recorder, edges = Trace(), []
    for _ in range(5):
        begin = time.perf_counter()
        time.sleep(0.002)
        recorder.kernel("GPU.0", step, begin + 500.0, time.perf_counter() - begin, 1)
        edges.append((begin, time.perf_counter()))
    recorder.inference("GPU.0", edges[0][0], edges[-1][1])
    tracks = check_events(recorder.events())
    kernels = tracks["main: GPU.0"]
    zero = edges[0][0]
    for kernel, (begin, end) in zip(kernels, edges, strict=True):
        assert kernel["ts"] == pytest.approx((begin - zero) * 1e6, abs=300)
        assert kernel["ts"] + kernel["dur"] <= (end - zero) * 1e6 + 1


def test_one_trace_at_a_time_and_no_more_than_fits(model, monkeypatch, tmp_path):
    compiled = tunewright.Core().compile_model(model, "CPU.HOST")
    monkeypatch.setattr(timeline, "MOST", 2)
    with Trace() as recorder:
        with pytest.raises(InputError, match="is being recorded"), Trace():
            pass
        for _ in range(5):
            compiled(X)
    assert timeline.active is None
    assert len(recorder) == 2 and recorder.dropped == 3
    recorder.save(tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text())["otherData"] == {"dropped_events": 3}
    compiled(X)
    assert len(recorder) == 2
    with pytest.raises(InputError, match="cannot be written"):
        recorder.save(tmp_path / "absent" / "t.json")
    assert check_events(Trace().events()) == {}


#: the parts of the packages that are used, with a diary
NVTX = """
import contextlib
diary = []
@contextlib.contextmanager
def annotate(message=None, color=None, domain=None, category=None, payload=None):
    diary.append((domain, message))
    yield
    diary.append("end")
"""


def test_ranges_of_other_tools(model, tmp_path, monkeypatch):
    """Stand-ins with the packages' own interface: they are not installed where tests run."""
    (tmp_path / "nvtx.py").write_text(NVTX)
    (tmp_path / "ittapi.py").write_text(NVTX.replace("annotate(message=None, color=None, domain=None, category=None, "
                                                     "payload=None)", "task(message=None, domain=None)"))  # fmt: skip
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("nvtx", "ittapi"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    compiled = tunewright.Core({"JOIN_LAUNCHES": "NO"}).compile_model(model, "CPU.HOST")
    with profiler_ranges.listening() as found:
        assert found == ["nvtx", "ittapi"]
        compiled(X)
    assert profiler_ranges.active is None
    for name in found:
        diary = sys.modules.pop(name).diary
        assert diary[0] == ("tunewright", "inference on CPU.HOST") and diary[-1] == "end"
        assert ("tunewright", "product") in diary and diary.count("end") == len(diary) / 2


def test_without_the_packages_nothing_listens(monkeypatch):
    monkeypatch.setattr(profiler_ranges, "installed", list)
    with profiler_ranges.listening() as found:
        assert found == [] and profiler_ranges.active is None


def test_the_kernels_of_one_launch_end_with_it(model):
    compiled = tunewright.Core().compile_model(model, "CPU.HOST")
    steps = [step for step in compiled.program.plans[0].steps if not step.optimized_out][:2]
    recorder = Trace()
    recorder.inference("CPU", 10.0, 11.0)
    recorder.kernels("CPU", steps, [0.1, 0.2], 10.0, 10.9)
    recorder.kernels("CPU", steps, [0.1, 0.2], 20.0, 20.1)  # the device's clock says more than the host's: not before
    found = [(e["ts"], e["dur"], e["args"]["launches"]) for e in check_events(recorder.events())["main: CPU"]]
    assert [e[:2] for e in found] == [
        pytest.approx(pair) for pair in ((0.6e6, 0.1e6), (0.7e6, 0.2e6), (10e6, 0.1e6), (10.1e6, 0.2e6))
    ]
    assert [e[2] for e in found] == [1, 0, 1, 0]
