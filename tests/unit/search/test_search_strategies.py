"""What single strategies do beyond the promises that the conformance suite checks."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tunewright.errors import SettingsError
from tunewright.search import Config, Space, Status, Trial, create, names, strategy_for
from tunewright.search.base import varied
from tunewright.search.gaussian import GaussianProcess, _inverse_factor
from tunewright.search.reinforce import Reinforce
from tunewright.search.surrogate import expected_improvement
from tunewright.testing.strategy import bowl, drive

LEARNERS = ("genetic", "reinforce", "surrogate", "local", "auto")


def test_names_and_unknown_names() -> None:
    assert {"exhaustive", "random", *LEARNERS} <= set(names())
    with pytest.raises(SettingsError, match=r"no strategy 'nope'.*one of: auto"):
        create("nope", Space({"a": [1]}))


def test_exhaustive_keeps_the_order_of_the_space() -> None:
    space = Space({"a": [1, 2, 3], "b": ["x", "y"]}, lambda c: c["a"] != 2)
    assert create("exhaustive", space).ask(99) == list(space)


def test_cost_counts_only_what_is_usable() -> None:
    config = Config(a=1)
    assert Trial(config, Status.OK, 2.0).cost == 2.0
    for status, seconds in ((Status.WRONG, 1.0), (Status.OK, math.nan), (Status.OK, 0.0), (Status.TIMEOUT, 9.0)):
        assert Trial(config, status, seconds).cost == math.inf


def test_a_told_config_must_be_of_the_space() -> None:
    with pytest.raises(SettingsError, match="not a combination"):
        create("random", Space({"a": [1]})).tell([Trial({"a": 2}, Status.OK, 1.0)])


@pytest.mark.parametrize("name", LEARNERS)
def test_learners_leave_a_failing_region(name: str) -> None:
    """Half of the space fails; a random search walks into it every second time."""
    space = Space({"a": list(range(1, 17)), "b": list(range(1, 17)), "c": [1, 2, 4, 8], "bad": [0, 1]})
    failures = []
    for seed in range(5):
        strategy = create(name, space, seed=seed)
        asked = drive(strategy, lambda c: Trial(c, Status.CRASHED) if c["bad"] else bowl(c), 100)
        failures.append(sum(bool(config["bad"]) for config in asked[30:]) / 70)
    assert np.mean(failures) < 0.2


@pytest.mark.parametrize("name", LEARNERS)
def test_learners_work_in_a_space_too_large_to_enumerate(name: str) -> None:
    space = Space({n: list(range(100)) for n in "abcd"}, lambda c: sum(c.values()) % 8 == 0)
    best = {}
    for who in (name, "random"):
        runs = []
        for seed in range(3):
            asked = drive(create(who, space, seed=seed), bowl, 120)
            runs.append(min(bowl(config).seconds for config in asked))
        best[who] = np.median(runs)
    assert best[name] < best["random"]


def test_a_policy_survives_json_and_prefers_what_was_good() -> None:
    space = Space({"a": list(range(1, 33)), "b": list(range(1, 33)), "c": [1, 2, 4, 8], "d": [0, 1]})
    teacher = create("reinforce", space, seed=1)
    assert isinstance(teacher, Reinforce)
    taught = drive(teacher, bowl, 150)
    policy = json.loads(json.dumps(teacher.export_policy()))
    assert max(policy["logits"]["a"], key=lambda pair: pair[1])[0] == 4  # where the bowl is deepest
    states = drive(create("reinforce", space, seed=2, policy=policy), bowl, 4)
    assert states == sorted(taught, key=lambda config: bowl(config).seconds)[:4]
    assert len(policy["states"]) <= 8 and all(state in taught for state in policy["states"])

    def best(seed: int, **options: object) -> float:
        return min(bowl(config).seconds for config in drive(create("reinforce", space, seed, **options), bowl, 40))

    assert np.median([best(seed, policy=policy) for seed in range(8)]) < np.median([best(seed) for seed in range(8)])


def test_a_policy_of_another_space_is_used_as_far_as_it_fits() -> None:
    space = Space({"a": [1, 2, 4], "new": ["x", "y"]})
    policy = {"policy": 1, "logits": {"a": [[4, 9.0], [64, 3.0]], "gone": [[1, 1.0]]}, "states": [{"a": 4, "gone": 1}]}
    first = create("reinforce", space, policy=policy).ask(1)[0]
    assert first["a"] == 4


@pytest.mark.parametrize(
    "policy", [{}, {"policy": 9, "logits": {}, "states": []}, {"policy": 1, "logits": 3, "states": []}]
)
def test_a_damaged_policy_is_refused(policy: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match="policy: cannot be read"):
        create("reinforce", Space({"a": [1, 2]}), policy=policy)


def test_the_process_extends_as_it_would_be_computed_anew() -> None:
    rng = np.random.default_rng(0)
    points, pool = rng.random((30, 3)), rng.random((50, 3))
    values = np.sin(points.sum(axis=1))
    whole, grown = GaussianProcess(np.arange(3)), GaussianProcess(np.arange(3))
    whole.condition(points, values, pool)
    grown.condition(points[:10], values[:10], pool)
    for point, value in zip(points[10:], values[10:], strict=True):
        grown.add(point, float(value))
    assert np.allclose(whole.mean, grown.mean, atol=1e-3)
    assert np.allclose(whole._variance, grown._variance, atol=1e-3)


def test_the_process_focuses_and_forgets_what_it_only_expected() -> None:
    rng = np.random.default_rng(1)
    points, pool = rng.random((90, 3)), rng.random((40, 3))  # so many that the factor is inverted in blocks
    values = np.cos(points.sum(axis=1))
    whole, part = GaussianProcess(np.arange(3)), GaussianProcess(np.arange(3))
    whole.condition(points, values, pool)
    part.condition(points[:-1], values[:-1], pool)
    chosen = np.array([3, 4, 17, 39])
    part.focus(chosen)
    before = part.deviation()
    part.expect(points[-1])
    assert np.all(part.deviation() <= before) and np.any(part.deviation() < before)
    part.add(points[-1], float(values[-1]))
    assert np.allclose(whole.mean[chosen], part.mean, atol=1e-3)
    assert np.allclose(whole._variance[chosen], part._variance, atol=1e-3)


@pytest.mark.parametrize("n", [1, 64, 65, 150])
def test_the_inverse_in_blocks_is_the_inverse(n: int) -> None:
    rng = np.random.default_rng(n)
    root = rng.random((n, n))
    square = root @ root.T + n * np.eye(n)
    assert np.allclose(_inverse_factor(square) @ np.linalg.cholesky(square), np.eye(n), atol=1e-9)


def test_what_is_handed_on_is_good_and_varied() -> None:
    alike = [(0, 0, i) for i in range(20)]
    ranked = [*alike[:9], (1, 1, 0), *alike[9:], (2, 2, 0), *((9, i, i) for i in range(60))]
    assert varied(ranked, 4) == [(0, 0, 0), (0, 0, 1), (1, 1, 0), (2, 2, 0)]
    assert varied(ranked[:3], 4) == ranked[:2] and varied([], 4) == []
    assert varied(ranked, 1) == ranked[:1]


@pytest.mark.parametrize("name", ["surrogate", "auto"])
def test_a_suggestion_among_twenty_thousand_is_cheap(name: str) -> None:
    """CPU time of all threads: a linear algebra library that starts its own would show here.

    It is about 1.5 ms on a quiet machine (docs/search.md); the bound leaves room for a slow and busy one.
    """
    space = Space(
        {
            "a": [1, 2, 4, 8, 16, 32, 64, 128],
            "b": [1, 2, 3, 4, 5],
            "c": [1, 2, 4, 8, 16],
            "d": [0, 1],
            "e": [0, 1],
            "f": [1, 2, 4, 8, 16],
            "g": [16, 32, 48, 64, 80],
        }
    )
    assert space.rows is not None and len(space.rows) == 20_000

    def once(seed: int) -> float:
        start = time.process_time()
        assert len(drive(create(name, space, seed=seed), bowl, 200)) == 200
        return (time.process_time() - start) / 200

    assert min(once(seed) for seed in range(3)) < 2e-2


def test_the_process_learns_which_coordinate_matters() -> None:
    rng = np.random.default_rng(0)
    points = rng.random((60, 2))
    process = GaussianProcess(np.arange(2))
    for _ in range(4):
        process.learn(points, np.sin(9 * points[:, 0]))
    assert process._log_lengths[0] < process._log_lengths[1] - 1


def test_expected_improvement_orders_the_tail() -> None:
    mean = np.array([-1.0, 0.0, 3.0, 6.0, 12.0], dtype=np.float32)
    gain = expected_improvement(mean, np.ones(5, dtype=np.float32), 0.0)
    assert np.all(np.diff(gain) < 0) and gain[-1] > 0
    assert gain[1] == pytest.approx(0.39894, abs=1e-4)


@pytest.mark.parametrize(
    ("mode", "op", "expected"),
    [
        ("NO_TUNE", "conv", None),
        ("RL", "conv", "reinforce"),
        ("GA", "reduce", "genetic"),
        ("rl, ga", "conv", "genetic"),
        ("RL,GA", "matmul", "genetic"),
        ("GA,RL", "element-wise", "reinforce"),
        ("GA,RL", "broadcast", "reinforce"),
        ("RL,GA", "reduce", "reinforce"),
        ("RL,GA", "elewise", "reinforce"),
        ("RL,GA", "softmax", "genetic"),
    ],
)
def test_modes(mode: str, op: str, expected: str | None) -> None:
    assert strategy_for(mode, op) == expected


@pytest.mark.parametrize("mode", ["", "RL,RL", "NO_TUNE,GA", "SA"])
def test_unknown_modes(mode: str) -> None:
    with pytest.raises(SettingsError, match="NO_TUNE, RL, GA or RL,GA"):
        strategy_for(mode, "conv")


def test_importing_search_loads_no_strategy() -> None:
    code = "import sys, tunewright.search; print([m for m in sys.modules if m.endswith(('surrogate', 'genetic'))])"
    source = str(Path(__file__).parents[3] / "src")
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={"PYTHONPATH": source}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
