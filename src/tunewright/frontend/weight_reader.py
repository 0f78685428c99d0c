"""Reads a model file in two parts: protobuf parses the small fields, large tensors go straight to their final memory.

Protobuf alone would make three copies of every weight: the file's bytes, its message, and the returned field. This
module walks the fields of the file (protobuf docs, "Encoding") and removes the bytes of every large ``raw_data`` before
parsing. It reads each of them from the file into an array of its own, which can also be freed separately. If the walk
meets something unexpected, protobuf parses the whole file and reports errors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import IO, Any, TypeAlias

import numpy as np

from ..ir.stored_weights import StoredBytes, StoredFile, read_into
from ..ir.weight_memory import lasting

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
#: path to a message: names of fields, each with an index if the field is repeated
Path: TypeAlias = tuple[tuple[str, int | None], ...]

#: smaller files are parsed whole, and smaller tensors with the rest
SMALL_FILE, SMALL = 1 << 20, 1 << 14
#: Bytes that a thread reads at a time, and the number of threads: touching new memory takes longer than the copy.
CHUNK, THREADS = 16 << 20, 4
#: Fields that the walk follows, by message and number: name, content, and whether the field is repeated. Weights are
#: initializers, or attributes of Constant nodes.
FOLLOWED = {
    "model": {7: ("graph", "graph", False)},
    "graph": {1: ("node", "node", True), 5: ("initializer", "tensor", True)},
    "node": {5: ("attribute", "attribute", True)},
    "attribute": {5: ("t", "tensor", False)},
    "tensor": {9: ("raw_data", "bytes", False)},
}
#: maximum number of fields of a node, attribute or tensor in the walk: protobuf is faster for long lists
MOST = 1000
#: wire types: varint, 8 bytes, length-delimited, 4 bytes
NUMBER, EIGHT, LENGTH, FOUR = 0, 1, 2, 5


class _Unexpected(Exception):
    """The walk met something that protobuf must judge."""


@dataclass
class SplitModel:
    """A model without the raw_data of its large tensors, and those data by path."""

    small: bytes
    large: dict[Path, Bytes]

    def tensors(self, model: Any) -> dict[int, tuple[Any, Bytes]]:
        """Return the large tensors of the parsed model with their raw_data, by identity.

        The tensors must be held for as long as their ids are used: only then does protobuf keep one object for each.
        """
        found = {}
        for path, raw in self.large.items():
            message = model
            for name, place in path:
                message = getattr(message, name) if place is None else getattr(message, name)[place]
            found[id(message)] = message, raw
        return found


@dataclass(frozen=True)
class _Field:
    """Where a field begins, where its content begins, and where it ends."""

    number: int
    kind: int
    begin: int
    content: int
    end: int


def read(file: IO[bytes], size: int) -> SplitModel:
    """Read the parts of a file of exactly ``size`` bytes."""
    if size >= SMALL_FILE:
        walk = _Walk(file)
        try:
            small = walk.message("model", 0, size)
        except _Unexpected:
            file.seek(0)
        else:
            return SplitModel(small, _read_all(file.fileno(), walk.found))
    return SplitModel(file.read(size), {})


@dataclass
class _Walk:
    file: IO[bytes]
    #: offset and length of the raw_data of large tensors
    found: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def message(self, kind: str, begin: int, end: int, path: Path = ()) -> bytes:
        """Return a message without the large bytes in it."""
        made, counts = bytearray(), Counter[int]()
        for count, one in enumerate(self.fields(begin, end)):
            if count == MOST and kind not in ("model", "graph"):
                raise _Unexpected
            name, inner, repeated = FOLLOWED[kind].get(one.number, ("", "", False))
            # protobuf would merge several occurrences
            if inner and (one.kind != LENGTH or (counts[one.number] and not repeated)):
                raise _Unexpected
            place = counts[one.number] if repeated else None
            counts[one.number] += 1
            if not inner or one.end - one.content < SMALL:
                made += self.copy(one.begin, one.end)
            elif inner == "bytes":
                self.found[path] = one.content, one.end - one.content
            else:
                made += _whole(one.number, self.message(inner, one.content, one.end, (*path, (name, place))))
        return bytes(made)

    def fields(self, begin: int, end: int) -> Iterator[_Field]:
        at = begin
        while at < end:
            self.file.seek(at)
            tag = self.number()
            number, kind = tag >> 3, tag & 7
            if not number:
                raise _Unexpected
            if kind == LENGTH:
                length = self.number()
                content = self.file.tell()
                after = content + length
            else:
                content = self.file.tell()
                if kind == NUMBER:
                    self.number()
                    after = self.file.tell()
                elif kind in (EIGHT, FOUR):
                    after = content + (8 if kind == EIGHT else 4)
                else:
                    raise _Unexpected
            if after > end:
                raise _Unexpected
            yield _Field(number, kind, at, content, after)
            at = after

    def number(self) -> int:
        """Read a varint: seven bits in each byte, lowest first."""
        found = 0
        for shift in range(0, 70, 7):
            byte = self.file.read(1)
            if not byte:
                raise _Unexpected
            found |= (byte[0] & 0x7F) << shift
            if byte[0] < 0x80:
                return found
        raise _Unexpected

    def copy(self, begin: int, end: int) -> bytes:
        self.file.seek(begin)
        data = self.file.read(end - begin)
        if len(data) != end - begin:
            raise _Unexpected
        return data


def _whole(number: int, content: bytes) -> bytes:
    """Encode a length-delimited field."""
    return _number(number << 3 | LENGTH) + _number(len(content)) + content


def _number(value: int) -> bytes:
    made = bytearray()
    while value >= 0x80:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)


def _read_all(descriptor: int, places: dict[Path, tuple[int, int]]) -> dict[Path, Bytes]:
    """Read each range of a file into memory of its own. Raises OSError if the file has become shorter."""
    stored = StoredFile(descriptor)
    made = {key: lasting(length) for key, (_, length) in places.items()}
    chunks = [
        (made[key][first : first + CHUNK], offset + first)
        for key, (offset, length) in places.items()
        for first in range(0, length, CHUNK)
    ]

    def fill(chunk: tuple[Bytes, int]) -> None:
        read_into(descriptor, *chunk)

    with ThreadPoolExecutor(max(1, min(THREADS, len(chunks)))) as pool:
        for _ in pool.map(fill, chunks):
            pass
    return {key: StoredBytes(stored, *places[key]).in_memory(memory) for key, memory in made.items()}
