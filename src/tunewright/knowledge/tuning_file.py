"""TUNING_FILE: tuned kernels in a JSON file with the two levels of OpenVINO's GPU tuning, and keys beside them.

::

    {"<execution units>": {
      "<hash>": ["<kernel name>", <index>], ...,
      "keys": {"<hash>": {"digest": ..., "record": {...}, "space": {"hash": ..., "params": {...}}}, ...}}}

The hash stands for a problem in a place: 32 hex digits of SHA-256 over the key's problem and where (`hash_of`). The
kernel name is the id of a solver. The index is the number of its config in the solver's space (`Space.index`). The two
levels do not say everything. ``keys`` therefore holds the whole measurement with its digest, and hash and parameters of
the space. An entry counts only if all of it agrees. Other entries are ignored with a reason, and so are entries without
a key, as in OpenVINO's files. `lookup` decides whether the present solvers can use an answer.

Entries are only added. Everything else in the file stays: other sections, and unknown members.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..devices.base import Target
from ..errors import InputError, TunewrightError
from ..search.space import Config, Space
from ..solvers import problem_json
from ..solvers.base import solvers
from .database import MemoryDatabase, better, newest
from .json_file import JsonFile, short
from .key import WHERE_FIELDS, Key, KeyMatch, MatchKind, Where
from .record import MOST_PARAMETERS, AnyRecord, Measurement, parse

#: Maximum number of values of all parameters of a space.
MOST_VALUES = 1 << 16
KEYS = "keys"
_UNITS = re.compile(r"0|[1-9][0-9]{0,18}")
_ARCH = re.compile(r"(.*); ([0-9]{1,9}) registers of ([0-9]{1,9}) bytes; ([^;]*)((?:; no [^;]+)*)")


class TuningFile(JsonFile):
    """A tuning file at a path. Safe for several processes and threads."""

    title, setting = "tuning file", "TUNING_FILE"

    def read(self, *, new: bool = False) -> tuple[list[Measurement], list[str]]:
        """Return the measurements of valid entries, and a reason for everything that was ignored.

        Raises `InputError` if there is no file (unless it may be ``new``), or if it is unreadable or has another form.
        """
        try:
            with self.opened() as descriptor:
                data = self._parse(descriptor)
        except FileNotFoundError:
            if new:
                return [], []
            raise self.error("there is no such file", "TUNING_MODE = TUNING_CREATE makes it") from None
        found: list[Measurement] = []
        ignored: list[str] = []
        for units, section in data.items():
            if not _is_section(units, section):
                ignored.append(f"{short(units)}: is not a section for a number of execution units")
                continue
            keys = section.get(KEYS, {})
            for name, entry in section.items():
                if name == KEYS:
                    continue
                try:
                    found.append(_entry(int(units), name, entry, keys))
                except TunewrightError as error:
                    ignored.append(f"{units}, {short(name)}: {error.what}")
            lone = keys.keys() - section.keys() if isinstance(keys, dict) else ()
            ignored += [f"{units}, {short(name)}: is a key without an entry" for name in sorted(lone)]
        return found, ignored

    def as_database(self, *, new: bool = False) -> MemoryDatabase:
        """Return the valid entries as a layer; its `damage` tells what was ignored."""
        return _Layer(str(self.path), *self.read(new=new))

    def extend(self, records: Iterable[AnyRecord]) -> tuple[int, list[str]]:
        """Add the best answer for each problem in each place unless the file has one. Creates the file if needed.

        Returns the number of new entries, which are then on disk, and why each of the others was not added. Raises
        `InputError` if the file cannot be written or has another form.
        """
        skipped: list[str] = []
        entries = list(_entries(records, skipped))
        if not entries:
            return 0, skipped
        try:
            with self.locked() as descriptor:
                data = self._parse(descriptor)
                reasons = [_add(data, *entry) for entry in entries]
                skipped += [f"{_title(m)}: {why}" for (m, _, _), why in zip(entries, reasons, strict=True) if why]
                added = reasons.count("")
                if added:
                    self.replace(descriptor, _text(data))
        except RecursionError:
            raise self.error("is nested too deeply and cannot be written") from None
        except OSError as error:
            raise self.error(f"cannot be written: {error.strerror or error}") from None
        return added, skipped

    def _parse(self, descriptor: int) -> dict[str, Any]:
        """Return the file's content. An empty file has no entries."""
        data = self.load(descriptor)
        if data is None:
            return {}
        if not isinstance(data, dict) or (data and not any(_is_section(*member) for member in data.items())):
            raise self.error(
                "is not a tuning file: it has no section for a number of execution units", "name another TUNING_FILE"
            )
        return data


def _add(data: dict[str, Any], m: Measurement, index: int, space: Space) -> str:
    """Add an answer to the content of a tuning file. Returns why it is not added; empty if it is."""
    section = data.setdefault(str(m.key.where.units), {})
    name, keys = hash_of(m.key), section.setdefault(KEYS, {}) if isinstance(section, dict) else None
    if not isinstance(keys, dict):
        return f"the section {m.key.where.units} is damaged"
    if name in section or name in keys:
        return "the file has an entry for it"
    section[name] = [m.key.solver, index]
    space_json = {"hash": m.key.space, "params": {k: list(v) for k, v in space.params.items()}}
    keys[name] = {"digest": m.digest, "record": m.body(), "space": space_json}
    return ""


def export(path: str | os.PathLike[str], records: Iterable[AnyRecord]) -> tuple[int, list[str]]:
    """Write a new tuning file with the best answer for each problem in each place; see `TuningFile.extend`."""
    file = TuningFile(path)
    if os.path.lexists(file.path):
        raise file.error("exists already", "name another one, or remove it first")
    return file.extend(records)


def hash_of(key: Key) -> str:
    """Return the name of a key's problem and place in a tuning file."""
    place = [getattr(key.where, name) for name in WHERE_FIELDS]
    text = json.dumps([key.problem, *place], ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]


class _Layer(MemoryDatabase):
    """The entries of a file. Records added to it stay in memory."""

    def __init__(self, path: str, records: Iterable[Measurement], ignored: Sequence[str]) -> None:
        super().__init__(records)
        self.path, self._ignored = path, [f"{Path(path).name}, {text}" for text in ignored]

    def damage(self) -> Sequence[str]:
        return list(self._ignored)


# ---- reading: files are untrusted data -------------------------------------------------------------------------------


def _is_section(name: str, content: Any) -> bool:
    return _UNITS.fullmatch(name) is not None and isinstance(content, dict)


def _entry(units: int, name: str, entry: Any, keys: Any) -> Measurement:
    """Return the measurement of an entry. Raises an error with the reason if it does not count."""
    if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], str) or type(entry[1]) is not int:
        raise InputError("is not a list of a kernel's name and an index")
    if not isinstance(keys, dict) or name not in keys:
        raise InputError("has no key, so its problem is unknown")
    solver, index = entry
    beside = keys[name]
    if not isinstance(beside, dict) or not {"digest", "record", "space"} <= beside.keys():
        raise InputError("its key lacks digest, record or space")
    try:
        record = parse(beside["record"])
        digest = record.digest
    except (RecursionError, ValueError, OverflowError) as error:  # nested too deeply, or a number beyond any float
        raise InputError(f"its key is no record ({type(error).__name__})") from None
    if digest != beside["digest"]:
        raise InputError("its key does not fit the digest")
    if not isinstance(record, Measurement):
        raise InputError("its key is not a measurement")
    if record.key.where.units != units:
        raise InputError(f"was measured on {record.key.where.units} execution units")
    if hash_of(record.key) != name:
        raise InputError("its hash does not match the problem and device in its key")
    if record.key.solver != solver:
        raise InputError(f"names the kernel {short(solver)}, its key {short(record.key.solver)}")
    _check_problem(record)
    _check_space(record, index, beside["space"])
    return record


def _check_problem(m: Measurement) -> None:
    problem = problem_json.from_json(m.problem)
    if (problem.key(), problem.family(), problem.sizes) != (m.key.problem, m.family, m.sizes):
        raise InputError("its problem differs from the one in its key")


def _check_space(m: Measurement, index: int, space: Any) -> None:
    if not isinstance(space, dict) or space.get("hash") != m.key.space:
        raise InputError("its space differs from the one in its key")
    params = space.get("params")
    if not isinstance(params, dict) or len(params) > MOST_PARAMETERS:
        raise InputError("its space has no parameters")
    if not all(isinstance(v, list) for v in params.values()) or sum(map(len, params.values())) > MOST_VALUES:
        raise InputError("a parameter of its space is not a list of values")
    if _canonical(Space(params).at(index)) != _canonical(m.config):
        raise InputError("its index belongs to another config")


def _canonical(config: Config) -> str:
    """Return a config as text, because Python considers 1, 1.0 and True equal."""
    return json.dumps(dict(config), sort_keys=True)


# ---- writing ---------------------------------------------------------------------------------------------------------


def _entries(records: Iterable[AnyRecord], skipped: list[str]) -> Iterator[tuple[Measurement, int, Space]]:
    """Yield the best answer for each problem and place with its index and space, ordered by hash."""
    groups: dict[str, list[Measurement]] = {}
    for m in newest(r for r in records if isinstance(r, Measurement)):
        groups.setdefault(hash_of(m.key), []).append(m)
    for _, group in sorted(groups.items()):
        ranked = better((KeyMatch(MatchKind.EXACT), m) for m in group if m.evidence.gain.low >= 1)
        if not ranked:
            skipped.append(f"{_title(group[0])}: nothing is confirmed to be as fast as the default")
            continue
        m = ranked[0][1]
        try:
            _check_problem(m)
            space = _space(m)
            yield m, space.index(m.config), space
        except TunewrightError as error:
            skipped.append(f"{_title(m)}: {error}")


def _space(m: Measurement) -> Space:
    """Return the space that contains a measurement's config."""
    solver = next((s for s in solvers() if s.id == m.key.solver), None)
    if solver is None:
        raise InputError(f"solver {m.key.solver} is not installed, so its config has no index")
    problem, target = problem_json.from_json(m.problem), _target(m.key.where)
    if target is None:
        raise InputError("its device is described in the format of another version")
    try:
        reason = solver.why_not(problem, target)
        space = Space({}) if reason is not None else solver.space(problem, target)
        changed = space.hash != m.key.space or m.config not in space
    except Exception as error:  # a record may come from anywhere, and a solver need not expect all possible content
        raise InputError(f"{m.key.solver} does not understand it: {error!r}") from None
    if reason is not None:
        raise InputError(f"{m.key.solver} refuses it: {reason}")
    if changed:
        raise InputError(f"the space of {m.key.solver} has changed since it was measured")
    return space


def _target(where: Where) -> Target | None:
    """Rebuild the target of a key, as far as solvers use it; None if the text comes from another version."""
    found = _ARCH.fullmatch(where.arch)
    if found is None:
        return None
    arch, registers, vector_bytes, language, lacks = found.groups()
    names = [text.partition(" ")[::2] for text in where.software.split("; ") if text]
    for software in (names, [*names, ("runtime", where.runtime)]):
        target = Target(
            where.device, where.processor, arch, where.units, tuple(software), language, where.options,
            int(vector_bytes), int(registers), tuple(lacks.split("; no ")[1:]),
        )  # fmt: skip
        if Where.of(target) == where:
            return target
    return None


def _title(m: Measurement) -> str:
    return m.key.problem if len(m.key.problem) <= 200 else m.key.problem[:197] + "..."


def _text(data: Mapping[str, Any]) -> str:
    """Return the file's text: one entry per line, so that diffs are readable."""
    parts = [f"{_json(name)}: {_lines(content, 1)}" for name, content in data.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(content: Any, depth: int) -> str:
    if not isinstance(content, dict) or not content or depth > 2:
        return _json(content)
    blanks = " " * depth
    parts = [f"{blanks}{_json(n)}: {_lines(c, depth + 1 if n == KEYS else 3)}" for n, c in content.items()]
    return "{\n" + ",\n".join(parts) + "\n" + blanks[:-1] + "}"


def _json(content: Any) -> str:
    return json.dumps(content, ensure_ascii=True, allow_nan=False)
