"""The records of a knowledge base: `Measurement`; `Fault` of a candidate that crashed, hung or was wrong; and `Survey`.

A record is a value with a digest of its content, so sets of records can be merged by union on any machine. Its JSON is
canonical (sorted members, no blanks). Every field is checked when it is read, and any violation raises `InputError`.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias

from ..errors import InputError
from ..search.base import Status
from ..search.space import Config, Scalar
from .key import WHERE_FIELDS, Key, Where

#: Limits of a record: characters of a field, samples, parameters, bytes and nesting. A file must not make the reader
#: build without bound.
LONGEST, MOST_SAMPLES, MOST_PARAMETERS, MOST_BYTES, DEEPEST = 1 << 16, 256, 256, 1 << 20, 32
#: Maximum number of sightings of a survey.
MOST_SEEN = 2000
_DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{6})?Z")
#: How data is supplied. "network": as in the running network. "layer": weights from memory and the rest from the cache,
#: as in most networks. "cold": all from memory. "warm": all from the cache.
REGIMES = ("network", "layer", "cold", "warm")
_EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Ratio:
    """A ratio of times from interleaved pairs: its median, its interval, and the number of pairs."""

    median: float
    low: float
    high: float
    pairs: int

    @staticmethod
    def one() -> Ratio:
        """Return the ratio of something to itself."""
        return Ratio(1.0, 1.0, 1.0, 0)


@dataclass(frozen=True)
class Evidence:
    """Circumstances and results of a measurement."""

    #: median of the samples, and their quartiles
    seconds: float
    lower: float
    upper: float
    samples: tuple[float, ...]
    #: largest deviation from the reference, relative to the largest element of the result
    error: float
    #: time of the default divided by time of this candidate; above 1 the candidate is faster
    gain: Ratio
    #: the same for the default against itself in the same turns; it shows the noise
    control: Ratio
    #: whether separate samples, taken after the candidate was picked, confirm the gain
    confirmed: bool
    #: solver and config of the default that the candidate was compared with
    default: tuple[str, Config]
    #: one of `REGIMES`, with the number of copies and bytes
    regime: str
    copies: int
    nbytes: int
    environment: Mapping[str, str] = field(default_factory=lambda: _EMPTY, hash=False)


class Record(ABC):
    """Content with a digest. Records with equal digests are equal."""

    kind: str
    key: Key
    config: Config
    date: str
    tool: str

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """Return the content as JSON data."""

    @cached_property
    def text(self) -> str:
        """Canonical JSON of the content."""
        return json.dumps(self.body(), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode("ascii")).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@dataclass(frozen=True, eq=False)
class Measurement(Record):
    """Time of one candidate for one problem in one place, with its evidence."""

    kind = "measurement"
    key: Key
    config: Config
    evidence: Evidence
    #: the problem as JSON (`solvers.problem_json`), so that it can be posed again
    problem: Mapping[str, Any]
    #: the key's problem with open sizes, and those sizes; used to find neighbours
    family: str
    sizes: tuple[int, ...]
    date: str  # UTC, as in 2026-11-15T12:00:00Z
    tool: str  # version of Tunewright

    def body(self) -> dict[str, Any]:
        e = self.evidence
        return {
            "kind": self.kind,
            "key": _key_json(self.key),
            "config": dict(self.config),
            "evidence": {
                "seconds": float(e.seconds), "lower": float(e.lower), "upper": float(e.upper),
                "samples": [float(s) for s in e.samples], "error": float(e.error),
                "gain": _ratio_json(e.gain), "control": _ratio_json(e.control),
                "confirmed": e.confirmed, "default": [e.default[0], dict(e.default[1])], "regime": e.regime,
                "copies": e.copies, "nbytes": e.nbytes, "environment": dict(e.environment),
            },
            "problem": dict(self.problem),
            "family": self.family,
            "sizes": list(self.sizes),
            "date": self.date,
            "tool": self.tool,
        }  # fmt: skip


@dataclass(frozen=True, eq=False)
class Fault(Record):
    """A candidate that must not be used, because it crashed, hung or was wrong."""

    kind = "fault"
    key: Key
    config: Config
    status: Status
    why: str
    date: str
    tool: str

    def body(self) -> dict[str, Any]:
        return {
            "kind": self.kind, "key": _key_json(self.key), "config": dict(self.config), "status": str(self.status),
            "why": self.why, "date": self.date, "tool": self.tool,
        }  # fmt: skip


@dataclass(frozen=True)
class Sighting:
    """A session's result for one candidate from a few turns: good enough to continue a search, not for an answer."""

    solver: str
    version: str  # of the solver
    config: Config
    #: time of the default divided by its time; 0 if it was unusable (did not compile, was refused, ...)
    gain: float


@dataclass(frozen=True, eq=False)
class Survey(Record):
    """Every candidate that one session examined, except faults, which have their own records.

    Later sessions need not examine them again, and the heuristic learns from them. Key and config are those of the
    default that the gains refer to.
    """

    kind = "survey"
    key: Key
    config: Config
    #: seconds of the default in that session
    seconds: float
    seen: tuple[Sighting, ...]
    #: one of `REGIMES`
    regime: str
    problem: Mapping[str, Any]
    family: str
    sizes: tuple[int, ...]
    date: str
    tool: str

    def body(self) -> dict[str, Any]:
        seen = [[s.solver, s.version, dict(s.config), float(s.gain)] for s in self.seen]
        return {
            "kind": self.kind, "key": _key_json(self.key), "config": dict(self.config), "seconds": float(self.seconds),
            "seen": seen, "regime": self.regime, "problem": dict(self.problem), "family": self.family,
            "sizes": list(self.sizes), "date": self.date, "tool": self.tool,
        }  # fmt: skip


AnyRecord: TypeAlias = Measurement | Fault | Survey
#: Statuses that make a candidate a fault; one that does not compile is merely useless.
FAULTS = frozenset({Status.WRONG, Status.TIMEOUT, Status.CRASHED})


def now() -> str:
    """Return the date for a new record. It has a fixed length, because dates are compared as text."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def to_line(record: AnyRecord) -> str:
    """Return a record as a line of a file: its digest, then its content."""
    return f'{{"digest":"{record.digest}","record":{record.text}}}'


def from_line(line: str) -> AnyRecord:
    """Parse the record of a line. Raises `InputError` if anything differs from what was written."""
    data = _json(line)
    if not isinstance(data, dict) or set(data) != {"digest", "record"}:
        raise _wrong("a line has the members digest and record")
    record = parse(data["record"])
    if record.digest != data["digest"]:
        raise _wrong("the digest does not match the content")
    return record


def from_text(text: str, digest: str) -> AnyRecord:
    """Parse stored content. Raises `InputError` if it does not match the digest."""
    if len(text) > MOST_BYTES or hashlib.sha256(text.encode("utf-8", "replace")).hexdigest() != digest:
        raise _wrong("the digest does not match the content")
    record = parse(_json(text))
    if record.digest != digest:
        raise _wrong("the content is not in its canonical form")
    return record


def parse(data: Any) -> AnyRecord:
    """Build a record from JSON data."""
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind == "measurement":
        given = as_members(data, {"kind", "key", "config", "evidence", "problem", "family", "sizes", "date", "tool"})
        return Measurement(
            _key(given["key"]), as_config(given["config"]), _evidence(given["evidence"]), *_posed(given),
            _date(given["date"]), as_text(given["tool"], "tool"),
        )  # fmt: skip
    if kind == "survey":
        names = {"key", "config", "seconds", "seen", "regime", "problem", "family", "sizes", "date", "tool"}
        given = as_members(data, names | {"kind"})
        return Survey(
            _key(given["key"]), as_config(given["config"]), as_number(given["seconds"], "seconds"),
            _seen(given["seen"]), _regime(given["regime"]), *_posed(given), _date(given["date"]),
            as_text(given["tool"], "tool"),
        )  # fmt: skip
    if kind == "fault":
        given = as_members(data, {"kind", "key", "config", "status", "why", "date", "tool"})
        if given["status"] not in [str(s) for s in FAULTS]:
            raise _wrong(f"a fault is {', '.join(sorted(FAULTS))}")
        return Fault(
            _key(given["key"]), as_config(given["config"]), Status(given["status"]), as_text(given["why"], "why"),
            _date(given["date"]), as_text(given["tool"], "tool"),
        )  # fmt: skip
    raise _wrong("it is neither a measurement nor a fault nor a survey")


def _posed(given: Mapping[str, Any]) -> tuple[Mapping[str, Any], str, tuple[int, ...]]:
    """Return the problem, its family and its sizes."""
    if not isinstance(given["problem"], dict):
        raise _wrong("problem is not an object")
    _plain(given["problem"])
    sizes = given["sizes"]
    if not isinstance(sizes, list) or len(sizes) > LONGEST:
        raise _wrong("sizes is not a list")
    return given["problem"], as_text(given["family"], "family"), tuple(as_whole(s, "a size") for s in sizes)


def _key_json(key: Key) -> dict[str, Any]:
    where = {name: getattr(key.where, name) for name in WHERE_FIELDS}
    return {"problem": key.problem, "where": where, "solver": key.solver, "version": key.version,
            "source": key.source, "space": key.space}  # fmt: skip


def _ratio_json(ratio: Ratio) -> list[float]:
    return [float(ratio.median), float(ratio.low), float(ratio.high), ratio.pairs]


# ---- reading: files are untrusted data -------------------------------------------------------------------------------


def _wrong(what: str) -> InputError:
    return InputError(what, where="a record")


def _json(text: str) -> Any:
    if len(text) > MOST_BYTES:
        raise _wrong("it is too long")
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"it is not JSON ({error})") from None


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _plain(data: Any, depth: int = 0) -> None:
    """Check nesting and numbers of JSON data.

    JSON reads 1e999 as infinity and allows any depth; neither could be written.
    """
    if depth > DEEPEST:
        raise _wrong("it is nested too deeply")
    if isinstance(data, float) and not math.isfinite(data):
        raise _wrong("it holds an infinite number")
    if isinstance(data, dict | list):
        for item in data.values() if isinstance(data, dict) else data:
            _plain(item, depth + 1)


def as_members(data: Any, names: set[str]) -> Mapping[str, Any]:
    if not isinstance(data, dict) or set(data) != names:
        raise _wrong(f"an object with the members {', '.join(sorted(names))} is needed")
    return data


def as_text(data: Any, what: str) -> str:
    if not isinstance(data, str) or len(data) > LONGEST:
        raise _wrong(f"{what} is not a text")
    return data


def as_whole(data: Any, what: str) -> int:
    if not isinstance(data, int) or isinstance(data, bool) or not 0 <= data < 1 << 62:
        raise _wrong(f"{what} is not a whole number")
    return data


def as_number(data: Any, what: str) -> float:
    if not isinstance(data, int | float) or isinstance(data, bool) or not 0 <= data <= sys.float_info.max:
        raise _wrong(f"{what} is not a number from 0 up")
    return float(data)


def _date(data: Any) -> str:
    if not isinstance(data, str) or not _DATE.fullmatch(data):
        raise _wrong("date is not like 2026-11-15T12:00:00Z")
    return data


def as_config(data: Any) -> Config:
    if not isinstance(data, dict) or len(data) > MOST_PARAMETERS:
        raise _wrong("config is not an object of parameters")
    for name, value in data.items():
        if not isinstance(value, Scalar) or (isinstance(value, str) and len(value) > LONGEST):
            raise _wrong(f"parameter {name[:80]} is not a scalar")
        if isinstance(value, float) and not math.isfinite(value):
            raise _wrong(f"parameter {name[:80]} is not a number")
    return Config(data)


def _key(data: Any) -> Key:
    given = as_members(data, {f.name for f in fields(Key)})
    names = ("problem", "solver", "version", "source", "space")
    return Key(where=as_where(given["where"]), **{name: as_text(given[name], name) for name in names})


def as_where(data: Any) -> Where:
    place = as_members(data, set(WHERE_FIELDS))
    texts = {name: as_text(place[name], name) for name in WHERE_FIELDS if name != "units"}
    return Where(units=as_whole(place["units"], "units"), **texts)


def _ratio(data: Any) -> Ratio:
    if not isinstance(data, list) or len(data) != 4:
        raise _wrong("a ratio is a list of median, low, high and pairs")
    median, low, high = (as_number(x, "a ratio") for x in data[:3])
    if not low <= median <= high:
        raise _wrong("a ratio's median lies outside of its interval")
    return Ratio(median, low, high, as_whole(data[3], "pairs"))


def _regime(data: Any) -> str:
    if data not in REGIMES:
        raise _wrong(f"regime is {', '.join(REGIMES)}")
    return str(data)


def _seen(data: Any) -> tuple[Sighting, ...]:
    if not isinstance(data, list) or len(data) > MOST_SEEN:
        raise _wrong(f"seen is not a list of at most {MOST_SEEN}")
    if not all(isinstance(row, list) and len(row) == 4 for row in data):
        raise _wrong("what was seen of a candidate is solver, version, config and gain")
    return tuple(
        Sighting(as_text(solver, "solver"), as_text(version, "version"), as_config(config), as_number(gain, "gain"))
        for solver, version, config, gain in data
    )


def _evidence(data: Any) -> Evidence:
    given = as_members(data, {f.name for f in fields(Evidence)})
    samples, default, environment = given["samples"], given["default"], given["environment"]
    if not isinstance(samples, list) or len(samples) > MOST_SAMPLES:
        raise _wrong(f"samples is not a list of at most {MOST_SAMPLES}")
    if not isinstance(default, list) or len(default) != 2:
        raise _wrong("default is not a solver and its config")
    if not isinstance(environment, dict) or len(environment) > MOST_PARAMETERS:
        raise _wrong("environment is not an object")
    if not isinstance(given["confirmed"], bool):
        raise _wrong("confirmed is neither true nor false")
    return Evidence(
        as_number(given["seconds"], "seconds"), as_number(given["lower"], "lower"), as_number(given["upper"], "upper"),
        tuple(as_number(s, "a sample") for s in samples), as_number(given["error"], "error"), _ratio(given["gain"]),
        _ratio(given["control"]), given["confirmed"], (as_text(default[0], "default"), as_config(default[1])),
        _regime(given["regime"]), as_whole(given["copies"], "copies"), as_whole(given["nbytes"], "nbytes"),
        {as_text(k, "environment"): as_text(v, "environment") for k, v in environment.items()},
    )  # fmt: skip
