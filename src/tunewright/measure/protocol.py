"""Messages between a measurer and its worker: frames of JSON, and values that are checked when they are read.

A frame is a length (four bytes) and a JSON object. A worker runs kernels that may be broken, so its parent trusts
nothing: any violation raises `Broken`.
"""

from __future__ import annotations

import json
import struct
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..search.base import Status
from ..search.space import Config
from .base import Attempt, Candidate, Race, Regime

Message: TypeAlias = dict[str, Any]
#: Files of compiled programs, by the key of each program.
Programs: TypeAlias = Mapping[str, Mapping[str, bytes]]

#: Longest frame, maximum number of elements of a list, longest text.
MOST_BYTES, MOST_SAMPLES, LONGEST = 64 << 20, 1 << 16, 1 << 16
#: Seconds by which a request or a timed stretch may seem longer than it is, because a process was woken late.
BUSY, LATE = 0.25, 50e-6
#: Factor and seconds by which clock readings may differ.
MORE, MORE_SECONDS = 1.01, 1e-4
_LENGTH = struct.Struct("!I")


class Broken(Exception):
    """The data is not a valid message."""


def pack(message: Message) -> bytes:
    """Return the frame of a message. Uses Python's JSON, which can represent infinite limits."""
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    if len(body) > MOST_BYTES:
        raise Broken(f"a message of {len(body)} bytes is longer than {MOST_BYTES}")
    return _LENGTH.pack(len(body)) + body


class Reader:
    """Assembles frames from pieces."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that these bytes complete."""
        self._data += data
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > MOST_BYTES:
                raise Broken(f"a frame of {length} bytes")
            end = _LENGTH.size + length
            if len(self._data) < end:
                return
            body = bytes(self._data[_LENGTH.size : end])
            del self._data[:end]
            try:
                message = json.loads(body)
            except (ValueError, RecursionError) as error:
                raise Broken(f"a frame that is not JSON ({error})") from None
            if not isinstance(message, dict):
                raise Broken("a frame that is no object")
            yield message


# ---- values: to JSON, and back with a check of every field -----------------------------------------------------------


def candidates_json(candidates: Sequence[Candidate]) -> list[Any]:
    return [[solver, dict(config)] for solver, config in candidates]


def candidates(data: Any) -> list[Candidate]:
    pairs = [_list(pair, 2) for pair in _list(data)]
    return [(_text(solver), Config(_members(config))) for solver, config in pairs]


def programs_json(programs: Programs) -> list[Any]:
    return [[key, {name: b64encode(data).decode() for name, data in files.items()}] for key, files in programs.items()]


def programs(data: Any) -> Programs:
    """Parse compiled programs: files by the key of their program."""
    found: dict[str, dict[str, bytes]] = {}
    for pair in _list(data):
        key, files = _list(pair, 2)
        if not isinstance(key, str):
            raise Broken("a program without a key")
        try:
            found[key] = {_text(name): b64decode(text, validate=True) for name, text in _members(files).items()}
        except (ValueError, TypeError):
            raise Broken("a program that is not in base 64") from None
    return found


def attempt_json(attempt: Attempt) -> Message:
    return {
        "status": str(attempt.status), "why": attempt.why[:LONGEST], "samples": [float(s) for s in attempt.samples],
        "error": float(attempt.error), "compile_seconds": float(attempt.compile_seconds),
        "check_seconds": float(attempt.check_seconds), "probed": bool(attempt.probed),
    }  # fmt: skip


def attempt(data: Any) -> Attempt:
    given = _members(data, "status", "why", "samples", "error", "compile_seconds", "check_seconds", "probed")
    if given["status"] not in set(Status) or not isinstance(given["probed"], bool):
        raise Broken("an attempt without a status")
    return Attempt(
        Status(given["status"]), _text(given["why"]), _numbers(given["samples"]), _number(given["error"]),
        _number(given["compile_seconds"]), _number(given["check_seconds"]), given["probed"],
    )  # fmt: skip


def race_json(race: Race) -> Message:
    fallen = [[i, attempt_json(a)] for i, a in race.fallen.items()]
    return {"samples": [[float(s) for s in row] for row in race.samples], "fallen": fallen}


def race(data: Any, count: int) -> Race:
    """Parse a race. ``count``: number of candidates that were sent."""
    given = _members(data, "samples", "fallen")
    rows = tuple(_numbers(row) for row in _list(given["samples"]))
    fallen: dict[int, Attempt] = {}
    for pair in _list(given["fallen"]):
        i, what = _list(pair, 2)
        fallen[whole(i, count)] = attempt(what)
    if len(rows) != count:
        raise Broken(f"samples of {len(rows)} candidates, not of {count}")
    return Race(rows, fallen)


def regime_json(regime: Regime) -> Message:
    return {"kind": regime.kind, "copies": int(regime.copies), "nbytes": int(regime.nbytes)}


def regime(data: Any) -> Regime:
    given = _members(data, "kind", "copies", "nbytes")
    return Regime(_text(given["kind"]), whole(given["copies"]), whole(given["nbytes"]))


def pose_json(refusal: str | None, regime: Regime | None) -> Message:
    return {"refusal": refusal, "regime": None if regime is None else regime_json(regime)}


def pose(data: Any) -> tuple[str | None, Regime | None]:
    """Parse the answer to posing a problem: the reason why it cannot be measured, or the regime."""
    given = _members(data, "refusal", "regime")
    if given["refusal"] is not None:
        return _text(given["refusal"]), None
    return None, regime(given["regime"])


@dataclass(frozen=True)
class Clock:
    """Readings of a worker's clocks for a request: its duration, and the time of its timed stretches.

    ``stamped`` is their time by a clock function saved before any candidate ran. ``claimed`` is the time from which the
    candidate's times were computed.
    """

    whole: float
    stretches: int
    stamped: float
    claimed: float

    def to_json(self) -> list[Any]:
        return [self.whole, self.stretches, self.stamped, self.claimed]

    @staticmethod
    def of(data: Any) -> Clock:
        took, stretches, stamped, claimed = _list(data, 4)
        return Clock(_number(took), whole(stretches), _number(stamped), _number(claimed))

    def objection(self, took: float) -> str | None:
        """Return why the readings cannot be true if the request took ``took`` seconds by the caller's clock; else None.

        The worker's work lies between two readings of the caller's clock, and its claimed time between two of its own.
        More time is therefore impossible. Less is possible, since a process may be woken late, so only much less is an
        objection.
        """
        if not took / 2 - BUSY <= self.whole <= took * MORE + MORE_SECONDS:
            return f"its process has a clock that disagrees with ours: {self.whole:.4g} s for what took {took:.4g} s"
        least = self.stamped / 2 - self.stretches * LATE
        if not least <= self.claimed <= self.stamped * MORE + MORE_SECONDS:
            return f"its clock disagrees with ours: {self.claimed:.4g} s for what took {self.stamped:.4g} s"
        return None


def whole(data: Any, end: int = 1 << 62) -> int:
    """Check that data is a number from 0 up to, but not including, ``end``."""
    if not isinstance(data, int) or isinstance(data, bool) or not 0 <= data < end:
        raise Broken(f"{str(data)[:80]} where a whole number belongs")
    return data


def _number(data: Any) -> float:
    if not isinstance(data, int | float) or isinstance(data, bool):
        raise Broken(f"{str(data)[:80]} where a number belongs")
    try:
        return float(data)
    except OverflowError:
        raise Broken("a number beyond all bounds") from None


def _numbers(data: Any) -> tuple[float, ...]:
    return tuple(_number(x) for x in _list(data))


def _text(data: Any) -> str:
    if not isinstance(data, str) or len(data) > LONGEST:
        raise Broken(f"{str(data)[:80]} where a text belongs")
    return data


def _list(data: Any, length: int | None = None) -> Sequence[Any]:
    if not isinstance(data, list) or len(data) > MOST_SAMPLES or (length is not None and len(data) != length):
        raise Broken(f"{str(data)[:80]} where a list belongs")
    return data


def _members(data: Any, *names: str) -> Message:
    if not isinstance(data, dict) or (names and set(data) != set(names)):
        raise Broken(f"{str(data)[:80]} where an object belongs")
    return data
