"""Damaged knowledge bases: no error, no record that was never written, no silent loss; and writing goes on.

About a hundred corruptions by default, a thousand of each kind with the marker ``soak``. A failure names its seed.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tunewright.knowledge.database import Database
from tunewright.knowledge.record import AnyRecord, Fault
from tunewright.knowledge.shared import SharedDatabase
from tunewright.knowledge.sqlite import PAGE_BYTES, SqliteDatabase
from tunewright.knowledge.system import SystemDatabase, write_lines
from tunewright.search.base import Status
from tunewright.testing.database import random_key, random_measurement, random_problem, random_records

CHUNK = 20


@cache
def originals() -> tuple[AnyRecord, ...]:
    """Small ones and large ones: some fill most of a page, some need several."""
    rng = random.Random(0)
    large = [random_measurement(rng, samples=250) for _ in range(4)]
    huge = [
        Fault(random_key(rng, random_problem(rng)), {}, Status.CRASHED, rng.randbytes(n).hex(), date, "0.1.0")
        for n, date in ((5_000, "2026-01-01T00:00:00Z"), (20_000, "2026-01-01T00:00:00Z"))
    ]
    return (*random_records(1, 34), *large, *huge)


# ---- what happens to bytes ------------------------------------------------------------------------------------------

Damage = Callable[[random.Random, bytes], bytes]


def flip_bits(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 16))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def flip_in_head(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    changed[rng.randrange(min(100, len(changed)))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def overwrite(rng: random.Random, data: bytes) -> bytes:
    at, length = rng.randrange(len(data)), rng.choice((1, 16, 512, 4096))
    filler = rng.choice((bytes(length), b"\xff" * length, rng.randbytes(length)))
    return data[:at] + filler[: len(data) - at] + data[at + length :]


def swap_pages(rng: random.Random, data: bytes) -> bytes:
    pages = [data[at : at + PAGE_BYTES] for at in range(0, len(data), PAGE_BYTES)]
    a, b = rng.sample(range(len(pages)), 2)
    pages[a], pages[b] = pages[b], pages[a]
    return b"".join(pages)


def drop_page(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(0, len(data), PAGE_BYTES)
    return data[:at] + bytes(PAGE_BYTES) + data[at + PAGE_BYTES :]


def flip_in_structure(rng: random.Random, data: bytes) -> bytes:
    """In the head of a page, or in its list of cells."""
    changed = bytearray(data)
    at = rng.randrange(0, len(data), PAGE_BYTES) + rng.randrange(40)
    changed[at] ^= 1 << rng.randrange(8)
    return bytes(changed)


def swap_lines(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    a, b = rng.sample(range(len(lines) - 1), 2)
    lines[a], lines[b] = lines[b], lines[a]
    return b"\n".join(lines)


def swap_members(rng: random.Random, data: bytes) -> bytes:
    """The digests of two lines change places."""
    lines = data.split(b"\n")
    a, b = rng.sample(range(len(lines) - 1), 2)
    lines[a], lines[b] = lines[b][:75] + lines[a][75:], lines[a][:75] + lines[b][75:]
    return b"\n".join(lines)


def join_lines(rng: random.Random, data: bytes) -> bytes:
    at = rng.choice([k for k, byte in enumerate(data) if byte == 10])
    return data[:at] + rng.choice((b"", b" ", b"\r", b"\n\n", b"\0")) + data[at + 1 :]


PAGES: tuple[Damage, ...] = (
    flip_bits, flip_bits, flip_in_head, flip_in_structure, flip_in_structure, truncate, overwrite, swap_pages,
    drop_page,
)  # fmt: skip
LINES: tuple[Damage, ...] = (flip_bits, flip_bits, truncate, overwrite, swap_lines, swap_members, join_lines)


# ---- whole files ----------------------------------------------------------------------------------------------------


def the_file(folder: Path) -> Path:
    (found,) = [p for p in folder.rglob("*") if p.is_file()]
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[type[Database], tuple[str, bytes]]:
    """Where in its folder a knowledge base's file is, and its bytes."""
    made = {}
    for kind in (SqliteDatabase, SharedDatabase, SystemDatabase):
        folder = tmp_path_factory.mktemp("whole")
        if kind is SystemDatabase:
            write_lines(folder / "system.jsonl", originals())
        else:
            database = kind(folder)
            for k in range(0, len(originals()), 8):
                database.add(originals()[k : k + 8])
                database.note("tuned", "something")
        path = the_file(folder)
        made[kind] = str(path.relative_to(folder)), path.read_bytes()
    return made


def asked(database: Database) -> tuple[set[AnyRecord], set[AnyRecord]]:
    """What a knowledge base says as a whole, and family by family."""
    families = {r.family for r in originals() if not isinstance(r, Fault)}
    by_family: set[AnyRecord] = {m for family in families for m in database.family(family)}
    by_family |= {s for family in families for s in database.surveys(family)}
    return set(database), by_family | set(database.faults())


def check_reading(database: Database, undetectable: bool) -> set[AnyRecord]:
    """Nothing raises, nothing is returned that was not written, and a loss is told. What can be read."""
    as_written = {record.digest: record.text for record in originals()}
    as_whole, by_family = asked(database)
    for record in as_whole | by_family:
        assert as_written.get(record.digest) == record.text, "a record that was never written"
    database.events()
    lost = set(originals()) - (as_whole & by_family)
    assert not lost or undetectable or database.damage(), f"{len(lost)} records lost without a word"
    assert database.read_only is None or isinstance(database, SystemDatabase)
    return as_whole | by_family


def corrupt(kind: type[Database], seed: int, name: str, data: bytes, folder: Path) -> str:
    """One corruption and everything that follows from it; what came of it."""
    rng = random.Random(seed)
    damage = rng.choice(PAGES if kind is SqliteDatabase else LINES)
    broken = damage(rng, data)
    path = folder / name
    path.parent.mkdir(parents=True)
    path.write_bytes(broken)
    # A file of lines that ends where a line ended is a whole file of fewer lines.
    undetectable = kind is not SqliteDatabase and data.startswith(broken) and broken[-1:] in (b"", b"\n")
    readable = check_reading(kind(folder), undetectable)  # type: ignore[call-arg]
    left = "all" if len(readable) == len(originals()) else "some" if readable else "none"
    outcome = f"{damage.__name__}: {left} left"
    if kind is SystemDatabase:
        return outcome
    extra = random_records(99, 1)
    assert kind(folder).add(extra) == 1  # type: ignore[call-arg]
    as_whole, by_family = asked(kind(folder))  # type: ignore[call-arg]
    assert {*readable, *extra} <= as_whole, "what could be read before the write cannot be read after it"
    assert {r.digest for r in readable} <= {r.digest for r in by_family}
    kind(folder).add(originals())  # type: ignore[call-arg]
    as_whole, by_family = asked(kind(folder))  # type: ignore[call-arg]
    assert as_whole == {*originals(), *extra}, "records that were damaged cannot be added again"
    assert by_family >= set(originals())
    return outcome


def chunks(last: int, first: int = 0) -> list[range]:
    return [range(at, min(at + CHUNK, last)) for at in range(first, last, CHUNK)]


def run(kind: type[Database], seeds: range, whole: dict[type[Database], tuple[str, bytes]], folder: Path) -> None:
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        try:
            outcomes[corrupt(kind, seed, *whole[kind], folder / str(seed))] += 1
        except Exception as error:
            raise AssertionError(f"{kind.__name__}, seed {seed}: {type(error).__name__}: {error}") from error
    print(dict(outcomes))


KINDS = (SqliteDatabase, SharedDatabase, SystemDatabase)


@pytest.mark.parametrize("seeds", chunks(40), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_corruption(
    kind: type[Database], seeds: range, whole: dict[type[Database], tuple[str, bytes]], tmp_path: Path
) -> None:
    run(kind, seeds, whole, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("seeds", chunks(1000, 40), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_more_corruptions(
    kind: type[Database], seeds: range, whole: dict[type[Database], tuple[str, bytes]], tmp_path: Path
) -> None:
    run(kind, seeds, whole, tmp_path)


def test_what_is_not_damaged_is_all_there(whole: dict[type[Database], tuple[str, bytes]], tmp_path: Path) -> None:
    for kind, (name, data) in whole.items():
        path = tmp_path / kind.__name__ / name
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
        database = kind(tmp_path / kind.__name__)  # type: ignore[call-arg]
        assert asked(database) == (set(originals()), set(originals())) and not database.damage()


def test_most_of_a_file_without_a_head_is_saved(whole: dict[type[Database], tuple[str, bytes]], tmp_path: Path) -> None:
    """SQLite reads nothing of it; records that lie on one page are found in its bytes."""
    name, data = whole[SqliteDatabase]
    (tmp_path / name).write_bytes(os.urandom(100) + data[100 : len(data) - 10_000])
    database = SqliteDatabase(tmp_path)
    assert not list(database) and database.damage() == ["kb.sqlite: file is not a database"]
    database.add(random_records(99, 1))
    assert len(list(database)) > 0.6 * len(originals())
    assert not database.damage()
    (event,) = database.events()
    assert event.action == "repaired" and "file is not a database" in event.what
    (aside,) = tmp_path.glob("kb.sqlite.damaged-*")
    assert aside.name in event.what and aside.stat().st_size == len(data) - 10_000
