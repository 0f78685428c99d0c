"""Attention kernels against their references."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conformance.short_form import every_other
from tunewright.plugins.single import open_device
from tunewright.solvers.base import solvers
from tunewright.solvers.host.reference import HostKernel
from tunewright.testing.kernelcheck import Case, check, run_one

MULTI_HEAD = "com.microsoft::MultiHeadAttention"


def normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def generic(case: Case, id: str = "opencl.attention") -> str:
    """What is wrong with the solver that takes shapes as arguments, in its default config: nothing new to compile."""
    device, problem = open_device("CPU"), case.problem()
    solver = next(s for s in solvers() if s.id == id)
    assert solver.why_not(problem, device.target) is None
    want = HostKernel(problem).run(device.queue(), case.inputs, [None] * case.outputs)
    return run_one(case, problem, solver, solver.default(problem, device.target), device, want)


def qkv(rng: np.random.Generator, 
    batch: int = 2, heads: int = 3, queries: int = 7, keys: int = 19, size: int = 5, width: int | None = None,
    groups: int | None = None, dtype: Any = np.float32,
) -> list[np.ndarray]:  # fmt: skip
    groups = groups or heads
    return [
        normal(rng, batch, heads, queries, size, dtype=dtype),
        normal(rng, batch, groups, keys, size, dtype=dtype),
        normal(rng, batch, groups, keys, width or size, dtype=dtype),
    ]


def flat(x: np.ndarray) -> np.ndarray:
    """[batch, heads, length, size] -> [batch, length, heads * size]"""
    batch, heads, length, size = x.shape
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(batch, length, heads * size)


@pytest.mark.parametrize("sizes", [
    {}, {"batch": 1, "heads": 1, "queries": 1, "keys": 1, "size": 1}, {"queries": 1, "keys": 100}, {"queries": 2},
    {"queries": 1, "keys": 100, "size": 64}, {"queries": 2, "keys": 33, "size": 40},
    {"queries": 1, "keys": 3, "size": 16}, {"queries": 1, "heads": 6, "groups": 2, "keys": 16, "size": 23, "width": 70},
    {"queries": 4, "keys": 3}, {"queries": 64, "keys": 64, "size": 32}, {"queries": 13, "size": 17, "width": 40},
    {"heads": 6, "groups": 2}, {"heads": 6, "groups": 1, "width": 3}, {"batch": 0}, {"queries": 0}, {"keys": 0},
])  # fmt: skip
def test_sizes(rng: np.random.Generator, sizes: dict[str, int]) -> None:
    inputs = qkv(rng, **sizes)
    assert not generic(Case("Attention", inputs))
    heads = {"q_num_heads": inputs[0].shape[1], "kv_num_heads": inputs[1].shape[1]}
    assert not generic(Case("Attention", [flat(x) for x in inputs], heads | {"scale": 0.3}))


def test_configs(rng: np.random.Generator) -> None:
    assert not check(
        Case("Attention", [*qkv(rng), normal(rng, 7, 19)], {"is_causal": 1}), "opencl.attention", configs=1
    )


@pytest.mark.parametrize("own", [False, True])
def test_packing(rng: np.random.Generator, own: bool) -> None:
    """Keys and values packed by each work-item, or by launches of their own: shared heads, few heads, a past."""
    device = open_device("CPU")
    solver = next(s for s in solvers() if s.id == "opencl.attention")
    past = [normal(rng, 2, 2, 9, 5), normal(rng, 2, 2, 9, 17)]
    cases = [
        Case("Attention", qkv(rng, heads=6, groups=2, width=17)),
        Case("Attention", qkv(rng, batch=1, heads=1, queries=100)),
        Case("Attention", [flat(x) for x in qkv(rng, heads=8)], {"q_num_heads": 8, "kv_num_heads": 8}),
        Case("Attention", [*qkv(rng, heads=4, groups=2, width=17), None, *past], {"is_causal": 1}),
        Case("Attention", qkv(rng, dtype=np.float16)),
    ]  # fmt: skip
    for case in cases:
        problem = case.problem()
        config = dict(solver.default(problem, device.target)) | {"own": own}
        want = HostKernel(problem).run(device.queue(), case.inputs, [None])
        assert not run_one(case, problem, solver, config, device, want), problem.key()


MASKS = [(19,), (7, 19), (1, 19), (3, 7, 19), (2, 3, 7, 19), (2, 1, 1, 19), (1, 3, 7, 19), (7, 11)]


@pytest.mark.parametrize("shape", MASKS)
def test_masks(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    for mode in (0, 2):
        attrs = {"qk_matmul_output_mode": mode}
        boolean = rng.random(shape) < 0.7
        assert not generic(Case("Attention", [*qkv(rng), normal(rng, *shape)], attrs, outputs=4))
        assert not generic(Case("Attention", [*qkv(rng), boolean], attrs, outputs=4))


def test_masked_rows(rng: np.random.Generator) -> None:
    """Where nothing may be seen the result is zero, whatever the scores are."""
    mask = np.ones((7, 19), bool)
    mask[2:4] = False
    q, k, v = qkv(rng)
    assert not generic(Case("Attention", [q, k, v, mask], {"qk_matmul_output_mode": 3}, outputs=4))
    q[0, 0, 2], k[1, 1, 5, 1], v[1, 2, 3] = np.nan, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        assert not generic(Case("Attention", [q, k, v, np.where(mask, 0, -np.inf).astype(np.float32)]))


@pytest.mark.parametrize("attrs", [
    {"is_causal": 1}, {"left_window_size": 2}, {"left_window_size": 3, "right_window_size": 1},
    {"right_window_size": 0}, {"is_causal": 1, "left_window_size": 0}, {"softcap": 0.8},
    {"softcap": 2.0, "is_causal": 1, "scale": 2.0},
])  # fmt: skip
def test_attributes(rng: np.random.Generator, attrs: dict[str, Any]) -> None:
    for keys in (4, 19):
        assert not generic(Case("Attention", qkv(rng, keys=keys), attrs))


@every_other(("mode", [0, 1, 2, 3]), ("softcap", [0.0, 1.5]))
def test_shown_scores(rng: np.random.Generator, mode: int, softcap: float) -> None:
    attrs = {"qk_matmul_output_mode": mode, "softcap": softcap}
    assert not generic(Case("Attention", [*qkv(rng), normal(rng, 7, 19)], attrs, outputs=4))


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("rank", [3, 4])
def test_past(rng: np.random.Generator, outputs: int, rank: int) -> None:
    inputs = qkv(rng, heads=4, groups=2, width=6)
    heads = {"q_num_heads": 4, "kv_num_heads": 2, "is_causal": 1}
    given = inputs if rank == 4 else [flat(x) for x in inputs]
    past = [normal(rng, 2, 2, 9, 5), normal(rng, 2, 2, 9, 6)]
    assert not generic(Case("Attention", [*given, None, *past], heads, outputs))
    assert not generic(Case("Attention", [*given, None, None, None], heads, outputs))
    assert not generic(Case("Attention", [*given, normal(rng, 7, 28), *past], heads, outputs))


@pytest.mark.parametrize("attrs", [{}, {"is_causal": 1}, {"left_window_size": 2}])
def test_valid_lengths(rng: np.random.Generator, attrs: dict[str, Any]) -> None:
    lengths = np.array([19, 3], np.int64)
    assert not generic(Case("Attention", [*qkv(rng), None, None, None, lengths], attrs))
    assert not generic(Case("Attention", [*qkv(rng), rng.random((7, 12)) < 0.6, None, None, lengths], attrs))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_types(rng: np.random.Generator, dtype: Any) -> None:
    mask = normal(rng, 7, 19, dtype=dtype)
    assert not generic(Case("Attention", [*qkv(rng, dtype=dtype), mask], {"is_causal": 1, "softcap": 3.0}, outputs=3))


@pytest.mark.parametrize("precision", [1, 10, 11, 16])
def test_softmax_precision(rng: np.random.Generator, precision: int) -> None:
    attrs = {"softmax_precision": precision, "qk_matmul_output_mode": 3}
    assert not generic(Case("Attention", qkv(rng, dtype=np.float16), attrs, outputs=4))


def test_extreme_scores(rng: np.random.Generator) -> None:
    q, k, v = qkv(rng)
    assert not generic(Case("Attention", [q * 100, k * 100, v], {"scale": 1.0}))
    q[0, 1, 3, 2], k[1, 0, 2, 1] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        assert not generic(Case("Attention", [q, k, v]))


ENCODER = "opencl.attention_encoder"


@pytest.mark.parametrize("sizes", [
    {}, {"queries": 13, "keys": 33, "size": 32}, {"batch": 1, "heads": 1, "queries": 100, "keys": 5},
    {"heads": 6, "groups": 2, "width": 5}, {"width": 21}, {"batch": 0}, {"keys": 0},
])  # fmt: skip
def test_encoder(rng: np.random.Generator, sizes: dict[str, int]) -> None:
    """All queries of a head see the same keys: masks that say which, as numbers or not, for fewer keys than there are,
    and those that leave nothing to be seen."""
    q, k, v = qkv(rng, **{"size": 16, **sizes})
    batch, heads, keys = q.shape[0], q.shape[1], k.shape[2]
    for mask in (
        None,
        normal(rng, keys),
        rng.random((batch, 1, 1, keys)) < 0.5,
        normal(rng, heads, 1, max(keys - 3, 1)),
    ):
        assert not generic(Case("Attention", [q, k, v, mask][: 3 + (mask is not None)]), ENCODER)
    given = [flat(x) for x in (q, k, v)]
    attrs = {"q_num_heads": heads, "kv_num_heads": k.shape[1], "scale": 0.3}
    assert not generic(Case("Attention", [*given, np.zeros((heads, 1, keys), bool)], attrs), ENCODER)


def test_encoder_extremes(rng: np.random.Generator) -> None:
    q, k, v = qkv(rng, size=16)
    assert not generic(Case("Attention", [q * 100, k * 100, v], {"scale": 1.0}), ENCODER)
    mask = np.where(rng.random((2, 3, 1, 19)) < 0.5, 0, -np.inf).astype(np.float32)
    mask[1, 1] = -np.inf
    q[0, 1, 3, 2], q[1, 1, 2], k[1, 0, 2, 1] = np.nan, np.nan, np.inf
    with np.errstate(invalid="ignore"):
        assert not generic(Case("Attention", [q, k, v]), ENCODER)
        assert not generic(Case("Attention", [q, k, v, mask]), ENCODER)


@pytest.mark.parametrize("scores", ["near", "some far", "all far", "growing"])
@pytest.mark.parametrize("shift", [0.0, -40.0, 30.0])
def test_encoder_guesses(rng: np.random.Generator, scores: str, shift: float) -> None:
    """The highest score is guessed: it fits all rows, all but some, none (then it is no longer tried), or those behind
    the first that it did not fit; and a mask that shifts all scores alike changes nothing."""
    q, k, v = qkv(rng, batch=1, heads=2, queries=61, keys=37, size=16)
    rows = np.arange(61)[:, None]
    far = {"some far": np.where(rows % 17 == 3, 20, 1), "all far": 1 + rows % 5 * 5, "growing": rows / 4}
    q *= far.get(scores, 1)
    mask = np.where(rng.random(37) < 0.2, -np.inf, normal(rng, 37) + shift).astype(np.float32)
    assert not generic(Case("Attention", [q, k, v * 1e20, mask]), ENCODER)


def test_encoder_configs(rng: np.random.Generator) -> None:
    assert not check(Case("Attention", [*qkv(rng, size=16), normal(rng, 19)]), ENCODER, configs=1)


@pytest.mark.parametrize("more", [
    {"attrs": {"is_causal": 1}}, {"attrs": {"softcap": 1.0}}, {"mask": (7, 19)}, {"outputs": 4}, {"size": 10},
    {"queries": 2}, {"keys": 9000},
])  # fmt: skip
def test_what_encoders_do_not_do(rng: np.random.Generator, more: dict[str, Any]) -> None:
    sizes = {name: more[name] for name in ("size", "queries", "keys") if name in more}
    mask = [normal(rng, *more["mask"])] if "mask" in more else []
    inputs = [*qkv(rng, **{"size": 16, "batch": 1, "heads": 1, **sizes}), *mask]
    problem = Case("Attention", inputs, more.get("attrs", {}), more.get("outputs", 1)).problem()
    solver = next(s for s in solvers() if s.id == ENCODER)
    assert solver.why_not(problem, open_device("CPU").target)


@pytest.mark.parametrize("bias", [None, (1, 3, 7, 19), (2, 1, 7, 19)])
def test_multi_head(rng: np.random.Generator, bias: tuple[int, ...] | None) -> None:
    inputs: list[Any] = [flat(x) for x in qkv(rng, width=6)]
    if bias is not None:
        inputs += [None, None, normal(rng, *bias)]
    assert not generic(Case(MULTI_HEAD, inputs, {"num_heads": 3}, outputs=3))


def test_refusals(rng: np.random.Generator) -> None:
    device = open_device("CPU")
    q, k, v = (flat(x) for x in qkv(rng))
    problem = Case(MULTI_HEAD, [q, k, v, normal(rng, 45)], {"num_heads": 3}).problem()
    reasons = [s.why_not(problem, device.target) for s in solvers() if s.id.startswith("opencl.attention")]
    assert reasons and all(r == "does not take a bias" for r in reasons)
