"""Recorded tables: both formats, what is wrong with a file, and strategies on tables made here from a seed."""

from __future__ import annotations

import gzip
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from tunewright.errors import InputError
from tunewright.search import Config, Space, Status, Trial, create
from tunewright.search.reinforce import Reinforce
from tunewright.testing.replay import Table, load, replay
from tunewright.testing.strategy import drive

PARAMS = {
    "bx": [16, 32, 48, 64, 96, 128, 192, 256],
    "by": [1, 2, 4, 8],
    "tx": [1, 2, 3, 4],
    "ty": [1, 2, 3, 4],
    "cache": [0, 1],
    "pad": [0, 1],
}


def made_table(seed: int = 0, device: int = 0) -> Table:
    """A landscape like a kernel's: aligned blocks, occupancy, an interaction, noise, launches that fail.

    Another device has the same kernel's landscape with other noise and another price for each parameter.
    """
    rng = np.random.default_rng(seed)
    best = {name: int(rng.integers(len(values))) for name, values in PARAMS.items()}
    rng = np.random.default_rng([seed, device])
    price = dict(zip(PARAMS, rng.uniform(0.6, 1.6, len(PARAMS)), strict=True))
    trials = []
    for config in Space(PARAMS, lambda c: 16 <= c["bx"] * c["by"] <= 1024):
        if config["bx"] * config["by"] * config["tx"] > 2048:
            trials.append(Trial(config, Status.FAILED, why="too many registers"))
            continue
        away = sum(price[n] * abs(PARAMS[n].index(config[n]) - best[n]) / len(PARAMS[n]) for n in PARAMS)
        cost = 1 + away + 0.4 * (config["bx"] % 64 != 0) + 0.5 * (config["cache"] != config["pad"])
        trials.append(Trial(config, Status.OK, 1e-3 * cost * float(rng.lognormal(0, 0.03))))
    return Table.of(f"made {seed}", PARAMS, trials)


def kernel_tuner_file(table: Table) -> dict[str, object]:
    cache = {}
    for config, trial in table.trials.items():
        time = trial.seconds * 1e3 if trial.cost < math.inf else "CompilationFailedConfig"
        cache[",".join(map(str, config.values()))] = {**config, "time": time, "times": [time]}
    return {
        "device_name": "GPU",
        "kernel_name": "k",
        "tune_params_keys": list(PARAMS),
        "tune_params": PARAMS,
        "objective": "time",
        "cache": cache,
    }


def same(one: Table, other: Table) -> bool:
    return set(one.trials) == set(other.trials) and all(
        math.isclose(one.trials[c].cost, other.trials[c].cost) for c in one.trials
    )


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_our_format_keeps_everything(tmp_path: Path, suffix: str) -> None:
    table = made_table()
    table.save(tmp_path / f"t.{suffix}")
    read = load(tmp_path / f"t.{suffix}")
    assert same(read, table) and read.name == table.name and read.space.hash == table.space.hash
    assert {t.status for t in read.trials.values()} == {Status.OK, Status.FAILED}


@pytest.mark.parametrize("ending", ["whole", "gzip", "interrupted", "comma"])
def test_kernel_tuner_files(tmp_path: Path, ending: str) -> None:
    table, path = made_table(), tmp_path / "A100"
    text = json.dumps(kernel_tuner_file(table), indent="")
    if ending in ("interrupted", "comma"):
        text = text.rstrip()[:-1].rstrip()[:-1] + ("," if ending == "comma" else "")
    path.write_bytes(gzip.compress(text.encode()) if ending == "gzip" else text.encode())
    read = load(path)
    assert same(read, table) and read.name == "k on GPU"
    assert list(read.space.params) == list(PARAMS)


def test_old_failures_are_huge_times(tmp_path: Path) -> None:
    data = {"tune_params": {"a": [1, 2]}, "cache": {"1": {"a": 1, "time": 1e20}, "2": {"a": 2, "time": 5.0}}}
    (tmp_path / "old.json").write_text(json.dumps(data))
    table = load(tmp_path / "old.json")
    assert table.optimum == 5e-3 and table.trials[Config(a=1)].status is Status.FAILED


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"[1]", "damaged"),
        (b"{}", "not a recorded table"),
        (b"not json", "is not JSON"),
        (b'{"table": 7, "name": "x", "params": {}}', "format is 7"),
        (b"\x1f\x8b torn", "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b'{"tune_params": {"a": [1]}, "cache": {"1": {"a": 1}}}', "no trial that worked"),
        (
            b'{"table": 1, "name": "x", "params": {"a": [1]}}\n{"config": {"a": 2}, "status": "OK", "seconds": 1}',
            "a comb",
        ),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(Exception, match=message) as caught:
        load(path)
    assert caught.type.__module__ == "tunewright.errors"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.json.*cannot be read"):
        load(tmp_path / "none.json")


@pytest.mark.parametrize("name", ["genetic", "reinforce", "surrogate", "local", "auto"])
def test_learners_beat_random_on_a_hard_table(name: str) -> None:
    table = made_table(3)
    assert table.share_within(0.95) < 0.02
    ours = [replay(table, name, seed=seed, budget=80) for seed in range(8)]
    random = [replay(table, "random", seed=seed, budget=80) for seed in range(8)]
    assert not any(run.repeats or run.strays for run in ours)
    assert np.median([run.at(80) for run in ours]) > np.median([run.at(80) for run in random])


def test_the_other_devices_best_configs_help_as_seeds() -> None:
    here, there = made_table(1, device=0), made_table(1, device=1)
    cold = [replay(here, "auto", seed=seed).evaluations_to(0.95) or 200 for seed in range(6)]
    teacher = create("auto", there.space, seed=1)
    drive(teacher, lambda config: there.trials[config], 200)
    for seeds in (there.best(5), teacher.elite()):
        warm = [replay(here, "auto", seed=seed, seeds=seeds).evaluations_to(0.95) or 200 for seed in range(6)]
        assert np.median(warm) <= np.median(cold) / 2


def test_a_policy_learnt_on_another_device_halves_the_way() -> None:
    here, there = made_table(1, device=0), made_table(1, device=1)
    teacher = create("reinforce", there.space, seed=1)
    assert isinstance(teacher, Reinforce)
    drive(teacher, lambda config: there.trials[config], 200)
    policy = teacher.export_policy()
    cold = [replay(here, "reinforce", seed=seed).evaluations_to(0.95) or 200 for seed in range(9)]
    warm = [replay(here, "reinforce", seed=seed, policy=policy).evaluations_to(0.95) or 200 for seed in range(9)]
    assert np.median(warm) <= np.median(cold) / 2


def test_a_run_that_exhausts_its_table_ends_at_the_optimum() -> None:
    table = made_table()
    run = replay(table, "random", budget=10**6, batch=50)
    assert len(run.curve) == len(table.trials) and run.at(10**6) == 1.0 and run.failures > 0


def test_the_command_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    from tunewright.tools import execute

    made_table().save(tmp_path / "t.jsonl.gz")
    picture = tmp_path / "out.png"
    arguments = ["replay", str(tmp_path / "t.jsonl.gz"), "--strategy", "genetic,random", "--seeds", "2"]
    assert execute([*arguments, "--budget", "30", "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "genetic" in out and "random" in out and "made 0" in out and "repeats" in out
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert execute([*arguments[:3], "nope"]) == 2
    assert "there is no strategy 'nope'" in capsys.readouterr().err


def test_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tunewright.tools import execute

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    made_table().save(tmp_path / "t.jsonl")
    assert execute(["replay", str(tmp_path / "t.jsonl"), "--seeds", "1"]) == 2
    assert "pip install tunewright[plot]" in capsys.readouterr().err
