"""The arena: buffers alive at the same time never overlap, and the arena stays near its lower bound."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tunewright.runtime import memory
from tunewright.runtime.memory import ALIGNMENT, Lifetime, pack


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
    check(buffers, *memory._scan(buffers))


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
