"""Plans for classes of shapes on a CUDA device: in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from conformance import interpreter as interpreter

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import gpu_decoders
from tunewright import Core
from tunewright.devices.cuda.device import CudaDevice, CudaQueue
from tunewright.devices.cuda.graph import BoundGraph
from tunewright.plugins import single
from tunewright.runtime.requests.room import rounded

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
LAYERS, WIDTH, HEADS = 2, 32, 4
F32 = {"INFERENCE_PRECISION_HINT": "f32"}
F16 = {"INFERENCE_PRECISION_HINT": "f16"}


class Seen:
    """Graphs of plans for classes of shapes that were recorded, and what was copied to the device."""

    def __init__(self) -> None:
        self.recorded, self.copied = 0, list[tuple[int, ...]]()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found, prepare, put = Seen(), BoundGraph.prepare, CudaQueue.put

    def recorded(self: BoundGraph) -> None:
        found.recorded += self._replay is None and self._layout is not None
        prepare(self)

    def copied(self: CudaQueue, array: Any, to: Any) -> None:
        found.copied.append(array.shape)
        put(self, array, to)

    monkeypatch.setattr(BoundGraph, "prepare", recorded)
    monkeypatch.setattr(CudaQueue, "put", copied)
    return found


@pytest.fixture
def core(device: CudaDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Core:
    monkeypatch.setattr(single, "available", lambda: ({"GPU.0": CudaDevice}, {}))
    monkeypatch.setattr(single, "serving", {"GPU.0": CudaDevice}.get)
    monkeypatch.setattr(single, "_opened", lambda key: device)
    return Core({"USER_DB_PATH": str(tmp_path / "kb")})


def classes(compiled: Any) -> int:
    """Plans for classes of shapes."""
    return sum(plan.template is not None for plan in compiled.program.plans)


def rows() -> Any:
    """A product, a normalisation, a transpose and a softmax over open sizes."""
    rng = np.random.default_rng(0)
    shapes = {"w": (8, 16), "b": (16,), "v": (16, 4), "g": (16,), "e": (16,)}
    weights = [numpy_helper.from_array((rng.standard_normal(s) / 3).astype(np.float32), n) for n, s in shapes.items()]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Add", ["a", "b"], ["c"]),
        helper.make_node("Relu", ["c"], ["r"]), helper.make_node("LayerNormalization", ["r", "g", "e"], ["l"]),
        helper.make_node("MatMul", ["l", "v"], ["m"]), helper.make_node("Transpose", ["m"], ["t"], perm=[0, 2, 1]),
        helper.make_node("Softmax", ["t"], ["y"], axis=-1),
    ]  # fmt: skip
    values = [helper.make_tensor_value_info(n, 1, s) for n, s in (("x", ["b", "n", 8]), ("y", None))]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


def x(batch: int, count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(count).standard_normal((batch, count, 8)).astype(np.float32)


def test_one_plan_serves_new_sizes(core: Core) -> None:
    model, oracle = rows(), onnxruntime.InferenceSession(rows())
    for config, tolerance in ((F32, 1e-5), (F16, 2e-3)):
        compiled = core.compile_model(model, "GPU.0", config)
        request = compiled.create_infer_request()
        for batch, count in ((2, 70), (2, 90), (3, 67), (2, 70), (5, 128), (2, 91)):
            got, want = request.infer({"x": x(batch, count)})["y"], oracle.run(None, {"x": x(batch, count)})[0]
            np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)
        assert classes(compiled) == 1 and len(compiled.program.plans) == 2


def test_the_first_shape_has_a_plan_of_its_own(core: Core) -> None:
    """It is made for these very sizes, and goes on serving them."""
    compiled = core.compile_model(rows(), "GPU.0", F32)
    request = compiled.create_infer_request()
    for _ in range(3):
        request.infer({"x": x(2, 9)})
    assert classes(compiled) == 0
    first = compiled.program.plan_for([x(2, 9)])
    request.infer({"x": x(2, 12)})
    assert classes(compiled) == 1 and compiled.program.plan_for([x(2, 9)]) is first


def test_a_graph_serves_every_size_that_there_is_room_for(core: Core, seen: Seen) -> None:
    model = gpu_decoders.encoder(1, 32, 2)
    oracle = onnxruntime.InferenceSession(model)
    compiled = core.compile_model(model, "GPU.0", F16)
    request = compiled.create_infer_request()
    recorded = []
    for count in (40, 65, 70, 66, 80, 72, 65, 41, 43, 80):
        inputs = {"ids": gpu_decoders.words(count)}
        np.testing.assert_allclose(
            next(iter(request.infer(inputs).values())), oracle.run(None, inputs)[0], rtol=0, atol=2e-2
        )
        recorded.append(seen.recorded)
    # without a graph at first; then those of 65 to 80, and of 41 to 48
    assert recorded == [0, 0, 1, 1, 1, 1, 1, 1, 2, 2] and classes(compiled) == 1


def test_rooms() -> None:
    assert [rounded(n) for n in (2, 16, 17, 33, 65, 100, 129, 1000)] == [16, 16, 32, 48, 80, 112, 160, 1024]
    assert all(n <= rounded(n) <= max(16, n * 5 // 4 + 16) for n in range(2, 5000))
    assert [rounded(n, grows=True) for n in (2, 128, 129, 1000)] == [128, 128, 256, 1024]


@pytest.mark.parametrize("half", [False, True])
def test_a_decoder_makes_one_plan_and_one_graph(core: Core, seen: Seen, half: bool) -> None:
    """Past and present are inputs and outputs of the caller's."""
    model = gpu_decoders.decoder(LAYERS, WIDTH, HEADS, half)
    step = gpu_decoders.plain(core, "GPU.0", model, F16 if half else F32)
    check(step, model, 7, half)
    assert seen.recorded == 1


@pytest.mark.parametrize("half", [False, True])
def test_states_stay_on_the_device(core: Core, seen: Seen, half: bool) -> None:
    """From the third token on the only copies are the token, and what follows from the length."""
    model = gpu_decoders.decoder(LAYERS, WIDTH, HEADS, half)
    compiled = core.compile_model(model, "GPU.0", F16 if half else F32, stateful="auto")
    request = compiled.create_infer_request()
    copied = []

    def step(token: int) -> Any:
        seen.copied.clear()
        logits = request.infer({"ids": np.array([[token]])})["logits"]
        copied.append([shape for shape in seen.copied if len(shape) > 2])
        return logits

    state = check(step, model, 8, half)
    assert not any(copied[3:]) and seen.recorded == 2  # the cache has two places, which change roles
    for one in request.query_state():
        np.testing.assert_allclose(one.state, state[one.name], rtol=0, atol=2e-2 if half else 1e-5)
    request.reset_state()
    check(step, model, 2, half)


def test_states_move_to_a_larger_room(core: Core) -> None:
    model = gpu_decoders.decoder(1, 32, 2, False)
    request = core.compile_model(model, "GPU.0", F32, stateful="auto").create_infer_request()
    oracle = onnxruntime.InferenceSession(model)
    state = empty(oracle)
    for ids in (np.full((1, 120), 3), *np.arange(12).reshape(12, 1, 1)):
        want = dict(zip(names(oracle), oracle.run(None, {"ids": ids, **state}), strict=True))
        np.testing.assert_allclose(request.infer({"ids": ids})["logits"], want["logits"], rtol=0, atol=1e-4)
        state = {name: want[name.replace("past", "present")] for name in state}
    np.testing.assert_allclose(request.query_state()[0].state, state["past_k0"], rtol=0, atol=1e-5)


def test_a_state_that_was_set_is_continued(core: Core) -> None:
    model = gpu_decoders.decoder(1, 32, 2, False)
    compiled = core.compile_model(model, "GPU.0", F32, stateful="auto")
    one, other = compiled.create_infer_request(), compiled.create_infer_request()
    for token in range(4):
        one.infer({"ids": np.array([[token]])})
    for mine, its in zip(other.query_state(), one.query_state(), strict=True):
        mine.state = its.state
    for token in (5, 9, 2):
        ids = {"ids": np.array([[token]])}
        np.testing.assert_allclose(one.infer(ids)["logits"], other.infer(ids)["logits"], rtol=0, atol=1e-5)


def names(oracle: Any) -> list[str]:
    return [one.name for one in oracle.get_outputs()]


def empty(oracle: Any) -> dict[str, np.ndarray[Any, Any]]:
    past = [one for one in oracle.get_inputs() if one.name.startswith("past")]
    types = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
    return {one.name: np.zeros((1, one.shape[1], 0, one.shape[3]), types[one.type]) for one in past}


def check(step: Any, model: bytes, tokens: int, half: bool) -> dict[str, np.ndarray[Any, Any]]:
    """Tokens against ONNX Runtime; its state in the end."""
    oracle = onnxruntime.InferenceSession(model)
    state, token = empty(oracle), 7
    for _ in range(tokens):
        got = step(token)
        found = oracle.run(None, {"ids": np.array([[token]]), **state})
        want = dict(zip(names(oracle), found, strict=True))
        np.testing.assert_allclose(got, want["logits"], rtol=0, atol=5e-2 if half else 1e-4)
        state = {name: want[name.replace("past", "present")] for name in state}
        token = int(want["logits"][0, -1].argmax())
    return state
