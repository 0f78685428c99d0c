"""Operators on strings. A string array holds Python strings as objects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tunewright.ir.types import DType, TensorType, Type
from tunewright.ops.base import Array, Attrs, Operands, OpSpec
from tunewright.ops.shapes import elementwise, same_as, tensor


def _array(values: Iterable[str], shape: tuple[int, ...]) -> Array:
    result = np.empty(shape, object)
    result.reshape(-1)[:] = list(values)
    return result


def _concat(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    a, b = np.broadcast_arrays(*inputs)
    return [_array((x + y for x, y in zip(a.ravel(), b.ravel(), strict=True)), a.shape)]


def _full_match(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    (x,) = inputs
    try:
        pattern = re.compile(attrs["pattern"], re.ASCII)  # the character classes of RE2 are ASCII
    except re.error as error:
        raise ValueError(f"pattern {attrs['pattern']!r} is not a regular expression: {error}") from None
    return [np.asarray([pattern.fullmatch(s) is not None for s in x.ravel()], bool).reshape(x.shape)]


def _split(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """Split each string into parts along a new last axis, padded with empty strings. Also returns their number."""
    (x,) = inputs
    delimiter, most = attrs.get("delimiter") or None, int(attrs.get("maxsplit", -1))
    parts = [s.split(delimiter, most) if s else [] for s in x.ravel()]
    width = max((len(p) for p in parts), default=0)
    filled = [piece for p in parts for piece in (*p, *[""] * (width - len(p)))]
    counts = np.asarray([len(p) for p in parts], np.int64).reshape(x.shape)
    return [_array(filled, (*x.shape, width)), counts]


def _infer_split(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x = tensor(operands, 0)
    parts = None if x.shape is None else (*x.shape, None)
    return [TensorType(DType.STRING, parts), TensorType(DType.INT64, x.shape)][:n]


def _normalize(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """Remove stop words and change case. If nothing is left, the result is one empty string."""
    (x,) = inputs
    if x.ndim not in (1, 2) or (x.ndim == 2 and x.shape[0] != 1):
        raise ValueError(f"takes shape [C] or [1,C], not {list(x.shape)}")
    change = {"LOWER": str.lower, "UPPER": str.upper}.get(attrs.get("case_change_action", "NONE"), str)
    exact = attrs.get("is_case_sensitive", 0)
    stop = {w if exact else w.lower() for w in attrs.get("stopwords", ())}
    kept = [change(w) for w in x.ravel() if (w if exact else w.lower()) not in stop] or [""]
    return [_array(kept, (len(kept),) if x.ndim == 1 else (1, len(kept)))]


def _infer_normalize(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x = tensor(operands, 0)
    if x.shape is None:
        return [TensorType(DType.STRING)]
    return [TensorType(DType.STRING, (*x.shape[:-1], None))]


OPS = (
    OpSpec("StringConcat", _concat, elementwise(DType.STRING)),
    OpSpec("RegexFullMatch", _full_match, same_as(0, DType.BOOL)),
    OpSpec("StringSplit", _split, _infer_split),
    OpSpec("StringNormalizer", _normalize, _infer_normalize),
)
