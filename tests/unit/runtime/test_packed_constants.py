"""Constants that a kernel wants rearranged: made once, and where cache lines begin."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tunewright.devices.base import address, aligned, on_lines
from tunewright.devices.host import HostDevice
from tunewright.passes.base import Context
from tunewright.runtime.plans.program import Environment
from tunewright.settings import Settings
from tunewright.solvers.base import Packing
from tunewright.tuning.tuner import Tuner


def beside_a_line(values: np.ndarray) -> np.ndarray:
    """The same elements 16 bytes behind the beginning of a line, where numpy puts them as a rule."""
    made = np.ndarray(values.shape, values.dtype, aligned(values.nbytes + 16)[16:])
    made[...] = values
    return made


def test_packed_constants_begin_with_a_line() -> None:
    settings = Settings()
    env = Environment(HostDevice(), Tuner(settings), settings, Context(settings))
    constant = np.arange(12, dtype=np.float32).reshape(3, 4)
    packing = Packing("turned", lambda a: beside_a_line(a.T))
    with ThreadPoolExecutor(1) as pool:
        packed = env.pack(packing, constant, pool)
        assert env.pack(packing, constant, pool) is packed
    assert address(packed.array) % 64 == 0
    np.testing.assert_array_equal(packed.array, constant.T)


def test_what_begins_with_a_line_is_not_copied() -> None:
    there = np.ndarray((4,), np.float32, aligned(16))
    assert on_lines(there) is there
    assert on_lines(np.empty((0,), np.float32)).shape == (0,)
