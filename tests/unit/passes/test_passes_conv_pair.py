"""A convolution and the depthwise one behind it become one node, where a device expects to gain by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest

from golden import graphs
from helpers import kb_records
from tunewright import Core
from tunewright.ir.graph import Graph
from tunewright.knowledge.database import MemoryDatabase
from tunewright.knowledge.record import Measurement
from tunewright.ops.internal.conv_pair import PAIR
from tunewright.passes.base import Context, run_passes
from tunewright.passes.fusion.conv_pair import ConvPairs
from tunewright.passes.fusion.fuse import Fuse
from tunewright.passes.placement.layout import AssignLayouts
from tunewright.plugins.single import open_device
from tunewright.settings import Settings
from tunewright.solvers.base import Problem
from tunewright.tuning.layout_costs import LayoutCosts
from tunewright.tuning.tuner import Tuner

RULE = "conv-pair"


def network(size: int, between: str = "b = Relu(a)", channels: int = 96, outputs: str = "y") -> str:
    made = ", ".join(f"float[1,{channels},{size},{size}] {name}" for name in outputs.split())
    return f"""g (float[1,16,{size},{size}] x) => ({made})
    <float[16,16,3,3] u, float[{channels},16,1,1] w, float[{channels},1,3,3] v, float[{channels}] c> {{
    f = Conv<pads=[1,1,1,1]>(x, u) a = Conv(f, w, c) {between}
    d = Conv<group={channels}, pads=[1,1,1,1]>(b, v) y = Relu(d) }}"""


def paired(text: str, records: Sequence[Measurement] = ()) -> tuple[Graph, Context]:
    tuner = Tuner(Settings(), user=MemoryDatabase(records), system=MemoryDatabase())
    device = open_device("CPU")
    context = Context(
        Settings(), layouts=LayoutCosts(tuner, device), knows=lambda op: tuner.knows(op, device),
        works_in=lambda node, layout, ins: tuner.why_not_layout(Problem.of(node).in_layout(layout, ins), device),
    )  # fmt: skip
    graph = graphs.graph(text)
    run_passes(graph, [Fuse(), AssignLayouts(), ConvPairs()], context)
    return graph, context


def ops(graph: Graph) -> list[str]:
    """Behind the convolution in front of all."""
    return [node.op for node in graph.nodes if "Reorder" not in node.op][1:]


def refusal(context: Context) -> str:
    return next(e.reason for e in context.log.entries if e.rule == RULE)


@pytest.fixture
def two_units() -> None:
    """Estimates depend on the number of units; the tests' images are large for two."""
    target = open_device("CPU").target
    if target.units != 2:
        pytest.skip(f"sizes are chosen for two units, not {target.units}")


@pytest.mark.usefixtures("two_units")
def test_a_large_pair_is_one_node() -> None:
    graph, context = paired(network(200))
    assert ops(graph) == [PAIR]
    node = next(n for n in graph.nodes if n.op == PAIR)
    assert [s.op for s in node.epilogue] == ["Relu"] and "Relu" in node.attrs["middle"]
    assert len(node.origin) == 4
    assert not any(e.reason for e in context.log.entries if e.rule == RULE)


@pytest.mark.usefixtures("two_units")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (network(14), "estimated"),  # it stays in the caches anyway
        (network(200, outputs="y b"), ""),  # somebody else reads what is in between
        (network(200, between="b = Mul(a, f)", channels=16), ""),  # what is in between is not constant
        (network(200).replace("pads=[1,1,1,1]>(b", "dilations=[2,2], pads=[2,2,2,2]>(b"), "takes no dilation"),
    ],
)
def test_who_stays_apart(text: str, said: str) -> None:
    graph, context = paired(text)
    assert PAIR not in ops(graph)
    if said:
        assert said in refusal(context)


@pytest.mark.usefixtures("two_units")
def test_measurements_decide() -> None:
    where = kb_records.here("CPU")
    whole, _ = paired(network(200))
    assert ops(whole) == [PAIR]

    def known(graph: Graph, seconds: float) -> list[Measurement]:
        nodes = [n for n in graph.nodes if n.op in ("Conv", PAIR)][1:]
        return [kb_records.measurement(Problem.of(n), where, "opencl.some", seconds=seconds) for n in nodes]

    # the two of the large image, as they are when they stay apart
    text = network(200)
    both = paired_apart(text)
    slow, fast = known(whole, 1e-2), known(both, 1e-3)
    graph, context = paired(text, [*slow, *fast])
    assert ops(graph) == ["Conv", "Conv"]
    assert refusal(context) == "one kernel takes 10000 us, two 2000 (measured)"
    assert ops(paired(text, [*known(whole, 1e-3), *fast])[0]) == [PAIR]
    assert ops(paired(text, slow)[0]) == [PAIR]  # the whole alone says nothing about the parts


def paired_apart(text: str) -> Graph:
    """The same graph without the pass."""
    tuner, graph = Tuner(Settings(), user=MemoryDatabase(), system=MemoryDatabase()), graphs.graph(text)
    run_passes(graph, [Fuse(), AssignLayouts()], Context(Settings(), layouts=LayoutCosts(tuner, open_device("CPU"))))
    return graph


@pytest.mark.usefixtures("two_units")
def test_a_network_gives_the_same(tmp_path: Any) -> None:
    """From a file of ONNX: results are those of two kernels, and counters and explanations name the one."""
    model, rng = graphs.model(network(160, between="s = Sigmoid(a) b = Mul(a, s)")), np.random.default_rng(0)
    for weights in model.graph.initializer:
        shape = tuple(weights.dims)
        weights.CopyFrom(onnx.numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), weights.name))
    feed = {"x": rng.standard_normal((1, 16, 160, 160)).astype(np.float32)}
    core = Core({"CACHE_DIR": str(tmp_path / "cache"), "USER_DB_PATH": str(tmp_path / "kb")})
    kernels, results = [], []
    for settings in ({}, {"DISABLED_PASSES": RULE}):
        compiled = core.compile_model(model.SerializeToString(), "CPU", {"PERF_COUNT": "YES", **settings})
        request = compiled.create_infer_request()
        results.append(np.array(request.infer(feed)["y"]))
        kernels.append([row.kernel for row in request.get_profiling_info() if row.calls])
    assert "opencl.conv_pair" in kernels[0] and "opencl.conv_depthwise" in kernels[1]
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-5)
