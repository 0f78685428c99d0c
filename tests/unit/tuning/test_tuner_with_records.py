"""What the tuner does with what is known, and what does not stop it."""

import logging
import threading

import numpy as np
import pytest

from tunewright.devices.null import NullDevice
from tunewright.errors import DeviceError
from tunewright.ir.graph import Graph
from tunewright.ir.types import DType, TensorType
from tunewright.knowledge.database import MemoryDatabase
from tunewright.knowledge.record import Ratio
from tunewright.measure.base import Regime
from tunewright.measure.local import LocalMeasurer
from tunewright.search.base import Status
from tunewright.search.space import Config, Space
from tunewright.settings import Settings
from tunewright.solvers.base import Kernel, Problem, Solver
from tunewright.tuning import evidence, knowledge_layers
from tunewright.tuning.tuner import Origin, Tuner

DEVICE = NullDevice()
CREATE = Settings.make({"TUNING_MODE": "TUNING_CREATE", "TUNE_SECONDS": "30", "TUNE_RESULT_PATH": ""}, Settings())


class Zeros(Kernel):
    """Right for an input of zeros, in the time that its config says."""

    name = "zeros"

    def __init__(self, seconds):
        self.seconds = seconds

    def run(self, queue, inputs, outputs):
        queue.advance(self.seconds)
        for given, out in zip(inputs, outputs, strict=True):
            np.copyto(out, np.maximum(given, 0))
        return outputs


class Tiled(Solver):
    id, language, rank = "tiled", "null", 10

    def __init__(self, first=1):
        self.first = first

    def why_not(self, problem, target):
        return None

    def space(self, problem, target):
        return Space({"tile": [1, 2, 4]})

    def default(self, problem, target):
        return {"tile": self.first}

    def compile(self, problem, config, device):
        return Zeros(1e-3 / config["tile"])


class Host(Tiled):
    id, rank, host = "host", 900, True

    def space(self, problem, target):
        return Space({})

    def default(self, problem, target):
        return {}


TILED, HOST = Tiled(), Host()


def problem():
    type = TensorType(DType.FLOAT32, (8, 8))
    graph = Graph()
    return Problem.of(graph.add("Relu", [graph.add_input("x", type)], types=[type]))


def measured(tile, gain, default=1):
    return evidence.measurement(
        problem(),
        DEVICE.target,
        TILED,
        Config(tile=tile),
        evidence.ContestSamples([1e-3], 0.0, gain, Ratio.one(), True, ("tiled", Config(tile=default))),
        Regime("cold", 2, 1),
        {},
    )


def make(settings=None, records=(), candidates=(TILED, HOST), **options):
    options.setdefault("measurer", lambda device, settings: LocalMeasurer(device, candidates))
    return Tuner(settings or Settings(), candidates, MemoryDatabase(records), MemoryDatabase(), **options)


FAULT = evidence.fault(problem(), DEVICE.target, TILED, Config(tile=1), Status.CRASHED, "SIGSEGV")


def test_a_search_finds_the_faster_config_and_stores_it():
    one = make(CREATE)
    choice = one.choose(problem(), DEVICE)
    assert (choice.solver, choice.config, choice.origin) == (TILED, {"tile": 4}, Origin.SEARCH)
    again = make(records=one.user).choose(problem(), DEVICE)
    assert (again.config, again.origin) == ({"tile": 4}, Origin.USER)


def test_a_barred_default_leaves_the_field_to_what_is_known(caplog):
    known = make(records=[FAULT, measured(2, Ratio(1.3, 1.2, 1.4, 9))]).choose(problem(), DEVICE)
    assert (known.solver, known.config, known.origin) == (TILED, {"tile": 2}, Origin.USER)
    forbidden = Settings.make({"HOST_FALLBACK": "NO"}, Settings())
    assert make(forbidden, [FAULT, measured(2, Ratio(1.3, 1.2, 1.4, 9))]).choose(problem(), DEVICE).config["tile"] == 2


def test_a_barred_default_without_anything_known_runs_on_the_host_and_says_so(caplog):
    knowledge_layers.warn.cache_clear()
    with caplog.at_level(logging.WARNING, "tunewright"):
        choice = make(records=[FAULT]).choose(problem(), DEVICE)
    assert choice.solver is HOST and "barred: crashed" in choice.rejected["tiled"]
    assert "Relu runs on the host, because its kernel on NULL is barred: crashed" in caplog.text


def test_a_barred_default_can_be_replaced_by_a_search():
    assert make(CREATE, [FAULT]).choose(problem(), DEVICE).solver is TILED


def test_a_measurer_that_fails_stops_nothing(caplog):
    def broken(device, settings):
        raise DeviceError("no worker")

    knowledge_layers.warn.cache_clear()
    with caplog.at_level(logging.WARNING, "tunewright"):
        choice = make(CREATE, measurer=broken).choose(problem(), DEVICE)
    assert choice.origin is Origin.DEFAULT and "nothing can be tuned" in caplog.text


def test_threads_tune_a_problem_once():
    database = MemoryDatabase()
    threads = [
        threading.Thread(
            target=lambda: Tuner(
                CREATE, [TILED], database, MemoryDatabase(), lambda device, settings: LocalMeasurer(device, [TILED])
            ).choose(problem(), DEVICE)
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [event.action for event in database.events()] == ["tuned"]


def test_a_search_that_is_interrupted_is_made_up_for():
    calls = []

    def measurer(device, settings):
        calls.append(0)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return LocalMeasurer(device, [TILED])

    one = make(CREATE, candidates=[TILED], measurer=measurer)
    with pytest.raises(KeyboardInterrupt):
        one.choose(problem(), DEVICE)
    assert one.choose(problem(), DEVICE).config == {"tile": 4}


def test_a_default_of_yesterday_does_not_answer_for_that_of_today():
    records = [measured(1, Ratio.one())]
    assert make(records=records).choose(problem(), DEVICE).origin is Origin.USER
    newer = Tiled(first=4)
    choice = make(records=records, candidates=[newer]).choose(problem(), DEVICE)
    assert (choice.config, choice.origin) == ({"tile": 4}, Origin.DEFAULT) and "not any more" in choice.nearest
