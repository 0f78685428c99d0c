"""NUM_STREAMS = AUTO: measured once, kept, and used by whoever comes next; and streams share the cores out."""

import json
import logging
import os
import statistics
import threading
import time

import numpy as np
import pytest
from onnx import helper, numpy_helper, parser

from helpers import opencl_runtime
from helpers.made_devices import made
from tunewright import AsyncInferQueue, Core, tools
from tunewright.devices import host
from tunewright.knowledge.streams import StreamsAnswer, StreamsFile, key
from tunewright.plugins.batching import streams
from tunewright.plugins.batching.streams import ServingPoint
from tunewright.plugins.single import open_device
from tunewright.settings import Settings

#: everywhere, and quick to compile; its threads are numpy's, so they are not shared out
HOST = "CPU.HOST"
NETWORK = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[{rows}, 8] x, int64[{rows}] i) => (float[{rows}, 8] y)
<float[8, 8] w = {{{weights}}}, float[2, 8] table = {{{table}}}>
{{
    a = MatMul(x, w)
    b = Gather(table, i)
    y = Add(a, b)
}}
"""


def network(rows=3, seed=0):
    rng = np.random.default_rng(seed)
    texts = {name: ", ".join(f"{v:.3f}" for v in rng.random(n)) for name, n in (("weights", 64), ("table", 16))}
    return parser.parse_model(NETWORK.format(rows=rows, **texts))


@pytest.fixture
def core(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "SECONDS", 0.15)
    monkeypatch.setattr(streams, "TURN", 0.01)
    measure = streams.measure

    def patient(models, inputs, seconds):
        """On a machine that is busy the little time may be over before there were enough rounds."""
        while (found := measure(models, inputs, seconds)) is None:
            seconds *= 2
        return found

    monkeypatch.setattr(streams, "measure", patient)
    monkeypatch.setattr(streams, "doubt_of", lambda rates, others: "")  # of the machine that runs the tests
    return Core({"USER_DB_PATH": str(tmp_path / "kb"), "NUM_STREAMS": "AUTO"})


def never(*arguments):
    raise AssertionError("it was measured again")


def test_measured_once_and_kept(core, monkeypatch, caplog, capsys):
    caplog.set_level(logging.INFO, "tunewright")
    units = open_device(HOST).target.units
    first = core.compile_model(network(), HOST)
    assert first.streams_origin.startswith("measured now") and "comparing" in caplog.text
    assert 1 <= first.streams.count <= units and first.optimal_requests in (
        first.streams.count,
        2 * first.streams.count,
    )
    assert first.settings.num_streams == first.streams.count
    feed = {"x": np.ones((3, 8), np.float32), "i": np.zeros(3, np.int64)}
    want = first(feed)["y"]

    monkeypatch.setattr(streams, "measure", never)
    for config in ({}, {"NUM_STREAMS": 0, "PERFORMANCE_HINT": "THROUGHPUT"}):
        again = core.compile_model(network(seed=1), HOST, config=config)  # weights do not matter
        assert (again.streams.count, again.optimal_requests) == (first.streams.count, first.optimal_requests)
        assert again.streams_origin.startswith("measured 20")
    np.testing.assert_allclose(core.compile_model(network(), HOST)(feed)["y"], want, rtol=1e-5)
    alone = core.compile_model(network(), HOST, config={"NUM_STREAMS": 0})
    assert alone.streams.count == 1 and not alone.streams_origin
    with pytest.raises(AssertionError, match="measured again"):
        core.compile_model(network(rows=4), HOST)
    with pytest.raises(AssertionError, match="measured again"):
        core.compile_model(network(), HOST, config={"FIND_ENFORCE": 4, "AUTO_TUNE_MODE": "NO_TUNE"})

    folder = core.settings.user_db_path
    kept = StreamsFile.of(core.settings)
    before = kept.read()
    core.query_requests(network(), HOST, {"FIND_ENFORCE": 5})
    assert kept.read() == before and len(before) == 1
    assert tools.execute(["kb", "streams", "--json", "-c", f"USER_DB_PATH={folder}"]) == 0
    shown = json.loads(capsys.readouterr().out)["models"]
    assert [row["streams"] for row in shown] == [first.streams.count]
    gone = core.compile_model(network(), HOST, config={"FIND_ENFORCE": 5})
    assert not kept.read() and gone.streams.count == units and not gone.streams_origin


def test_what_a_busy_machine_said_is_measured_again_by_the_next_load(core, monkeypatch):
    """NUM_STREAMS = AUTO kept 1x1 from a loaded moment for ever."""
    said = []
    monkeypatch.setattr(streams, "doubt_of", lambda rates, others: said.append(1) or "others used 80% of the processor")
    monkeypatch.setattr(streams, "measure", lambda models, inputs, seconds: {
        point: [200.0 if point.streams == 1 else 100.0] * 4 for point in models
    })  # fmt: skip
    first = core.compile_model(network(), HOST)
    assert first.streams.count == 1 and len(said) == 2, "it is measured twice before it is kept with its doubt"
    assert "others used 80% of the processor: the next load measures again" in first.streams_origin
    hinted = core.compile_model(network(), HOST, config={"NUM_STREAMS": 0, "PERFORMANCE_HINT": "THROUGHPUT"})
    assert hinted.streams.count == 1 and len(said) == 2, "who does not measure uses it"
    disabled = core.compile_model(network(), HOST, config={"TUNING_MODE": "TUNING_DISABLED"})
    assert disabled.streams.count == 1 and len(said) == 2

    monkeypatch.setattr(streams, "doubt_of", lambda rates, others: said.append(1) or "")
    monkeypatch.setattr(streams, "measure", lambda models, inputs, seconds: {
        point: [100.0 * point.streams] * 4 for point in models
    })  # fmt: skip
    second = core.compile_model(network(), HOST)
    assert second.streams.count == open_device(HOST).target.units and len(said) == 3
    monkeypatch.setattr(streams, "measure", never)
    assert core.compile_model(network(), HOST).streams.count == second.streams.count


def test_a_machine_that_is_always_busy_is_measured_three_times(core, monkeypatch):
    monkeypatch.setattr(streams, "doubt_of", lambda rates, others: "busy")
    monkeypatch.setattr(streams, "measure", lambda models, inputs, seconds: {point: [1.0] * 4 for point in models})
    for _ in range(3):
        made = core.compile_model(network(), HOST)
    assert made.streams_origin.endswith("busy: as in 3 measurements")
    monkeypatch.setattr(streams, "measure", never)
    core.compile_model(network(), HOST)


def test_what_makes_a_measurement_doubtful():
    calm, restless = [100.0, 101.0, 99.5, 100.0], [100.0, 60.0, 110.0, 70.0]
    points = {ServingPoint(1, 1): calm, ServingPoint(2, 2): calm}
    assert not streams.doubt_of(points, 0.05) and not streams.doubt_of(points, None)
    assert "others used 40%" in streams.doubt_of(points, 0.4)
    assert "from turn to turn" in streams.doubt_of({ServingPoint(1, 1): restless, ServingPoint(2, 2): restless}, 0.0)


def test_the_share_of_others(tmp_path, monkeypatch):
    file = tmp_path / "stat"
    times = [os.times_result((1.0, 0.5, 0.0, 0.0, 0.0)), os.times_result((2.0, 0.5, 0.0, 0.0, 0.0))]
    monkeypatch.setattr(host.os, "times", lambda: times.pop(0))
    monkeypatch.setattr(host.os, "sysconf", lambda name: 100)
    file.write_text("cpu 1000 0 0 5000 0 0 0 0 0 0\ncpu0 ...\n")
    others = host.Others(file)
    file.write_text("cpu 1300 0 0 5100 0 0 0 0 0 0\ncpu0 ...\n")  # 4 s of cores passed, 3 of them busy, 1 of them ours
    assert others.share() == pytest.approx(0.5)
    assert host.Others(tmp_path / "none").share() is None


def test_where_nothing_can_be_measured(core, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "tunewright")
    monkeypatch.setattr(streams, "measure", never)
    units = open_device(HOST).target.units
    for model, config, said in (
        (network(rows="n"), {}, "shapes"),
        (network(), {"TUNING_MODE": "TUNING_DISABLED"}, "TUNING_DISABLED"),
    ):
        made = core.compile_model(model, HOST, config=config)
        assert made.streams.count == units and not made.streams_origin and said in caplog.text
    exclusive = core.compile_model(network(), HOST, config={"EXCLUSIVE_ASYNC_REQUESTS": "YES"})
    assert exclusive.streams.count == 1


def test_inputs_that_do_not_run(core, caplog):
    """Random numbers are no legal shapes: the model is compiled all the same."""
    model = parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
g (float[6] x, int64[2] s) => (float[a, b] y) { y = Reshape(x, s) }""")
    made = core.compile_model(model, HOST)
    assert made.streams.count == open_device(HOST).target.units and "do not run" in caplog.text
    assert made({"x": np.zeros(6, np.float32), "s": np.array([2, 3])})["y"].shape == (2, 3)


def test_candidates():
    def names(*arguments):
        return [point.name for point in streams.candidates(*arguments)]

    assert names(2, True) == ["1x1", "1x2", "2x2", "2x4"]
    assert names(6, True, 4) == ["1x1", "1x2", "2x2", "2x4", "4x4"]
    assert names(1, True, 1) == ["1x1"] and names(132, False, 2) == ["1x1", "1x2", "2x2"]


def test_the_best_wins_by_more_than_noise():
    def best(**rates):
        points = {ServingPoint(*map(int, name.strip("_").split("x"))): found for name, found in rates.items()}
        return streams.best(points).name

    assert best(_1x1=[100.0] * 4, _1x2=[100.5] * 4, _2x2=[101.0] * 4) == "1x1", "1 % is not enough"
    assert best(_1x1=[97.0] * 4, _1x2=[100.0] * 4, _2x2=[101.0] * 4) == "1x2"
    assert best(_1x1=[60.0] * 4, _2x2=[100.0] * 4, _2x4=[101.0] * 4) == "2x2"
    # a busy machine slows neighbours in a round down together: what counts is the quotient of a round
    assert best(_1x1=[10.0, 100.0, 20.0, 90.0], _2x2=[11.0, 110.0, 22.0, 99.0]) == "2x2"
    assert best(_1x1=[100.0] * 4, _2x2=[90.0, 95.0, 130.0, 120.0]) == "1x1", "it lost two rounds of four"
    # what differs from round to round is not chosen for its few requests: it beats nobody
    assert best(_1x1=[50.0] * 4, _1x2=[20.0, 90.0, 30.0, 120.0], _2x2=[100.0] * 4) == "2x2"
    assert best(_1x1=[50.0] * 4, _1x2=[60.0, 102.0, 70.0, 101.0], _2x2=[100.0] * 4) == "2x2"
    assert best(_1x1=[100.0] * 4, _1x2x2=[104.0] * 4) == "1x1", "a batch makes requests wait: 4 % are not enough"
    assert best(_1x1=[100.0] * 4, _1x2x2=[106.0] * 4) == "1x2x2"
    assert best(_1x8x8=[100.0] * 4, _2x4=[99.0] * 4, _1x4x4=[102.0] * 4) == "2x4", "smaller batches come first"


def test_too_short_to_compare(monkeypatch):
    """An inference that takes its time, whatever it is given."""
    point, feed = ServingPoint(1, 1), {"x": np.ones((3, 8), np.float32), "i": np.zeros(3, np.int64)}
    with made(monkeypatch, "GPU.7") as [device]:
        model = Core().compile_model(network(), "GPU.7")
        device.seconds = 0.03
        assert streams.measure({point: model}, feed, 0.05) is None
        rate = statistics.median(streams.measure({point: model}, feed, 0.6)[point])
    assert 3 < rate < 34, "it is 33, or less on a busy machine"


def test_keys():
    core, target, settings = Core(), open_device("CPU").target, Settings()
    graphs = [core.read_model(network(**how)).graph for how in ({}, {"seed": 5}, {"rows": 4})]
    names = [key(graph, target, settings) for graph in graphs]
    assert names[0] == names[1] != names[2]
    assert key(graphs[0], open_device("CPU.HOST").target, settings) != names[0]
    other = Settings.make({"EXECUTION_MODE_HINT": "ACCURACY"}, settings)
    assert key(graphs[0], target, other) != names[0] != key(graphs[0], target, settings, batches=True)
    # bodies of control flow count too
    make = helper.make_node
    values = {n: helper.make_tensor_value_info(n, 1, [2]) for n in "xyz"}
    for op in ("Neg", "Abs"):
        body = helper.make_graph([make(op, ["x"], ["z"])], "b", [], [values["z"]])
        node = make("If", ["c"], ["y"], then_branch=body, else_branch=body)
        graph = helper.make_graph([node], "g", [values["x"]], [values["y"]],
                                  [numpy_helper.from_array(np.array(True), "c")])  # fmt: skip
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        names.append(key(core.read_model(proto).graph, target, settings))
    assert names[-1] != names[-2]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": "other"}', '{"schema": "tunewright.streams/1"}', "\0"])
def test_a_damaged_file(tmp_path, content, caplog):
    file = StreamsFile(tmp_path / "streams.json")
    file.path.write_text(content, encoding="utf-8")
    assert file.read() == {}
    file.add("k", StreamsAnswer(2, 4, {"2x4": 10.0}))
    assert file.find("k").requests == 4


def test_damaged_answers(tmp_path):
    file = StreamsFile(tmp_path / "streams.json")
    file.add("right", StreamsAnswer(2, 4, {"2x4": 10.0}))
    content = json.loads(file.path.read_text(encoding="utf-8"))
    numbers = [{"streams": -1, "requests": 1}, {"streams": True, "requests": 1}, {"streams": 1, "requests": 10**9}]
    others = [3, None, {"streams": 2}, {"streams": 1, "requests": 1, "rates": {"a": "b"}}]
    wrong = [*({**one, "rates": {}} for one in numbers), *others]
    content["models"] |= {f"wrong{i}": one for i, one in enumerate(wrong)}
    file.path.write_text(json.dumps(content), encoding="utf-8")
    assert list(file.read()) == ["right"]


def test_many_writers(tmp_path):
    def write(number):
        for i in range(5):
            StreamsFile(tmp_path / "deep" / "streams.json").add(f"{number}.{i}", StreamsAnswer(1, 1, {}))

    writers = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(StreamsFile(tmp_path / "deep" / "streams.json").read()) == 20
    assert os.listdir(tmp_path / "deep") == ["streams.json"]


def test_nothing_can_be_written(tmp_path, caplog):
    (tmp_path / "file").write_text("", encoding="utf-8")
    StreamsFile(tmp_path / "file" / "streams.json").add("k", StreamsAnswer(1, 1, {}))
    assert "cannot be kept" in caplog.text


@pytest.mark.skipif(open_device("CPU").family == "host" or open_device("CPU").target.units < 2, reason="one thread")
def test_a_stream_uses_its_share_of_the_cores():
    """Processor time of one busy stream of as many as there are cores: about one core's, whatever the machine does."""
    units = open_device("CPU").target.units
    proto = parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
g (float[384, 384] x) => (float[384, 384] y) { a = MatMul(x, x)  b = MatMul(a, x)  y = Relu(b) }""")
    compiled = Core().compile_model(proto, "CPU", {"NUM_STREAMS": units})
    queue = AsyncInferQueue(compiled, 1)
    feed = {name: np.zeros(type.dims, np.float32) for name, type in compiled.inputs.items()}
    streams.rate(queue, feed, 0.05)
    begin, used = time.perf_counter(), time.process_time()
    streams.rate(queue, feed, 0.4)
    share = (time.process_time() - used) / (time.perf_counter() - begin)
    assert share < 1.35, f"one stream of {units} kept {share:.2f} cores busy"


def test_the_limit_of_an_application():
    units = open_device("CPU").target.units
    config = {"NUM_STREAMS": 4, "PERFORMANCE_HINT_NUM_REQUESTS": 2}
    assert Core().compile_model(network(), HOST, config).optimal_requests == 2
    config = {"PERFORMANCE_HINT": "THROUGHPUT", "PERFORMANCE_HINT_NUM_REQUESTS": 1}
    made = Core().compile_model(network(), "CPU", config)
    assert made.optimal_requests == made.streams.count == 1 and made.env.device.target.units == units


def lent_queue():
    import pyopencl as cl

    raw = open_device(opencl_runtime.NAME).raw
    context = cl.Context([raw])
    return context, cl.CommandQueue(context, raw)  # Intel's queues do not keep theirs


@pytest.mark.parametrize("lent", [False, pytest.param(True, marks=opencl_runtime.needs_opencl)])
def test_streams_in_a_context_of_the_callers(lent):
    core = Core()
    name, (_context, theirs) = (opencl_runtime.NAME, lent_queue()) if lent else ("CPU", (None, None))
    units = open_device(name).target.units
    made = core.compile_model(network(), core.create_context(name, queue=theirs), {"NUM_STREAMS": units})
    assert made.streams.count == units and made.env.device.target.units == (units if lent else 1)
    queue, got = AsyncInferQueue(made), {}
    queue.set_callback(lambda request, number: got.__setitem__(number, request.results["y"]))
    one = core.compile_model(network(), HOST)
    feeds = [{"x": np.full((3, 8), k, np.float32), "i": np.array([0, 1, 0])} for k in range(20)]
    for k, feed in enumerate(feeds):
        queue.start_async(feed, k)
    queue.wait_all()
    for k, feed in enumerate(feeds):
        np.testing.assert_allclose(got[k], one(feed)["y"], rtol=1e-5)
