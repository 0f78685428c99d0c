"""Seeded mutations of records, and of whole knowledge bases. ``mutation(n)`` is always the same for the same n.

Run as a script it is a worker (see `sandbox`) that reads a mutation in every way in which a record can come in, and
notes whatever the interpreter does meanwhile that reading data has no need of.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.mutate import BYTES
from tunewright import InputError, TunewrightError
from tunewright.knowledge.database import Database
from tunewright.knowledge.record import Fault, Measurement, Survey, from_line, from_text, to_line
from tunewright.knowledge.shared import SharedDatabase
from tunewright.knowledge.sqlite import SqliteDatabase
from tunewright.knowledge.system import SystemDatabase
from tunewright.solvers import problem_json
from tunewright.testing.database import random_records

SEEDS = random_records(0, 40)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 1 << 40, 1 << 62, 1 << 63, -(1 << 70), 10**3000, 0.0, -0.0, 0.5, -1.5, 1e308, 1e-308,
    "", "x", "fault", "measurement", "survey", "\0", "\ud800", "\u2028", "a" * 70_000,
    "__import__('os').system('true')", "../../etc/passwd", "float32[1,2]", "float32[99999999999999999999]",
    "2026-01-01T00:00:00Z", [], {}, [[]], [1, 2],
    {"": 0}, {"array": ["float32", [2], "AAAAAAAAAAA="]}, {"array": ["string", [1], ""]}, {"bytes": "!"},
    {"tuple": [{"tuple": []}]}, {"float": "nan"}, [0] * 300, {str(k): k for k in range(300)},
)  # fmt: skip
#: what JSON has no value for, written as it is
RAW = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 5000, "01", "[" * 2000 + "]" * 2000, '{"a":' * 500)


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a tree of JSON."""
    found = [path]
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        found += places(value, (*path, key))
    return found


def at(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


def change_tree(rng: random.Random, data: Any) -> None:
    """One change somewhere below the root."""
    path = rng.choice(places(data)[1:])
    parent, key = at(data, path[:-1]), path[-1]
    what = rng.randrange(6)
    if what == 0:
        del parent[key]
    elif what == 1 and isinstance(parent, dict):
        parent[rng.choice(("x", "family", "kind", "digest", "", "config"))] = parent.pop(key)
    elif what == 2:
        other = rng.choice(places(data)[1:])
        parent[key] = json.loads(json.dumps(at(data, other)))
    elif what == 3 and isinstance(parent[key], str):
        parent[key] = rng.choice((parent[key] + rng.choice("é\0 ,]"), parent[key][:-1], parent[key] * 2))
    else:
        parent[key] = json.loads(json.dumps(rng.choice(VALUES)))


def canonical(data: Any) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def mutation(seed: int) -> tuple[str, str, Any]:
    """A line, and a content with a digest, both mutated; and the JSON of a problem."""
    rng = random.Random(seed)
    record = rng.choice(SEEDS)
    tree = json.loads(record.text)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        if len(places(tree)) > 1:
            change_tree(rng, tree)
    text = canonical(tree)
    if rng.random() < 0.2:
        spot = rng.choice([k for k, c in enumerate(text) if c in "0123456789"] or [0])
        text = text[:spot] + rng.choice(RAW) + text[spot + 1 :]
    digest = record.digest if rng.random() < 0.2 else hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
    line = f'{{"digest":"{digest}","record":{text}}}'
    if rng.random() < 0.4:
        data = line.encode("utf-8", "replace")
        for _ in range(rng.choice((1, 1, 3))):
            data = rng.choice(BYTES)(rng, data, to_line(rng.choice(SEEDS)).encode())
        line = data.decode("utf-8", "replace")
    problem = rng.choice([m.problem for m in SEEDS if isinstance(m, Measurement)])
    posed = json.loads(json.dumps(dict(problem)))
    for _ in range(rng.choice((0, 1, 1, 2))):
        change_tree(rng, posed)
    return line, text, posed


class Handler:
    """Reads mutations under the eyes of an audit hook."""

    #: events of the interpreter that reading data never needs, by what they begin with
    FORBIDDEN = (
        "exec", "compile", "import", "subprocess", "socket", "ctypes", "pickle", "marshal", "os.system", "os.exec",
        "os.fork", "os.posix_spawn", "os.spawn", "os.putenv", "code.", "shutil", "urllib", "webbrowser", "signal",
    )  # fmt: skip
    #: events with a path that must be inside of the folder
    WRITES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen, self.watching = folder, list[str](), False
        sys.addaudithook(self._audit)
        for seed in range(-60, 0):  # brings in whatever is imported on first use
            self.handle(seed)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.watching:
            return
        if event.startswith(self.FORBIDDEN):
            self.seen.append(f"{event} {arguments!r}"[:200])
        elif event == "open":
            path, mode, flags = arguments
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            if writes or (mode and set(mode) & set("wax+")):
                self._inside(event, path)
        elif event.startswith(self.WRITES) or event == "sqlite3.connect":
            self._inside(event, arguments[0])

    def _inside(self, event: str, path: Any) -> None:
        text = os.fsdecode(path).removeprefix("file://") if isinstance(path, str | bytes | os.PathLike) else str(path)
        if not text.startswith(f"{self.folder}{os.sep}") or ".." in text:
            self.seen.append(f"{event} {text}"[:200])

    def handle(self, seed: int) -> dict[str, Any]:
        line, text, posed = mutation(seed)
        self.seen.clear()
        counts = {"ok": 0, "refused": 0}
        try:
            self.watching = True
            for read in (lambda: from_line(line), lambda: self.stored(text), lambda: problem_json.from_json(posed)):
                try:
                    self.check(read())
                    counts["ok"] += 1
                except TunewrightError as error:
                    assert isinstance(error, InputError) and error.what, error
                    counts["refused"] += 1
            if seed % 10 == 0:
                self.opened(seed, line)
            return {"outcome": "done", **counts, "seen": list(self.seen)}
        except Exception:  # what this is here to find
            return {"outcome": "leaked", "message": traceback.format_exc()[-3000:]}
        finally:
            self.watching = False

    @staticmethod
    def stored(text: str) -> Any:
        return from_text(text, hashlib.sha256(text.encode("utf-8", "replace")).hexdigest())

    @staticmethod
    def check(found: Any) -> None:
        """What was taken can be written down and read again, and says the same."""
        if isinstance(found, Measurement | Fault | Survey):
            assert from_line(to_line(found)).text == found.text
        else:
            assert problem_json.from_json(problem_json.to_json(found)).key() == found.key()

    def opened(self, seed: int, line: str) -> None:
        """The mutated line among good ones, in a file that was given to us, and what a user then does."""
        folder = self.folder / str(seed)
        good = SEEDS[:3]
        lines = [to_line(good[0]), line, to_line(good[1]), to_line(good[2]), ""]
        data = "\n".join(lines).encode("utf-8", "replace")
        (folder / "writers").mkdir(parents=True)
        (folder / "system.jsonl").write_bytes(data)
        (folder / "writers" / "other-1-1.jsonl").write_bytes(data)
        source, shared, user = SystemDatabase(folder), SharedDatabase(folder), SqliteDatabase(folder / "user")
        bases: tuple[Database, ...] = (source, shared, user)
        user.merge(source)
        for base in bases:
            list(base), base.faults(), base.events(), base.damage(), base.family(""), base.surveys("")
        texts = [r.text for r in source]
        assert {r.text for r in good} <= set(texts), "a good line was lost"
        assert [r.text for r in user] == texts == [r.text for r in shared]


def main() -> None:
    handler = Handler(Path(sys.argv[1]))
    print(json.dumps({"outcome": "ready"}), flush=True)
    handle: Callable[[int], dict[str, Any]] = handler.handle
    for line in sys.stdin:
        answers = [(seed, handle(seed)) for seed in range(*json.loads(line)["seeds"])]
        wrong = [(seed, a) for seed, a in answers if a["outcome"] != "done" or a["seen"]]
        ok, refused = (sum(a.get(name, 0) for _, a in answers) for name in ("ok", "refused"))
        print(json.dumps({"outcome": "done", "ok": ok, "refused": refused, "wrong": wrong[:3]}), flush=True)


if __name__ == "__main__":
    main()
