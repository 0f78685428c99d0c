"""Text operators of com.microsoft that converters of scikit-learn pipelines emit: Tokenizer and MurmurHash3."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tunewright.ir.types import DType, TensorType, Type

from ..base import Array, Attrs, Operands, OpSpec
from ..shapes import tensor
from .common import MS

_START, _END = "\x02", "\x03"
#: finds alternatives and lazy repetition, where the first match may be shorter than the longest
_SHORT = re.compile(r"\||[*+?}]\?")


# -- Tokenizer ---------------------------------------------------------------------------------------------------------
def _matches(pattern: re.Pattern[str], text: str) -> Iterator[tuple[int, int]]:
    """The leftmost longest matches of the pattern, in order. After an empty match the search skips one character."""
    start = 0
    while found := pattern.search(text, start):
        begin, end = found.span()
        if _SHORT.search(pattern.pattern):
            end = next((e for e in range(len(text), end, -1) if pattern.fullmatch(text, begin, e)), end)
        yield begin, end
        start = end if end > begin else begin + 1
        if start > len(text):
            return


def _split(pattern: re.Pattern[str], text: str) -> list[str]:
    """The text between the matches of a separator. An empty match also consumes the character behind it."""
    parts, start = [], 0
    for begin, end in _matches(pattern, text):
        parts.append(text[start:begin])
        start = max(end, begin + 1)
    return [*parts, text[start:]]


def _compile(expression: str) -> re.Pattern[str]:
    try:
        return re.compile(expression, re.ASCII)  # the character classes of RE2 are ASCII
    except re.error as error:
        raise ValueError(f"{expression!r} is not a regular expression: {error}") from None


def _tokens(text: str, separators: Sequence[re.Pattern[str]], token: re.Pattern[str] | None, least: int) -> list[str]:
    if token is not None:
        parts = [text[begin:end] for begin, end in _matches(token, text)]
        return [p for p in parts if len(p) >= least]
    parts = [text]
    for separator in separators:
        parts = [p for whole in parts for p in _split(separator, whole) if len(p) >= least]
    return parts


def _tokenizer(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    x, least = inputs[0], int(attrs.get("mincharnum", 1))
    separators, expression = tuple(attrs.get("separators", ())), attrs.get("tokenexp", "")
    if bool(separators) == bool(expression):
        raise ValueError("takes either separators or tokenexp")
    if separators == ("",):
        rows = [list(s) for s in x.ravel()]
    else:
        token = _compile(expression) if expression else None
        patterns = [_compile(s) for s in separators]
        rows = [_tokens(s, patterns, token, least) for s in x.ravel()]
    if attrs.get("mark", 0) and any(rows):
        rows = [[_START, *row, _END] for row in rows]
    width = max((len(row) for row in rows), default=0)
    result = np.full((len(rows), width), attrs.get("pad_value", ""), object)
    for i, row in enumerate(rows):
        result[i, : len(row)] = row
    return [result.reshape(*x.shape, width)]


def _infer_tokenizer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x = tensor(operands, 0)
    return [TensorType(DType.STRING, None if x.shape is None else (*x.shape, None))]


# -- MurmurHash3 -------------------------------------------------------------------------------------------------------
def _rotate(h: Array, bits: int) -> Array:
    return (h << np.uint32(bits)) | (h >> np.uint32(32 - bits))


def _mix(block: Array) -> Array:
    return _rotate(block * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)


def _hash(data: Array, seed: int) -> Array:
    """The 32-bit hash of each row of bytes."""
    size = data.shape[1]
    words = np.zeros((len(data), -(-size // 4) * 4), np.uint8)
    words[:, :size] = data
    blocks = words.view("<u4").astype(np.uint32)
    h = np.full(len(data), seed & 0xFFFFFFFF, np.uint32)
    for i in range(size // 4):
        h = _rotate(h ^ _mix(blocks[:, i]), 13) * np.uint32(5) + np.uint32(0xE6546B64)
    if size % 4:
        h = h ^ _mix(blocks[:, -1])
    h = h ^ np.uint32(size)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> np.uint32(shift))) * np.uint32(factor)
    return np.asarray(h ^ (h >> np.uint32(16)))


def _murmur(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    x, seed = inputs[0], int(attrs.get("seed", 0))
    if x.dtype.kind in "OUST":
        texts = [np.frombuffer(s.encode(), np.uint8)[None] for s in x.ravel()]
        hashes = np.concatenate([_hash(t, seed) for t in texts]) if texts else np.zeros(0, np.uint32)
    else:
        flat = np.ascontiguousarray(x).reshape(-1, 1)
        hashes = _hash(flat.astype(x.dtype.newbyteorder("<"), copy=False).view(np.uint8), seed)
    return [hashes.reshape(x.shape).view(np.uint32 if attrs.get("positive", 1) else np.int32)]


def _infer_murmur(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    return [TensorType(DType.UINT32 if attrs.get("positive", 1) else DType.INT32, tensor(operands, 0).shape)]


OPS = (
    OpSpec(MS + "Tokenizer", _tokenizer, _infer_tokenizer),
    OpSpec(MS + "MurmurHash3", _murmur, _infer_murmur),
)
