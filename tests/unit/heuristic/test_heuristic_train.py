"""Training a heuristic: what is learned from, how good it is on networks that it has not seen, and the command."""

import dataclasses
import json
import math

import pytest

from helpers.heuristic_data import NETWORKS, SOLVER, TARGET, conv, problems, speed, survey, surveys
from tunewright import tools
from tunewright.heuristic import file as heuristic_file
from tunewright.heuristic.regret import Network, hold_out, summary
from tunewright.heuristic.train import LEAST_PROBLEMS, MOST_LISTED, examples, learnable, shortlist, target_of, train
from tunewright.knowledge.key import Key, Where
from tunewright.knowledge.open_databases import open_user
from tunewright.knowledge.record import Evidence, Measurement, Ratio, Sighting
from tunewright.search.space import Config
from tunewright.settings import Settings
from tunewright.solvers import base

SOLVERS = (SOLVER,)


def measurement(problem, config, gain, regime="layer", date="2026-11-16T12:00:00Z", confirmed=True, default=None):
    default = default or SOLVER.default(problem, TARGET)
    found = Evidence(
        2e-3, 2e-3, 2e-3, (2e-3,), 0.0, Ratio(gain, gain, gain, 9), Ratio.one(), confirmed, (SOLVER.id, default),
        regime, 1, 1, {},
    )  # fmt: skip
    one = survey(problem, 0, 1)
    key = Key.of(problem, TARGET, SOLVER, config)
    return Measurement(key, config, found, one.problem, one.family, one.sizes, date, "0.1")


def networks():
    return [Network(name, {p.key(): 1e-3 * (n + 1) for n, p in enumerate(problems(name))}) for name in NETWORKS]


# ---- examples -------------------------------------------------------------------------------------------------------


def test_a_survey_is_an_example():
    (one,), unused = examples([survey(conv(64, 64, 56), 1, 7)], SOLVERS)
    assert not unused and one.seconds == 2e-3 and one.default == (SOLVER.id, Config(nb=2, ur=6, run=1))
    assert len(one.gains) in (7, 8) and one.gain(*one.default) == 1.0 and one.gain("tiles", Config(nb=9)) is None
    assert one.best == max(one.gains.values()) and one.problem.key() == conv(64, 64, 56).key()
    assert Where.of(one.target) == dataclasses.replace(Where.of(TARGET), software="")


def test_the_best_evidence_of_a_candidate_counts():
    problem, config = conv(64, 64, 56), Config(nb=4, ur=3, run=8)
    seen = dataclasses.replace(survey(problem, 0, 1), seen=(Sighting(SOLVER.id, "1.0", config, 1.1),))
    open_ = measurement(problem, config, 1.2, date="2026-11-18T12:00:00Z", confirmed=False)
    sure = measurement(problem, config, 1.3)
    inside = measurement(problem, config, 0.9, "network", "2026-11-15T12:00:00Z", False)
    newer = measurement(problem, config, 1.25, date="2026-11-19T12:00:00Z")
    for records, expected in (
        ([seen], 1.1), ([open_, seen], 1.2), ([seen, sure, open_], 1.3), ([sure, newer], 1.25), ([inside, newer], 0.9)
    ):  # fmt: skip
        for order in (records, records[::-1]):
            (one,), _ = examples(order, SOLVERS)
            assert one.gain(SOLVER.id, config) == expected


def test_a_few_turns_tell_nothing():
    problem, config = conv(64, 64, 56), Config(nb=4, ur=3, run=8)
    sure = measurement(problem, config, 1.3, confirmed=False)
    rough, fair, seen = Ratio(9.0, 1e-6, 1e6, 1), Ratio(1.2, 0.9, 1.7, 16), Ratio(1.1, 1e-6, 1e6, 0)
    for ratio, expected in ((rough, None), (fair, 1.2), (seen, 1.1)):
        noisy = dataclasses.replace(sure, evidence=dataclasses.replace(sure.evidence, gain=ratio))
        (one,), _ = examples([survey(problem, 0, 3), noisy], SOLVERS)
        assert one.gain(SOLVER.id, config) == expected


def test_gains_refer_to_one_default():
    problem, config, other = conv(64, 64, 56), Config(nb=4, ur=3, run=8), Config(nb=1, ur=1, run=1)
    old = measurement(problem, config, 3.0, default=other)
    new = measurement(problem, config, 1.5, date="2026-11-17T12:00:00Z")
    (one,), _ = examples([old, new], SOLVERS)
    assert one.default[1] == SOLVER.default(problem, TARGET) and one.gain(SOLVER.id, config) == 1.5


def test_what_is_of_no_use_is_counted():
    good = survey(conv(64, 64, 56), 0)
    gone = dataclasses.replace(good, key=dataclasses.replace(good.key, solver="gone"))
    newer = dataclasses.replace(good, key=dataclasses.replace(good.key, version="2.0"))
    odd = dataclasses.replace(good, problem={**good.problem, "inputs": []})
    senseless = {**good.problem, "inputs": ["float32[1,64]", None], "constant": []}
    strange = dataclasses.replace(good, problem=senseless, key=dataclasses.replace(good.key, problem="x"))
    place = dataclasses.replace(good.key.where, arch="a new form")
    elsewhere = dataclasses.replace(good, key=dataclasses.replace(good.key, where=place))
    known, unused = examples([good, gone, newer], SOLVERS)
    assert len(known) == 1 and unused.total() == 2
    for record in (odd, strange, elsewhere):
        assert examples([record], SOLVERS)[0] == [] and examples([record], SOLVERS)[1].total() == 1
    # of a sighting, the version of its own solver counts
    stale = dataclasses.replace(good, seen=(Sighting(SOLVER.id, "0.9", Config(nb=1, ur=1, run=1), 5.0),))
    assert len(examples([stale], SOLVERS)[0][0].gains) == 1


def test_a_place_is_a_target_again():
    for changed in ({}, {"lacks": ("fp64", "fp16")}, {"language": "", "device": "gpu"}, {"registers": 32}):
        target = dataclasses.replace(TARGET, **changed)
        where = Where.of(target)
        assert Where.of(target_of(where)) == dataclasses.replace(where, software="")


def test_a_shortlist_serves_all_problems():
    known, _ = examples(surveys(), SOLVERS)
    listed = shortlist(known)
    assert 0 < len(listed) <= MOST_LISTED and len(set(listed)) == len(listed)
    for e in known:
        assert max(e.gains.get(who, 0.0) for who in listed) >= 0.97 * e.best
    assert all(any(e.gains.get(who, 0.0) >= 0.97 * e.best for e in known) for who in listed)


def test_too_little_teaches_nothing():
    known, _ = examples(surveys("wide"), SOLVERS)
    assert len(known) == 6 and len(learnable(known)) == 1
    assert not learnable(known[: LEAST_PROBLEMS - 1])
    # the default alone says nothing about others
    bare, _ = examples([dataclasses.replace(s, seen=()) for s in surveys("wide")], SOLVERS)
    assert len(bare) == 6 and not learnable(bare)


# ---- training, with scikit-learn ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def known():
    pytest.importorskip("sklearn", reason="training needs the extra train")
    return examples(surveys(), SOLVERS)[0]


def truth(judged):
    """The pick's speed as a share of the best of all configs, not of those that were seen."""
    e = judged.example
    config = judged.pick[1] if judged.pick is not None else e.default[1]
    return speed(e.problem, config) / max(speed(e.problem, c) for c in SOLVER.space(e.problem, TARGET))


def test_networks_that_it_has_not_seen(known):
    held = hold_out(known, networks(), SOLVERS)
    judged = [j for one in held for j in one.judged]
    assert [one.name for one in held] == list(NETWORKS) and len(judged) == 24
    answered = [j for j in judged if not j.abstains]
    assert len(answered) >= 18
    shares = [truth(j) for j in answered]
    defaults = [speed(j.example.problem, j.example.default[1]) * truth(j) / speed(j.example.problem, (
        j.pick[1] if j.pick else j.example.default[1])) for j in answered]  # fmt: skip
    mean = math.exp(sum(map(math.log, shares)) / len(shares))
    assert mean > 0.93 and mean > 1.3 * math.exp(sum(map(math.log, defaults)) / len(defaults))
    for j in judged:  # what is reported is what was recorded
        assert j.gain == (1.0 if j.pick is None else j.example.gain(*j.pick))


def test_no_problem_of_a_network_teaches_about_it(known):
    mine = {p.key() for p in problems("wide")}
    seen = []
    held = hold_out(known, [Network("wide", dict.fromkeys(mine, 1.0))], SOLVERS, tell=seen.append)
    assert seen == ["wide"] and {j.example.problem.key() for j in held[0].judged} == mine
    # a record that lies about one of its problems changes nothing about it
    lie = dataclasses.replace(survey(problems("wide")[0], 0), seen=(
        Sighting(SOLVER.id, "1.0", Config(nb=1, ur=1, run=64), 1000.0),))  # fmt: skip
    others = [s for s in surveys() if s.key.problem != lie.key.problem]
    again = hold_out(examples([*others, lie], SOLVERS)[0], [Network("wide", dict.fromkeys(mine, 1.0))], SOLVERS)
    assert [j.pick for j in again[0].judged] == [j.pick for j in held[0].judged]


def test_the_summary_weighs_by_time(known):
    held = hold_out(known, networks()[:2], SOLVERS)
    found = summary(held, True)
    for one, told in zip(held, found["networks"], strict=True):
        weights = [j.weight for j in one.judged]
        logs = [w * math.log(j.share) for w, j in zip(weights, one.judged, strict=True)]
        assert told["speed"] == pytest.approx(math.exp(sum(logs) / sum(weights)))
        assert len(set(weights)) == 6 and told["untuned"] < told["speed"] <= told["known"] <= 1
    assert found["speed"] == pytest.approx(math.sqrt(held[0].speed * held[1].speed))
    assert found["held_out"] == "networks" and found["problems"] == 12
    assert found["unknown"] == sum(j.gain is None for one in held for j in one.judged)
    json.dumps(found, allow_nan=False)


def test_training_repeats_and_is_small(known):
    one, other = (heuristic_file.dump(dataclasses.replace(train(known, {}), date="")) for _ in range(2))
    assert one == other and len(one) < 200_000
    assert len(heuristic_file.parse(one).sections) == 1


def test_trees_are_those_of_scikit_learn(known):
    from sklearn.ensemble import GradientBoostingRegressor

    from tunewright.heuristic import train as t
    from tunewright.heuristic.features import columns

    asked = columns([(who.solver, who.config) for e in known for who in e.gains])
    x, y, weights = t._table(known, asked)
    model = GradientBoostingRegressor(
        n_estimators=t.TREES, max_depth=t.DEPTH, learning_rate=t.RATE, min_samples_leaf=t.LEAST_LEAF,
        subsample=t.SUBSAMPLE, max_features=0.5, init="zero", random_state=0,
    )  # fmt: skip
    section = train(known, {}).sections[0]
    model.fit(x, y - section.base, sample_weight=weights / weights.mean())
    row = 0
    for e in known:
        for who in e.gains:
            _, rated = section.rate(e.numbers, (who.solver, who.config))
            assert rated == pytest.approx(section.base + model.predict(x[row : row + 1])[0], abs=1e-4)
            row += 1


def test_far_away_shapes_abstain_and_those_between_do_not(known):
    given = train(known, {})

    def asked(problem):
        default = (SOLVER.id, SOLVER.default(problem, TARGET))
        return given.advise(problem, TARGET, default, SOLVERS, lambda s, c: s.why_not(problem, TARGET))

    for inside in (conv(80, 80, 28), conv(128, 96, 14), conv(64, 64, 42), conv(200, 128, 14, 1), conv(64, 160, 28, 1)):
        assert asked(inside).picks, asked(inside).why
    for outside in (
        conv(2048, 2048, 28), conv(64, 64, 512), conv(64, 64, 28, 15), conv(64, 64, 56, batch=128), conv(3, 8, 4, 1)
    ):  # fmt: skip
        assert asked(outside).abstains and "far from its data" in asked(outside).why


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TUNEWRIGHT_USER_DB_PATH", str(tmp_path / "user"))
    monkeypatch.setenv("TUNEWRIGHT_SYSTEM_DB_PATH", str(tmp_path / "system"))
    monkeypatch.setattr(base, "solvers", lambda: SOLVERS)

    def run(*arguments):
        code = tools.execute(["kb", "train", *(str(a) for a in arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def result(path, network):
    layers = [{"problem": p.key(), "seconds": 1e-3} for p in problems(network)]
    content = {"schema": "tunewright.tune/1", "model": f"models/{network}.onnx", "layers": layers}
    path.write_text(json.dumps(content))
    return path


def test_the_command_trains_and_publishes(known, call, tmp_path):
    open_user(Settings.from_environment()).add(surveys())
    files = [result(tmp_path / f"tune_result_{name}.json", name) for name in NETWORKS]
    code, out, err = call(*files)
    assert code == 0 and not err, err
    assert "% of the tuned speed on networks that it had not seen" in out and "wide.onnx" in out
    made = heuristic_file.read(tmp_path / "user" / "heuristic.json")
    assert made.about["held_out"] == "networks" and made.about["networks"][0]["name"] == "wide.onnx"
    assert made.about["examples"] == {"records": 24, "problems": 24, "candidates": sum(len(e.gains) for e in known)}
    code, out, err = call(*files, "--json", "--out", tmp_path / "other.json")
    report = json.loads(out)
    assert code == 0 and report["path"] == str(tmp_path / "other.json") and len(report["picks"]) == 24
    assert report["speed"] == pytest.approx(made.about["speed"]) and (tmp_path / "other.json").exists()


def test_without_results_groups_are_left_out(known, call, tmp_path):
    open_user(Settings.from_environment()).add(surveys())
    code, out, err = call("--from", "user", "--out", tmp_path / "h.json")
    assert code == 0 and "groups of problems that it had not seen" in out and "an easier test" in err
    assert len(heuristic_file.read(tmp_path / "h.json").about["networks"]) == 5


def test_the_command_refuses_what_it_cannot_do(call, tmp_path):
    code, _, err = call()
    assert code == 2 and "too few to learn from" in err and not (tmp_path / "user" / "heuristic.json").exists()
    for text, why in (("{", "is not JSON"), ("{}", "not a result file"), ("[]", "not a result file")):
        (tmp_path / "r.json").write_text(text)
        code, _, err = call(tmp_path / "r.json")
        assert code == 2 and why in err and "Traceback" not in err
    layers = [{"problem": 3, "seconds": None}]
    (tmp_path / "r.json").write_text(json.dumps({"schema": "tunewright.tune/1", "layers": layers}))
    assert "without a problem" in call(tmp_path / "r.json")[2]
    assert call(tmp_path / "absent.json")[0] == 2
    assert call("--from", tmp_path / "absent")[0] == 2
    assert call("--out", tmp_path / "no" / "such" / "folder.json")[0] == 2


def test_without_scikit_learn_it_says_what_to_install(call, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    open_user(Settings.from_environment()).add(surveys())
    code, _, err = call()
    assert code == 2 and "tunewright[train]" in err and "Traceback" not in err
