"""Moves elements as words of 1, 2, 4 or 8 bytes, whatever their type, so that one kernel text serves all types."""

from __future__ import annotations

from tunewright.ir.symbolic import lesser
from tunewright.ir.types import DType

from .emit import STORAGE

_WORDS = {1: DType.UINT8, 2: DType.UINT16, 4: DType.UINT32, 8: DType.UINT64, 16: DType.UINT64}

#: Types whose elements are movable bytes: neither strings nor types that this numpy cannot hold.
MOVABLE = frozenset(d for d in DType if d is not DType.STRING and d.itemsize in _WORDS and d.numpy.kind != "O")


#: types with one word per element
SINGLE = frozenset(d for d in MOVABLE if d.itemsize <= 8)


def word(dtype: DType) -> DType:
    """The integer type in which elements of a type are moved."""
    return _WORDS[dtype.itemsize]


def words(dtype: DType) -> int:
    """The number of words of an element: one, except for the widest type."""
    return dtype.itemsize // word(dtype).itemsize


def transposer(dtype: DType, width: int) -> str:
    """The C text of ``transpose_tile`` with the vector types that it needs."""
    vectors = f"vector_of({STORAGE[dtype]}, {width}, V); typedef V VU __attribute__((aligned({dtype.itemsize})));"
    return f"{vectors}\n{transpose_tile(dtype, width)}"


def transpose_tile(dtype: DType, width: int) -> str:
    """The C text of ``transpose_tile``, which transposes a tile of ``width`` x ``width`` words in registers.

    V is a vector of ``width`` words. Source rows at or beyond ``rows`` are not read and count as zeros; target rows at
    or beyond ``columns`` are not written. The text exchanges halves of vectors until the remaining transposition lies
    inside 128 bits; there it interleaves rows. Each of these shuffles is one instruction.
    """
    assert width & (width - 1) == 0
    lane = lesser(width, 16 // dtype.itemsize)
    names = [f"r{i}" for i in range(width)]
    lines = []

    def shuffle(a: int, b: int, low: list[int], high: list[int]) -> None:
        text = "__builtin_shufflevector(r{}, r{}, {})"
        pair = [text.format(a, b, ", ".join(map(str, picked))) for picked in (low, high)]
        lines.append(f"{{ V low = {pair[0]}, high = {pair[1]}; r{a} = low; r{b} = high; }}")

    half = width // 2
    while half >= lane:
        low = [at + i for at in range(0, width, 2 * half) for i in [*range(half), *range(width, width + half)]]
        for a in range(width):
            if a // half % 2 == 0:
                shuffle(a, a + half, low, [i + half for i in low])
        half //= 2
    low = [at + i for at in range(0, width, lane) for k in range(lane // 2) for i in (k, width + k)]
    high = [i + lane // 2 for i in low]
    order = list(range(width))
    for _ in range(lane.bit_length() - 1):
        turned = []
        for first in range(0, width, lane):
            for k in range(first, first + lane // 2):
                a, b = order[k], order[k + lane // 2]
                shuffle(a, b, low, high)
                turned += [a, b]
        order = turned
    loads = [f"V r{i} = {i} < rows ? LOADV(s + {i} * from) : (V)(0);" for i in range(width)]
    stores = [f"if ({i} < columns) STOREV(d + {i} * to, {names[k]});" for i, k in enumerate(order)]
    c = STORAGE[dtype]
    return "\n".join(
        [
            f"INLINE void transpose_tile(GLOBAL const {c}* s, int from, int rows,",
            f"                           GLOBAL {c}* d, int to, int columns) {{",
            *loads, *lines, *stores, "}",
        ]
    )  # fmt: skip
