"""The batch by measurement: found once, kept, used by later loads; and what GPUs do where nothing was measured."""

import json
import logging

import pytest
from onnx import parser

from helpers.made_devices import made
from tunewright import AsyncInferQueue, Core, tools
from tunewright.knowledge.streams import StreamsAnswer, StreamsFile, batch_of, told
from tunewright.plugins import batch
from tunewright.plugins.batching import batch_tune, streams
from tunewright.plugins.single import SingleDevice, open_device
from tunewright.runtime.requests.request import DeviceModel, of_one_device
from tunewright.runtime.several.batch import BatchModel
from unit.runtime.test_batch_device import MIXING, check, feed, network

AUTO = {"NUM_STREAMS": "AUTO", "PERFORMANCE_HINT": "THROUGHPUT"}
THROUGHPUT = {"PERFORMANCE_HINT": "THROUGHPUT"}


@pytest.fixture
def core(tmp_path, monkeypatch):
    for module, seconds in ((streams, {"SECONDS": 0.15, "TURN": 0.01}), (batch_tune, {"STEP": 0.1})):
        for name, value in seconds.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(streams, "doubt_of", lambda rates, others: "")  # of the machine that runs the tests
    return Core({"USER_DB_PATH": str(tmp_path / "kb")})


def never(*arguments):
    raise AssertionError("it was measured again")


def rates(monkeypatch, speed):
    """Speeds of points as they would be; what was asked for, in order."""
    asked = []

    def measure(models, inputs, seconds):
        asked.append([point.name for point in models])
        found = {point: speed(point) for point in models}
        return None if None in found.values() else {point: [rate] * 4 for point, rate in found.items()}

    monkeypatch.setattr(streams, "measure", measure)
    return asked


def serve(model, count=40):
    queue, got = AsyncInferQueue(model), {}
    queue.set_callback(lambda request, number: got.update({number: request.results}))
    for number in range(count):
        queue.start_async(feed(number), number)
    queue.wait_all()
    for number in range(count):
        check(got[number], number)


def test_a_batch_is_measured_once_and_kept(core, monkeypatch, capsys):
    """A device that takes the same time for any batch: really measured, in turns."""
    monkeypatch.setattr(batch_tune, "MOST", 4)
    monkeypatch.setattr(streams, "LEAST", 1)  # rounds, so that a busy machine need not be quick
    with made(monkeypatch, "GPU.7") as [device]:
        device.seconds = 0.02  # long beside what a busy machine adds
        first = core.compile_model(network(), "GPU.7", AUTO)
        assert isinstance(first, BatchModel) and first.size == 4 and first.device_name == "BATCH:GPU.7(4)"
        assert first.optimal_requests in (4 * first.streams.count, 8 * first.streams.count)
        assert first.streams_origin.startswith("measured now: ") and "no more than 4 are tried" in first.streams_origin
        serve(first)

        [(key, answer)] = StreamsFile.of(core.settings).read().items()
        assert (answer.streams, answer.requests, answer.batch) == (first.streams.count, first.optimal_requests, 4)
        assert answer.digest and answer.date and answer.target == str(device.target)
        best = f"{answer.streams}x{answer.requests}x4"
        assert answer.rates[best] > 2 * max(rate for name, rate in answer.rates.items() if batch_of(name) == 1)

        monkeypatch.setattr(streams, "measure", never)
        for model in (network(), network("n")):  # an open batch is the same model
            again = core.compile_model(model, "GPU.7", THROUGHPUT)
            assert (again.size, again.streams.count, again.optimal_requests) == (4, answer.streams, answer.requests)
            assert again.get_property("STREAMS_ORIGIN").startswith("measured 20")
            assert again.get_property("OPTIMAL_BATCH_SIZE") == 4
            assert again.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS") == answer.requests
            for name in ("OPTIMAL_BATCH_SIZE", "MAX_BATCH_SIZE"):
                assert core.get_property("GPU.7", name, {"MODEL_PTR": core.read_model(model)}) == 4
            choice = core.query_requests(model, "GPU.7", THROUGHPUT)
            assert (choice.streams, choice.requests, choice.batch) == (answer.streams, answer.requests, 4)
            assert choice.why == again.streams_origin
        serve(again)
        two = core.compile_model(network(), "GPU.7", {**THROUGHPUT, "NUM_STREAMS": 2})
        assert (two.size, two.streams.count, two.optimal_requests) == (4, 2, 8), "the streams are the user's"
        with pytest.raises(AssertionError, match="measured again"):
            core.compile_model(network(), "GPU.7", {**AUTO, "FIND_ENFORCE": 4, "AUTO_TUNE_MODE": "NO_TUNE"})
        # those who do not want batches have an answer of their own
        for config in ({"ALLOW_AUTO_BATCHING": "NO"}, {"PERFORMANCE_HINT": "LATENCY"}):
            with pytest.raises(AssertionError, match="measured again"):
                core.compile_model(network(), "GPU.7", AUTO | config)

    path = ["-c", f"USER_DB_PATH={core.settings.user_db_path}"]
    assert tools.execute(["kb", "streams", "--json", *path]) == 0
    [row] = json.loads(capsys.readouterr().out)["models"]
    assert row["batch"] == 4 and row["key"] == key
    assert tools.execute(["kb", "streams", *path]) == 0
    assert "no more than 4" in " ".join(capsys.readouterr().out.split())
    assert tools.execute(["kb", "streams", "--forget", "nothing", *path]) == 2
    assert "kb streams" in capsys.readouterr().err
    assert tools.execute(["kb", "streams", "--forget", key[:6], *path]) == 0
    assert "forgotten: 1 answer" in capsys.readouterr().out
    assert not StreamsFile.of(core.settings).read()


@pytest.mark.parametrize(
    ("speed", "config", "chosen", "why"),
    [
        (lambda p: p.batch if p.batch <= 8 else 7.5, {}, (1, 8, 8), "batches of 16 and 32 do not pay"),
        (lambda p: 100 + p.batch, {}, (1, 1, 1), "batches of 2 and 4 do not pay"),
        # once is noise, and what pays later is found
        (lambda p: {1: 10, 2: 10, 4: 20}.get(p.batch, 5), {}, (1, 4, 4), "batches of 8 and 16"),
        (lambda p: p.batch * min(p.streams, 2), {}, (2, 128, 64), "no more than 64 are tried"),
        (lambda p: p.batch * (p.requests >= 2 * p.streams * p.batch) + 1, {}, (1, 128, 64), "no more than 64"),
        (lambda p: p.batch, {"PERFORMANCE_HINT_NUM_REQUESTS": 6}, (1, 4, 4), "PERFORMANCE_HINT_NUM_REQUESTS = 6"),
        (lambda p: None if p.batch == 4 else p.batch, {}, (1, 2, 2), "a batch of 4 takes too long"),
    ],
)  # fmt: skip
def test_larger_batches_while_they_pay(core, monkeypatch, speed, config, chosen, why):
    rates(monkeypatch, speed)
    with made(monkeypatch, "GPU.7"):
        model = core.compile_model(network(), "GPU.7", AUTO | config)
    assert (model.streams.count, model.optimal_requests, model.size) == chosen
    assert isinstance(model, BatchModel if chosen[2] > 1 else DeviceModel) and why in model.streams_origin
    [answer] = StreamsFile.of(core.settings).read().values()
    assert (answer.streams, answer.requests, answer.batch) == chosen and why in answer.ended


def test_what_ends_it(core, monkeypatch):
    asked = rates(monkeypatch, lambda point: point.batch)
    with made(monkeypatch, "GPU.7"), monkeypatch.context() as patch:
        patch.setattr(batch_tune, "fits", lambda model, streams: model.inputs["x"].dims[0] < 4)
        assert "batch of 4 does not fit" in core.compile_model(network(), "GPU.7", AUTO).streams_origin
        assert asked == [["1x1", "1x2", "2x2", "2x4", "4x4", "4x8"], ["1x1", "1x2x2", "1x4x2"]]
        patch.setattr(batch_tune, "SECONDS", -1.0)
        core = Core({"USER_DB_PATH": core.settings.user_db_path + "2"})
        model = core.compile_model(network(), "GPU.7", AUTO)
        assert isinstance(model, DeviceModel) and "were over before a batch of 2" in model.streams_origin


def test_examples_that_mix_are_seen_while_measuring(core, monkeypatch):
    """Numbers tell what nobody proved."""
    monkeypatch.setattr(streams, "LEAST", 1)
    model = core.compile_model(parser.parse_model(MIXING), "BATCH:CPU.HOST", AUTO)
    assert isinstance(model, DeviceModel) and "depends on the others" in model.streams_origin


def test_on_a_processor_whoever_names_batch_has_one(core, monkeypatch, caplog):
    asked = rates(monkeypatch, lambda point: point.batch * point.streams)
    assert isinstance(core.compile_model(network(), "CPU.HOST", AUTO), DeviceModel)
    assert all(batch_of(name) == 1 for names in asked for name in names), "batches are not even tried"
    model = core.compile_model(network(), "BATCH:CPU.HOST", AUTO)
    units = open_device("CPU.HOST").target.units
    assert (model.size, model.streams.count) == (64, units) and model.optimal_requests == 64 * units
    assert core.compile_model(network(), "BATCH:CPU.HOST").size == 64
    assert core.compile_model(network(), "BATCH:CPU.HOST(4)").size == 4
    named = core.compile_model(network(), "BATCH:CPU.HOST(4)", AUTO)
    assert (named.size, named.streams.count) == (4, units) and "; measured now: 1x1" in named.streams_origin
    monkeypatch.setattr(streams, "measure", never)
    serve(core.compile_model(network(), "BATCH:CPU.HOST", AUTO), 200)
    with caplog.at_level(logging.INFO, "tunewright"):  # nothing may be measured: as if nobody had
        none = core.compile_model(network(), "BATCH:CPU", {**AUTO, "TUNING_MODE": "TUNING_DISABLED"})
    assert none.size == batch.SIZE and "nothing is measured" in caplog.text


def test_tuning_comes_last(core, monkeypatch):
    """Models that are compared are not tuned: the chosen one is, when it is compiled."""
    rates(monkeypatch, lambda point: point.batch if point.batch <= 2 else 1)
    seen, real = [], batch.Batch.alone
    monkeypatch.setattr(batch.Batch, "alone", lambda self, model, settings, count: (
        seen.append(settings.tuning_mode), real(self, model, settings, count))[1])  # fmt: skip
    config = {"TUNING_MODE": "TUNING_CREATE", "AUTO_TUNE_MODE": "NO_TUNE"}
    model = core.compile_model(network(), "BATCH:CPU.HOST", {**AUTO, **config})
    assert model.size == 2 and seen[-2:] == ["TUNING_CREATE"] * 2 and set(seen[:-2]) == {"TUNING_USE_EXISTING"}


def test_a_gpu_without_measurements(core, monkeypatch):
    monkeypatch.setattr(streams, "LEAST", 1)
    with made(monkeypatch, "GPU.7"):
        model = core.compile_model(network(), "GPU.7", THROUGHPUT)
        assert isinstance(model, BatchModel) and model.size == 8 and model.optimal_requests == 16
        assert "nothing was measured" in model.streams_origin
        assert isinstance(of_one_device(model), DeviceModel) and of_one_device(model).inputs["x"].dims == (1, 8)
        serve(model)
        for config in (
            {"PERFORMANCE_HINT": "LATENCY"}, {"ALLOW_AUTO_BATCHING": "NO"}, {"EXCLUSIVE_ASYNC_REQUESTS": "YES"},
            {"PERFORMANCE_HINT_NUM_REQUESTS": 1},
        ):  # fmt: skip
            other = core.compile_model(network(), "GPU.7", THROUGHPUT | config)
            assert isinstance(other, DeviceModel) and other.size == other.get_property("OPTIMAL_BATCH_SIZE") == 1
        few = core.compile_model(network(), "GPU.7", {**THROUGHPUT, "PERFORMANCE_HINT_NUM_REQUESTS": 6})
        assert (few.size, few.optimal_requests) == (6, 6)
        named = core.compile_model(network(), "MULTI:GPU.7(2),CPU.HOST(1)", THROUGHPUT)
        assert named.optimal_requests == 3, "requests that a user counts are no batches"
        monkeypatch.setattr(batch, "fits", lambda model, streams: model.inputs["x"].dims[0] < 4)
        small = core.compile_model(network(), "GPU.7", THROUGHPUT)
        assert small.size == 2 and "batch of 4 does not fit" in small.streams_origin
        real = batch.Batch.together

        def full(self, alone, model, settings, count, size):
            if size > 2:
                raise MemoryError
            return real(self, alone, model, settings, count, size)

        with monkeypatch.context() as patch:
            patch.setattr(batch.Batch, "together", full)
            assert core.compile_model(network(), "GPU.7", THROUGHPUT).size == 2
        mixing = core.compile_model(parser.parse_model(MIXING), "GPU.7", AUTO)
        assert isinstance(mixing, DeviceModel) and mixing.streams_origin.startswith("measured now: 1x1")
        assert "one by one: it is not proven that examples are independent: ReduceMax" in mixing.streams_origin
        choice = core.query_requests(parser.parse_model(MIXING), "GPU.7", THROUGHPUT)
        assert choice.batch == 1 and "ReduceMax" in choice.why
        asked = []
        monkeypatch.setattr(
            "tunewright.model_tuning.model.tune", lambda plugin, *rest, **more: asked.append(plugin) or never()
        )
        with pytest.raises(AssertionError):
            core.tune(network(), feed(1), "GPU.7", config={**THROUGHPUT, "TUNE_RESULT_PATH": ""})
        assert isinstance(asked[0], SingleDevice), "a device is tuned by itself, whatever serves it"
    assert isinstance(core.compile_model(network(), "CPU.HOST", THROUGHPUT), DeviceModel)
    assert core.query_requests(network(), "MULTI:CPU,CPU.HOST") is None
    choice = core.query_requests(network(), "CPU.HOST", {"NUM_STREAMS": 3})
    assert (choice.streams, choice.requests, choice.batch, choice.why) == (3, 3, 1, "NUM_STREAMS = 3")


def test_command_lines(core, monkeypatch, capsys, tmp_path):
    import onnx

    path = tmp_path / "model.onnx"
    onnx.save(network(), path)
    config = ["-c", f"USER_DB_PATH={core.settings.user_db_path}", "-c", "PERFORMANCE_HINT=THROUGHPUT"]
    with made(monkeypatch, "GPU.7"):
        assert tools.execute(["query", str(path), "--device", "GPU.7", *config]) == 0
        assert "served with 16 requests on 2 streams, 8 of them together: a batch of 8" in capsys.readouterr().out
        assert tools.execute(["explain", str(path), "--device", "GPU.7", "--no-time", *config]) == 0
        assert "8 of them together" in capsys.readouterr().out
        assert tools.execute(["benchmark", str(path), "--device", "GPU.7", "-n", "64", *config]) == 0
        out = capsys.readouterr().out
        assert "16 requests on 2 streams, async, 8 of them together" in out
        assert "streams, requests and batch: a batch of 8" in out and "for a stream" not in out


def test_answers_in_words(tmp_path):
    found = {"1x1": 10.0, "2x2": 12.0, "1x2x2": 20.0, "1x4x2": 21.0, "1x4x4": 19.0}
    assert told(found) == "2x2: 12/s, 1x4x2: 21/s, 1x4x4: 19/s"
    assert told({"1x1": 1.0, "2x2": 2.0}) == "1x1: 1/s, 2x2: 2/s"
    assert [batch_of(name) for name in ("1x1", "2x32x8", "x", "axbxc")] == [1, 8, 1, 1]
    file = StreamsFile(tmp_path / "streams.json")
    assert file.forget(lambda key, answer: True) == {} and not file.path.exists()
    for name in "ab":
        file.add(name, StreamsAnswer(1, 8, {"1x8x8": 2.0}, 8, "enough", model=name))
    assert list(file.forget(lambda key, answer: key == "a")) == ["a"] and list(file.read()) == ["b"]
    assert file.find("b").batch == 8 and file.find("b").ended == "enough"
    content = json.loads(file.path.read_text(encoding="utf-8"))
    content["models"]["b"] |= {"batch": 0}
    file.path.write_text(json.dumps(content), encoding="utf-8")
    assert file.read() == {}
