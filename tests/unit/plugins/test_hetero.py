"""HETERO: models cut over two devices give what one gives; placing by hand, by order, by costs, by measurement."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from helpers import opencl_runtime
from tunewright import AsyncInferQueue, Core
from tunewright.devices.remote import RemoteTensor
from tunewright.errors import DeviceError, ExecutionError, InputError, SettingsError, UnsupportedError
from tunewright.frontend.model import Model
from tunewright.ir.types import DType
from tunewright.ops.tolerance import TOLERANCES, deviation
from tunewright.plugins.hetero import Hetero, PlacementTask, bare
from tunewright.plugins.placement import affinity as hetero_affinity
from tunewright.plugins.placement import costs, store
from tunewright.plugins.single import SingleDevice
from tunewright.runtime.several.hetero import HeteroModel
from tunewright.runtime.several.hetero_dot import quote
from tunewright.settings import Settings
from tunewright.testing import models

BOTH = "HETERO:CPU,CPU.HOST"
F, INT = TensorProto.FLOAT, TensorProto.INT64
RESNET = models.resnet(18, size=32, classes=10, width=8)


@pytest.fixture
def core(tmp_path: Path) -> Core:
    """Kernels one by one: each part's own program of all its kernels would take longest to compile."""
    return Core({"USER_DB_PATH": str(tmp_path), "JOIN_LAUNCHES": "NO"})


def value(name: str, shape: Any, kind: int = F) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def model(nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: dict[str, Any] | None = None) -> Any:
    made = [numpy_helper.from_array(np.asarray(a), k) for k, a in (weights or {}).items()]
    graph = helper.make_graph(nodes, "test", inputs, outputs, made)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def node(op: str, inputs: str, outputs: str, name: str = "", **attrs: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split(), name=name or outputs.split()[0], **attrs)


def branches() -> onnx.ModelProto:
    """A stem, two branches that share a weight, and where they meet."""
    w = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    return model(
        [node("Relu", "x", "stem"), node("MatMul", "stem w", "left"), node("Tanh", "left", "left2"),
         node("MatMul", "stem w", "right"), node("Sigmoid", "right", "right2"), node("Add", "left2 right2", "y")],
        [value("x", [4, 8])], [value("y", [4, 8])], {"w": w},
    )  # fmt: skip


def forced(loaded: Model, pieces: int = 4) -> Model:
    """Every other piece on the second device."""
    nodes = loaded.graph.nodes
    size = max(1, -(-len(nodes) // pieces))
    loaded.affinity = {n.name: ("CPU", "CPU.HOST")[i // size % 2] for i, n in enumerate(nodes)}
    return loaded


def compiled(core: Core, loaded: Any, device: str = BOTH, **config: Any) -> HeteroModel:
    made = core.compile_model(loaded, device, config)
    assert isinstance(made, HeteroModel)
    return made


def agree(got: Any, expected: Any) -> None:
    assert list(got) == list(expected)
    for name, one in expected.items():
        other = got[name]
        if isinstance(one, np.ndarray) and one.dtype.kind == "f":
            assert other.shape == one.shape and other.dtype == one.dtype
            assert deviation(other, one) <= TOLERANCES[DType.of_numpy(one.dtype)].network, name
        else:
            np.testing.assert_equal(other, one)


X = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)


# ---- the same results -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("proto", "shape"),
    [
        pytest.param(lambda: RESNET, (1, 3, 32, 32), id="resnet"),
        pytest.param(lambda: models.resnet(18, 32, 10, 8, "n"), (2, 3, 32, 32), id="open batch"),
        pytest.param(lambda: models.transformer(1, 32, length=8), (1, 8, 32), id="transformer"),
        pytest.param(lambda: models.mobilenet(32, 10), (1, 3, 32, 32), id="mobilenet", marks=pytest.mark.soak),
    ],
)
def test_networks_in_parts(core: Core, proto: Any, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    loaded = core.read_model(proto())
    expected = core.compile_model(loaded, "CPU")({"x": x})
    parted = compiled(core, forced(loaded))
    assert len(parted.subgraphs) >= 3
    assert {s.device for s in parted.subgraphs} == {"CPU", "CPU.HOST"}
    for _ in range(2):
        agree(parted({"x": x}), expected)


def test_one_device_twice_is_bit_for_bit(core: Core) -> None:
    """Where the same kernels run, the same bits come out."""
    loaded = core.read_model(branches())
    expected = core.compile_model(loaded, "CPU.HOST")({"x": X})["y"]
    loaded.affinity = {"left": "CPU.HOST", "left2": "CPU.HOST"}
    made = compiled(core, loaded, "HETERO:CPU.HOST,CPU", HETERO_PLACEMENT="PRIORITY")
    np.testing.assert_array_equal(made({"x": X})["y"], expected)


def test_open_shapes(core: Core) -> None:
    """Shapes that are computed, and handed over: Shape, Gather and Reshape on different devices."""
    w = np.ones((8, 3), np.float32)
    proto = model(
        [node("Shape", "x", "s"), node("Gather", "s zero", "n"), node("Concat", "n two", "t", axis=0),
         node("Reshape", "x t", "flat"), node("MatMul", "flat w", "m"), node("Relu", "m", "y")],
        [value("x", ["n", 2, 4])], [value("y", ["n", 3])],
        {"zero": np.array([0]), "two": np.array([8]), "w": w},
    )  # fmt: skip
    loaded = core.read_model(proto)
    single = core.compile_model(loaded, "CPU")
    loaded.affinity = {"s": "CPU.HOST", "n": "CPU", "t": "CPU.HOST", "flat": "CPU", "m": "CPU.HOST", "y": "CPU"}
    parted = compiled(core, loaded)
    for n in (1, 5, 3, 1):
        x = np.random.default_rng(n).standard_normal((n, 2, 4)).astype(np.float32)
        agree(parted({"x": x}), single({"x": x}))
    with pytest.raises(InputError, match="input 'x'"):
        parted({"x": np.ones((1, 2, 5), np.float32)})


def test_arithmetic_on_shapes_goes_with_its_reader(core: Core) -> None:
    """Reshape is planned only where it sees how its shape comes about."""
    proto = model(
        [node("Shape", "x", "s"), node("Gather", "s zero", "n"), node("Concat", "n rest", "t", axis=0),
         node("NonZero", "x", "z"), node("Reshape", "x t", "flat"), node("Relu", "flat", "y")],
        [value("x", ["n", 2, 4])], [value("y", ["n", 8]), value("z", [3, None], INT)],
        {"zero": np.array([0]), "rest": np.array([8])},
    )  # fmt: skip
    loaded = core.read_model(proto)
    assert {said.device for name, said in core.query_model(loaded, BOTH).items() if name != "z"} == {"CPU"}
    loaded.affinity = {"flat": "CPU.HOST"}
    placed = compiled(core, loaded).affinity
    assert [placed[name] for name in ("s", "n", "t", "flat", "y")] == ["CPU.HOST"] * 4 + ["CPU"]
    x = np.ones((3, 2, 4), np.float32)
    agree(compiled(core, loaded)({"x": x}), core.compile_model(loaded, "CPU")({"x": x}))


def test_shapes_that_depend_on_data(core: Core) -> None:
    proto = model(
        [node("NonZero", "x", "at"), node("Transpose", "at", "rows", perm=[1, 0]), node("Cast", "rows", "f", to=F),
         node("MatMul", "f w", "y")],
        [value("x", [3, 4])], [value("y", [None, 2])], {"w": np.ones((2, 2), np.float32)},
    )  # fmt: skip
    loaded = core.read_model(proto)
    single = core.compile_model(loaded, "CPU")
    loaded.affinity = {"at": "CPU", "rows": "CPU.HOST", "f": "CPU", "y": "CPU.HOST"}
    parted = compiled(core, loaded)
    for x in (np.eye(3, 4, dtype=np.float32), np.ones((3, 4), np.float32), np.zeros((3, 4), np.float32)):
        agree(parted({"x": x}), single({"x": x}))


def test_control_flow(core: Core) -> None:
    """A branch that captures what another device made, and a loop that another device reads."""
    then = helper.make_graph([node("Mul", "a a", "t")], "then", [], [value("t", None)])
    other = helper.make_graph([node("Neg", "a", "e")], "else", [], [value("e", None)])
    body = helper.make_graph(
        [node("Add", "acc a", "next"), node("Identity", "go", "go_on")], "body",
        [value("i", [], INT), value("go", [], TensorProto.BOOL), value("acc", [2])],
        [value("go_on", [], TensorProto.BOOL), value("next", [2])],
    )  # fmt: skip
    proto = model(
        [node("Relu", "x", "a"), node("If", "c", "b", then_branch=then, else_branch=other),
         node("Tanh", "b", "d"), helper.make_node("Loop", ["k", "", "d"], ["l"], name="l", body=body),
         node("Sqrt", "l", "y")],
        [value("x", [2]), value("c", [], TensorProto.BOOL), value("k", [], INT)], [value("y", [2])],
    )  # fmt: skip
    loaded = core.read_model(proto)
    runs = (([1, 2], True, 3), ([0, 0], False, 20), ([3, 4], True, 0))
    feeds = [{"x": np.array(x, np.float32), "c": np.array(c), "k": np.array(k)} for x, c, k in runs]
    single = core.compile_model(loaded, "CPU")
    loaded.affinity = {"a": "CPU", "b": "CPU.HOST", "d": "CPU", "l": "CPU.HOST", "y": "CPU"}
    parted = compiled(core, loaded, PERF_COUNT="YES")
    assert [s.device for s in parted.subgraphs] == ["CPU", "CPU.HOST", "CPU", "CPU.HOST", "CPU"]
    for feed in feeds:
        agree(parted(feed), single(feed))
    assert parted.affinity == loaded.affinity  # nodes in bodies go where their node goes, and are not named
    assert {said.device for name, said in core.query_model(loaded, BOTH).items() if name in "ten"} == {"CPU.HOST"}
    with pytest.raises(InputError, match=r"affinity of 't'.*goes where 'b' goes"):
        loaded.affinity = {"t": "CPU"}
        core.compile_model(loaded, BOTH)


def test_outputs_that_nothing_makes(core: Core) -> None:
    """An input, a constant, one value twice: each result is the caller's own array."""
    proto = model(
        [node("Relu", "x", "a"), node("Neg", "a", "b"), node("Identity", "x", "same"), node("Add", "one one", "two")],
        [value("x", [3])],
        [value("same", [3]), value("two", [1]), value("a", [3]), value("b", [3])],
        {"one": np.ones(1, np.float32)},
    )  # fmt: skip
    loaded = core.read_model(proto)
    loaded.affinity = {"a": "CPU", "b": "CPU.HOST"}
    x = np.array([-1, 0, 2], np.float32)
    parted = compiled(core, loaded)
    got = parted({"x": x})
    agree(got, core.compile_model(loaded, "CPU")({"x": x}))
    arrays = [*got.values(), x]
    assert not any(np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])
    got["two"][:] = 7
    assert parted({"x": x})["two"] == 2


def test_a_model_of_nothing(core: Core) -> None:
    proto = model([node("Identity", "x", "y")], [value("x", [3])], [value("y", [3])])
    made = compiled(core, proto)
    x = np.ones(3, np.float32)
    got = made({"x": x})["y"]
    np.testing.assert_array_equal(got, x)
    assert got is not x


def test_texts_and_lists(core: Core) -> None:
    """What is no array of numbers goes from part to part as it is."""
    proto = model(
        [node("Identity", "s", "s1"), node("SequenceConstruct", "x x", "q"), node("SequenceAt", "q i", "e"),
         node("Relu", "e", "y"), node("Concat", "s1 s1", "t", axis=0)],
        [value("s", [2], TensorProto.STRING), value("x", [3])],
        [value("t", [4], TensorProto.STRING), value("y", [3])], {"i": np.array(1)},
    )  # fmt: skip
    loaded = core.read_model(proto)
    loaded.affinity = {"s1": "CPU", "t": "CPU.HOST", "q": "CPU", "e": "CPU.HOST", "y": "CPU"}
    feed = {"s": np.array(["a", "bc"], object), "x": np.array([-1, 1, 2], np.float32)}
    parted = compiled(core, loaded)
    assert len(parted.subgraphs) >= 3
    agree(parted(feed), core.compile_model(loaded, "CPU")(feed))


# ---- placing --------------------------------------------------------------------------------------------------------


def test_the_first_device_that_has_a_kernel(core: Core) -> None:
    """CPU has none for NonZero: the host is listed second, and gets it, and what follows goes back."""
    proto = model([node("Relu", "x", "a"), node("NonZero", "a", "n"), node("Cast", "n", "y", to=F)], [value("x", [4])],
                  [value("y", [1, None])])  # fmt: skip
    answers = core.query_model(proto, BOTH)
    assert {name: said.device for name, said in answers.items()} == {"a": "CPU", "n": "CPU.HOST", "y": "CPU"}
    assert all(said.device == "CPU.HOST" for said in core.query_model(proto, "HETERO:CPU.HOST,CPU").values())
    assert compiled(core, proto).affinity == {"a": "CPU", "n": "CPU.HOST", "y": "CPU"}


def test_what_passes_take_away_cuts_nothing(core: Core) -> None:
    """A device has no kernel for Dropout, and needs none: it is gone, or part of another node, before anything runs."""
    nodes = [node("Relu", "x", "a"), node("Dropout", "a", "b"), node("Tanh", "b", "c"), node("Det", "c", "y")]
    proto = model(nodes, [value("x", [2, 3, 3])], [value("y", [2])])
    assert core.query_model(proto, "CPU")["b"].on_host
    placed = compiled(core, proto)
    assert [(s.device, s.nodes) for s in placed.subgraphs] == [("CPU", ("a", "b", "c")), ("CPU.HOST", ("y",))]
    x = np.random.default_rng(0).standard_normal((2, 3, 3)).astype(np.float32)
    agree(placed({"x": x}), {"y": np.linalg.det(np.tanh(np.maximum(x.astype("d"), 0))).astype(np.float32)})


def test_what_nobody_runs(core: Core) -> None:
    proto = model([node("NonZero", "x", "n")], [value("x", [4])], [value("n", [1, None], INT)])
    pair, config = "HETERO:CPU,CPU.NATIVE", {"HOST_FALLBACK": "NO"}
    said = core.query_model(proto, pair, config)["n"]
    assert not said and "HOST_FALLBACK" in said.rejected["host.reference"]
    with pytest.raises(UnsupportedError, match=r"'n' \(NonZero\): no device of HETERO:CPU,CPU.NATIVE runs it"):
        core.compile_model(proto, pair, config)


def test_by_hand(core: Core, tmp_path: Path) -> None:
    """The model's own affinity wins over the file's; what neither names is placed by itself."""
    loaded = core.read_model(branches())
    file = tmp_path / "nodes.json"
    hetero_affinity.write(file, {"left": "CPU.HOST", "right": "CPU.HOST"})
    loaded.affinity = {"right": "cpu"}
    made = compiled(core, loaded, HETERO_AFFINITY=str(file))
    assert made.affinity == dict.fromkeys(("stem", "left2", "right", "right2", "y"), "CPU") | {"left": "CPU.HOST"}
    agree(made({"x": X}), core.compile_model(loaded, "CPU")({"x": X}))
    for name in ("all.json", "all.csv"):
        hetero_affinity.write(tmp_path / name, made.affinity)
        assert hetero_affinity.read(tmp_path / name, 1 << 20) == made.affinity
        loaded.affinity = {}
        assert compiled(core, loaded, HETERO_AFFINITY=str(tmp_path / name)).affinity == made.affinity


@pytest.mark.parametrize(
    ("affinity", "error", "text"),
    [
        ({"lefd": "CPU"}, InputError, "no such node.*did you mean 'left'"),
        ({"left": "GPU.7"}, SettingsError, "'GPU.7' is not one of the devices.*CPU, CPU.HOST"),
    ],
)
def test_mistakes_by_hand(core: Core, affinity: dict[str, str], error: type[Exception], text: str) -> None:
    loaded = core.read_model(branches())
    loaded.affinity = affinity
    with pytest.raises(error, match=text):
        core.compile_model(loaded, BOTH)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.json", "[1]", "is not an object of names"),
        ("a.json", '{"left": 1}', "is not an object of names"),
        ("a.json", '{"left": "CPU", "left": "CPU.HOST"}', "names 'left' twice"),
        ("a.json", "{", "is not JSON"),
        ("a.csv", "node,device\nleft\n", "a.csv:2: is not a node and a device"),
        ("a.csv", "left,CPU\nleft,CPU\n", "a.csv:2: names 'left' twice"),
        ("none.json", None, "cannot be read"),
        ("a.json", b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_mistakes_in_a_file(core: Core, tmp_path: Path, name: str, content: Any, text: str) -> None:
    if isinstance(content, str):
        (tmp_path / name).write_text(content)
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=text):
        core.compile_model(branches(), BOTH, {"HETERO_AFFINITY": str(tmp_path / name)})


def test_a_device_that_cannot_run_what_is_put_there(core: Core) -> None:
    proto = model([node("NonZero", "x", "n")], [value("x", [4])], [value("n", [1, None], INT)])
    loaded = core.read_model(proto)
    loaded.affinity = {"n": "CPU"}
    with pytest.raises(UnsupportedError, match=r"CPU cannot run it.*HOST_FALLBACK"):
        core.compile_model(loaded, BOTH, {"HOST_FALLBACK": "NO"})


@pytest.mark.parametrize(
    ("device", "error", "text"),
    [
        ("HETERO", SettingsError, "names no devices"),
        ("HETERO:CPU,CPU", SettingsError, "twice"),
        ("HETERO:CPU,NOWHERE", DeviceError, "no device 'NOWHERE'"),
    ],
)
def test_device_strings(core: Core, device: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        core.compile_model(branches(), device)


def test_devices_from_the_settings(core: Core) -> None:
    made = compiled(core, branches(), "HETERO", TARGET_FALLBACK="CPU.HOST,CPU")
    assert made.device_name == "HETERO:CPU.HOST,CPU"


def test_by_costs(core: Core) -> None:
    """Numpy is far slower on a convolution: nothing is left to it, although it is listed first."""
    made = compiled(core, RESNET, "HETERO:CPU.HOST,CPU", HETERO_PLACEMENT="COST")
    assert made.origin == "costs"
    convolutions = {name: made.affinity[name] for name, op in made.nodes if op == "Conv"}
    assert set(convolutions.values()) == {"CPU"}
    first = compiled(core, RESNET, "HETERO:CPU.HOST,CPU")
    assert first.origin == "priorities" and set(first.affinity.values()) == {"CPU.HOST"}


def test_costs_of_the_knowledge_bases(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """AUTO goes by costs as soon as enough of them is known, on all devices; estimates alone are not enough."""
    pair = "HETERO:CPU,CPU.NATIVE"
    assert compiled(core, RESNET, pair).origin == "priorities"
    monkeypatch.setattr(costs, "ENOUGH", 0.0)
    assert compiled(core, RESNET, pair).origin == "costs"


def test_a_measurement_is_taken_for_what_it_says(core: Core, tmp_path: Path) -> None:
    """What the knowledge base has of a kernel is what its node costs; what it has not is scaled like that."""
    plugin = Hetero(["CPU", "CPU.HOST"], core.settings)
    task = PlacementTask(plugin, core.read_model(RESNET), core.settings)
    whole = plugin.plugins[0].compile(bare(task.model, task.graph), core.settings)
    steps = [step for plan in whole.program.plans for step in plan.steps if not step.optimized_out]
    convolutions = [step for step in steps if step.node.op == "Conv"]
    found = costs._costs(task.graph, steps, whole.env.device, lambda step: 1.0 if step is convolutions[0] else None)
    assert found.seconds[next(n for n in task.graph.nodes if n.name == "conv_0")] >= 1.0
    assert 0 < found.share < 1 and sum(found.seconds.values()) > 1.5
    fused = {frozenset(n.name for n in group) for group in found.together}
    assert any({"conv_0", "batchnormalization_1", "relu_2"} <= group for group in fused)


def test_measured_and_kept(core: Core, tmp_path: Path) -> None:
    """The placement that was measured is used by the next load, and by no other model."""
    proto, x = RESNET, np.ones((1, 3, 32, 32), np.float32)
    found = core.place_model(proto, {"x": x}, "HETERO:CPU.HOST,CPU", 0.2)
    assert {"all on CPU", "all on CPU.HOST"} <= {c.name for c in found.candidates}
    singles = [c.seconds for c in found.candidates if c.is_single and c.seconds is not None]
    assert found.best.seconds is not None and found.best.seconds <= min(singles)
    made = compiled(core, proto, "HETERO:CPU.HOST,CPU")
    assert made.origin == "measurement"
    assert found.affinity.items() <= made.affinity.items()
    agree(made({"x": x}), core.compile_model(proto, "CPU")({"x": x}))
    assert compiled(core, branches(), "HETERO:CPU.HOST,CPU").origin == "priorities"
    loaded = core.read_model(proto)
    loaded.affinity = {"conv_0": "CPU.HOST"}  # another wish is another problem
    assert compiled(core, loaded, "HETERO:CPU.HOST,CPU").origin == "priorities"
    assert compiled(core, proto, "HETERO:CPU.HOST,CPU", HETERO_PLACEMENT="PRIORITY").origin == "priorities"
    with pytest.raises(DeviceError, match="no nodes to place"):
        core.place_model(proto, {"x": x}, "CPU")


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": "tunewright.hetero/1", "placements": 3}', '{"schema": 1}'])
def test_a_damaged_file_of_placements_is_none(core: Core, tmp_path: Path, content: str) -> None:
    (tmp_path / store.FILE).write_text(content)
    assert compiled(core, branches()).origin == "priorities"


def test_an_entry_that_does_not_fit_is_not_used(core: Core, tmp_path: Path) -> None:
    core.place_model(branches(), {"x": X}, BOTH, 0.01)
    file = tmp_path / store.FILE
    written = json.loads(file.read_text())
    (entry,) = written["placements"].values()
    entry["nodes"]["stem"] = "GPU.3"
    file.write_text(json.dumps(written))
    assert compiled(core, branches()).origin == "priorities"


# ---- running --------------------------------------------------------------------------------------------------------


def halves(core: Core, **config: Any) -> HeteroModel:
    loaded = core.read_model(branches())
    loaded.affinity = dict.fromkeys(("stem", "left", "left2", "y"), "CPU")
    loaded.affinity |= dict.fromkeys(("right", "right2"), "CPU.HOST")
    return compiled(core, loaded, **config)


def test_branches_run_at_the_same_time(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each branch waits, as it begins, until the other has begun: one after the other would wait for ever."""
    from tunewright.runtime.several import hetero_split

    monkeypatch.setattr(hetero_split, "OVERHEAD", 0.0)  # the branches are worth parts of their own
    made = halves(core)
    assert len(made.lanes) == 2
    left, right = (k for k, s in enumerate(made.subgraphs) if set(s.nodes) & {"left", "right"})
    request = made.create_infer_request()
    barrier = threading.Barrier(2, timeout=20)
    for k in (left, right):
        inner = request.requests[k]
        monkeypatch.setattr(inner, "run", lambda *a, run=inner.run, **b: (barrier.wait(), run(*a, **b))[1])
    agree(request.infer({"x": X}), core.compile_model(branches(), "CPU")({"x": X}))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_error_reaches_the_caller_and_the_request_goes_on(
    core: Core, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    from tunewright.runtime.several import hetero_split

    monkeypatch.setattr(hetero_split, "OVERHEAD", 0.0)
    made = halves(core)
    request = made.create_infer_request()

    def fail(*given: Any, **others: Any) -> Any:
        raise ExecutionError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(request.requests[which], "run", fail)
        with pytest.raises(ExecutionError, match="broken"):
            request.infer({"x": X})
    agree(request.infer({"x": X}), core.compile_model(branches(), "CPU")({"x": X}))


def test_values_are_let_go_of(core: Core) -> None:
    from tunewright.runtime.several.hetero import _Run

    request = halves(core).create_infer_request()
    run = _Run(request, {"x": X})
    run.go(request._workers)
    assert list(run.values) == ["y"]


def test_nothing_is_copied_between_parts(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that share the host's memory read the very array that the part before has made."""
    made = halves(core)
    request = made.create_infer_request()
    seen: dict[str, list[int]] = {}
    for inner in request.requests:
        run = inner.run

        def watch(inputs: Any, run: Any = run, **more: Any) -> Any:
            found = run(inputs, **more)
            for name, array in (*inputs.items(), *found.items()):
                seen.setdefault(name, []).append(array.__array_interface__["data"][0])
            return found

        monkeypatch.setattr(inner, "run", watch)
    request.infer({"x": X})
    assert any(len(places) > 1 for places in seen.values())
    assert all(len(set(places)) == 1 for places in seen.values())


@opencl_runtime.needs_opencl
def test_a_device_with_memory_of_its_own(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a later part of the same device reads stays in its memory; the others get it through the host."""
    proto = model(
        [node("Relu", "x", "a"), node("Exp", "a", "b"), node("Neg", "a", "c"), node("Add", "b c", "d"),
         node("Mul", "d a", "y")],
        [value("x", [4, 8])], [value("y", [4, 8])],
    )  # fmt: skip
    loaded = core.read_model(proto)
    loaded.affinity = {"a": "CPU", "b": "CPU", "c": "CPU.HOST", "d": "CPU", "y": "CPU"}
    plugin = Hetero(["CPU", "CPU.HOST"], core.settings)
    plugin.plugins[0] = SingleDevice(opencl_runtime.device(shares_memory=False))
    made = plugin.compile(loaded, core.settings)
    first = made.subgraphs[0]
    assert "a" in first.stay and "a" in first.leave
    request = made.create_infer_request()
    given: list[dict[str, Any]] = []
    for inner in request.requests:
        run = inner.run
        monkeypatch.setattr(inner, "run", lambda feed, run=run, **more: (given.append(feed), run(feed, **more))[1])
    for _ in range(2):
        agree(request.infer({"x": X}), core.compile_model(loaded, "CPU")({"x": X}))
    for subgraph, feed in zip(made.subgraphs, given, strict=False):
        for name, tensor in feed.items():
            inside = subgraph.device == plugin.plugins[0].name and name in first.stay
            assert isinstance(tensor, RemoteTensor) == inside, (subgraph.device, name)
    there, back = costs.links(plugin.plugins[0].device)
    assert there.seconds(1 << 20) > there.seconds(0) > 0 and back.seconds(1 << 20) > 0
    seconds = costs.transfer(plugin.devices)
    assert seconds(0, 1, 1 << 22) > seconds(1, 1, 1 << 22)


def test_requests_of_a_model_run_one_after_the_other(core: Core) -> None:
    """EXCLUSIVE_ASYNC_REQUESTS is what HETERO does unless streams are asked for."""
    one, other = halves(core), compiled(core, branches())
    assert one.streams is other.streams and one.streams.count == 1
    assert one.get_property("EXCLUSIVE_ASYNC_REQUESTS") is True
    assert halves(core, NUM_STREAMS=2).streams.count == 2
    side_by_side = halves(core, PERFORMANCE_HINT="THROUGHPUT")
    assert (
        side_by_side.streams.count
        == side_by_side.optimal_requests
        == core.compile_model(branches(), "CPU", {"PERFORMANCE_HINT": "THROUGHPUT"}).streams.count
    )
    assert halves(core, NUM_STREAMS=2, EXCLUSIVE_ASYNC_REQUESTS="YES").streams is one.streams
    expected = core.compile_model(branches(), "CPU")
    results: dict[int, Any] = {}
    queue = AsyncInferQueue(one, 4)
    queue.set_callback(lambda request, i: results.update({i: request.results["y"]}))
    inputs = [X * i for i in range(20)]
    for i, x in enumerate(inputs):
        queue.start_async({"x": x}, i)
    queue.wait_all()
    for i, x in enumerate(inputs):
        agree({"y": results[i]}, expected({"x": x}))


def test_tensors_of_a_request(core: Core) -> None:
    request = halves(core).create_infer_request()
    request.get_tensor("x")[:] = X
    out = np.zeros((4, 8), np.float32)
    request.set_tensor("y", out)
    assert request.infer()["y"] is out
    agree({"y": out}, core.compile_model(branches(), "CPU")({"x": X}))
    request.set_tensor("y", None)
    remote = request.infer(remote=True)["y"]
    np.testing.assert_array_equal(remote.numpy(), out)
    with pytest.raises(InputError, match="no input 'z'"):
        request.infer({"z": X})


def test_counters(core: Core) -> None:
    """Every node of the model has a row with its device and its subgraph; what was folded has none of these."""
    proto = branches()
    proto.graph.node.insert(0, node("Constant", "", "k", value=numpy_helper.from_array(np.ones((4, 8), np.float32))))
    proto.graph.node.append(node("Exp", "k", "e"))
    proto.graph.node.append(node("Mul", "y e", "z"))
    proto.graph.output[0].name = "z"
    loaded = core.read_model(proto)
    loaded.affinity = {"right": "CPU.HOST", "right2": "CPU.HOST"}
    made = compiled(core, loaded, PERF_COUNT="YES")
    request = made.create_infer_request()
    request.infer({"x": X})
    rows = {row.name: row for row in request.get_profiling_info()}
    assert rows["right"].device == "CPU.HOST" and rows["left"].device == "CPU"
    assert made.subgraphs[rows["right"].subgraph or 0].device == "CPU.HOST"
    assert rows["e"].status.value == "OPTIMIZED_OUT" and rows["e"].subgraph is None
    totals, parts = request.get_totals(), request.get_subgraph_totals()
    assert len(parts) == len(made.subgraphs)
    assert totals.launches == sum(part.launches for part in parts) > 0
    assert 0 < max(part.seconds for part in parts) <= totals.seconds
    assert compiled(core, loaded).create_infer_request().get_profiling_info() == []


def test_properties(core: Core) -> None:
    made = halves(core)
    assert made.execution_devices == ["CPU", "CPU.HOST"]
    assert made.device_name == BOTH
    assert made.optimal_requests == 1
    assert list(made.inputs) == ["x"] and list(made.outputs) == ["y"]


def test_a_single_device_is_as_it_is_alone(core: Core) -> None:
    """Where nothing is cut there is nothing between the caller and the device."""
    made = compiled(core, branches())
    assert made.is_whole and len(made.subgraphs) == 1
    np.testing.assert_array_equal(made({"x": X})["y"], core.compile_model(branches(), "CPU")({"x": X})["y"])


# ---- drawings -------------------------------------------------------------------------------------------------------


def test_drawings(core: Core, tmp_path: Path) -> None:
    proto = branches()
    evil = 'a"; b [label="\\'
    proto.graph.node[0].name = evil
    loaded = core.read_model(proto)
    loaded.affinity = {evil: "CPU.HOST", "right": "CPU.HOST"}
    folder = tmp_path / "new" / "dots"
    core.compile_model(loaded, BOTH, {"HETERO_DUMP_GRAPH_DOT": "YES", "GRAPH_DUMPS_DIR": str(folder)})
    files = sorted(folder.glob("hetero_*"))
    assert {f.name for f in files} >= {"hetero_affinity.dot", "hetero_subgraphs.dot"}
    if shutil.which("dot"):
        assert {f.name for f in files} >= {"hetero_affinity.svg", "hetero_subgraphs.svg"}
        command = ["dot", "-Tplain", str(folder / "hetero_affinity.dot")]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        drawn = [line.split()[1] for line in told.splitlines() if line.startswith("node ")]
        assert sorted(drawn) == sorted(["d0", "d1", "in0", "out0", *(f"n{i}" for i in range(6))])  # and no node b


def test_quoting() -> None:
    assert quote('a"b\\c\nd\0') == '"a\\"b\\\\c\\nd\N{REPLACEMENT CHARACTER}"'


def test_a_folder_that_cannot_be_made(core: Core, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="cannot be written"):
        core.compile_model(
            branches(), BOTH, {"HETERO_DUMP_GRAPH_DOT": "YES", "GRAPH_DUMPS_DIR": str(tmp_path / "file" / "below")}
        )


def test_the_plugin_by_itself() -> None:
    plugin = Hetero(["cpu", "cpu.host"], Settings())
    assert plugin.name == BOTH
