"""What a load does beside passes: it times itself, leaves garbage for later, chooses once, rounds and packs weights."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import time

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper

from tunewright import Core
from tunewright.devices.base import Device, address, empty_on_lines, on_lines
from tunewright.devices.cuda.device import CudaDevice
from tunewright.ir.types import DType
from tunewright.passes.placement.precision import rounded
from tunewright.runtime.plans.load_phases import Phases, uncollected
from tunewright.solvers.base import Problem
from tunewright.solvers.c.convolution import conv_winograd
from tunewright.solvers.c.product import matmul_pack
from tunewright.solvers.c.product.matmul_product import Matrix
from tunewright.tuning.tuner import Choice, Origin, Tuner

#: draws the tables of this module, once, when it is imported; tests draw from their own (the fixture rng)
TABLES = np.random.default_rng(2)
SEED = 1002
NARROW = {DType.FLOAT16: np.float16, DType.BFLOAT16: ml_dtypes.bfloat16}


def test_a_phase_inside_another_counts_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))  # a second for each look at it
    phases = Phases()
    with phases("whole"):  # 0 to 7
        with phases("part"), phases("inner"):  # 1 to 4, 2 to 3
            pass
        with phases("part"):  # 5 to 6
            pass
    with pytest.raises(KeyError), phases("whole"):  # 8 to 9
        raise KeyError
    assert phases.seconds == {"inner": 1.0, "part": 3.0, "whole": 7.0 - 4.0 + 1.0}


def test_a_compiled_model_says_where_its_time_went() -> None:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 3]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    begin = time.perf_counter()
    compiled = Core().compile_model(helper.make_model(graph), "CPU")
    whole = time.perf_counter() - begin
    found = compiled.phases
    assert set(found) >= {"solvers", "passes", "choosing", "kernels", "planning"}
    assert 0 < sum(found.values()) <= whole


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_not_looked_for_meanwhile(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(KeyError), uncollected():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


class _Node:
    """What Python's search for garbage looks at."""


@pytest.mark.parametrize("frozen", [False, True])
def test_what_was_made_meanwhile_is_not_looked_through_afterwards(frozen: bool) -> None:
    before = gc.isenabled()
    gc.enable()
    (gc.freeze if frozen else gc.unfreeze)()  # the tests freeze what they begin with
    try:
        with uncollected():
            made = [_Node() for _ in range(10)]
        young = {id(one) for one in (*gc.get_objects(0), *gc.get_objects(1))}
        assert all(id(one) in young for one in made) is frozen
        assert bool(gc.get_freeze_count()) is frozen, "what an application froze has thawed"
    finally:
        gc.freeze()
        (gc.enable if before else gc.disable)()


SPECIAL = np.array(
    [0.0, -0.0, 1.0, 65504.0, 65519.0, 65520.0, 1e6, -1e9, 3.4e38, 1e-8, 6e-8, 1e-40, np.inf, -np.inf, np.nan],
    np.float32,
)
ARRAYS = {
    "normal": TABLES.standard_normal(70_001).astype(np.float32),
    "special": SPECIAL,
    "scalar": np.array(-1e9, np.float32),
    "empty": np.empty((0, 3), np.float32),
    "turned": TABLES.standard_normal((5, 7)).astype(np.float32).T,
}


def wanted(array: np.ndarray, to: DType) -> np.ndarray:
    """Each element by itself: the nearest one that the type has, the largest instead of infinity."""
    most = float(ml_dtypes.finfo(NARROW[to]).max)
    with np.errstate(over="ignore"):
        near = array.astype(NARROW[to])
    lost = np.isinf(near.astype(np.float64)) & np.isfinite(array)
    return np.where(lost, np.copysign(np.float32(most), array), near.astype(np.float32)).astype(NARROW[to])


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("to", NARROW)
def test_weights_are_rounded_to_what_a_type_can_hold(name: str, to: DType) -> None:
    array = ARRAYS[name]
    found = rounded(array, to)
    assert found.dtype == NARROW[to] and found.shape == array.shape and found.flags.c_contiguous
    np.testing.assert_array_equal(found.astype(np.float32), wanted(array, to).astype(np.float32))


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("to", [*NARROW, DType.FLOAT32, DType.INT32])
def test_torch_converts_as_numpy_does(name: str, to: DType) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("triton", reason="triton is not installed")
    array = ARRAYS[name].view()
    array.flags.writeable = False
    device = CudaDevice("GPU.0", raw="cpu")
    if to is DType.INT32:
        array = np.asarray(np.clip(np.nan_to_num(array), -9, 9))
    with np.errstate(over="ignore"):
        plain = array.astype(to.numpy)
    found = device.convert(array, to)
    assert found.dtype == to.numpy and found.shape == array.shape and found.flags.c_contiguous
    assert not np.shares_memory(found, array)
    np.testing.assert_array_equal(found.astype(np.float64), plain.astype(np.float64))
    if to is DType.FLOAT16:  # and back
        back = device.convert(found, DType.FLOAT32)
        np.testing.assert_array_equal(back, plain.astype(np.float32))
    constant = device.constant(found)
    np.testing.assert_array_equal(device.queue().fetch([constant])[0].astype(np.float64), plain.astype(np.float64))


@pytest.mark.parametrize("searched", [False, True])
def test_equal_layers_are_chosen_for_once(
    rng: np.random.Generator, searched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for one that is searched: the others know what it found, and say so."""
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 3]) for n in "xy")
    nodes = [helper.make_node("Softmax", [a], [b], a) for a, b in (("x", "a"), ("a", "b"), ("b", "y"))]
    asked = []

    def choose(tuner: Tuner, problem: Problem, device: Device) -> Choice:
        asked.append(problem.key())
        found = real(tuner, problem, device)
        return dataclasses.replace(found, origin=Origin.SEARCH) if searched else found

    real = Tuner.choose
    monkeypatch.setattr(Tuner, "choose", choose)
    compiled = Core().compile_model(helper.make_model(helper.make_graph(nodes, "g", [x], [y])), "CPU")
    assert len(asked) == (3 if searched else 1) and len(set(asked)) == 1
    given = rng.standard_normal((2, 3)).astype(np.float32)
    wanted = given.astype(np.float64)
    for _ in nodes:
        wanted = np.exp(wanted) / np.exp(wanted).sum(-1, keepdims=True)
    np.testing.assert_allclose(compiled({"x": given})["y"], wanted, rtol=1e-5)


@pytest.mark.parametrize("shape", [(64,), (7, 33), (33, 5, 7)])
def test_copies_begin_where_cache_lines_do(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    array = rng.standard_normal(shape).astype(np.float32)
    for given in (array, array.T, array[..., 1:]):
        found = on_lines(given)
        assert address(found) % 64 == 0 and found.flags.c_contiguous
        np.testing.assert_array_equal(found, given)
        assert on_lines(found) is found


def test_what_fills_up_packed_weights_is_zero(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    def dirty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        made = empty_on_lines(shape, dtype)
        made.fill(np.nan)
        return made

    for module in (conv_winograd, matmul_pack):
        monkeypatch.setattr(module, "empty_on_lines", dirty)
    weights = rng.standard_normal((20, 3, 3, 3)).astype(np.float32)
    packed = conv_winograd.pack(weights, 4, 2, 8)  # slabs of 16
    assert packed.shape == (2, 36, 3, 16)
    g = conv_winograd.weight_matrix(4)
    wanted = np.einsum("ai,ocij,bj->abco", g, weights.astype(np.float64), g).reshape(36, 3, 20)
    np.testing.assert_allclose(packed.transpose(1, 2, 0, 3).reshape(36, 3, 32)[..., :20], wanted, rtol=1e-5, atol=1e-6)
    assert not packed[1, :, :, 4:].any()
    b = rng.standard_normal((5, 11)).astype(np.float32)
    panels = matmul_pack.packing(matmul_pack.PackedOperand(Matrix(1, 11, 1), 5, 11, ()), 8, DType.FLOAT32).pack(b)
    np.testing.assert_array_equal(panels, np.pad(b, ((0, 0), (0, 5))).reshape(5, 2, 8).swapaxes(0, 1)[None])
