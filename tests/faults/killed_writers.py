"""Eight processes that write to one knowledge base and are killed at random, and a ninth that reads all the time.

Run as a script: ``killed_writers KIND FOLDER KILLS SEED`` prints what came of it as JSON. Writers are forked from a
process without threads, and tell the digest of each record through a pipe once `add` has returned: from then on it must
be there.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tunewright.knowledge.database import Database
from tunewright.knowledge.record import Measurement
from tunewright.knowledge.shared import SharedDatabase
from tunewright.knowledge.sqlite import SqliteDatabase
from tunewright.testing.database import random_fault, random_measurement, random_survey

WRITERS, HOSTS = 8, 4
T = TypeVar("T")


def opened(kind: str, folder: Path, number: int) -> Database:
    return SqliteDatabase(folder) if kind == "SQLITE" else SharedDatabase(folder, f"host{number % HOSTS}")


def write(database: Database, seed: int, tell: int) -> None:
    """Add records for ever."""
    rng = random.Random(seed)
    while True:
        makers = rng.choices((random_measurement, random_fault, random_survey), (7, 2, 1), k=rng.choice((1, 1, 4)))
        records = [make(rng) for make in makers]
        database.add(records)
        os.write(tell, "".join(f"{record.digest}\n" for record in records).encode())  # few bytes: never in two pieces
        if rng.random() < 0.1:
            database.note("tuned", records[0].digest)


def busy() -> float:
    """Seconds that this process has worked, or waited for a core: neither is waiting for a writer."""
    try:
        with open("/proc/self/schedstat", encoding="ascii") as file:
            return sum(map(int, file.read().split()[:2])) / 1e9
    except OSError:
        return time.process_time()


def read(open_database: Callable[[], Database], tell: int) -> None:
    """Ask for ever; tell now and then the longest wait so far, and what was wrong."""
    longest, rounds, wrong, told = 0.0, 0, "", 0.0
    seen: set[str] = set()
    database = open_database()

    def timed(question: Callable[[], T]) -> T:
        nonlocal longest
        begin = time.monotonic() - busy()
        answer = question()
        longest = max(longest, time.monotonic() - busy() - begin)
        return answer

    while True:
        if rounds % 5 == 4:
            database = open_database()
        found = {record.digest: record for record in timed(partial(list, database))}
        for family in {r.family for r in found.values() if isinstance(r, Measurement)}:
            timed(partial(database.family, family))
        timed(database.faults)
        if not seen <= found.keys():
            wrong = f"{len(seen - found.keys())} records had been read and are gone"
        seen, rounds = set(found), rounds + 1
        if time.monotonic() > told + 0.05:
            os.write(tell, json.dumps([longest, rounds, len(found), wrong]).encode() + b"\n")
            told = time.monotonic()


def forked(job: Callable[..., None], *arguments: Any) -> tuple[int, int]:
    """A child that does a job; its number, and what it tells through."""
    listen, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(listen)
        try:
            job(*arguments, tell)
        finally:
            os._exit(1)  # neither job ends
    os.close(tell)
    return child, listen


def heard(listen: int) -> bytes:
    """What a child has told since the last time."""
    return os.read(listen, 1 << 16) if select.select([listen], [], [], 0)[0] else b""


def killed(child: int, listen: int) -> bytes:
    """Kill a child; everything that it has told."""
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"a child ended by itself with status {status}"
    told = b""
    while data := os.read(listen, 1 << 16):
        told += data
    os.close(listen)
    return told


def run(kind: str, folder: Path, kills: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    seeds = iter(range(seed * 1_000_000, seed * 1_000_000 + kills + WRITERS))

    def start(number: int) -> tuple[int, int]:
        return forked(lambda s, tell: write(opened(kind, folder, number), s, tell), next(seeds))

    reader = forked(read, lambda: opened(kind, folder, 0))
    writers = [start(number) for number in range(WRITERS)]
    acknowledged: list[str] = []
    for _ in range(kills):
        time.sleep(rng.uniform(0.005, 0.08))
        number = rng.randrange(WRITERS)
        acknowledged += killed(*writers[number]).decode().split()
        writers[number] = start(number)
    # Until there was something to lose and somebody read it, however busy the machine is.
    reading, late = b"", time.monotonic() + 120
    while time.monotonic() < late:
        time.sleep(0.2)
        acknowledged += b"".join(heard(listen) for _, listen in writers).decode().split()
        reading += heard(reader[1])
        rounds = json.loads(reading.splitlines()[-1])[1] if reading.endswith(b"\n") else 0
        if rounds > 5 and len(acknowledged) > kills:
            break
    for writer in writers:
        acknowledged += killed(*writer).decode().split()
    # What it waits for now counts too: it has to come to the end of the round that it is in, and of another one.
    last = b"".join(os.read(reader[1], 1 << 16) for _ in range(3) if select.select([reader[1]], [], [], 20.0)[0])
    told = (reading + last + killed(*reader)).splitlines()
    longest, rounds, seen, wrong = json.loads(told[-1]) if told else [0.0, 0, 0, "the reader never answered"]

    database = opened(kind, folder, 0)
    found = {record.digest for record in database}
    damage = database.damage()
    return {
        "acknowledged": len(acknowledged), "lost": sorted(set(acknowledged) - found), "found": len(found),
        "damage": [text for text in damage if "the last line is not complete" not in text], "torn": len(damage),
        "longest": longest, "rounds": rounds, "seen": seen, "wrong": wrong,
        "aside": sorted(p.name for p in folder.rglob("*") if "damaged" in p.name),
    }  # fmt: skip


def main() -> None:
    kind, folder, kills, seed = sys.argv[1:]
    print(json.dumps(run(kind, Path(folder), int(kills), int(seed))))


if __name__ == "__main__":
    main()
