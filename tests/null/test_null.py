"""The whole pipeline on the Null device: no hardware, a scripted clock, deterministic."""

import numpy as np
import pytest
from onnx import parser

import tunewright
from tunewright.devices.host import HostDevice
from tunewright.devices.null import NullDevice
from tunewright.ir.types import PLAIN, blocked
from tunewright.passes.base import Context, LayoutChoice
from tunewright.plugins.single import SingleDevice, prepare
from tunewright.runtime.insight.counters import NodeStatus
from tunewright.runtime.plans.plan import format_plan
from tunewright.runtime.plans.program import Environment
from tunewright.runtime.requests.request import DeviceModel
from tunewright.settings import Settings
from tunewright.tuning.tuner import Tuner

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
g (float[1, 3, 8, 8] x) => (float[1, 4] y)
<float[4, 3, 3, 3] w>
{ c = Conv<pads = [1, 1, 1, 1]>(x, w)
  p = GlobalAveragePool(c) s = Constant<value_ints = [1, 4]>() y = Reshape(p, s) }"""


def read():
    proto = parser.parse_model(TEXT)
    w = proto.graph.initializer.add()
    proto.graph.ClearField("initializer")
    from onnx import numpy_helper

    proto.graph.initializer.append(numpy_helper.from_array(np.ones((4, 3, 3, 3), np.float32), "w"))
    for node in proto.graph.node:
        node.name = node.output[0]
    del w
    return tunewright.Core().read_model(proto)


def test_the_clock_is_the_script():
    asked = []

    def script(solver, problem):
        asked.append((solver, problem))
        return 0.25 if problem.startswith("Conv") else 0.5

    plugin = SingleDevice(NullDevice(script=script))
    compiled = plugin.compile(read(), Settings.make({"PERF_COUNT": "YES"}))
    request = compiled.create_infer_request()
    out = request.infer({"x": np.ones((1, 3, 8, 8), np.float32)})
    assert not out["y"].any()
    rows = {r.name: r for r in request.get_profiling_info()}
    assert rows["c"].device_seconds == 0.25 and rows["p"].device_seconds == 0.5 and rows["c"].host_seconds == 0
    assert rows["y"].status is NodeStatus.OPTIMIZED_OUT
    assert {solver for solver, _ in asked} == {"null.any"}
    assert asked[0][1].startswith("Conv(float32[1,3,8,8], float32[4,3,3,3]!)")


def test_the_plan_is_stable_text():
    texts = set()
    for _ in range(2):
        compiled = SingleDevice(NullDevice()).compile(read(), Settings())
        texts.add(format_plan(compiled.program.plans[0]))
    assert len(texts) == 1


def test_nothing_falls_back_to_the_host():
    compiled = tunewright.Core()
    proto = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[n] x) => (int64[1, m] y) { y = NonZero(x) }"""
    )
    with pytest.raises(
        tunewright.UnsupportedError, match=r"no solver for NonZero on NULL: .*null.any: shapes are not known"
    ):
        compiled.compile_model(proto, "NULL")({"x": np.ones(3, np.float32)})


def test_query_tells_per_node():
    answer = tunewright.Core().query_model(read(), "NULL")
    assert answer["c"] and answer["c"].solver == "null.any"
    assert set(answer) == {"c", "p", "y"}


class Blocks:
    """Convolutions are fast in blocks, nothing else works in them."""

    def preferred(self, node):
        return (blocked(4), blocked(4)) if node.op == "Conv" else None

    def ways(self, node, preferred, layout, data):
        plain = LayoutChoice(PLAIN, PLAIN, 1.0)
        return [LayoutChoice(*preferred, 0.1), plain] if preferred else [plain]

    def reorder(self, type, layout):
        return 0.1


@pytest.mark.parametrize("device", [NullDevice(), HostDevice()], ids=["null", "host"])
def test_inserted_reorders_are_rows_too(device):
    settings = Settings.make({"PERF_COUNT": "YES"}, Settings())
    context = Context(settings, layouts=Blocks())
    model = read()
    nodes = [(node.name, node.op) for node in model.graph.nodes]
    prepare(model.graph, context)
    compiled = DeviceModel(model.graph, Environment(device, Tuner(settings), settings, context), nodes)
    request = compiled.create_infer_request()
    x = np.random.default_rng(0).standard_normal((1, 3, 8, 8)).astype(np.float32)
    out = request.infer({"x": x})["y"]
    rows = request.get_profiling_info()
    reorders = [row for row in rows if row.type == "tunewright::Reorder"]
    assert [row.name for row in rows[:3]] == ["c", "p", "y"]
    assert reorders and all(row.status is NodeStatus.EXECUTED and row.calls == 1 for row in reorders)
    if device.family == "host":
        np.testing.assert_allclose(out, tunewright.Core().compile_model(model, "CPU.HOST")({"x": x})["y"], rtol=1e-6)
