"""Keys: every field counts, and a key is the same text on every machine."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tunewright.devices.base import Target
from tunewright.knowledge.key import FIELDS, WHERE_FIELDS, Key, MatchKind, Where, compare, distance
from tunewright.testing.database import random_records

KEY = Key(
    "Relu(float32[2,3]) -> float32[2,3]",
    Where("cpu", "Processor", 8, "x86-64; 32 registers of 64 bytes; c", "native", "driver 3.0; runtime 1.2", "-O3"),
    "opencl.relu", "1.2", "0" * 32, "1" * 32,
)  # fmt: skip


def changed(name: str, value: object) -> Key:
    if name in WHERE_FIELDS:
        return dataclasses.replace(KEY, where=dataclasses.replace(KEY.where, **{name: value}))
    return dataclasses.replace(KEY, **{name: value})


def value(key: Key, name: str) -> object:
    return getattr(key.where if name in WHERE_FIELDS else key, name)


def test_no_field_is_forgotten() -> None:
    names = {f.name for kind in (Key, Where) for f in dataclasses.fields(kind)}
    assert set(FIELDS) == names - {"where"} and len(FIELDS) == len(names) - 1
    assert compare(KEY, dataclasses.replace(KEY)).kind is MatchKind.EXACT


@pytest.mark.parametrize("distance", [0.0, 1.0, math.inf])
@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_differs_is_never_exact_and_is_named(name: str, distance: float) -> None:
    old = value(KEY, name)
    for new in [old + 1, 0] if isinstance(old, int) else [f"{old}x", f" {old}", "", str(old).upper() + "\u00e9"]:
        for asked, stored in ((KEY, changed(name, new)), (changed(name, new), KEY)):
            match = compare(asked, stored, distance)
            assert match.kind is not MatchKind.EXACT and match.differs == (name,), (name, new)
            assert name in str(match)


@pytest.mark.parametrize("name", FIELDS)
def test_what_a_difference_means(name: str) -> None:
    soft = {"problem", "processor", "units", "software", "version", "source", "space"}
    new = value(KEY, name) + 1 if name == "units" else "1.3" if name == "version" else f"{value(KEY, name)}x"  # type: ignore[operator]
    kind = compare(KEY, changed(name, new), 1.0).kind
    assert kind is (MatchKind.PROVISIONAL if name in soft else MatchKind.MISS)


def test_another_major_version_or_a_far_shape_is_a_miss() -> None:
    assert compare(KEY, changed("version", "2.2")).kind is MatchKind.MISS
    assert compare(KEY, changed("problem", "Relu(float32[900,3]) -> float32[900,3]"), math.inf).kind is MatchKind.MISS
    assert distance((2, 3), (4, 3)) == 1.0 and distance((2, 3), (5, 3)) == math.inf and distance((0,), (1,)) == math.inf


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Target) if f.compare])
def test_every_field_of_a_target_is_in_the_key(field: str) -> None:
    software = (("opencl", "native"), ("driver", "3.0"))
    target = Target("cpu", "Processor", "x86-64", 8, software, "c", "-O3", 64, 32, ("fp64",))
    others = {
        "device": "gpu", "name": "Other", "arch": "arm", "units": 9, "language": "d", "options": "", "vector_bytes": 32,
        "registers": 16, "lacks": (), "software": (("opencl", "native"), ("driver", "3.1")),
    }  # fmt: skip
    there = dataclasses.replace(target, **{field: others[field]})
    assert Where.of(target) != Where.of(there)
    assert Where.of(dataclasses.replace(target, software=target.software[::-1])) == Where.of(target)


SCRIPT = """
import json, random
from tunewright.testing.database import random_problem, random_records
from tunewright.plugins.single import open_device
from tunewright.solvers.base import solvers
from tunewright.knowledge.key import Key
from tunewright.knowledge.record import to_line
problems = [random_problem(random.Random(k)) for k in range(12)]
target = open_device("NULL").target
keys = [repr(Key.of(p, target, s, s.default(p, target)))
        for p in problems for s in solvers() if s.why_not(p, target) is None]
print(json.dumps([keys, [p.family() for p in problems], [to_line(r) for r in random_records(0, 20)]]))
"""


def test_keys_do_not_depend_on_locale_time_zone_or_hash_seed(tmp_path: Path) -> None:
    found = []
    for language, zone, seed in (("C", "UTC", "0"), ("tr_TR.UTF-8", "Asia/Kathmandu", "99")):
        environment = {
            **os.environ, "LC_ALL": language, "LANG": language, "TZ": zone, "PYTHONHASHSEED": seed,
            "PYTHONPATH": str(Path(__file__).parents[3] / "src"),
        }  # fmt: skip
        command = [sys.executable, "-c", SCRIPT]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout)
    assert found[0] == found[1]
    keys, families, lines = json.loads(found[0])
    assert len(set(keys)) > 12 and len(set(families)) > 4
    assert [json.loads(line)["digest"] for line in lines] == [r.digest for r in random_records(0, 20)]
