"""What an application meets, recorded for tuning elsewhere: problems as JSON Lines, and as commands of the driver.

`record` is called for every problem that is chosen for. It never raises: what cannot be written is told once, and the
application goes on. `read` takes dumps of any number of processes and machines; files are data, checked line by line.

A line is an object of the members ``problem`` (as `solvers.serial` has it), ``key`` (its text), ``device`` (name, kind,
processor and runtime of where it was met), ``date`` and ``tool``.
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

from .._version import __version__
from ..devices.base import Device
from ..errors import InputError
from ..settings import Settings
from ..solvers import serial
from ..solvers.base import Problem
from . import suggest
from .disk import write_all
from .key import Where
from .record import now

LOG = logging.getLogger("tunewright")
#: the commands; a level of its own, so that they are shown where an application shows warnings only
COMMANDS = logging.getLogger("tunewright.commands")
COMMANDS.setLevel(logging.INFO)

#: most problems that a process remembers, most bytes of a line, and of a file
MOST_PROBLEMS, MOST_LINE, MOST_FILE = 100_000, 1 << 20, 256 << 20
#: most lines that a reader names one by one
MOST_REASONS = 1000
_MEMBERS = {"problem", "key", "device", "date", "tool"}
_DEVICE = ("name", "kind", "processor", "runtime")

#: what was recorded: (file or nothing for commands, problem, device); its own entry says who came first
_MET: dict[tuple[str, str, Where], object] = {}
#: places that could not be written to: told once, and not tried again
_CLOSED: dict[str, object] = {}


def record(problem: Problem, device: Device, settings: Settings) -> None:
    """Record a problem once per process, as ENABLE_TUNE_DUMP and ENABLE_LOGGING_CMD say."""
    if not problem.is_static or len(_MET) >= MOST_PROBLEMS:
        return  # what has no shape yet comes back when it has one
    where = Where.of(device.target)
    if settings.enable_logging_cmd and _is_first("", problem, where):
        try:
            _show(suggest.driver(problem, device.name, settings))
        except InputError as error:
            LOG.info("no command: %s", error)
    named = settings.tune_dump_path or "."
    if settings.enable_tune_dump and named not in _CLOSED:
        try:
            path = destination(settings)
            if _is_first(str(path), problem, where) and (line := _line(problem, device, where)):
                _append(path, line)
        except (OSError, ValueError, RuntimeError) as error:  # of writing; of names that no file can have
            me = object()
            if _CLOSED.setdefault(named, me) is me:
                why = getattr(error, "strerror", None) or error
                LOG.warning("TUNE_DUMP_PATH %s: problems are not dumped any more: %s", named, why)


def destination(settings: Settings) -> Path:
    """The file that this process dumps to: TUNE_DUMP_PATH, or one in that folder, or in the working folder."""
    named = Path(settings.tune_dump_path or ".").expanduser()
    path = named if named.suffix == ".jsonl" and not named.is_dir() else named / f"tune_dump_pid{os.getpid()}.jsonl"
    return path.absolute()


def _is_first(to: str, problem: Problem, where: Where) -> bool:
    me = object()
    return _MET.setdefault((to, problem.key(), where), me) is me  # one step: several threads may ask


def _show(text: str) -> None:
    """On stderr, unless the application has its own way to show what is logged."""
    if COMMANDS.hasHandlers():
        COMMANDS.info("%s", text)
    elif sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # closed, or of an alphabet without these letters
            sys.stderr.write(f"{text}\n")


def _line(problem: Problem, device: Device, where: Where) -> bytes:
    """Empty for what cannot be dumped: a sequence, or text. No kernel is chosen for such by measuring."""
    try:
        data = {
            "problem": serial.to_json(problem),
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
    """One write at the end, wherever others have moved it; what a full disk tore off before stays a line of its own."""
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


# ---- reading: data from a file, never trusted ---------------------------------------------------------------------


def read(path: str | os.PathLike[str]) -> tuple[list[Problem], list[str]]:
    """The problems of a dump, each once, in the order in which they were met, and what was left out and why.

    ``path``: a file, or a folder whose .jsonl files are read. InputError when there is none, or it cannot be read.
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
    """Lines by number, without blank ones; None for one that is too long."""
    try:
        with file.open("rb") as stream:
            number = 0
            while line := stream.readline(MOST_LINE + 1):
                number += 1
                whole = len(line) <= MOST_LINE
                while not line.endswith(b"\n") and (more := stream.readline(MOST_LINE)):
                    line, whole = more, False
                if not whole:
                    yield number, None
                elif line.strip():
                    yield number, line
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
    problem = serial.from_json(data["problem"])
    try:
        json.dumps(data["problem"], ensure_ascii=False).encode()
    except ValueError as error:  # half of a character: it could not be shown, or written again
        raise _wrong(f"its text is no text ({error})") from None
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
