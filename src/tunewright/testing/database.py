"""Conformance checks for knowledge bases, which raise AssertionError, and random records to run them with.

A check receives a `Place`, which creates knowledge bases of one kind and opens them again:

>>> import pytest
>>> from tunewright.testing import database
>>> @pytest.mark.parametrize("check", database.CHECKS, ids=lambda check: check.__name__)   # doctest: +SKIP
... def test_mine(check, tmp_path): ...     check(MyPlace(tmp_path))

`DISK_CHECKS` are for knowledge bases on disk. `READ_CHECKS` also hold for one that is only read.
"""

from __future__ import annotations

import itertools
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

from ..ir.types import DType, TensorType
from ..knowledge.database import Database, better, newest
from ..knowledge.key import Key, KeyMatch, MatchKind, Where
from ..knowledge.record import (
    FAULTS,
    REGIMES,
    AnyRecord,
    Evidence,
    Fault,
    Measurement,
    Ratio,
    Sighting,
    Survey,
    from_line,
    to_line,
)
from ..search.base import Status
from ..search.space import Config
from ..solvers import problem_json
from ..solvers.base import Problem


class Place(ABC):
    """Creates knowledge bases of one kind."""

    @abstractmethod
    def create(self, records: Iterable[AnyRecord] = ()) -> Database:
        """Create a knowledge base that holds these records and shares nothing with others."""

    @abstractmethod
    def reopen(self, database: Database) -> Database:
        """Open the same knowledge base as a later process would see it."""


# ---- records --------------------------------------------------------------------------------------------------------


def random_problem(rng: random.Random) -> Problem:
    """A small problem of one of a few families and many sizes. One of the operations is unknown to Tunewright."""
    op, rank, attrs = rng.choice((
        ("Relu", 2, {}), ("Softmax", 3, {"axis": -1}), ("Conv", 4, {"kernel_shape": [1, 1]}),
        ("Custom \u00e9\"\\", 1, {"family": "x", "alpha": 0.5, "text": 'a","key":{"b', "many": [1.5, -2.0]}),
    ))  # fmt: skip
    dtype = rng.choice((DType.FLOAT32, DType.FLOAT16))
    data = TensorType(dtype, tuple(rng.choice((1, 2, 3, 8, 56, 224)) for _ in range(rank)))
    weights = [TensorType(dtype, (data.dims[1], data.dims[1], 1, 1))] if op == "Conv" else []
    return Problem(op, (data, *weights), (data,), attrs, constant=(False, *(True for _ in weights)))


def random_where(rng: random.Random) -> Where:
    version = f"driver {rng.randrange(1, 4)}.{rng.randrange(3)}"
    return Where("cpu", f"Processor {rng.randrange(3)}", rng.choice((2, 8)), "x86-64; 32 registers of 64 bytes; c",
                 "native", version, "-O3")  # fmt: skip


def random_key(rng: random.Random, problem: Problem) -> Key:
    digests = [f"{rng.randrange(1 << 128):032x}" for _ in range(2)]
    return Key(problem.key(), random_where(rng), f"solver.{rng.choice('abc')}", f"1.{rng.randrange(3)}", *digests)


def random_config(rng: random.Random) -> Config:
    values = {"tile": rng.choice((1, 2, 4, 8)), "order": rng.choice(("ab", "ba")), "vector": rng.random() < 0.5}
    return Config(values, **rng.choice(({}, {"family": "y"}, {"ratio": rng.random(), "kind": "fault"})))


def _ratio(rng: random.Random) -> Ratio:
    low, median, high = sorted(rng.uniform(0.5, 2.0) for _ in range(3))
    return Ratio(median, low, high, rng.randrange(5, 50))


def random_measurement(rng: random.Random, samples: int = 20) -> Measurement:
    problem = random_problem(rng)
    times = sorted(rng.uniform(1e-6, 1e-2) for _ in range(samples))
    evidence = Evidence(
        times[samples // 2], times[samples // 4], times[3 * samples // 4], tuple(times), rng.random() * 1e-6,
        _ratio(rng), _ratio(rng), rng.random() < 0.7, ("solver.a", random_config(rng)), rng.choice(("cold", "warm")),
        rng.randrange(1, 9), rng.randrange(1 << 30), {"load": f"{rng.random():.2f}", "governor": "performance"},
    )  # fmt: skip
    return Measurement(
        random_key(rng, problem), random_config(rng), evidence, problem_json.to_json(problem), problem.family(),
        problem.sizes, random_date(rng), "0.1.0",
    )  # fmt: skip


def random_fault(rng: random.Random) -> Fault:
    status = rng.choice(sorted(FAULTS, key=str))
    why = rng.choice(("signal 11", "no answer in 20 s", "off by 1 % at \u2028 [0, 3]", ""))
    key = random_key(rng, random_problem(rng))
    return Fault(key, random_config(rng), Status(status), why, random_date(rng), "0.1.0")


def random_survey(rng: random.Random, seen: int = 12) -> Survey:
    problem = random_problem(rng)
    sightings = tuple(
        Sighting(f"solver.{rng.choice('abc')}", "1.0", random_config(rng), rng.choice((0.0, rng.uniform(0.1, 3.0))))
        for _ in range(rng.randrange(seen + 1))
    )
    return Survey(
        random_key(rng, problem), random_config(rng), rng.uniform(1e-6, 1e-2), sightings, rng.choice(REGIMES),
        problem_json.to_json(problem), problem.family(), problem.sizes, random_date(rng), "0.1.0",
    )  # fmt: skip


def random_date(rng: random.Random) -> str:
    """A date out of few, so that equal dates occur."""
    return f"2026-{rng.randrange(1, 13):02}-{rng.randrange(1, 28):02}T{rng.randrange(24):02}:00:00Z"


def random_records(seed: int, count: int) -> list[AnyRecord]:
    """Valid records of all kinds, all different. The same seed gives the same records."""
    rng = random.Random(seed)
    makers = rng.choices((random_measurement, random_fault, random_survey), (6, 2, 2), k=count)
    made: list[AnyRecord] = [make(rng) for make in makers]
    assert len({record.digest for record in made}) == count
    return made


def answers(database: Database) -> dict[str, list[str]]:
    """Return the answers of a knowledge base by family: digests, best first."""
    families = sorted({m.family for m in database if isinstance(m, Measurement)})
    exact = KeyMatch(MatchKind.EXACT)
    return {f: [m.digest for _, m in better((exact, m) for m in newest(database.family(f)))] for f in families}


# ---- checks ---------------------------------------------------------------------------------------------------------


def _same(database: Database, records: Iterable[AnyRecord]) -> None:
    """Assert that the knowledge base holds exactly these records, byte by byte, whichever method is used to read it."""
    wanted = {record.digest: record for record in records}
    found = list(database)
    assert [r.digest for r in found] == sorted(wanted), "not the same records, or not in the order of digests"
    assert [r.text for r in found] == [wanted[r.digest].text for r in found], "a record has changed"
    ways: tuple[tuple[type[AnyRecord], Callable[[str], Sequence[AnyRecord]]], ...]
    ways = (Measurement, database.family), (Survey, database.surveys)
    for kind, ask in ways:
        for family in {r.family for r in wanted.values() if not isinstance(r, Fault)}:
            of_family = {r for r in wanted.values() if isinstance(r, kind) and r.body().get("family") == family}
            assert set(ask(family)) == of_family, f"{kind.kind}s of {family} are not complete, or not alone"
            assert len(ask(family)) == len(of_family), f"a {kind.kind} is there twice"
            assert ask(family) is ask(family), "nothing has changed, and it is another object"
    faults = [r for r in wanted.values() if isinstance(r, Fault)]
    assert set(database.faults()) == set(faults) and len(database.faults()) == len(faults), "the faults differ"
    assert list(database.damage()) == [], "damage is reported where there is none"


def holds_what_it_was_given(place: Place) -> None:
    for count in (0, 1, 60):
        records = random_records(count, count)
        database = place.create(records)
        _same(database, records)
        _same(place.reopen(database), records)


def knows_no_other_family(place: Place) -> None:
    database = place.create(random_records(1, 20))
    for family in ("", "no such family", "x", "\ud800", "'; DROP TABLE records; --"):
        assert len(database.family(family)) == len(database.surveys(family)) == 0


def answers_do_not_depend_on_the_order(place: Place) -> None:
    records = random_records(2, 60)
    shuffled = random.Random(0).sample(records, len(records))
    assert answers(place.create(records)) == answers(place.create(shuffled)) != {}


def is_a_path_for_people(place: Place) -> None:
    database = place.create()
    assert isinstance(database.path, str) and database.path
    assert database.read_only is None or database.read_only


def adding_counts_what_is_new(place: Place) -> None:
    database, records = place.create(), random_records(3, 30)
    assert database.add(records[:10]) == 10
    assert database.add(records[:10]) == 0, "a record that is there is not new"
    assert database.add([*records[5:15], *records[5:15]]) == 5, "one that comes twice is new once"
    assert database.add([]) == 0
    assert database.add(from_line(to_line(record)) for record in records) == 15, "any iterable, and equal content"
    _same(database, records)


def others_see_what_was_added(place: Place) -> None:
    one, records = place.create(), random_records(4, 30)
    other = place.reopen(one)
    _same(other, [])
    for k in range(0, 30, 6):
        (one if k % 12 else other).add(records[k : k + 6])
        _same(one, records[: k + 6])
        _same(other, records[: k + 6])


def removing_removes(place: Place) -> None:
    records = random_records(5, 30)
    database = place.create(records)
    other = place.reopen(database)
    gone = [record.digest for record in records[:10]]
    assert database.remove([*gone, gone[0], "0" * 64, "nonsense"]) == 10
    assert database.remove(gone) == 0, "what is gone is not removed again"
    for seen in (database, other, place.reopen(database)):
        _same(seen, records[10:])
    assert other.add(records[:5]) == 5, "what was removed can be added again"
    assert database.remove(gone[:2]) == 2, "and removed again"
    for seen in (database, other, place.reopen(database)):
        _same(seen, [*records[2:5], *records[10:]])
    assert database.remove(r.digest for r in records) == 23
    _same(place.reopen(database), [])


def union_is_commutative(place: Place) -> None:
    a, b = random_records(6, 30), random_records(7, 30)
    ab, ba = place.create([*a, *b[:10]]), place.create(b)
    ab.merge(place.create(b))
    ba.merge(place.create([*a, *b[:10]]))
    _same(ab, [*a, *b])
    _same(ba, [*a, *b])
    assert answers(ab) == answers(ba)


def union_is_associative(place: Place) -> None:
    sets = [random_records(8, 25), random_records(9, 25), random_records(10, 25)]
    sets = [[*s, *sets[(i + 1) % 3][:5]] for i, s in enumerate(sets)]
    expected = None
    for order in itertools.permutations(sets):
        left, right = place.create(order[0]), place.create(order[1])
        left.merge(order[1])
        left.merge(order[2])
        right.merge(order[2])
        whole = place.create(order[0])
        whole.merge(right)
        expected = expected or answers(left)
        for database in (left, whole):
            _same(database, itertools.chain(*sets))
            assert answers(database) == expected


def union_is_idempotent(place: Place) -> None:
    records = random_records(11, 40)
    database = place.create(records)
    before = answers(database)
    assert database.merge(database) == 0 and database.merge(place.create(records)) == 0
    _same(database, records)
    assert answers(database) == before


def keeps_a_log(place: Place) -> None:
    database = place.create()
    notes = [("tuned", "one"), ("merged", "two \u00e9 \ud800"), ("tuned", "one"), ("pruned", "")]
    for action, what in notes:
        database.note(action, what)
    for seen in (database, place.reopen(database)):
        assert [e.action for e in seen.events()] == [action for action, _ in notes], "not all events, or not in order"
        assert [e.what for e in seen.events()][::2] == ["one", "one"]
        assert all(e.date for e in seen.events())
    _same(database, [])


def refuses_what_it_could_not_read(place: Place) -> None:
    good = random_records(12, 1)[0]
    bad = random_measurement(random.Random(0))
    object.__setattr__(bad, "date", "yesterday")
    database = place.create()
    try:
        database.add([good, bad])
    except Exception as error:
        assert type(error).__name__ == "InputError", error
    else:
        raise AssertionError("a record without a date was taken")
    _same(database, [])


def may_be_used_by_threads(place: Place) -> None:
    database, records = place.create(), random_records(13, 80)
    families = sorted({r.family for r in records if isinstance(r, Measurement)})
    errors: list[BaseException] = []
    done = threading.Event()

    def write(mine: Sequence[AnyRecord]) -> None:
        for record in mine:
            database.add([record])
            database.note("added", record.digest)

    def read() -> None:
        while not done.is_set():
            seen = set(database)
            assert seen <= set(records)
            for family in families:
                assert {m.family for m in database.family(family)} <= {family}
                assert {s.family for s in database.surveys(family)} <= {family}
            assert all(isinstance(f, Fault) for f in database.faults())

    def guarded(job: Callable[..., None], *arguments: Sequence[AnyRecord]) -> None:
        try:
            job(*arguments)
        except BaseException as error:
            errors.append(error)

    readers = [threading.Thread(target=guarded, args=(read,)) for _ in range(2)]
    writers = [threading.Thread(target=guarded, args=(write, records[k::4])) for k in range(4)]
    for thread in [*readers, *writers]:
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    assert not errors, errors
    _same(database, records)
    assert len(database.events()) == len(records)


READ_CHECKS: tuple[Callable[[Place], None], ...] = (
    holds_what_it_was_given, knows_no_other_family, answers_do_not_depend_on_the_order, is_a_path_for_people,
)  # fmt: skip
CHECKS: tuple[Callable[[Place], None], ...] = (
    *READ_CHECKS, adding_counts_what_is_new, others_see_what_was_added, removing_removes, union_is_commutative,
    union_is_associative, union_is_idempotent, keeps_a_log, may_be_used_by_threads,
)  # fmt: skip
#: for knowledge bases that write records and read them again
DISK_CHECKS: tuple[Callable[[Place], None], ...] = (*CHECKS, refuses_what_it_could_not_read)
