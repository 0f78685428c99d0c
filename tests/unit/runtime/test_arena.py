"""The arena: buffers alive at the same time never overlap, and it stays near its lower bound. Where memory begins."""

import gc
import mmap
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tunewright.devices.base import address
from tunewright.devices.host import HostDevice
from tunewright.ir import weight_memory as weights
from tunewright.ir.formulas import Formulas
from tunewright.ir.symbolic import ShapeTrace, hint
from tunewright.runtime.plans import memory_layout
from tunewright.runtime.plans.memory_layout import ALIGNMENT, Lifetime, Stack, aligned, pack


@st.composite
def lifetimes(draw):
    count = draw(st.integers(0, 40))
    made = []
    for _ in range(count):
        first = draw(st.integers(0, 30))
        made.append(Lifetime(draw(st.integers(0, 5000)), first, first + draw(st.integers(0, 12))))
    return made


def check(buffers, offsets, total):
    for i, a in enumerate(buffers):
        assert offsets[i] % ALIGNMENT == 0
        assert offsets[i] >= 0 and offsets[i] + a.nbytes <= total
        for j in range(i):
            b = buffers[j]
            if a.first <= b.last and b.first <= a.last:
                assert offsets[i] + a.nbytes <= offsets[j] or offsets[j] + b.nbytes <= offsets[i], (a, b)


@given(lifetimes())
def test_live_buffers_never_overlap(buffers):
    check(buffers, *pack(buffers))


@given(lifetimes())
def test_the_linear_scan_for_long_graphs_is_legal_too(buffers):
    check(buffers, *memory_layout._scan(buffers))


@settings(max_examples=50)
@given(lifetimes())
def test_the_arena_is_at_most_twice_the_lower_bound(buffers):
    _, total = pack(buffers)
    peak = max(
        (
            sum(max(1, -(-b.nbytes // ALIGNMENT)) * ALIGNMENT for b in buffers if b.first <= t <= b.last)
            for t in range(50)
        ),
        default=0,
    )
    assert total <= 2 * peak


def test_a_chain_needs_two_buffers():
    chain = [Lifetime(1024, t, t + 1) for t in range(3000)]
    _, total = pack(chain)
    assert total == 2048


def test_where_any_array_begins():
    """Also of those that no buffer describes: read-only ones, empty ones, types that only onnx knows."""
    whole = np.zeros((4, 6), np.float32)
    fixed = np.zeros(3, np.int64)
    fixed.flags.writeable = False
    odd = [np.zeros(3, ml_dtypes.bfloat16), np.zeros((0, 2)), np.zeros(()), np.zeros(3, bool), whole[1:, ::2]]
    for array in [whole, whole[2:], fixed, *odd]:
        assert address(array) == array.__array_interface__["data"][0]
    for nbytes in (0, 1, 100):
        found = HostDevice("CPU.HOST").alloc(nbytes)
        assert found.nbytes == nbytes and (not nbytes or address(found) % 64 == 0)


def test_weights_share_pages_of_2_mb():
    """Each begins at a cache line, is nobody else's, and goes back to the system when nobody holds it any more."""
    sizes = [weights.LARGE - 1, weights.LARGE, 3 << 20, 100_003, weights.SHELF + 1, 1 << 20]
    arrays = [weights.shared_pages(nbytes) for nbytes in sizes]
    for k, array in enumerate(arrays):
        array[:] = k + 1
    assert [array.nbytes for array in arrays] == sizes
    assert all(address(array) % 64 == 0 for array in arrays[1:])
    view, gone = arrays[2].reshape(-1, 2)[5:], weakref.ref(arrays[4].base)
    del arrays[2], arrays[3], array
    gc.collect()
    assert gone() is None and view.min() == view.max() == 3
    assert [(int(array.min()), int(array.max())) for array in arrays] == [(1, 1), (2, 2), (4, 4), (6, 6)]
    again = [weights.shared_pages(1 << 20) for _ in range(8)]
    for array in again:
        array[:] = 9
    assert [(int(array.min()), int(array.max())) for array in arrays] == [(1, 1), (2, 2), (4, 4), (6, 6)]
    assert view.max() == 3


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_what_weights_took_goes_back_although_others_stay():
    arrays = [weights.shared_pages(4 << 20) for _ in range(8)]
    for array in arrays:
        array[:] = 1
    kept, before = arrays[::4], resident()
    del arrays, array
    gc.collect()
    assert before - resident() > 20 << 20
    assert all(array.min() == 1 for array in kept)


@given(lifetimes(), st.integers(2, 400), st.integers(2, 400))
@settings(deadline=None)
def test_places_as_expressions_are_those_of_each_size(buffers, n, m):
    trace = ShapeTrace()
    one, other = trace.symbol("n", 7), trace.symbol("m", 11)
    wanted = {k: life.nbytes * (one if k % 3 == 0 else other if k % 3 == 1 else 1) for k, life in enumerate(buffers)}
    lives = {k: Lifetime(int(hint(wanted[k])), life.first, life.last) for k, life in enumerate(buffers)}
    offsets, _ = pack([*lives.values()])
    stack = Stack(lives, dict(enumerate(offsets)))
    places, total = stack.expressions(wanted)
    assert not trace.guards
    sizes = {k: aligned(nbytes) for k, nbytes in wanted.items()}
    formulas = Formulas(trace, [*places.values(), *sizes.values(), total, 0])
    bytes_at = {k: formulas.place(nbytes) for k, nbytes in sizes.items()}
    offsets_at, total_at = stack.offsets(bytes_at, formulas.place(0), formulas.made)
    values = formulas((n, m))
    assert values is not None
    assert all(values[formulas.place(places[k])] == values[at] for k, at in offsets_at.items())
    assert values[formulas.place(total)] == values[total_at]
    for k, life in enumerate(buffers):  # nothing that is alone in its place meets another one
        end = values[offsets_at[k]] + values[bytes_at[k]]
        assert values[offsets_at[k]] >= 0 and end <= values[total_at]
        for other, its in list(enumerate(buffers))[:k]:
            if its.first <= life.last and life.first <= its.last:
                begin, stop = values[offsets_at[other]], values[offsets_at[other]] + values[bytes_at[other]]
                assert stop <= values[offsets_at[k]] or end <= begin
