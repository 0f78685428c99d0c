"""Triton's attention in its interpreter, and the vendor's, on the processor: against the reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

from conformance.cuda_cases import Made
from tunewright.core import Core
from tunewright.ir.graph import Fused
from tunewright.ops import lookup
from tunewright.ops.internal.strided_attention import STRIDED
from tunewright.plugins.single import SingleDevice
from tunewright.solvers.base import solvers
from tunewright.solvers.host.reference import HostKernel
from tunewright.testing.kernelcheck import Case, check, run_one
from tunewright.testing.models import transformer

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from tunewright.devices.cuda.device import CudaDevice

# The interpreter computes masked lanes too, with numpy, which warns of what becomes of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
MADE = Made()
RNG, normal = MADE.rng, MADE.normal
MULTI_HEAD = "com.microsoft::MultiHeadAttention"
F16, BF16 = np.float16, ml_dtypes.bfloat16
#: one program for all keys, and several that put their parts together
SMALL = {"bm": 16, "bn": 16, "split": 1, "warps": 4, "stages": 2}
SPLIT = SMALL | {"split": 2}


def qkv(
    batch: int = 1, heads: int = 2, queries: int = 7, keys: int = 19, size: int = 5, width: int | None = None,
    groups: int | None = None, dtype: Any = np.float32,
) -> list[Any]:  # fmt: skip
    groups = groups or heads
    return [
        normal(batch, heads, queries, size, dtype=dtype),
        normal(batch, groups, keys, size, dtype=dtype),
        normal(batch, groups, keys, width or size, dtype=dtype),
    ]


def flat(x: np.ndarray) -> np.ndarray:
    """[batch, heads, length, size] -> [batch, length, heads * size]"""
    batch, heads, length, size = x.shape
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(batch, length, heads * size)


def solver() -> Any:
    return next(s for s in solvers() if s.id == "triton.attention")


def wrong(case: Case, device: CudaDevice, *configs: dict[str, Any]) -> list[str]:
    """What is wrong with the given configs; with the default, where there are none."""
    problem, found = case.problem(), []
    assert solver().why_not(problem, device.target) is None
    want = HostKernel(problem).run(device.queue(), case.inputs, [None] * case.outputs)
    default = dict(solver().default(problem, device.target))
    for config in [default | more for more in configs] or [default]:
        found.append(run_one(case, problem, solver(), config, device, want))
    return [text for text in found if text]


@pytest.mark.parametrize("sizes", [
    {"batch": 2}, {"heads": 1, "queries": 1, "keys": 1, "size": 1}, {"queries": 1, "keys": 50},
    {"queries": 13, "size": 17, "width": 40}, {"queries": 32, "keys": 32, "size": 16}, {"heads": 6, "groups": 2},
    {"heads": 6, "groups": 1, "width": 3, "queries": 1}, {"batch": 0}, {"queries": 0}, {"keys": 0},
])  # fmt: skip
def test_sizes(sizes: dict[str, int], device: CudaDevice) -> None:
    inputs = qkv(**sizes)
    assert not wrong(Case("Attention", inputs), device)
    heads = {"q_num_heads": inputs[0].shape[1], "kv_num_heads": inputs[1].shape[1]}
    assert not wrong(Case("Attention", [flat(x) for x in inputs], heads | {"scale": 0.3}), device, SPLIT)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_narrow_types(dtype: Any, device: CudaDevice) -> None:
    case = Case("Attention", [*qkv(dtype=dtype, queries=17, keys=35, heads=1), normal(17, 35, dtype=dtype)])
    assert not wrong(case, device, SPLIT)


LENGTHS = np.array([11], np.int64)
TYPICAL = {
    "heads side by side": Case("Attention", [flat(x) for x in qkv(dtype=F16)], {"q_num_heads": 2, "kv_num_heads": 2}),
    "causal and mask": Case("Attention", [*qkv(keys=70, dtype=F16), normal(7, 70, dtype=F16)], {"is_causal": 1}),
    "one query": Case("Attention", [*qkv(heads=6, groups=2, queries=1, keys=70, dtype=F16), RNG.random(70) < 0.7]),
    "lengths": Case("Attention", [*qkv(dtype=F16), None, None, None, LENGTHS], {"softcap": 3.0}),
    "single precision": Case("Attention", [*qkv(), normal(19)], {"left_window_size": 4}),
    "bfloat16": Case("Attention", qkv(dtype=BF16)),
}


@pytest.mark.parametrize("name", TYPICAL)
def test_typical(name: str, device: CudaDevice) -> None:
    assert not check(TYPICAL[name], "triton.attention", configs=int(name == "causal and mask"), device=device)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", [F16, np.float32])
def test_many_configs(dtype: Any, device: CudaDevice) -> None:
    case = Case("Attention", [*qkv(heads=1, queries=70, keys=150, size=20, dtype=dtype), normal(70, 150, dtype=dtype)])
    assert not check(case, "triton.attention", configs=40, device=device)


MASKS = [(19,), (7, 19), (2, 3, 7, 19), (2, 1, 1, 19), (1, 3, 1, 19), (7, 11)]


@pytest.mark.parametrize("shape", MASKS)
def test_masks(shape: tuple[int, ...], device: CudaDevice) -> None:
    batch = shape[0] if len(shape) == 4 else 1
    for groups, mask, configs in ((3, normal(*shape), ()), (1, RNG.random(shape) < 0.7, (SPLIT,))):
        assert not wrong(Case("Attention", [*qkv(batch, heads=3, groups=groups), mask]), device, *configs)


@pytest.mark.parametrize("config", [SMALL, SPLIT])
def test_masked_rows(config: dict[str, Any], device: CudaDevice) -> None:
    """Where nothing may be seen the result is zero, whatever the scores are."""
    mask = np.ones((7, 19), bool)
    mask[2:4] = False
    mask[5, :16] = False  # the first block alone
    mask[6, 16:] = False
    q, k, v = qkv(2)
    added = np.where(mask, 0, -np.inf).astype(np.float32)
    assert not wrong(Case("Attention", [q, k, v, mask]), device, config)
    q[1, 1, 5, 1] = -1.0  # what a mask forbids stays forbidden
    q[0, 0, 2], k[1, 1, 5, 1], v[1, 0, 3] = np.nan, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        assert not wrong(Case("Attention", [q, k, v, added]), device, config)


def test_large_numbers_in_masks(device: CudaDevice) -> None:
    """What exporters write instead of minus infinity; a row of them alone is no masked row."""
    mask = np.zeros((2, 1, 1, 19), F16)
    mask[..., 12:] = -65504.0
    mask[1] = -65504.0
    assert not wrong(Case("Attention", [*qkv(2, dtype=F16), mask]), device, SPLIT)


@pytest.mark.parametrize("attrs", [
    {"is_causal": 1}, {"left_window_size": 2}, {"left_window_size": 3, "right_window_size": 1},
    {"right_window_size": 0}, {"is_causal": 1, "left_window_size": 0}, {"softcap": 0.8},
    {"softcap": 2.0, "is_causal": 1, "scale": 2.0},
])  # fmt: skip
def test_attributes(attrs: dict[str, Any], device: CudaDevice) -> None:
    assert not wrong(Case("Attention", qkv(heads=1, queries=21, keys=40), attrs), device, SPLIT, SMALL)
    assert not wrong(Case("Attention", qkv(groups=1, queries=11, keys=9), attrs), device)


@pytest.mark.parametrize("attrs", [{}, {"is_causal": 1}, {"left_window_size": 2}])
def test_valid_lengths(attrs: dict[str, Any], device: CudaDevice) -> None:
    lengths = np.array([19, 3], np.int64)
    assert not wrong(Case("Attention", [*qkv(2), None, None, None, lengths], attrs), device, SPLIT)
    assert not wrong(Case("Attention", [*qkv(2), RNG.random((7, 12)) < 0.6, None, None, lengths], attrs), device)


def test_extreme_scores(device: CudaDevice) -> None:
    q, k, v = qkv(2)
    assert not wrong(Case("Attention", [q * 100, k * 100, v], {"scale": 1.0}), device, SPLIT)
    q[0, 1, 3, 2], k[1, 0, 2, 1] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        assert not wrong(Case("Attention", [q, k, v]), device, SPLIT)


@pytest.mark.parametrize("bias", [None, (1, 2, 7, 19), (1, 1, 7, 19)])
def test_multi_head(bias: tuple[int, ...] | None, device: CudaDevice) -> None:
    inputs: list[Any] = [flat(x) for x in qkv(width=6)]
    if bias is not None:
        inputs += [None, None, normal(*bias)]
    assert not wrong(Case(MULTI_HEAD, inputs, {"num_heads": 2}), device, SPLIT)


VENDOR = {
    "causal": Case("Attention", qkv(queries=9), {"is_causal": 1}),
    "shared heads": Case("Attention", qkv(heads=6, groups=2, dtype=F16), {"scale": 0.5}),
    "mask of another type": Case("Attention", [*qkv(dtype=F16), normal(7, 19)]),
    "boolean mask": Case("Attention", [*qkv(2), RNG.random((2, 1, 1, 19)) < 0.7]),
}


@pytest.mark.parametrize("name", VENDOR)
def test_the_vendors(name: str, device: CudaDevice) -> None:
    assert not check(VENDOR[name], "vendor.", configs=1, device=device)


@pytest.mark.parametrize(("more", "attrs", "why"), [
    ([None, None, None, np.array([19], np.int64)], {}, "no lengths"), ([normal(7, 11)], {}, "all keys"),
    ([normal(7, 19)], {"is_causal": 1}, "or none"), ([], {"left_window_size": 0}, "left_window_size"),
    ([], {"softcap": 1.0}, "softcap"),
])  # fmt: skip
def test_what_the_vendors_does_not_know(more: list[Any], attrs: dict[str, Any], why: str, device: CudaDevice) -> None:
    vendor = next(s for s in solvers() if s.id == "vendor.tensors")
    assert why in str(vendor.why_not(Case("Attention", [*qkv(), *more], attrs).problem(), device.target))


# ---- queries, keys and values inside of other tensors ---------------------------------------------------------------


def strided_cases() -> dict[str, Case]:
    spec = lookup(STRIDED)
    assert spec is not None and spec.samples is not None
    names = ("room to grow", "one source", "mask", "two sources", "rows first", "multi head")
    found = [Case(STRIDED, sample.inputs, sample.attrs) for sample in spec.samples(np.random.default_rng(1))]
    return dict(zip(names, found, strict=True))


PLACED = strided_cases()
#: BERT: one product of all three, 12 heads of 64 elements
BERT = {"strided BERT": Case(STRIDED, [normal(1, 128, 2304, dtype=F16)], {
    "main": "Attention", "scale": 0.125, "sizes": (1, 12, 12, 128, 128, 64, 64), "sources": (0, 0, 0),
    "q": (0, 128 * 2304, 64, 2304), "k": (768, 128 * 2304, 64, 2304), "v": (1536, 128 * 2304, 64, 2304),
    "order": (0, 2, 1, 3),
})}  # fmt: skip


@pytest.mark.parametrize("name", PLACED)
def test_strided(name: str, device: CudaDevice) -> None:
    case = PLACED[name]
    assert not wrong(case, device, SPLIT)
    narrow = [x if x is None else x.astype(F16) for x in case.inputs]
    assert not wrong(Case(STRIDED, narrow, case.attrs), device)
    if case.attrs["main"] == "Attention" and not (case.attrs.get("is_causal") and len(narrow) > 1):
        assert not check(Case(STRIDED, narrow, case.attrs), "vendor.", configs=1, device=device)


def test_strided_with_lengths_and_an_epilogue(device: CudaDevice) -> None:
    """Inputs behind the sources have other numbers than the main operation knows them by."""
    case = PLACED["two sources"]
    lengths = np.array([7, 2], np.int64)
    attrs = dict(case.attrs)
    residual = normal(2, 3, 4, 3)
    whole = Case(STRIDED, [*case.inputs, None, None, None, lengths, residual], attrs,
                 epilogue=(Fused("Add", (6, -1)), Fused("Relu", (-2,))), operands=1)  # fmt: skip
    assert not wrong(whole, device, SMALL, SPLIT)


def test_strided_stays_inside_of_its_sources(device: CudaDevice) -> None:
    problem = PLACED["one source"].problem()
    for name, value in (("v", (19, 110, 2, 22)), ("k", (12, 116, 3, 22)), ("q", (0, 110, -3, 22))):
        outside = dataclasses.replace(problem, attrs={**problem.attrs, name: value})
        assert solver().why_not(outside, device.target)


def ran(compiled: Any) -> list[Any]:
    return [step for plan in compiled.program.plans for step in plan.steps if not step.optimized_out]


def test_a_transformer_has_one_product_for_all_three(device: CudaDevice) -> None:
    core = Core({"INFERENCE_PRECISION_HINT": "F32"})
    proto = transformer(layers=1, hidden=32, heads=2, length=8)
    model = core.read_model(proto)
    compiled = SingleDevice(device).compile(model, core.settings)
    shape = [d.dim_value for d in proto.graph.input[0].type.tensor_type.shape.dim]
    inputs = {"x": normal(*shape)}
    got, want = compiled(inputs)["y"], core.compile_model(model, "CPU.HOST")(inputs)["y"]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())
    ops = [step.node.op for step in ran(compiled)]
    assert ops.count(STRIDED) == 1 and not {"Transpose", "Split", "Attention"} & set(ops)
    assert all(step.choice.solver.id == "triton.attention" for step in ran(compiled) if step.node.op == STRIDED)
    assert ops.count("MatMul") == 4  # of 6
    on_host = core.compile_model(model, "CPU.HOST")
    on_host(inputs)
    assert [step.node.op for step in ran(on_host)].count("MatMul") == 6


def test_plans_for_other_shapes_share_joined_weights(device: CudaDevice) -> None:
    text = """<ir_version: 10, opset_import: ["" : 24]> g (float[N,L,6] x) => (float[N,L,8] y)
    { q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv) y = Attention<q_num_heads=2, kv_num_heads=2>(q, k, v) }"""
    model = onnx.parser.parse_model(text)
    weights = {f"w{name}": normal(6, 8) for name in "qkv"}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    core = Core({"INFERENCE_PRECISION_HINT": "F32"})
    compiled = SingleDevice(device).compile(core.read_model(model), core.settings)
    host = core.compile_model(model, "CPU.HOST")
    for length in (5, 9):
        x = normal(2, length, 6)
        np.testing.assert_allclose(compiled({"x": x})["y"], host({"x": x})["y"], rtol=0, atol=1e-4)
    products = [step.node for step in ran(compiled) if step.node.op == "MatMul"]
    assert len(products) == 2 and products[0].inputs[1].const is products[1].inputs[1].const


def test_groups_of_warps_that_would_not_wait_for_each_other(device: CudaDevice) -> None:
    """See `multiply.is_safe`: seen to go wrong on a GPU."""
    problem = Case("Attention", [*qkv(heads=1, queries=70, keys=150, size=20), normal(70, 150)]).problem()
    racing = {"bm": 64, "bn": 16, "split": 4, "warps": 8, "stages": 1, "precision": "tf32x3"}
    space = solver().space(problem, dataclasses.replace(device.target, units=132))
    assert racing not in space
    assert all(racing | one in space for one in ({"warps": 4}, {"bm": 32}, {"precision": "tf32"}))


def test_default_fills_the_device(device: CudaDevice) -> None:
    """BERT at batch 1 has twelve heads: a block of queries each leaves most multiprocessors idle."""
    problem = Case("Attention", [normal(1, 128, 768, dtype=F16)] * 3, {"q_num_heads": 12, "kv_num_heads": 12}).problem()
    target = dataclasses.replace(device.target, units=132)
    config = solver().default(problem, target)
    assert 12 * -(-128 // config["bm"]) * config["split"] >= 90
    assert solver().default(BERT["strided BERT"].problem(), target) == config
    assert config in solver().space(problem, target)
    long = Case("Attention", [normal(1, 1, 64, dtype=F16), *[normal(1, 4096, 64, dtype=F16)] * 2],
                {"q_num_heads": 1, "kv_num_heads": 1}).problem()  # fmt: skip
    assert solver().default(long, target)["split"] > 1


def test_refusals(device: CudaDevice) -> None:
    def why(case: Case) -> str | None:
        return solver().why_not(case.problem(), device.target)

    past = [normal(1, 2, 9, 5), normal(1, 2, 9, 5)]
    assert why(Case("Attention", [*qkv(), None, *past])) == "takes no past"
    assert why(Case("Attention", qkv(), outputs=3)) == "makes one output"
    assert "256" in str(why(Case("Attention", qkv(batch=1, heads=1, size=300))))
    assert "round" in str(why(Case("Attention", qkv(), {"softmax_precision": 10})))


def test_rounded_factors_are_no_choice_where_accuracy_is_asked_for(device: CudaDevice) -> None:
    problem = Case("Attention", qkv()).problem()
    default = dict(solver().default(problem, device.target))
    assert solver().inexact(problem, default) is None
    assert "tf32" in str(solver().inexact(problem, default | {"precision": "tf32"}))
    assert "precision" not in solver().default(Case("Attention", qkv(dtype=F16)).problem(), device.target)
