"""Lockfiles with real kernels, and seeded mutations of them. ``mutation(n)`` is always the same bytes for the same n.

Run as a script it is a worker (see `sandbox`) that reads, asks and extends mutated files under an audit hook.
"""

from __future__ import annotations

import json
import os
import random
import sys
from functools import cache
from pathlib import Path
from typing import Any

from faults.tuning_files import SOLVERS, TREES, problem, target
from tunewright.devices.base import Target
from tunewright.errors import InputError, LockError
from tunewright.knowledge.key import Where, source_digest
from tunewright.search.space import Config
from tunewright.solvers.base import Problem, Solver, solvers
from tunewright.tuning.lockfile import Locked, LockedKernel, LockFile

COUNT = 8


@cache
def posed() -> tuple[tuple[Problem, Target, Solver, Config], ...]:
    """Problems in two places, each with a config that is not the default."""
    found = []
    for i in range(COUNT):
        op = [*SOLVERS][i % len(SOLVERS)]
        one, where = problem(op, 8 + i), target((2, 16)[i % 2])
        solver = next(s for s in solvers() if s.id == SOLVERS[op])
        space = solver.space(one, where)
        assert space.rows is not None
        found.append((one, where, solver, space.config(space.rows[(7 * i) % len(space.rows)].tolist())))
    return tuple(found)


def write(path: Path) -> None:
    for i, (one, where, solver, config) in enumerate(posed()):
        entry = LockedKernel.of(one, where, solver, config, [f"node {i}", "another"], "user knowledge base", 1.25)
        LockFile(path).add(Where.of(where), "PERFORMANCE", {one.key(): entry})


@cache
def seed_text() -> str:
    path = Path(os.environ["LOCK_FILES_FOLDER"]) / "seed.json"
    write(path)
    return path.read_text()


def mutation(seed: int) -> tuple[str, bytes]:
    """Name and bytes of mutation number ``seed``."""
    rng = random.Random(seed)
    if rng.random() < 0.3:
        data = bytearray(seed_text().encode())
        for _ in range(rng.choice((1, 1, 2, 8))):
            how, at, length = rng.randrange(4), rng.randrange(len(data) + 1), rng.randrange(1, 200)
            if how == 0 and at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            elif how == 1:
                del data[at:]
                break
            elif how == 2:
                del data[at : at + length]
            else:
                data[at:at] = data[at : at + length]
        return f"{seed}: bytes", bytes(data)
    tree = json.loads(seed_text())
    steps = [rng.choice(TREES) for _ in range(rng.choice((1, 1, 2, 3)))]
    # half of them inside of an entry: there is most to be checked
    within = rng.random() < 0.5
    kernels = rng.choice(tree["places"])["kernels"]
    for step in steps:
        step(rng, kernels[rng.choice(sorted(kernels))] if within else tree)
    text = json.dumps(tree, ensure_ascii=rng.random() < 0.9).encode("utf-8", "surrogatepass")
    return f"{seed}: {'entry' if within else 'tree'} {' '.join(s.__name__ for s in steps)}", text


class Handler:
    """Reads a file, asks it for every problem, and extends it; notes every event but what that needs."""

    #: events that say nothing about other files, processes or code
    HARMLESS = ("object.", "builtins.id", "sys._getframe", "time.sleep", "fcntl.flock", "gc.")

    def __init__(self, folder: Path) -> None:
        self.path = folder / "model.onnx.lock.json"
        self.new = folder / ".model.onnx.lock.json.new"
        self.events: list[str] = []
        self.watching, self.writing = False, False
        self.path.write_text(seed_text())
        assert len(self._ask()) == COUNT  # and brings in what is imported on first use
        self._extend()
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.watching or event.startswith(self.HARMLESS):
            return
        self.watching = False
        mine = {str(self.path), *([str(self.new), str(self.path.parent)] if self.writing else [])}
        paths = arguments[:2] if event == "os.rename" else arguments[:1]
        names = [os.fsdecode(a) for a in paths if isinstance(a, str | bytes | os.PathLike)]
        writes = event != "open" or bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
        files = event in ("open", "os.rename", "os.remove", "os.chmod") and (self.writing or not writes)
        # a file that was opened by its descriptor was opened by name before
        by_number = event in ("open", "os.chmod") and isinstance(arguments[0], int)
        if not files or not (by_number or (names and set(names) <= mine)):
            self.events.append(f"{event} {str(arguments)[:300]}")
        self.watching = True

    def _ask(self) -> dict[int, tuple[Solver, Config]]:
        """The kernels that a frozen model would run; a loose one must run the same, and no other."""
        frozen, loose = (Locked(str(self.path), strict, lambda text: None) for strict in (True, False))
        found = {}
        for i, (one, where, _, _) in enumerate(posed()):
            candidates = [s for s in solvers() if (s.ops is None or one.op in s.ops) and s.language in (None, "c")]
            asked = (one, where, candidates, lambda s, one=one, where=where: s.why_not(one, where), lambda s, c: None)
            answer = loose.ask(*asked)  # type: ignore[arg-type]
            try:
                found[i] = frozen.ask(*asked)  # type: ignore[arg-type, assignment]
            except LockError:
                assert answer is None, "a frozen model refuses what a loose one takes"
            else:
                assert answer == found[i]
        return found

    def _extend(self) -> None:
        """One more problem."""
        one, where, solver, config = posed()[0]
        entry = LockedKernel.of(one, where, solver, config, [], "default", None)
        LockFile(self.path).add(Where.of(where), "PERFORMANCE", {"another problem": entry})

    def handle(self, seed: int) -> dict[str, Any]:
        name, data = mutation(seed)
        self.path.write_bytes(data)
        self.events.clear()
        found: dict[int, tuple[Solver, Config]] | InputError
        extended: InputError | None = None
        self.watching = True
        try:
            try:
                found = self._ask()
            except InputError as error:
                found = error
            self.writing = True
            try:
                self._extend()
            except InputError as error:
                extended = error
        except BaseException:  # what this is here to find
            import traceback

            self.watching = self.writing = False
            return {"outcome": "leaked", "name": name, "message": traceback.format_exc()[-3000:]}
        self.watching = self.writing = False
        wrong = list(self.events)
        if isinstance(found, InputError):
            if data.strip() and (extended is None or self.path.read_bytes() != data):
                wrong.append("what cannot be read was extended")
        else:
            wrong += self._check(found)
            if extended is not None:
                wrong.append(f"what can be read cannot be extended: {extended}")
            else:
                after = self._ask()
                wrong += [] if after == found else ["extending changed what was locked"]
        if self.new.exists():
            wrong.append("something is left over")
        refused = isinstance(found, InputError)
        return {"outcome": "refused" if refused else "read", "name": name, "wrong": wrong,
                "count": 0 if isinstance(found, InputError) else len(found)}  # fmt: skip

    def _check(self, found: dict[int, tuple[Solver, Config]]) -> list[str]:
        """Whatever is used is a config of its solver whose text is the locked one."""
        wrong = []
        places = LockFile(self.path).read()
        for i, (solver, config) in found.items():
            one, where, _, _ = posed()[i]
            entry = places[Where.of(where)].kernels[one.key()]
            sound = (solver.id, solver.version, dict(config)) == (entry.solver, entry.version, dict(entry.config))
            sound = sound and config in solver.space(one, where)
            if not sound or source_digest(one, where, solver, config) != entry.source:
                wrong.append(f"not a kernel that may be used: {solver.id} {dict(config)}")
        return wrong

    def plant(self) -> list[str]:
        """What the hook sees of what must not happen."""
        import socket
        import subprocess

        other = self.path.with_name("other")
        self.events.clear()
        self.watching, self.writing = True, True
        other.write_text("x")
        os.replace(other, other.with_name("another"))
        socket.socket().close()
        subprocess.run(["true"], check=True)
        exec(compile("1", "planted", "exec"))
        __import__("colorsys")
        self.writing = False
        self.path.write_text("reading does not write")
        self.watching = False
        return [event.split()[0] for event in self.events]


def main() -> None:
    handler = Handler(Path(os.environ["LOCK_FILES_FOLDER"]))
    print(json.dumps({"outcome": "ready"}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        answers = [handler.handle(seed) for seed in job["seeds"]] if job["seeds"] else handler.plant()
        print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
