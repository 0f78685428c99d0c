"""Lockfiles: the exact kernel of every problem of a model, in a file beside the model (docs/lockfile.md).

::

    {"schema": "tunewright.lock/1",
     "places": [
      {"where": {"device": ..., "processor": ..., ...}, "tunewright": "0.1.0", "execution_mode": "PERFORMANCE",
       "kernels": {
        "<problem>": {"nodes": [...], "solver": ..., "version": ..., "config": {...}, "source": "<digest>",
                      "reproducible": true, "origin": ..., "gain": 1.31}, ...}}]}

``nodes``, ``origin`` and ``gain`` are only for readers. A kernel is used only if all other fields match. These are the
place, the solver and its version, a config of its space, the digest of the source, and ``reproducible``. The file is
sorted and has no dates, so equal choices give equal bytes. Locking again adds missing entries.

`LockFile` reads and writes the file and trusts nothing in it; the tuner asks `Locked`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .._version import __version__
from ..devices.base import Target
from ..errors import InputError, LockError, SettingsError
from ..knowledge.json_file import JsonFile, short
from ..knowledge.key import WHERE_FIELDS, Where, source_digest
from ..knowledge.record import as_config, as_members, as_number, as_text, as_where
from ..search.space import Config
from ..settings import Settings
from ..solvers.base import Problem, Solver

SCHEMA = "tunewright.lock/1"
#: Limits of a file: places, problems of a place, nodes of a problem, and characters of a node's name.
MOST_PLACES, MOST_PROBLEMS, MOST_NODES, LONGEST_NODE = 256, 100_000, 64, 256
MODES = ("PERFORMANCE", "ACCURACY")
AGAIN = "lock the model again with `tunewright lock`, or load it without FROZEN"


@dataclass(frozen=True)
class LockedKernel:
    """The kernel of a problem."""

    solver: str
    version: str
    config: Config
    #: digest of the source that is compiled (`key.source_digest`)
    source: str
    reproducible: bool
    #: for readers: the nodes with this problem, the origin of the choice, and its speed-up over the default
    nodes: tuple[str, ...] = ()
    origin: str = ""
    gain: float | None = None

    @staticmethod
    def of(
        problem: Problem, target: Target, solver: Solver, config: Mapping[str, Any], nodes: Iterable[str], origin: str,
        gain: float | None,
    ) -> LockedKernel:  # fmt: skip
        """Make the entry of a current choice."""
        source = source_digest(problem, target, solver, config)
        named = tuple(sorted({name[:LONGEST_NODE] for name in nodes})[:MOST_NODES])
        gain = None if gain is None else round(gain, 4)
        return LockedKernel(solver.id, solver.version, Config(config), source, solver.reproducible, named, origin, gain)

    @property
    def kernel(self) -> str:
        """The fields that must match, as text, because Python considers 1, 1.0 and True equal."""
        return _shown({**_json(self), "nodes": (), "origin": "", "gain": None})

    @property
    def name(self) -> str:
        """The first node of the entry, and the number of further ones."""
        more = f" (+{len(self.nodes) - 1})" if len(self.nodes) > 1 else ""
        return f"{short(self.nodes[0])}{more}" if self.nodes else ""


@dataclass(frozen=True)
class LockedDevice:
    """The locked kernels of one device."""

    mode: str
    kernels: Mapping[str, LockedKernel]
    tool: str = __version__


@dataclass
class Written:
    """Changes that locking made to a file."""

    path: Path
    #: number of problems that the file now has for this place
    total: int = 0
    added: int = 0
    same: int = 0
    #: descriptions of kernels that replaced another one
    replaced: list[str] = field(default_factory=list)
    #: number of kernels removed because they were locked in the other execution mode
    dropped: int = 0
    #: descriptions of kernels that a frozen model would refuse
    refused: list[str] = field(default_factory=list)


class LockFile(JsonFile):
    """A lockfile at a path. Safe for several processes and threads."""

    title, setting = "lockfile", "LOCK_FILE"

    def read(self) -> dict[Where, LockedDevice]:
        """Read the locked kernels by place. Raises `InputError` if the file is missing, damaged or invalid."""
        try:
            with self.opened() as descriptor:
                data = self.load(descriptor)
        except FileNotFoundError:
            raise self.error("there is no such file", "`tunewright lock MODEL` writes it") from None
        if data is None:
            raise self.error("is empty", "`tunewright lock MODEL` writes it")
        return self._parse(data)

    def add(self, where: Where, mode: str, entries: Mapping[str, LockedKernel]) -> Written:
        """Lock problems of a place in addition to those already locked. Creates the file if needed.

        Kernels locked in the other execution mode are removed, and entries with another kernel are replaced. Raises
        `InputError` if the file cannot be written or is not a lockfile.
        """
        done = Written(self.path)
        try:
            with self.locked() as descriptor:
                data = self.load(descriptor)
                places = {} if data is None else self._parse(data)
                before = places.get(where, LockedDevice(mode, {}))
                kernels = dict(before.kernels)
                if before.mode != mode:
                    done.dropped = len(kernels)
                    kernels = {}
                for problem, entry in entries.items():
                    kernels[problem] = _merged(kernels.get(problem), entry, done)
                done.total = len(kernels)
                places[where] = LockedDevice(mode, kernels)
                text = _text(places)
                self._parse(json.loads(text))  # a file that could not be read again must not be written
                if text.encode() != os.pread(descriptor, len(text) + 1, 0):
                    self.replace(descriptor, text)
        except OSError as error:
            raise self.error(f"cannot be written: {error.strerror or error}") from None
        done.refused = [f"{e.name or p[:80]}: {e.solver}" for p, e in entries.items() if not e.reproducible]
        return done

    # ---- reading: files are untrusted data ---------------------------------------------------------------------------

    def _parse(self, data: Any) -> dict[Where, LockedDevice]:
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != SCHEMA:
            known = f"schema {short(schema)} is not {SCHEMA}" if isinstance(schema, str) else "it names no schema"
            raise self.error(f"is no lockfile: {known}", "name another LOCK_FILE")
        at = ""
        found: dict[Where, LockedDevice] = {}
        try:
            rows = as_members(data, {"schema", "places"})["places"]
            if not isinstance(rows, list) or len(rows) > MOST_PLACES:
                raise InputError(f"places is not a list of at most {MOST_PLACES}")
            for number, row in enumerate(rows, 1):
                at = f"place {number}: "
                given = as_members(row, {"where", "tunewright", "execution_mode", "kernels"})
                where, mode, kernels = as_where(given["where"]), given["execution_mode"], given["kernels"]
                if where in found:
                    raise InputError("it is there twice")
                if mode not in MODES:
                    raise InputError(f"execution_mode is neither {MODES[0]} nor {MODES[1]}")
                if not isinstance(kernels, dict) or len(kernels) > MOST_PROBLEMS:
                    raise InputError(f"kernels is not an object of at most {MOST_PROBLEMS:,}")
                entries = {}
                for problem, entry in kernels.items():
                    at = f"place {number}, {short(problem)}: "
                    entries[as_text(problem, "the problem")] = _entry(entry)
                found[where] = LockedDevice(mode, entries, as_text(given["tunewright"], "tunewright"))
        except InputError as error:
            raise self.error(f"is damaged: {at}{error.what}", "restore it, or lock the model again") from None
        return found


def _entry(data: Any) -> LockedKernel:
    names = {"nodes", "solver", "version", "config", "source", "reproducible", "origin", "gain"}
    given = as_members(data, names)
    nodes, gain = given["nodes"], given["gain"]
    if not isinstance(nodes, list) or len(nodes) > MOST_NODES:
        raise InputError(f"nodes is not a list of at most {MOST_NODES}")
    if not isinstance(given["reproducible"], bool):
        raise InputError("reproducible is neither true nor false")
    return LockedKernel(
        as_text(given["solver"], "solver"), as_text(given["version"], "version"), as_config(given["config"]),
        as_text(given["source"], "source"), given["reproducible"], tuple(as_text(node, "a node") for node in nodes),
        as_text(given["origin"], "origin"), None if gain is None else as_number(gain, "gain"),
    )  # fmt: skip


# ---- writing ---------------------------------------------------------------------------------------------------------


def _merged(old: LockedKernel | None, new: LockedKernel, done: Written) -> LockedKernel:
    """Return the entry to write, and count the change. An unchanged kernel keeps its old description."""
    if old is None:
        done.added += 1
        return new
    nodes = tuple(sorted({*old.nodes, *new.nodes})[:MOST_NODES])
    if old.kernel == new.kernel:
        done.same += 1
        return replace(old, nodes=nodes)
    done.replaced.append(f"{new.name or new.solver}: {_differing(old, new)}")
    return replace(new, nodes=nodes)


def _differing(old: LockedKernel, new: LockedKernel) -> str:
    """Describe the first field that differs, with both values."""
    for name in ("solver", "version", "config", "source", "reproducible"):
        one, other = (_shown(getattr(entry, name)) for entry in (old, new))
        if one != other:
            return f"{name} {one} is now {other}"
    raise AssertionError("they are the same")


def _shown(value: Any) -> str:
    return json.dumps(dict(value), sort_keys=True) if isinstance(value, Mapping) else str(value)


def _text(places: Mapping[Where, LockedDevice]) -> str:
    """Return the file's text: sorted, one member per line, so that diffs are readable."""
    rows = [
        {
            "where": {name: getattr(where, name) for name in WHERE_FIELDS},
            "tunewright": place.tool,
            "execution_mode": place.mode,
            "kernels": {problem: _json(place.kernels[problem]) for problem in sorted(place.kernels)},
        }
        for where, place in places.items()
    ]
    rows.sort(key=lambda row: json.dumps(row["where"]))
    return json.dumps({"schema": SCHEMA, "places": rows}, indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def _json(entry: LockedKernel) -> dict[str, Any]:
    config = {name: entry.config[name] for name in sorted(entry.config)}
    return {
        "nodes": list(entry.nodes), "solver": entry.solver, "version": entry.version, "config": config,
        "source": entry.source, "reproducible": entry.reproducible, "origin": entry.origin, "gain": entry.gain,
    }  # fmt: skip


def default_path(model: str | os.PathLike[str]) -> Path:
    """Return the default path of a model's lockfile, which is beside the model."""
    path = Path(model)
    return path.with_name(f"{path.name}.lock.json")


# ---- asking ----------------------------------------------------------------------------------------------------------


class Locked:
    """The content of LOCK_FILE, checked against this machine. ``told`` is called once for each unused entry."""

    def __init__(self, path: str, frozen: bool, told: Callable[[str], None]) -> None:
        self.file, self.frozen, self._told = LockFile(path), frozen, told
        self.places = self.file.read()
        self._answers: dict[tuple[str, Where], tuple[Solver, Config] | str] = {}

    @staticmethod
    def of(settings: Settings, told: Callable[[str], None]) -> Locked | None:
        """Make the object for these settings; None without LOCK_FILE."""
        if settings.lock_file:
            return Locked(settings.lock_file, settings.frozen, told)
        if settings.frozen:
            hint = "name the model's lockfile; `tunewright lock MODEL` writes one"
            raise SettingsError("FROZEN = YES needs LOCK_FILE", where="settings", hint=hint)
        return None

    def ask(
        self,
        problem: Problem,
        target: Target,
        solvers: Sequence[Solver],
        why_not: Callable[[Solver], str | None],
        barred: Callable[[Solver, Config], str | None],
    ) -> tuple[Solver, Config] | None:
        """Return the locked kernel of a problem if it matches.

        Raises `LockError` if it does not and the model is frozen.

        ``why_not`` returns why a solver does not accept the problem; ``barred`` returns why a candidate must not run.
        """
        where = Where.of(target)
        at = (problem.key(), where)
        if at not in self._answers:
            entry = self.places[where].kernels.get(problem.key()) if where in self.places else None
            if entry is not None:
                self._answers[at] = self._check(entry, problem, target, solvers, why_not, barred)
            elif where not in self.places:
                self._refuse(f"it was locked for {self._elsewhere(where)}", "")
                return None
            else:
                self._refuse("it names no kernel for this problem", problem.key(), quietly=True)
                return None
        found = self._answers[at]
        if isinstance(found, str):
            entry = self.places[where].kernels[problem.key()]
            self._refuse(found, problem.key(), entry.name)
            return None
        return found

    def _refuse(self, why: str, problem: str, layer: str = "", quietly: bool = False) -> None:
        """Raise if the model is frozen; else report the mismatch, and other knowledge is used."""
        if self.frozen:
            what = f"{why}; the problem is {problem}" if problem else why
            raise LockError(f"the model is frozen, and lockfile {self.file.path} does not fit: {what}", hint=AGAIN)
        if not quietly:
            about = f", layer {layer}" if layer else ""
            self._told(f"lockfile {self.file.path}{about}: {why}; it is not used")

    def _elsewhere(self, where: Where) -> str:
        """Describe the nearest locked place and how it differs."""
        if not self.places:
            return "no place at all"

        def differing(there: Where) -> list[str]:
            return [name for name in WHERE_FIELDS if getattr(there, name) != getattr(where, name)]

        there = min(self.places, key=lambda there: len(differing(there)))
        fields = differing(there)
        return ", ".join(f"{name} {short_value(getattr(there, name))}" for name in fields) + (
            f" (here: {', '.join(short_value(getattr(where, name)) for name in fields)})"
        )

    def _check(
        self,
        entry: LockedKernel,
        problem: Problem,
        target: Target,
        solvers: Sequence[Solver],
        why_not: Callable[[Solver], str | None],
        barred: Callable[[Solver, Config], str | None],
    ) -> tuple[Solver, Config] | str:
        """Return solver and config; or why they cannot be used, naming the field that differs."""
        solver = next((s for s in solvers if s.id == entry.solver), None)
        if solver is None:
            return f"there is no solver {short(entry.solver)} here"
        if solver.version != entry.version:
            return f"version {short(entry.version)} of solver {solver.id} is locked, and {solver.version} is here"
        reason = why_not(solver)
        if reason is not None:
            return f"solver {solver.id} does not take it any more: {reason}"
        if not problem.is_static and not solver.host:
            return f"solver {solver.id} does not take shapes that are not known before it runs"
        config = _config_of(entry, problem, target, solver)
        if config is None:
            return f"config {short(_shown(entry.config))} is none of solver {solver.id}"
        if source_digest(problem, target, solver, config) != entry.source:
            return f"source: solver {solver.id} would compile another text than the one locked as {short(entry.source)}"
        if solver.reproducible != entry.reproducible:
            return f"reproducible is locked as {entry.reproducible}, and solver {solver.id} says {solver.reproducible}"
        reason = barred(solver, config)
        if reason is not None:
            return f"solver {solver.id} is {reason}"
        if self.frozen and not solver.reproducible:
            return f"solver {solver.id} is not reproducible: it may give other results at each run"
        return solver, config


def short_value(value: object) -> str:
    """Shorten and quote a field of a place, for a message."""
    text = str(value)
    return repr(text if len(text) <= 80 else text[:77] + "...")


def _config_of(entry: LockedKernel, problem: Problem, target: Target, solver: Solver) -> Config | None:
    """Return the solver's own config whose text equals the entry's, because Python considers 1 and True equal."""
    default = Config(solver.default(problem, target))
    if _shown(default) == _shown(entry.config):
        return default
    if not problem.is_static:
        return None
    space = solver.space(problem, target)
    code = space.find(entry.config)
    if code is None or not space.valid(code):
        return None
    config = space.config(code)
    return config if _shown(config) == _shown(entry.config) else None
