"""One node, or a model, through ONNX Runtime and through Tunewright."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import tunewright

ort = pytest.importorskip("onnxruntime")

OPSET, IR_VERSION = 21, 10  # what every ONNX Runtime of the peers extra reads


@dataclass
class Case:
    """One node. ``constants`` are the inputs that are initializers; ``exact`` asks for equal quantised outputs."""

    op: str
    inputs: Sequence[Any]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1
    constants: Sequence[int] = ()
    domain: str = "com.microsoft"
    exact: bool = False
    absent: Sequence[int] = ()
    types: Mapping[int, Any] = field(default_factory=dict)  # outputs whose types ONNX Runtime does not infer
    tolerance: float = 0.0
    opset: int = OPSET

    def model(self, dynamic: bool = False) -> onnx.ModelProto:
        names = ["" if x is None else f"i{k}" for k, x in enumerate(self.inputs)]
        while names and not names[-1]:
            names.pop()
        results = ["" if k in self.absent else f"o{k}" for k in range(self.outputs)]
        node = helper.make_node(self.op, names, results, domain=self.domain, **self.attrs)
        infos, weights = [], []
        for k, (name, x) in enumerate(zip(names, self.inputs, strict=False)):
            if name and k in self.constants:
                weights.append(numpy_helper.from_array(x, name))
            elif name:
                shape = [f"{name}d{j}" for j in range(x.ndim)] if dynamic else x.shape
                infos.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), shape))
        outputs = [_output(o, self.types.get(k)) for k, o in enumerate(results) if o]
        graph = helper.make_graph([node], "one", infos, outputs, weights)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)

    def feeds(self) -> dict[str, Any]:
        return {f"i{k}": x for k, x in enumerate(self.inputs) if x is not None and k not in self.constants}


def _output(name: str, dtype: Any) -> onnx.ValueInfoProto:
    if dtype is None:
        return helper.make_empty_tensor_value_info(name)
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), None)


def run_ort(model: onnx.ModelProto | bytes | str, feeds: Mapping[str, Any], optimise: bool = False) -> dict[str, Any]:
    """ONNX Runtime's outputs by name."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_EXTENDED if optimise else level.ORT_DISABLE_ALL
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
    session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def check(case: Case) -> None:
    """Ours against ONNX Runtime's, with the shapes known when compiling and with none of them known."""
    expected = run_ort(case.model(), case.feeds())
    for dynamic in (False, True):
        actual = tunewright.Core().compile_model(case.model(dynamic))(case.feeds())
        for name, want in expected.items():
            assert_close(actual[name], want, name, case.tolerance, case.exact)


def assert_close(actual: Any, want: Any, name: str = "output", tolerance: float = 0.0, exact: bool = False) -> None:
    """Floats: 1e-5 of the scale (1e-3 for half precision). 8 bits: one step at most, and rarely. Others: equal."""
    assert actual.dtype == want.dtype, (name, actual.dtype, want.dtype)
    assert actual.shape == want.shape, (name, actual.shape, want.shape)
    if want.size == 0:
        return
    if want.dtype.kind in "OUSb" or (want.dtype.kind in "iu" and (exact or want.dtype.itemsize > 1)):
        assert np.array_equal(actual, want), name
    elif want.dtype.kind in "iu":
        step = np.abs(actual.astype(np.int32) - want.astype(np.int32))
        assert step.max() <= 1, (name, step.max())
        assert (step == 0).mean() >= 0.99, (name, (step == 0).mean())
    else:
        limit = tolerance or (1e-3 if want.dtype.itemsize == 2 else 1e-5)
        a, w = actual.astype(np.float64), want.astype(np.float64)
        finite = np.isfinite(w)
        assert np.array_equal(np.isfinite(a), finite), name
        assert np.array_equal(a[~finite], w[~finite], equal_nan=True), name
        if finite.any():
            error = np.abs(a[finite] - w[finite]).max() / max(np.abs(w[finite]).max(), 1e-6)
            assert error <= limit, (name, error)


def random_arrays(seed: int) -> tuple[np.random.Generator, Any, Any]:
    """A generator, and functions that draw float32 and float16 arrays of a shape from it."""
    rng = np.random.default_rng(seed)

    def single(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    def half(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float16)

    return rng, single, half


def ids(cases: Sequence[Case]) -> list[str]:
    """A name for each case: its operator and its place among those of the same operator."""
    seen: dict[str, int] = {}
    names = []
    for case in cases:
        seen[case.op] = seen.get(case.op, -1) + 1
        names.append(f"{case.op}-{seen[case.op]}")
    return names


@cache
def _kernels() -> frozenset[str]:
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return frozenset(k.op_name for k in state.get_all_opkernel_def() if k.provider == "CPUExecutionProvider")


def supported(case: Case) -> None:
    """Skip when this ONNX Runtime has no such operator."""
    if case.op not in _kernels():
        pytest.skip(f"onnxruntime {ort.__version__} has no {case.op} for the CPU")
