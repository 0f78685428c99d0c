"""Formulas of classes of shapes in C (`formulas.c`): they compute sizes, and the words of a table that are sizes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tunewright.ir.formulas import Computed, Flat

from ..base import address

_WORD = 0xFFFFFFFFFFFFFFFF
_FAILS, _OVERFLOW = -1, -2


class _Formulas(ctypes.Structure):
    _fields_ = [
        ("first", ctypes.c_int64), ("functions", ctypes.c_int64), ("guarded", ctypes.c_int64),
        ("checks", ctypes.c_int64), ("guards", ctypes.c_int64), ("code", ctypes.c_void_p), ("check", ctypes.c_void_p),
    ]  # fmt: skip


class Evaluator:
    """Computes formulas. Any number of threads may do so at a time.

    The first computation calls ``quick`` for the compiled text.
    """

    def __init__(self, flat: Flat, quick: Callable[[], ctypes.PyDLL]) -> None:
        self._quick, self._flat = quick, flat
        self._symbols, self._scopes = flat.symbols, flat.scopes
        self._before = np.zeros(flat.symbols + len(flat.constants) + len(flat.code) + flat.scopes, np.int64)
        self._before[flat.symbols : flat.symbols + len(flat.constants)] = flat.constants
        self._about = _Formulas(
            flat.symbols + len(flat.constants), len(flat.code), flat.guarded, len(flat.checks), flat.guards,
            address(flat.code), address(flat.checks),
        )  # fmt: skip
        self._compute: Callable[[Any, Any], int] | None = None

    def __call__(self, symbols: Sequence[int]) -> Computed | None:
        values = self._before.copy()
        values[: self._symbols] = symbols
        compute = self._compute
        if compute is None:
            compute = self._quick().formulas_compute
            compute.restype = ctypes.c_int64
            self._compute = compute
        state = compute(ctypes.byref(self._about), ctypes.c_void_p(address(values)))
        if not state:
            return Computed(values.data, ())
        if state == _OVERFLOW:
            raise OverflowError("a size is larger than 64 bits")
        return None if state == _FAILS else Computed(values.data, np.flatnonzero(values[-self._scopes :]).tolist())


class Words:
    """Words of a table that are values, each with a base added."""

    def __init__(
        self, quick: ctypes.PyDLL, table: np.ndarray[Any, Any], words: Sequence[tuple[int, int, int]], bases: int
    ) -> None:
        """``words``: the place of each word, the value that it is, and which of the ``bases`` is added."""
        self._words, self._table = np.array(words, np.int32).reshape(-1, 3), table
        #: the added numbers; the caller of `write` keeps them up to date
        self.bases = np.zeros(bases, np.uint64)
        self._write, to = quick.formulas_write, (self._table, self._words)
        self._begin = [ctypes.c_void_p(address(array)) if array.size else None for array in to]
        self._count, self._base = ctypes.c_int64(len(words)), ctypes.c_void_p(address(self.bases))

    def write(self, values: Sequence[int]) -> None:
        """Write all words."""
        if not isinstance(values, memoryview):  # Python computed the values
            values = np.array([value & _WORD for value in values], np.uint64).data
        table, words = self._begin
        self._write(table, words, self._count, ctypes.c_void_p(address(values)), self._base)
