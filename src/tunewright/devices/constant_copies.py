"""Copies of constants in a device's memory. Each is made once, and is freed with its source array."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

Array = np.ndarray[Any, Any]


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


Copy = TypeVar("Copy", bound=_Sized)


class ConstantCopies(Generic[Copy]):
    """A cache of copies. ``make`` copies an array that nobody writes to."""

    def __init__(self, make: Callable[[Array], Copy]) -> None:
        self._make = make
        #: id of an array -> a weak reference to the array, and its copy
        self._known: dict[int, tuple[weakref.ref[Array], Copy]] = {}
        self._lock = threading.Lock()

    def of(self, array: Array) -> Copy:
        key = id(array)
        with self._lock:
            known = self._known.get(key)
            if known is not None and known[0]() is array:
                return known[1]
            copy = self._make(array)
            # `_forget` takes no lock: the array may die while this thread holds the lock.
            self._known[key] = weakref.ref(array, lambda ref: self._forget(key, ref)), copy
            return copy

    @property
    def nbytes(self) -> int:
        """Bytes of all live copies."""
        return sum(copy.nbytes for _, copy in list(self._known.values()))

    def _forget(self, key: int, dead: weakref.ref[Array]) -> None:
        known = self._known.get(key)
        if known is not None and known[0] is dead:  # else another array has this id by now
            self._known.pop(key, None)
