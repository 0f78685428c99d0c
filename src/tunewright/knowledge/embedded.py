"""Measurements inside a model file, as one entry of its metadata that other engines ignore.

The value of the entry is JSON Lines as `kb export` writes them. Every line is checked when it is read, as in any
import. Writing parses only the outermost fields of the file. The entry goes to the end, and all other bytes stay as
they are. Weights in external files are not touched.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..errors import InputError
from .database import warn_of_damage
from .files import sync_folder
from .record import Measurement, to_line
from .record_lines import Lines
from .system import SystemDatabase

#: Key of the metadata entry.
KEY = "tunewright.records"
#: Maximum bytes of the entry's value.
MOST_BYTES = 8 << 20
#: Field numbers: ModelProto.metadata_props, and key and value of an entry. Last: the wire type of fields with a length.
_METADATA, _KEY, _VALUE, _LENGTH = 14, 1, 2, 2
#: Bytes of fields of fixed size, by wire type.
_FIXED = {1: 8, 5: 4}
#: Largest metadata entry that is examined.
_LARGEST_ENTRY = MOST_BYTES + (1 << 16)
_CHUNK = 16 << 20


class EmbeddedDatabase(SystemDatabase):
    """The measurements inside a model file; read-only. ``text``: the entry's value, if it was read already."""

    remedy = "`tunewright kb extract` names what is damaged, and `kb embed` writes it anew"

    def __init__(self, path: Path, text: str | None = None) -> None:
        super().__init__(path.parent, path.name)
        self._text = None if text is None else text.encode("utf-8", "surrogatepass")
        self._read_once: Lines | None = None

    def _current(self) -> Lines:
        if self._read_once is None:
            try:
                self._read_once = self._load()
            except OSError as error:
                self._read_once = Lines()
                warn_of_damage(self.path, str(error), self.remedy)
        return self._read_once

    def _read(self) -> bytes:
        if self._text is None:
            self._text = text_of(self._file).encode("utf-8", "surrogatepass")
        if len(self._text) > MOST_BYTES:
            raise OSError(f"what is embedded is larger than {MOST_BYTES >> 20} MiB")
        return self._text


@dataclass(frozen=True)
class _Field:
    number: int
    kind: int
    begin: int
    content: int
    end: int


def text_of(path: Path) -> str:
    """Read the embedded text of a model file; empty if there is none. Raises `InputError` if it is not a model file."""
    try:
        with path.open("rb") as file:
            found = [value for entry in _entries(file, path) if (value := _value(file, entry)) is not None]
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", where=str(path)) from None
    return found[-1].decode("utf-8", "surrogateescape") if found else ""


def embed(path: Path, to: Path, measurements: Iterable[Measurement]) -> int:
    """Write a model with these measurements instead of its own, and return their number of bytes.

    The file is replaced atomically. Without measurements the entry is removed. Raises `InputError` if they exceed
    `MOST_BYTES`.
    """
    lines = {m.digest: to_line(m) for m in measurements}
    text = "".join(f"{lines[digest]}\n" for digest in sorted(lines)).encode("ascii")
    if len(text) > MOST_BYTES:
        raise InputError(f"{len(text):,} bytes of measurements are more than {MOST_BYTES:,}", where=str(path))
    new = to.with_name(f"{to.name}.new-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with path.open("rb") as file, new.open("xb") as out:
            at = 0
            for entry in [e for e in _entries(file, path) if _value(file, e) is not None]:
                _copy(file, at, entry.begin, out)
                at = entry.end
            _copy(file, at, os.fstat(file.fileno()).st_size, out)
            if text:
                content = _delimited(_KEY, KEY.encode()) + _delimited(_VALUE, text)
                out.write(_delimited(_METADATA, content))
            out.flush()
            os.fsync(out.fileno())
        shutil.copymode(path, new)
        os.replace(new, to)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise InputError(f"cannot be written: {error.strerror or error}", where=str(to)) from None
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync_folder(to.absolute().parent)
    return len(text)


def within(measurements: Iterable[Measurement], most: int = MOST_BYTES) -> list[Measurement]:
    """Return as many of the first measurements as fit into ``most`` bytes."""
    found, left = [], most
    for m in measurements:
        left -= len(to_line(m)) + 1
        if left < 0:
            break
        found.append(m)
    return found


# ---- fields of a protobuf --------------------------------------------------------------------------------------------


def _entries(file: IO[bytes], path: Path) -> Iterator[_Field]:
    """Yield the metadata entries of a model."""
    size = os.fstat(file.fileno()).st_size
    for one in _fields(file, 0, size, path):
        if one.number == _METADATA and one.kind == _LENGTH:
            yield one


def _value(file: IO[bytes], entry: _Field) -> bytes | None:
    """Return the value of an entry with our key; None for other entries."""
    if entry.end - entry.content > _LARGEST_ENTRY:
        return None
    key, value = b"", b""
    for one in list(_fields(file, entry.content, entry.end, None)):
        if one.kind == _LENGTH and one.number in (_KEY, _VALUE):
            file.seek(one.content)
            found = file.read(one.end - one.content)
            key, value = (found, value) if one.number == _KEY else (key, found)
    return value if key == KEY.encode() else None


def _fields(file: IO[bytes], begin: int, end: int, path: Path | None) -> Iterator[_Field]:
    """Yield the fields between two positions. For invalid data raises `InputError` if ``path`` is given; else stops."""
    at = begin
    while at < end:
        tag, content = _varint(file, at, end)
        number, kind = tag >> 3, tag & 7
        if kind == _LENGTH:
            length, content = _varint(file, content, end)
            stop = content + length
        elif kind == 0:
            _, stop = _varint(file, content, end)
        else:
            stop = content + _FIXED.get(kind, end)
        if not number or content < 0 or not content <= stop <= end:
            if path is None:
                return
            raise InputError("is no ONNX file", where=str(path), hint="a model in ONNX's binary form is wanted")
        yield _Field(number, kind, at, content, stop)
        at = stop


def _varint(file: IO[bytes], at: int, end: int) -> tuple[int, int]:
    """Read a varint; return its value and end position. The end is -1 if the data is invalid."""
    file.seek(at)
    value = 0
    for shift, byte in enumerate(file.read(min(10, max(0, end - at)))):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, at + shift + 1
    return 0, -1


def _delimited(number: int, content: bytes) -> bytes:
    return _packed(number << 3 | _LENGTH) + _packed(len(content)) + content


def _packed(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _copy(file: IO[bytes], begin: int, end: int, out: IO[bytes]) -> None:
    file.seek(begin)
    while begin < end:
        data = file.read(min(_CHUNK, end - begin))
        if not data:
            raise OSError("the file became shorter meanwhile")
        out.write(data)
        begin += len(data)
