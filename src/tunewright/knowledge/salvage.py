"""Read what is left of a broken SQLite file of a knowledge base: row by row, and from its bytes."""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
from collections.abc import Iterator

from .database import Event

#: Errors of SQLite for a broken file; Python cannot even decode some of its messages.
ERRORS = (sqlite3.Error, MemoryError, UnicodeDecodeError)
#: Consecutive unreachable rows after which none are left: a page holds far fewer.
MOST_FAILURES = 5000
#: Prefix of the family's digest of a survey.
APART = "survey-"
#: A record within one page: its digest, its kind, the digest of its family if it has one, its content.
_KINDS = b"measurement[0-9a-f]{64}|survey%s[0-9a-f]{64}|fault" % APART.encode()
_ROW = re.compile(rb'([0-9a-f]{64})(?:%s)(?=\{"config":)' % _KINDS)
_PAGE = 1 << 16


def rows(connection: sqlite3.Connection) -> Iterator[tuple[object, object]]:
    """Yield digest and text of every row that some query reaches; most rows come more than once."""
    yield from _run(connection, "SELECT digest, text FROM records NOT INDEXED")
    row, failures = 0, 0
    while failures < MOST_FAILURES:
        try:  # >= instead of >, because > would first read the page of the previous row
            query = "SELECT rowid, digest, text FROM records NOT INDEXED WHERE rowid >= ? ORDER BY rowid"
            for number, digest, text in connection.execute(query, (row,)):
                row, failures = max(row, number) + 1, 0
                yield digest, text
            break
        except ERRORS:
            row, failures = row + 1, failures + 1
    listed = "SELECT family, NULL FROM records INDEXED BY records_of_family ORDER BY family"
    for family in {family for family, _ in _run(connection, listed)}:
        yield from _run(connection, "SELECT digest, text FROM records WHERE family = ?", family)


def _run(connection: sqlite3.Connection, query: str, *values: object) -> Iterator[tuple[object, object]]:
    """Yield the rows of a query until something fails."""
    try:
        yield from connection.execute(query, values)
    except ERRORS:
        return


def events(connection: sqlite3.Connection) -> list[Event]:
    """Return the readable part of the log."""
    found: list[Event] = []
    try:
        for row in connection.execute("SELECT date, action, what FROM events NOT INDEXED"):
            if all(isinstance(text, str) for text in row):
                found.append(Event(*row))
    except ERRORS:
        pass
    return found


def carved(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield digest and text of every record that lies contiguously in the bytes, whatever surrounds it.

    A deleted record may be among them. Its space is cleared, but a page that was rearranged before may hold a copy.
    """
    decoder = json.JSONDecoder()
    for row in _ROW.finditer(data):
        text = data[row.end() : row.end() + _PAGE].decode("latin-1")
        try:
            _, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            continue
        digest = row[1].decode("ascii")
        if hashlib.sha256(text[:end].encode("latin-1")).hexdigest() == digest:
            yield digest, text[:end]
