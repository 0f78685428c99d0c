"""Tuning files with real keys, and seeded mutations of them. ``mutation(n)`` is always the same bytes for the same n.

Run as a script it is a worker (see `sandbox`) that reads and extends mutated files under an audit hook.
"""

from __future__ import annotations

import copy
import json
import os
import random
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tunewright.devices.base import Target
from tunewright.errors import InputError
from tunewright.ir.graph import Fused
from tunewright.ir.types import DType, TensorType
from tunewright.knowledge.key import Key
from tunewright.knowledge.record import Evidence, Fault, Measurement, Ratio, from_line, parse, to_line
from tunewright.knowledge.tuning_file import KEYS, TuningFile, hash_of
from tunewright.search.base import Status
from tunewright.search.space import Config
from tunewright.solvers import problem_json
from tunewright.solvers.base import Problem, solvers

F32, I64 = DType.FLOAT32, DType.INT64
SOLVERS = {"MatMul": "opencl.matmul", "Conv": "opencl.conv_plain", "Softmax": "opencl.softmax",
           "Slice": "opencl.strided", "Add": "opencl.elementwise"}  # fmt: skip


def target(units: int = 2, **more: Any) -> Target:
    software = (("driver", "3.0"), ("runtime", "A runtime"))
    return Target(**{"device": "cpu", "name": "A processor", "arch": "256-bit vectors", "units": units,
                     "software": software, "language": "c", "options": "-w", "vector_bytes": 32, **more})  # fmt: skip


def tensor(*shape: int, dtype: DType = F32) -> TensorType:
    return TensorType(dtype, shape)


def problem(op: str, n: int) -> Problem:
    """A problem of size n."""
    if op == "MatMul":
        return Problem(op, (tensor(n, 64), tensor(64, 32)), (tensor(n, 32),), {}, (), 0, (False, True))
    if op == "Conv":
        types = (tensor(1, 8, n, n), tensor(16, 8, 3, 3))
        attrs = {"pads": (1, 1, 1, 1)}
        return Problem(op, types, (tensor(1, 16, n, n),), attrs, (Fused("Relu", (-1,), {}),), 0, (False, True))
    if op == "Softmax":
        return Problem(op, (tensor(n, 100),), (tensor(n, 100),), {"axis": -1}, (), 0, (False,))
    if op == "Slice":
        values = tuple((i, np.array([v])) for i, v in ((1, 0), (2, n), (3, 0)))
        types = (tensor(2 * n, 4), *[tensor(1, dtype=I64)] * 3)
        return Problem(op, types, (tensor(n, 4),), {}, (), 0, (False, True, True, True), values)
    return Problem(op, (tensor(n, 8), tensor(n, 8)), (tensor(n, 8),), {}, (), 0, (False, False))


def measurement(
    op: str = "MatMul", n: int = 16, units: int = 2, rank: int = 0, low: float = 1.1, confirmed: bool = True,
    date: str = "2026-11-15T12:00:00Z", regime: str = "cold", place: Target | None = None,
) -> Measurement:  # fmt: skip
    """A measurement of the rank-th valid config, with a key as tuning would make it."""
    solved, where = problem(op, n), place or target(units)
    solver = next(s for s in solvers() if s.id == SOLVERS[op])
    assert solver.why_not(solved, where) is None
    space = solver.space(solved, where)
    assert space.rows is not None
    config = space.config(space.rows[rank % len(space.rows)].tolist())
    default = (solver.id, Config(solver.default(solved, where)))
    evidence = Evidence(
        1e-3, 0.9e-3, 1.1e-3, (1e-3, 0.9e-3, 1.1e-3), 1e-6, Ratio(low + 0.1, low, low + 0.2, 9), Ratio.one(), confirmed,
        default, regime, 4, 1 << 20, {"cores": "2"},
    )  # fmt: skip
    key = Key.of(solved, where, solver, config)
    return Measurement(key, config, evidence, problem_json.to_json(solved), solved.family(), solved.sizes, date, "0.1")


def fault(m: Measurement) -> Fault:
    return Fault(m.key, m.config, Status.CRASHED, "it crashed", m.date, m.tool)


@cache
def originals() -> tuple[Measurement, ...]:
    ops = list(SOLVERS)
    return tuple(measurement(ops[i % len(ops)], 8 + i, (2, 16)[i % 2], 7 * i) for i in range(8))


@cache
def seed_text() -> str:
    """A file with two sections of ours, one entry of another engine, and members that nobody knows."""
    folder = Path(os.environ["TUNING_FILES_FOLDER"])
    path = folder / "seed.json"
    path.write_text('{"24": {"15830": ["convolution_gpu_bfyx_os_iyx_osv16", 3]}, "remark": "kept", "2": {"x": null}}')
    assert TuningFile(path).extend(originals()) == (8, [])
    return path.read_text()


# ---- mutations ----------------------------------------------------------------------------------------------------

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 1 << 31, 1 << 62, -(1 << 63), 1 << 70, 10**400, 0.5, -0.0, 1e300, "", "x", "keys",
    "a" * 70_000, "\ud800", "\u0000", "../../etc/passwd", "__import__('os')", [], {}, [[]], [None], {"": {}},
    ["opencl.matmul", 3], {"digest": "", "record": {}, "space": {}}, {"array": ["float32", [4], "AAAA"]},
    {"tuple": [1, 2]}, {"float": "nan"}, {"bytes": "%%%"}, "float32[8,64]@blocked8", "2026-11-15T12:00:00Z",
)  # fmt: skip


def spots(data: Any) -> list[tuple[Any, Any]]:
    """Every (container, index) of a JSON value."""
    found: list[tuple[Any, Any]] = []
    waiting = [data]
    while waiting:
        at = waiting.pop()
        for key in list(at) if isinstance(at, dict) else range(len(at)):
            found.append((at, key))
            if isinstance(at[key], dict | list):
                waiting.append(at[key])
    return found


def odd_value(rng: random.Random, data: Any) -> None:
    at, key = rng.choice(spots(data))
    at[key] = copy.deepcopy(rng.choice(ODD))


def near_value(rng: random.Random, data: Any) -> None:
    at, key = rng.choice([(a, k) for a, k in spots(data) if isinstance(a[k], str | int | float)])
    old = at[key]
    at[key] = old + rng.choice(("x", " ", "0")) if isinstance(old, str) else old + rng.choice((1, -1, 0.5))


def drop(rng: random.Random, data: Any) -> None:
    at, key = rng.choice(spots(data))
    del at[key]


def rename(rng: random.Random, data: Any) -> None:
    at, key = rng.choice([(a, k) for a, k in spots(data) if isinstance(a, dict)])
    at[rng.choice((key + "x", "keys", "2", "16", "0" * 32, "record"))] = at.pop(key)


def swap(rng: random.Random, data: Any) -> None:
    """Two members of one container change places."""
    at, key = rng.choice([(a, k) for a, k in spots(data) if len(a) > 1])
    other = rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
    at[key], at[other] = at[other], at[key]


def graft(rng: random.Random, data: Any) -> None:
    """A copy of one part in the place of another."""
    (a, k), (b, m) = rng.choice(spots(data)), rng.choice(spots(data))
    a[k] = copy.deepcopy(b[m])


def nest(rng: random.Random, data: Any) -> None:
    at, key = rng.choice(spots(data))
    for _ in range(rng.choice((5, 50, 400))):
        at[key] = [at[key]]


TREES: tuple[Callable[[random.Random, Any], None], ...] = (odd_value, near_value, drop, rename, swap, graft, nest)


def mutation(seed: int) -> tuple[str, bytes]:
    """Name and bytes of mutation number ``seed``."""
    rng = random.Random(seed)
    way = rng.random()
    if way < 0.25:
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
    if way < 0.6:
        for step in steps:
            step(rng, tree)
        name = "tree"
    else:
        # inside of a record, and everything around it is made to fit again: the checks behind the digest are reached
        units = rng.choice(("2", "16"))
        section = tree[units]
        hash = rng.choice(sorted(section[KEYS]))
        beside = section[KEYS][hash]
        for step in steps:
            step(rng, beside["record"])
        _sign(section, hash)
        name = "signed"
    text = json.dumps(tree, ensure_ascii=rng.random() < 0.9).encode("utf-8", "surrogatepass")
    return f"{seed}: {name} {' '.join(s.__name__ for s in steps)}", text


def _sign(section: dict[str, Any], hash: str) -> None:
    """Give a changed record the digest, the hash, the solver and the space's hash that belong to it."""
    entry, beside = section[hash], section[KEYS][hash]
    try:
        record = parse(beside["record"])
        beside["digest"], renamed = record.digest, hash_of(record.key)
    except (InputError, ValueError, RecursionError, OverflowError):
        return
    section[renamed], section[KEYS][renamed] = section.pop(hash), section[KEYS].pop(hash)
    entry[0], beside["space"]["hash"] = record.key.solver, record.key.space


# ---- the worker ---------------------------------------------------------------------------------------------------


class Handler:
    """Reads a file, then extends it; notes every event but what that needs."""

    #: events that say nothing about other files, processes or code
    HARMLESS = ("object.", "builtins.id", "sys._getframe", "time.sleep", "fcntl.flock", "gc.")

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tuning.json"
        self.new = folder / ".tuning.json.new"
        self.fresh = measurement("MatMul", 1000, 2, 3)
        self.events: list[str] = []
        self.watching, self.writing = False, False
        seed_text()
        self.path.write_text(seed_text())
        self._both()  # brings in what is imported on first use
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

    def _both(self) -> tuple[Any, Any]:
        """(measurements and reasons, or an error) of reading; (added and reasons, or an error) of extending."""
        answers: list[Any] = []
        for writing in (False, True):
            self.writing, file = writing, TuningFile(self.path)
            try:
                answers.append(file.extend([self.fresh]) if writing else file.read())
            except InputError as error:
                answers.append(error)
        return answers[0], answers[1]

    def handle(self, seed: int) -> dict[str, Any]:
        name, data = mutation(seed)
        self.path.write_bytes(data)
        self.events.clear()
        self.watching = True
        try:
            read, extended = self._both()
        except BaseException:  # what this is here to find
            import traceback

            self.watching = False
            return {"outcome": "leaked", "name": name, "message": traceback.format_exc()[-3000:]}
        self.watching = False
        wrong = list(self.events)
        outcome = "refused"
        if isinstance(read, InputError):
            if not isinstance(extended, InputError):
                wrong.append("what cannot be read was extended")
        else:
            outcome = "read"
            wrong += self._check(read, extended, data, signed=": signed" in name)
        if isinstance(extended, InputError) and self.path.read_bytes() != data:
            wrong.append("it could not be extended, and was changed")
        if self.new.exists():
            wrong.append("something is left over")
        return {"outcome": outcome, "name": name, "wrong": wrong, "count": 0 if outcome == "refused" else len(read[0]),
                "ignored": 0 if outcome == "refused" else len(read[1])}  # fmt: skip

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

    def _check(self, read: Any, extended: Any, data: bytes, signed: bool) -> list[str]:
        wrong = []
        for m in read[0]:
            if from_line(to_line(m)) != m or problem_json.from_json(m.problem).key() != m.key.problem:
                wrong.append(f"not a valid record: {m.key.problem}")
            if not signed and m not in originals():
                wrong.append(f"not a record of ours: {m.key.problem}")
        if isinstance(extended, InputError):
            return wrong
        before, after = json.loads(data or b"{}"), json.loads(self.path.read_bytes())
        wrong += [] if _within(before, after) else ["extending lost something"]
        added = [m for m in TuningFile(self.path).read()[0] if m not in read[0]]
        if added != [self.fresh] * extended[0] or (not extended[0] and not extended[1]):
            wrong.append(f"extended by {extended}, and {len(added)} are new")
        return wrong


def _within(before: Any, after: Any) -> bool:
    """Whatever was there is still there."""
    if isinstance(before, dict) and isinstance(after, dict):
        return all(k in after and _within(v, after[k]) for k, v in before.items())
    return bool(before == after)


def main() -> None:
    handler = Handler(Path(os.environ["TUNING_FILES_FOLDER"]))
    print(json.dumps({"outcome": "ready"}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        answers = [handler.handle(seed) for seed in job["seeds"]] if job["seeds"] else handler.plant()
        print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
