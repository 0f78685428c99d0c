"""A model file apart from its weights: protobuf parses what is small, large tensors go straight to where they stay.

Left to itself protobuf takes three copies of every weight: the file's bytes, its message, and what is asked of it.
Here the fields of the file are walked (docs of protobuf: "Encoding"). The bytes of a large ``raw_data`` are left out of
what is parsed, and each is read from the file into an array of its own, so that it can also be freed by itself. What
this walk does not expect, protobuf parses as a whole: it says what is wrong with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import IO, Any, TypeAlias

import numpy as np

from ..ir.memory import lasting

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

#: smaller files are parsed as they are, and smaller tensors with the rest
SMALL_FILE, SMALL = 1 << 20, 1 << 14
#: what one thread reads at a time, and threads: memory is new, and its first touch takes longer than the copy
CHUNK, THREADS = 16 << 20, 4
#: numbers of fields: ModelProto.graph, GraphProto.initializer, TensorProto.raw_data
GRAPH, INITIALIZER, RAW_DATA = 7, 5, 9
#: types of fields: a number, 8 bytes, anything with a length, 4 bytes
NUMBER, EIGHT, LENGTH, FOUR = 0, 1, 2, 5


class _Unexpected(Exception):
    """For protobuf to judge."""


@dataclass
class Parts:
    """A model without its large tensors, and these by their place among the initializers of its graph."""

    small: bytes
    large: dict[int, Bytes]


@dataclass(frozen=True)
class _Field:
    """Where a field begins, where its content does, and where it ends."""

    number: int
    kind: int
    begin: int
    content: int
    end: int


def read(file: IO[bytes], size: int) -> Parts:
    """The parts of a file of so many bytes, which may be a whole and nothing else."""
    if size >= SMALL_FILE:
        walk = _Walk(file)
        try:
            small = walk.model(size)
        except _Unexpected:
            file.seek(0)
        else:
            return Parts(small, _read_all(file.fileno(), walk.found))
    return Parts(file.read(size), {})


@dataclass
class _Walk:
    file: IO[bytes]
    #: by place among the initializers: where bytes lie, and how many
    found: dict[int, tuple[int, int]] = field(default_factory=dict)

    def model(self, size: int) -> bytes:
        made, graphs = bytearray(), 0
        for one in self.fields(0, size):
            if one.number != GRAPH:
                made += self.copy(one.begin, one.end)
                continue
            graphs += 1
            if one.kind != LENGTH or graphs > 1:  # protobuf would make one of several
                raise _Unexpected
            made += _whole(GRAPH, self.graph(one.content, one.end))
        return bytes(made)

    def graph(self, begin: int, end: int) -> bytes:
        made, count = bytearray(), 0
        for one in self.fields(begin, end):
            if one.number != INITIALIZER:
                made += self.copy(one.begin, one.end)
                continue
            if one.kind != LENGTH:
                raise _Unexpected
            if one.end - one.content < SMALL:
                made += self.copy(one.begin, one.end)
            else:
                made += _whole(INITIALIZER, self.tensor(one.content, one.end, count))
            count += 1
        return bytes(made)

    def tensor(self, begin: int, end: int, place: int) -> bytes:
        made = bytearray()
        for one in self.fields(begin, end):
            if one.number != RAW_DATA or one.kind != LENGTH or one.end - one.content < SMALL:
                made += self.copy(one.begin, one.end)
                continue
            if place in self.found:  # protobuf would take the last one
                raise _Unexpected
            self.found[place] = one.content, one.end - one.content
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
        """A number of variable length: seven bits in each byte, the lowest first."""
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
    """A field with a length."""
    return _number(number << 3 | LENGTH) + _number(len(content)) + content


def _number(value: int) -> bytes:
    made = bytearray()
    while value >= 0x80:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)


def _read_all(descriptor: int, places: dict[int, tuple[int, int]]) -> dict[int, Bytes]:
    """Bytes of a file, each range in memory of its own. OSError when the file has become shorter."""
    made = {key: lasting(length) for key, (_, length) in places.items()}
    chunks = [
        (made[key][first : first + CHUNK], offset + first)
        for key, (offset, length) in places.items()
        for first in range(0, length, CHUNK)
    ]

    def fill(chunk: tuple[Bytes, int]) -> None:
        memory, offset = chunk
        while len(memory):
            count = os.preadv(descriptor, [memory.data], offset)
            if not count:
                raise OSError("the file has become shorter")
            memory, offset = memory[count:], offset + count

    with ThreadPoolExecutor(max(1, min(THREADS, len(chunks)))) as pool:
        for _ in pool.map(fill, chunks):
            pass
    return made
