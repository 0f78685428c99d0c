"""Spaces: what is valid, near, equal and the same for ever."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunewright.errors import SettingsError
from tunewright.search import Config, Space

SCALARS = st.one_of(
    st.integers(-64, 256), st.booleans(), st.text("abc", max_size=3), st.floats(-4, 4, allow_nan=False), st.none()
)
PARAMS = st.dictionaries(
    st.text("pqrs", min_size=1, max_size=3),
    st.lists(SCALARS, min_size=1, max_size=5, unique=True),
    min_size=1,
    max_size=4,
)


def some_rule(salt: int):  # type: ignore[no-untyped-def]
    """Allows about two thirds of all configs, the same ones in every process."""
    return lambda c: sum(map(ord, json.dumps([str(c[name]) for name in sorted(c)]))) * (salt + 1) % 3 != 0


@settings(max_examples=60, deadline=None)
@given(PARAMS, st.integers(0, 50))
def test_samples_and_neighbours_are_valid_and_encode_is_injective(params: dict, salt: int) -> None:  # type: ignore[type-arg]
    rule = some_rule(salt)
    space = Space(params, rule)
    configs = list(space)
    assert all(rule(config) and config in space for config in configs)
    assert len(set(configs)) == len(configs)
    points = {tuple(space.encode(config)) for config in configs}
    assert len(points) == len(configs)
    assert all(0.0 <= x <= 1.0 for point in points for x in point)
    rng = np.random.default_rng(salt)
    sample = space.sample(rng)
    assert (sample is None) == (not configs)
    if sample is not None:
        assert sample in space
        near = space.neighbours(sample)
        assert len(set(near)) == len(near)
        for other in near:
            assert other in space and sum(other[name] != sample[name] for name in params) == 1
            assert sample in space.neighbours(other)
        far = [c for c in configs if sum(c[n] != sample[n] for n in params) == 1]
        assert set(near) == set(far)


def test_membership_asks_names_values_and_the_rule() -> None:
    space = Space({"a": [1, 2], "b": ["x", "y"]}, lambda c: c["a"] == 1 or c["b"] == "x")
    assert {"a": 2, "b": "x"} in space and Config(b="x", a=2) in space
    assert {"a": 2, "b": "y"} not in space and {"a": 3, "b": "x"} not in space
    assert {"a": 1} not in space and {"a": 1, "b": "x", "c": 0} not in space
    assert {"a": [1], "b": "x"} not in space and 7 not in space and "ab" not in space
    with pytest.raises(SettingsError, match="not a combination"):
        space.encode({"a": 3, "b": "x"})


@pytest.mark.parametrize("values", [[], [1, 1], [1, True], [float("nan")], [(1, 2)]])
def test_ill_formed_parameters_are_refused(values: list[object]) -> None:
    with pytest.raises(SettingsError, match="parameter a"):
        Space({"a": values})  # type: ignore[dict-item]


def test_a_large_sparse_space_is_sampled_without_enumeration() -> None:
    """10^8 combinations of which one in a thousand is valid."""
    calls = 0

    def rule(c):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        return (c["a"] * 7 + c["b"] * 3 + c["c"] + c["d"]) % 1000 == 0

    space = Space({name: list(range(100)) for name in "abcd"}, rule)
    rng = np.random.default_rng(0)
    found = [space.sample(rng) for _ in range(20)]
    assert all(config in space for config in found) and len(set(found)) == 20
    assert calls < 200_000
    assert space.rows is None


def test_sampling_is_fair() -> None:
    space = Space({"a": [0, 1, 2], "b": [0, 1, 2]}, lambda c: c["a"] >= c["b"])
    rng = np.random.default_rng(0)
    counts = dict.fromkeys(space, 0)
    for _ in range(6000):
        counts[space.sample(rng)] += 1  # type: ignore[index]
    assert all(850 < count < 1150 for count in counts.values())


def test_a_needle_is_found_and_an_empty_space_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunewright.search.space.ENUMERATE", 10)
    monkeypatch.setattr("tunewright.search.space.MISSES", 500)
    params = {name: list(range(30)) for name in "abc"}
    needle = Config(a=7, b=8, c=9)
    assert Space(params, lambda c: dict(c) == dict(needle)).sample(np.random.default_rng(0)) == needle
    assert Space(params, lambda _: False).sample(np.random.default_rng(0)) is None


def test_neighbours_within_a_step() -> None:
    space = Space({"a": [1, 2, 4, 8], "b": ["x", "y"]})
    near = space.neighbours({"a": 2, "b": "x"}, step=1)
    assert near == [Config(a=1, b="x"), Config(a=4, b="x"), Config(a=2, b="y")]


def test_kin_sees_powers_of_two() -> None:
    space = Space({"block": [16, 32, 48, 64, 80, 96, 112, 128]})
    kin = dict(zip(space.params["block"], space.kin[0], strict=True))
    near = {space.params["block"][i] for sense in kin[128] for i in sense}
    assert {112, 64, 32, 16} <= near and 48 not in near


def test_hash_names_the_content() -> None:
    params = {"a": [1, 2, 3], "b": [True, False]}
    rule = lambda c: c["a"] > 1  # noqa: E731
    base = Space(params, rule).hash
    assert base == Space(params, lambda c: c["a"] >= 2).hash  # another text, the same configs
    assert base == Space.of(params, Space(params, rule)).hash
    others = [
        Space(params),
        Space(params, lambda c: c["a"] > 2),
        Space({**params, "b": [False, True]}, rule),
        Space(params, rule, version="1"),
        Space(params, rule, version="2"),
    ]
    assert len({base, *(space.hash for space in others)}) == 6
    big = {name: list(range(100)) for name in "abcd"}
    assert Space(big, lambda c: c["a"] < 50).hash != Space(big, lambda c: c["a"] < 51).hash


def test_hash_is_the_same_in_another_process() -> None:
    code = (
        "from tunewright.search import Space;"
        "print(Space({'a': [1, 2, 4], 'b': ['x', 'y']}, lambda c: c['a'] < 4 or c['b'] == 'x').hash)"
    )
    source = str(Path(__file__).parents[3] / "src")
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": source, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert runs == {Space({"a": [1, 2, 4], "b": ["x", "y"]}, lambda c: c["a"] < 4 or c["b"] == "x").hash}


def test_config_is_a_value() -> None:
    config = Config({"a": 1}, b="x")
    assert config == {"a": 1, "b": "x"} and {config: 1}[Config(b="x", a=1)] == 1
    assert repr(config) == "Config(a=1, b='x')"
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(TypeError):
        config["a"] = 2  # type: ignore[index]


def test_a_space_of_a_list() -> None:
    configs = [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    space = Space.of({"a": [1, 3], "b": [2, 4]}, configs)
    assert list(space) == configs and {"a": 1, "b": 4} not in space
