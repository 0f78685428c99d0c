"""What the layers of knowledge bases answer: exact, provisional or nothing, and who is barred."""

from dataclasses import replace

import pytest

from tunewright.devices.base import Target
from tunewright.ir.graph import Graph
from tunewright.ir.types import DType, TensorType
from tunewright.knowledge.database import MemoryDatabase
from tunewright.knowledge.key import Key, MatchKind
from tunewright.knowledge.record import Evidence, Fault, Measurement, Ratio
from tunewright.search.base import Status
from tunewright.search.space import Config, Space
from tunewright.solvers import problem_json
from tunewright.solvers.base import Problem, Solver
from tunewright.tuning.lookup import KnowledgeLayer, Lookup

TARGET = Target("cpu", "Some CPU", "wide", 2, (("opencl", "Some runtime"), ("driver", "3.0")), "c")


class Tiled(Solver):
    id = "tiled"
    version = "1.2"

    def why_not(self, problem, target):
        return "too wide" if problem.sizes[-1] > 4096 else None

    def space(self, problem, target):
        return Space({"tile": [1, 2, 4, 8]})

    def source(self, problem, config, target):
        return f"kernel of {config['tile']} for {problem.key()}"

    def compile(self, problem, config, device):
        raise AssertionError


class Other(Tiled):
    id = "other"


TILED, OTHER = Tiled(), Other()


def problem(width=64, op="Relu"):
    type = TensorType(DType.FLOAT32, (2, width))
    graph = Graph()
    return Problem.of(graph.add(op, [graph.add_input("x", type)], types=[type]))


def measured(tile=2, gain=1.5, solver=TILED, p=None, target=TARGET, date="2026-01-01T00:00:00Z", **evidence):
    p = p or problem()
    config = Config(tile=tile)
    ratio = Ratio.one() if gain == 1 else Ratio(gain, gain - 0.1, gain + 0.1, 30)
    found = Evidence(1e-3, 9e-4, 2e-3, (1e-3,), 0.0, ratio, Ratio.one(), True, ("tiled", Config(tile=1)), "cold", 4, 99)
    key = Key.of(p, target, solver, config)
    return Measurement(
        key, config, replace(found, **evidence), problem_json.to_json(p), p.family(), p.sizes, date, "0.1"
    )


def ask(*layers, p=None, target=TARGET, solvers=(TILED, OTHER)):
    lookup = Lookup([KnowledgeLayer(f"layer {n}", MemoryDatabase(records)) for n, records in enumerate(layers)])
    p = p or problem()
    return lookup.ask(p, target, solvers, lambda s: s.why_not(p, target))


def tiles(answer):
    return [found.config["tile"] for found in answer.found]


def test_an_exact_answer():
    best = ask([measured()]).best
    assert (best.solver, best.config, best.layer, best.match.kind) == (TILED, {"tile": 2}, "layer 0", MatchKind.EXACT)


def test_nothing_is_known():
    answer = ask([measured(p=problem(op="Abs"))])
    assert answer.best is None and answer.nearest == "nothing is known of problems like this one"


def test_the_better_answer_is_the_one_with_the_higher_lower_end_of_its_gain():
    wide = measured(4, gain=2.0)
    wide = replace(wide, evidence=replace(wide.evidence, gain=Ratio(2.0, 1.1, 3.0, 9)))
    assert tiles(ask([wide, measured(2, gain=1.5)])) == [2, 4]


def test_the_upper_layer_wins_and_an_exact_answer_wins_over_a_provisional_one_of_any_layer():
    assert tiles(ask([measured(2, gain=1.2)], [measured(4, gain=3.0)])) == [2, 4]
    newer = replace(TARGET, software=(("opencl", "Some runtime"), ("driver", "4.0")))
    assert tiles(ask([measured(2, target=newer)], [measured(4)])) == [4, 2]


def test_a_newer_and_worse_measurement_demotes_a_candidate_of_its_own_layer_and_of_the_system():
    good, worse = measured(), measured(gain=0.9, date="2026-02-01T00:00:00Z")
    assert ask([good, worse]).best is None and ask([worse, good]).best is None
    assert ask([worse], [good]).best is None
    assert ask([good], [worse]).best is not None, "what the system says later does not demote the user's"


def test_the_default_answers_when_it_was_measured_as_the_best():
    assert tiles(ask([measured(1, gain=1), measured(2, gain=0.8)])) == [1]


def test_unconfirmed_gains_never_answer():
    assert ask([measured(confirmed=False)]).best is None


def test_warm_measurements_come_after_cold_ones():
    assert tiles(ask([measured(2, gain=3.0, regime="warm"), measured(4, gain=1.2)])) == [4, 2]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"software": (("opencl", "Some runtime"), ("driver", "4.0"))}, "software"),
        ({"name": "Sibling CPU"}, "processor"),
        ({"units": 4}, "units"),
    ],
)
def test_provisional_answers_name_the_field(changes, field):
    best = ask([measured(target=replace(TARGET, **changes))]).best
    assert best.match.kind is MatchKind.PROVISIONAL and best.match.differs == (field,)
    assert str(best.match) == f"provisional: another {field}"


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"arch": "narrow"}, "arch"),
        ({"vector_bytes": 64}, "arch"),
        ({"software": (("opencl", "Intel"), ("driver", "3.0"))}, "runtime"),
        ({"options": "-O1"}, "options"),
        ({"device": "gpu"}, "device"),
        ({"name": "Sibling CPU", "software": (("opencl", "Some runtime"), ("driver", "4.0"))}, "processor, software"),
    ],
)
def test_a_miss_names_the_fields(changes, fields):
    answer = ask([measured(target=replace(TARGET, **changes))])
    assert answer.best is None and answer.nearest.endswith(f"miss: another {fields}")


def test_neighbouring_shapes_are_provisional_the_nearest_first():
    stored = [measured(2, p=problem(96)), measured(4, p=problem(80)), measured(8, p=problem(640))]
    answer = ask(stored)
    assert tiles(answer) == [4, 2], "ten times the width is no neighbour"
    assert answer.best.match.differs == ("problem",)
    assert ask([*stored, measured(1)]).best.match.kind is MatchKind.EXACT


def test_a_minor_version_is_provisional_a_major_one_a_miss():
    class Newer(Tiled):
        version = "1.3"

    class Newest(Tiled):
        version = "2.0"

    best = ask([measured()], solvers=[Newer()]).best
    assert best.match.kind is MatchKind.PROVISIONAL and best.match.differs == ("version",)
    answer = ask([measured()], solvers=[Newest()])
    assert answer.best is None and "another version" in answer.nearest


def test_another_text_or_space_is_provisional():
    class Rewritten(Tiled):
        def source(self, problem, config, target):
            return "something else"

    class Larger(Tiled):
        def space(self, problem, target):
            return Space({"tile": [1, 2, 4, 8, 16]})

    assert ask([measured()], solvers=[Rewritten()]).best.match.differs == ("source",)
    assert ask([measured()], solvers=[Larger()]).best.match.differs == ("space",)


def test_what_is_stored_is_checked_against_the_code_of_today():
    class Smaller(Tiled):
        def space(self, problem, target):
            return Space({"tile": [1]})

    class Refusing(Tiled):
        def why_not(self, problem, target):
            return "not today"

    assert "not in the solver's space" in ask([measured()], solvers=[Smaller()]).nearest
    assert ask([measured()], solvers=[Refusing()]).nearest.endswith("not today")
    assert ask([measured()], solvers=[OTHER]).nearest.endswith("there is no such solver here")


def fault(tile=2, p=None, target=TARGET, solver=TILED):
    p = p or problem()
    return Fault(
        Key.of(p, target, solver, {"tile": tile}), Config(tile=tile), Status.CRASHED, "SIGSEGV",
        "2026-01-02T00:00:00Z", "0.1",
    )  # fmt: skip


def test_a_faulty_candidate_is_barred_for_every_problem_on_that_device_and_driver():
    lookup = Lookup([KnowledgeLayer("user", MemoryDatabase([fault()]))])
    for p in (problem(), problem(1000)):
        assert lookup.barred(TILED, Config(tile=2), p, TARGET) == "barred: crashed on 2026-01-02 (SIGSEGV)"
    assert lookup.barred(TILED, Config(tile=4), problem(), TARGET) is None
    assert lookup.barred(OTHER, Config(tile=2), problem(), TARGET) is None
    updated = replace(TARGET, software=(("opencl", "Some runtime"), ("driver", "4.0")))
    assert lookup.barred(TILED, Config(tile=2), problem(), updated) is None, "a new driver gets a new chance"
    assert lookup.barred(TILED, Config(tile=2), problem(), replace(TARGET, name="Another")) is None


def test_the_default_is_barred_for_the_problem_alone():
    lookup = Lookup([KnowledgeLayer("user", MemoryDatabase([fault()]))])
    default = ("tiled", Config(tile=2))
    assert lookup.barred(TILED, Config(tile=2), problem(), TARGET, default)
    assert lookup.barred(TILED, Config(tile=2), problem(1000), TARGET, default) is None


def test_a_barred_candidate_never_answers():
    answer = ask([measured(), fault()])
    assert answer.best is None and "barred" in answer.nearest
    database = MemoryDatabase([measured()])
    lookup = Lookup([KnowledgeLayer("user", database)])
    assert lookup.ask(problem(), TARGET, [TILED], lambda s: None).best
    database.add([fault()])
    assert lookup.ask(problem(), TARGET, [TILED], lambda s: None).best is None, "also when it is found out later"
