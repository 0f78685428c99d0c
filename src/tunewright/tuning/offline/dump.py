"""Record the problems that an application meets, for tuning elsewhere: as JSON Lines, and as commands of the driver.

`record` is called for every problem that a solver is chosen for. It never raises: it reports a failed write once, and
the application goes on. `read` accepts dumps of any number of processes and machines, and checks every line.

Each line is an object with the members ``problem`` (encoded by `solvers.problem_json`), ``key`` (its text), ``device``
(name, kind, processor and runtime), ``date`` and ``tool``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunewright._version import __version__
from tunewright.devices.base import Device
from tunewright.errors import InputError
from tunewright.knowledge.files import write_all
from tunewright.knowledge.key import Where
from tunewright.knowledge.record import now
from tunewright.settings import Settings
from tunewright.solvers import problem_json
from tunewright.solvers.base import Problem

from . import suggested_commands

LOG = logging.getLogger("tunewright")
#: Logger for commands. Its own level shows them even where an application shows only warnings.
COMMANDS = logging.getLogger("tunewright.commands")
COMMANDS.setLevel(logging.INFO)

#: Maximum number of problems that a process remembers, maximum bytes of a line, maximum bytes of a file.
MOST_PROBLEMS, MOST_LINE, MOST_FILE = 100_000, 1 << 20, 256 << 20
#: Maximum number of lines that a reader reports one by one.
MOST_REASONS = 1000
_MEMBERS = {"problem", "key", "device", "date", "tool"}
_DEVICE = ("name", "kind", "processor", "runtime")

#: What was recorded, by (file or "" for commands, problem, device). The stored object tells which thread came first.
_MET: dict[tuple[str, str, Where], object] = {}
#: Places where a write failed: reported once, and not tried again.
_CLOSED: dict[str, object] = {}


def record(problem: Problem, device: Device, settings: Settings) -> None:
    """Record a problem once per process, as ENABLE_TUNE_DUMP and ENABLE_LOGGING_CMD demand."""
    if not problem.is_static or len(_MET) >= MOST_PROBLEMS:
        return  # a problem without static shapes comes back once its shapes are known
    where = Where.of(device.target)
    if settings.enable_logging_cmd and _is_first("", problem, where):
        try:
            _show(suggested_commands.driver(problem, device.name, settings))
        except InputError as error:
            LOG.info("no command: %s", error)
    named = settings.tune_dump_path or "."
    if settings.enable_tune_dump and named not in _CLOSED:
        try:
            path = destination(settings)
            if _is_first(str(path), problem, where) and (line := _line(problem, device, where)):
                _append(path, line)
        except (OSError, ValueError, RuntimeError) as error:  # failed writes, and invalid file names
            me = object()
            if _CLOSED.setdefault(named, me) is me:
                why = getattr(error, "strerror", None) or error
                LOG.warning("TUNE_DUMP_PATH %s: problems are not dumped any more: %s", named, why)


def destination(settings: Settings) -> Path:
    """Return the file of this process's dump: TUNE_DUMP_PATH itself, or a file in that or the working folder."""
    named = Path(settings.tune_dump_path or ".").expanduser()
    path = named if named.suffix == ".jsonl" and not named.is_dir() else named / f"tune_dump_pid{os.getpid()}.jsonl"
    return path.absolute()


def _is_first(to: str, problem: Problem, where: Where) -> bool:
    me = object()
    return _MET.setdefault((to, problem.key(), where), me) is me  # atomic, because several threads may ask


def _show(text: str) -> None:
    """Print to stderr, unless the application has a logging handler."""
    if COMMANDS.hasHandlers():
        COMMANDS.info("%s", text)
    elif sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # stderr is closed, or its encoding lacks a character
            sys.stderr.write(f"{text}\n")


def _line(problem: Problem, device: Device, where: Where) -> bytes:
    """Encode a problem as a line. Empty for problems with sequences or strings, which are never tuned."""
    try:
        data = {
            "problem": problem_json.to_json(problem),
            "key": problem.key(),
            "device": dict(zip(_DEVICE, (device.name, where.device, where.processor, where.runtime), strict=True)),
            "date": now(),
            "tool": __version__,
        }
        line = json.dumps(data, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
        if len(line) > MOST_LINE:
            raise InputError(f"takes more than {MOST_LINE:,} bytes", where=problem.key()[:200])
    except InputError as error:
        LOG.info("not dumped: %s", error)
        return b""
    return line


def _append(path: Path, line: bytes) -> None:
    """Append a line with one write, even if others moved the file. A torn last line stays a line of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if size + len(line) > MOST_FILE:
            raise OSError(0, f"it has reached {MOST_FILE:,} bytes")
        torn = size and os.pread(descriptor, 1, size - 1) != b"\n"
        write_all(descriptor, b"\n" + line if torn else line)
    finally:
        os.close(descriptor)


# ---- reading: files are untrusted data -------------------------------------------------------------------------------


def read(path: str | os.PathLike[str]) -> tuple[list[Problem], list[str]]:
    """Read the distinct problems of a dump in their order, and the reasons for everything left out.

    ``path``: a file, or a folder whose .jsonl files are read. Raises `InputError` if nothing is there or readable.
    """
    found: dict[str, Problem] = {}
    reasons: list[str] = []
    for file in _files(Path(path)):
        for number, line in _lines(file):
            try:
                problem = _parse(line)
                found.setdefault(problem.key(), problem)
            except InputError as error:
                reasons.append(f"{file.name}, line {number}: {error.what}")
            if len(reasons) >= MOST_REASONS or len(found) > MOST_PROBLEMS:
                reasons.append(f"{file.name}: nothing behind line {number} was read")
                return list(found.values()), reasons
    return list(found.values()), reasons


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise InputError("there is no such file", where=str(path), hint="ENABLE_TUNE_DUMP=YES writes one")
    if not path.is_dir():
        return [path]
    files = sorted(p for p in path.glob("*.jsonl") if p.is_file())
    if not files:
        raise InputError("holds no .jsonl file", where=str(path), hint="ENABLE_TUNE_DUMP=YES writes one")
    return files


def _lines(file: Path) -> Iterator[tuple[int, bytes | None]]:
    """Yield the lines of a file with their numbers, without blank lines; None for a line that is too long."""
    try:
        with file.open("rb") as stream:
            number = 0
            while line := stream.readline(MOST_LINE + 1):
                number += 1
                whole = len(line) <= MOST_LINE
                while not line.endswith(b"\n") and (more := stream.readline(MOST_LINE)):
                    line, whole = more, False
                if line.strip() or not whole:
                    yield number, line if whole else None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", where=str(file)) from None


def _parse(line: bytes | None) -> Problem:
    if line is None:
        raise _wrong(f"it is longer than {MOST_LINE:,} bytes")
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"it is not JSON ({error})") from None
    if not isinstance(data, dict) or set(data) != _MEMBERS:
        raise _wrong(f"an object with the members {', '.join(sorted(_MEMBERS))} is needed")
    _check_texts(data)
    problem = problem_json.from_json(data["problem"])
    try:
        json.dumps(data["problem"], ensure_ascii=False).encode()
    except ValueError as error:  # a lone surrogate: the text could not be shown or written again
        raise _wrong(f"its text cannot be decoded ({error})") from None
    key = problem.key()
    if key != data["key"]:
        raise _wrong(f"the key belongs to another problem than {key[:200]}")
    return problem


def _check_texts(data: dict[str, Any]) -> None:
    device = data["device"]
    if not isinstance(device, dict) or set(device) != set(_DEVICE):
        raise _wrong(f"device is not an object of {', '.join(_DEVICE)}")
    for name, text in [*device.items(), *((name, data[name]) for name in ("key", "date", "tool"))]:
        if not isinstance(text, str):
            raise _wrong(f"{name} is not a text")


def _wrong(what: str) -> InputError:
    return InputError(what, where="a dump")
