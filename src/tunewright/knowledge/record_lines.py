"""Records as lines of text, ``{"digest":"<64 hex digits>","record":<content>}``, which are found without being parsed.

The digest has a fixed place and the content is canonical, so a line's family can be cut out of its bytes. That gives
only a hint where to look. A record is parsed and its digest checked before it is returned.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from ..errors import InputError
from .record import MOST_BYTES, AnyRecord, Fault, Measurement, Survey, from_text

_BEGIN, _MIDDLE = b'{"digest":"', b'","record":'
_DIGEST = slice(len(_BEGIN), len(_BEGIN) + 64)
_CONTENT = slice(len(_BEGIN) + 64 + len(_MIDDLE), -1)
#: Members are sorted by name, so `key` follows `family`. A parameter may also have one of these names, so a hit is only
#: a guess.
_FAMILY, _KEY, _FAULT = b'"family":"', b'","key":{', b'"kind":"fault"'
_FAMILIES: dict[bytes, type[Measurement] | type[Survey]] = {
    b'"kind":"measurement"': Measurement, b'"kind":"survey"': Survey
}  # fmt: skip

_Place: TypeAlias = tuple[bytes, int, int]


def split(line: bytes) -> tuple[str, bytes] | None:
    """Return the digest that a line claims, and its content; None if it does not look like a record."""
    if not line.startswith(_BEGIN) or line[_DIGEST.stop : _CONTENT.start] != _MIDDLE or not line.endswith(b"}"):
        return None
    return line[_DIGEST].decode("latin-1"), line[_CONTENT]


def read(line: bytes) -> AnyRecord:
    """Parse the record of a line. Raises `InputError` if the line is invalid."""
    parts = split(line)
    if parts is None:
        raise InputError("it does not begin with a digest and a record", where="a record")
    if len(line) > 2 * MOST_BYTES:
        raise InputError("it is too long", where="a record")
    return from_text(parts[1].decode("utf-8", "replace"), parts[0])


def fits(line: bytes) -> bool:
    """Whether the content of a line matches its digest."""
    parts = split(line)
    return parts is not None and hashlib.sha256(parts[1]).hexdigest() == parts[0]


class Lines:
    """A set of lines by digest, family and kind. A line is parsed on first use and the record is then kept."""

    def __init__(self) -> None:
        #: place of the line with a digest: the bytes, begin and end
        self._lines: dict[bytes, _Place] = {}
        #: other lines that claim the same digest; at most one of all is right
        self._others: dict[bytes, list[_Place]] = {}
        self._families: dict[tuple[type[AnyRecord], bytes], list[bytes]] = {}
        self._faults: list[bytes] = []
        self._parsed: dict[bytes, AnyRecord | None] = {}
        #: number of requested records that did not match their digest
        self.bad = 0
        #: results by kind and family, and under None for faults; dropped when a line of that group is added
        self._given: dict[tuple[type[AnyRecord], bytes] | None, Sequence[Any]] = {}

    def take(self, data: bytes) -> list[bytes]:
        """Add the lines of some bytes, and return those that do not look like records."""
        rest = []
        start, size = 0, len(data)
        while start < size:
            end = data.find(b"\n", start)
            end = size if end < 0 else end
            if data.startswith(_BEGIN, start) and data.startswith(_MIDDLE, start + _DIGEST.stop):
                self._take(data, start, end)
            elif end > start:
                rest.append(data[start:end])
            start = end + 1
        return rest

    def _take(self, data: bytes, start: int, end: int) -> None:
        digest = data[start + _DIGEST.start : start + _DIGEST.stop]
        known = self._lines.setdefault(digest, place := (data, start, end))
        if known is not place:
            same = data[start:end]
            if any(d[s:e] == same for d, s, e in (known, *self._others.get(digest, ()))):
                return
            self._others.setdefault(digest, []).append(place)
            self._parsed.pop(digest, None)
        kinds = [kind for text, kind in _FAMILIES.items() if data.find(text, start, end) >= 0]
        at = start
        while (at := data.find(_FAMILY, at, end)) >= 0:
            at += len(_FAMILY)
            if (stop := data.find(_KEY, at, end)) >= 0:
                for kind in kinds:
                    self._families.setdefault((kind, data[at:stop]), []).append(digest)
                    self._given.pop((kind, data[at:stop]), None)
        if data.find(_FAULT, start, end) >= 0:
            self._faults.append(digest)
            self._given.pop(None, None)

    def get(self, digest: str) -> AnyRecord | None:
        """Return the record with this digest; None if it is missing or damaged."""
        return self._get(digest.encode("utf-8", "replace"))

    def family(self, family: str) -> Sequence[Measurement]:
        """Return all measurements of a family, ordered by digest; the same object until it changes."""
        return self._of_family(Measurement, family)

    def surveys(self, family: str) -> Sequence[Survey]:
        """Return all surveys of a family, ordered by digest; the same object until it changes."""
        return self._of_family(Survey, family)

    def _of_family(self, kind: type[Measurement] | type[Survey], family: str) -> Sequence[Any]:
        at = kind, json.dumps(family)[1:-1].encode("ascii")
        if at not in self._families:
            return ()
        if at not in self._given:
            found = (self._get(digest) for digest in sorted(set(self._families[at])))
            self._given[at] = tuple(r for r in found if isinstance(r, kind) and r.family == family)
        return self._given[at]

    def faults(self) -> Sequence[Fault]:
        """Return all faults, ordered by digest; the same object until they change."""
        if None not in self._given:
            found = (self._get(digest) for digest in sorted(set(self._faults)))
            self._given[None] = tuple(f for f in found if isinstance(f, Fault))
        return self._given[None]

    def __iter__(self) -> Iterator[AnyRecord]:
        """Iterate over all records, ordered by digest."""
        return (record for digest in sorted(self._lines) if (record := self._get(digest)) is not None)

    def _get(self, digest: bytes) -> AnyRecord | None:
        if digest in self._parsed:
            return self._parsed[digest]
        if digest not in self._lines:
            return None
        found: AnyRecord | None = None
        for data, start, end in (self._lines[digest], *self._others.get(digest, ())):
            try:
                found = read(data[start:end])
                break
            except InputError:
                continue  # `damage` of the knowledge base reports place and reason
        self._parsed[digest] = found
        self.bad += found is None
        return found
