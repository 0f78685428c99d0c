"""Requests that keep states: what they compute is what a caller computes who hands states over, on every device."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tunewright
from device.runtime.test_plan_templates import decoder
from native.harness import native
from tunewright.devices.base import address

ort = pytest.importorskip("onnxruntime")
DECODER = decoder()
PAIRS = {f"past_{n}{k}": f"{n}{k}" for n in "kv" for k in range(2)}
Array = np.ndarray[Any, Any]


class Theirs:
    """ONNX Runtime, with states that are handed over."""

    def __init__(self, model: bytes, pairs: dict[str, str], begin: dict[str, Array]) -> None:
        self.session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
        self.pairs, self.states = pairs, dict(begin)
        self.names = [o.name for o in self.session.get_outputs()]

    def step(self, feeds: dict[str, Array]) -> dict[str, Array]:
        made = dict(zip(self.names, self.session.run(None, {**feeds, **self.states}), strict=True))
        self.states = {name: made.pop(output) for name, output in self.pairs.items()}
        return made


def decoding(batch: int = 2) -> Theirs:
    return Theirs(DECODER, PAIRS, {name: np.zeros((batch, 4, 0, 8), np.float32) for name in PAIRS})


def same(got: dict[str, Array], expected: dict[str, Array]) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-4, err_msg=name)


def ids(rng: np.random.Generator, count: int = 1, batch: int = 2) -> dict[str, Array]:
    return {"ids": rng.integers(0, 50, (batch, count))}


def lstm(hidden: int = 6) -> bytes:
    """Rows of one sequence after the other, with h and c as inputs and outputs."""
    rng, weights = np.random.default_rng(0), []
    for name, shape in (("w", (1, 4 * hidden, 3)), ("r", (1, 4 * hidden, hidden)), ("b", (1, 8 * hidden))):
        weights.append(numpy_helper.from_array((rng.standard_normal(shape) * 0.5).astype(np.float32), name))
    node = helper.make_node("LSTM", ["x", "w", "r", "b", "", "h", "c"], ["y", "hn", "cn"], hidden_size=hidden)
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "batch", 3])]
    given += [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, "batch", hidden]) for n in "hc"]
    made = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    made += [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, "batch", hidden]) for n in ("hn", "cn")]
    graph = helper.make_graph([node], "lstm", given, made, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


def request_of(device: str = "CPU", model: bytes = DECODER, states: Any = "auto", **config: Any) -> Any:
    return tunewright.Core().compile_model(model, device, config, stateful=states).create_infer_request()


# ---- what is computed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["CPU", "CPU.HOST", "HETERO:CPU.HOST,CPU", "MULTI:CPU,CPU.HOST", "AUTO:CPU"])
def test_a_decoder_on_every_device(device: str) -> None:
    request, rng = request_of(device, states=PAIRS), np.random.default_rng(0)
    for _ in range(2):
        theirs = decoding()
        for count in (5, 1, 1, 3, 1, 1, 1, 20, 1):
            feeds = ids(rng, count)
            same(request.infer(feeds), theirs.step(feeds))
        for variable in request.query_state():
            np.testing.assert_allclose(variable.state, theirs.states[variable.name], rtol=0, atol=1e-4)
        request.reset_state()


@native
def test_rows_are_appended_in_place() -> None:
    request, rng = request_of(), np.random.default_rng(0)
    theirs, moved, where = decoding(), 0, [0]
    for step in range(150):
        feeds = ids(rng, 5 if step == 0 else 1)
        same(request.infer(feeds), theirs.step(feeds))
        if step % 10 == 0:  # who looks at a state changes nothing
            assert not any(variable.state.flags.writeable for variable in request.query_state())
        now = [address(request._values[name]) for name in PAIRS]
        moved += now != where
        where = now
    assert moved <= 5


@pytest.mark.parametrize("device", ["CPU", "CPU.HOST", "MULTI:CPU,CPU.HOST"])
@pytest.mark.parametrize("states", ["auto", {"h": "hn", "c": "cn"}])
def test_states_of_a_fixed_shape(device: str, states: Any) -> None:
    rng, zeros = np.random.default_rng(0), np.zeros((1, 2, 6), np.float32)
    request = request_of(device, lstm(), states)
    theirs = Theirs(lstm(), {"h": "hn", "c": "cn"}, {"h": zeros, "c": zeros})
    for n in (4, 1, 1, 7):
        x = {"x": rng.standard_normal((n, 2, 3)).astype(np.float32)}
        same(request.infer(x), theirs.step(x))
    assert [v.state.shape for v in request.query_state()] == [(1, 2, 6)] * 2


def test_requests_have_states_of_their_own_and_hand_them_over() -> None:
    compiled = tunewright.Core().compile_model(DECODER, "CPU", stateful="auto")
    rng, requests = np.random.default_rng(0), [compiled.create_infer_request() for _ in range(3)]
    others = [decoding() for _ in requests]
    for step in range(8):
        for at in rng.permutation(3):
            feeds = ids(rng, 1 + at if step == 0 else 1)
            same(requests[at].infer(feeds), others[at].step(feeds))
    # two continuations of one state, and one with its beams reordered
    for to, other in zip(requests[1:], others[1:], strict=True):
        other.states = dict(others[0].states)
        for mine, its in zip(requests[0].query_state(), to.query_state(), strict=True):
            its.state = mine.state
    for variable in requests[2].query_state():
        variable.state = variable.state[[1, 0]]
        others[2].states[variable.name] = others[2].states[variable.name][[1, 0]]
    for _ in range(5):
        for at in rng.permutation(3):
            feeds = ids(rng)
            same(requests[at].infer(feeds), others[at].step(feeds))


def test_a_state_that_is_set_is_copied_and_one_that_is_held_stays() -> None:
    rng, request, theirs = np.random.default_rng(0), request_of(), decoding()
    begin = rng.standard_normal((2, 4, 7, 8)).astype(np.float32)
    for variable in request.query_state():
        mine = begin.copy()
        variable.state = mine
        mine[...] = np.nan
        theirs.states[variable.name] = begin
    held = request.query_state()[0].state
    with pytest.raises(ValueError, match="read-only"):
        held[...] = 0
    for _ in range(4):
        feeds = ids(rng)
        same(request.infer(feeds), theirs.step(feeds))
        assert np.array_equal(held, begin)
    one = request.query_state()[0]
    one.reset()
    assert "past" in repr(one) and request.query_state()[1].state.shape == (2, 4, 11, 8)


def test_states_change_when_an_inference_ends_well() -> None:
    rng, request, theirs = np.random.default_rng(0), request_of(), decoding()
    for _ in range(3):
        feeds = ids(rng)
        same(request.infer(feeds), theirs.step(feeds))
        with pytest.raises(tunewright.TunewrightError):
            request.infer({"ids": np.array([[99], [1]])})  # there are 50 rows
        with pytest.raises(tunewright.InputError):
            request.infer({"ids": np.zeros((3, 1), np.int64)})  # of another batch


def test_inputs_in_every_way_and_memory_of_callers() -> None:
    rng, request, theirs = np.random.default_rng(0), request_of(), decoding()
    for way in (list, lambda feeds: feeds["ids"], dict):
        feeds = ids(rng)
        same(request.infer([feeds["ids"]] if way is list else way(feeds)), theirs.step(feeds))
    feeds = ids(rng)
    request.set_tensor("ids", feeds["ids"])
    same(request.infer(), theirs.step(feeds))
    mine = np.zeros((2, 1, 50), np.float32)
    same(request.infer(outputs={"logits": mine}), theirs.step(feeds))
    found = request.infer(remote=True)
    same({"logits": found["logits"].numpy()}, theirs.step(feeds))
    assert request.query_state()[0].state.shape == (2, 4, 6, 8)
    same(request.infer(), theirs.step(feeds))


def test_started_requests_and_what_is_refused_while_one_runs() -> None:
    compiled = tunewright.Core().compile_model(DECODER, "CPU", {"NUM_STREAMS": 2}, stateful="auto")
    rng, requests, others = np.random.default_rng(0), [compiled.create_infer_request() for _ in range(3)], []
    others = [decoding() for _ in requests]
    for step in range(6):
        feeds = [ids(rng, 4 if step == 0 else 1) for _ in requests]
        for request, given in zip(requests, feeds, strict=True):
            request.start_async(given)
        for request, other, given in zip(requests, others, feeds, strict=True):
            request.wait()
            same(request.results, other.step(given))
    entered, leave = threading.Event(), threading.Event()
    requests[0].set_callback(lambda request, data: (entered.set(), leave.wait(60)))
    requests[0].start_async(ids(rng))
    entered.wait(60)
    for refused in (requests[0].reset_state, lambda: requests[0].query_state()[0].state):
        with pytest.raises(tunewright.InputError, match="is running"):
            refused()
    leave.set()
    requests[0].wait()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_goes_on_with_its_own_state() -> None:
    from native.children import python

    code = """
import json, os
import numpy as np
import tunewright
from device.runtime.test_plan_templates import decoder
request = tunewright.Core().compile_model(decoder(), "CPU", stateful="auto").create_infer_request()
for _ in range(6):
    request.infer({"ids": np.ones((1, 1), np.int64)})
before = request.query_state()[0].state.copy()
child = os.fork()
if not child:
    for _ in range(3):
        request.infer({"ids": np.ones((1, 1), np.int64)})
    os._exit(0 if request.query_state()[0].state.shape[2] == 9 else 1)
_, status = os.waitpid(child, 0)
request.infer({"ids": np.full((1, 1), 7)})
now = request.query_state()[0].state
print(json.dumps([status, now.shape[2], bool(np.array_equal(now[:, :, :6], before))]))
"""
    assert python(code) == [0, 7, True]


def test_beams_that_the_model_reorders() -> None:
    """As exporters write a beam search: an input says which beam goes on with which past."""
    nodes = [
        helper.make_node("Gather", ["past", "beams"], ["ordered"], axis=0),
        helper.make_node("Concat", ["ordered", "x"], ["present"], axis=1),
        helper.make_node("ReduceSum", ["present", "axis"], ["y"], keepdims=0),
    ]
    given = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", size, 4]) for n, size in
             (("past", "past_rows"), ("x", "n"))]  # fmt: skip
    given.append(helper.make_tensor_value_info("beams", TensorProto.INT64, ["batch"]))
    made = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("y", "present")]
    axis = [numpy_helper.from_array(np.array([1]), "axis")]
    graph = helper.make_graph(nodes, "beams", given, made, axis)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8).SerializeToString()
    request, rng = request_of("CPU", model), np.random.default_rng(0)
    past = np.zeros((3, 0, 4), np.float32)
    for _ in range(12):
        x, beams = rng.standard_normal((3, 1, 4)).astype(np.float32), rng.integers(0, 3, 3)
        past = np.concatenate([past[beams], x], 1)
        same(request.infer({"x": x, "beams": beams}), {"y": past.sum(1)})
    assert np.array_equal(request.query_state()[0].state, past)


@native
def test_memory_is_that_of_the_caches() -> None:
    request, rng = request_of(), np.random.default_rng(0)
    for _ in range(200):
        request.infer(ids(rng))
    values = request._values.values()
    assert sum(v.base.nbytes for v in values) <= 4 * sum(v.nbytes for v in values)


# ---- which are states --------------------------------------------------------------------------------------------


def named(inputs: dict[str, list[Any]], outputs: dict[str, list[Any]], nodes: list[onnx.NodeProto]) -> bytes:
    given = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n, shape in inputs.items()]
    made = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n, shape in outputs.items()]
    graph = helper.make_graph(nodes, "g", given, made)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8).SerializeToString()


def test_states_are_found_by_operators_and_by_names() -> None:
    nodes = [
        helper.make_node("Concat", ["a", "x"], ["b"], axis=1),  # by what makes it
        helper.make_node("Relu", ["past_key_values.0.key"], ["present.0.key"]),
        helper.make_node("Relu", ["cache_in"], ["cache_out"]),
        helper.make_node("Relu", ["state"], ["stateN"]),
        helper.make_node("Relu", ["other"], ["result"]),
    ]
    open_ = {"a": ["n", "p"], "x": ["n", "m"], "past_key_values.0.key": ["n", 3], "cache_in": [4], "state": [2, 3],
             "other": [5]}  # fmt: skip
    made = {"b": ["n", "q"], "present.0.key": ["n", 3], "cache_out": [4], "stateN": [2, 3], "result": [5]}
    model = tunewright.Core().read_model(named(open_, made, nodes)).make_stateful()
    assert model.states == {
        "a": "b", "past_key_values.0.key": "present.0.key", "cache_in": "cache_out", "state": "stateN"
    }  # fmt: skip
    assert not tunewright.Core().read_model(DECODER).states, "nothing is a state that nobody asked for"


@pytest.mark.parametrize(
    ("states", "what"),
    [
        ({"past": "k0"}, "there is no input 'past'"),
        ({"past_k0": "present"}, "there is no output 'present'"),
        ({"past_k0": "logits"}, r"the input is float32\[batch,4,past,8\], the output"),
        ({"past_k0": "k0", "past_v0": "k0"}, "continues 'past_k0' already"),
        ({"ids": "logits"}, "the input is int64"),
        ("past", "neither 'auto' nor a mapping"),
    ],
)
def test_wrong_declarations_say_what_is_wrong(states: Any, what: str) -> None:
    with pytest.raises(tunewright.InputError, match=what):
        tunewright.Core().compile_model(DECODER, "CPU.HOST", stateful=states)


def test_a_model_without_states_says_so() -> None:
    model = named({"x": [3]}, {"y": [3]}, [helper.make_node("Relu", ["x"], ["y"])])
    with pytest.raises(tunewright.InputError, match="no states were found") as told:
        tunewright.Core().compile_model(model, stateful="auto")
    assert "the inputs are x" in str(told.value)
    request = tunewright.Core().compile_model(model).create_infer_request()
    request.reset_state()
    assert request.query_state() == []


def test_wrong_uses_say_what_to_do() -> None:
    compiled = tunewright.Core().compile_model(DECODER, "CPU", stateful="auto")
    request, one = compiled.create_infer_request(), np.ones((2, 1), np.int64)
    assert list(compiled.inputs) == ["ids"] and list(compiled.outputs) == ["logits"] and compiled.states == PAIRS
    cases = [
        (lambda: compiled({"ids": one}), "create_infer_request"),
        (lambda: tunewright.AsyncInferQueue(compiled), "make a request for each sequence"),
        (lambda: request.infer({"ids": one, "past_k0": one}), "'past_k0' is a state"),
        (lambda: request.infer({"id": one}), "there is no input 'id'"),
        (lambda: request.infer({}), "is missing"),
        (lambda: request.infer([one, one]), "takes 1"),
        (lambda: request.infer({"ids": one}, outputs={"k0": one}), "there is no output 'k0'"),
        (lambda: request.set_tensor("past_k0", one), "there is no tensor 'past_k0'"),
        (lambda: setattr(request.query_state()[0], "state", one), "takes float32, not int64"),
        (lambda: setattr(request.query_state()[0], "state", np.zeros((2, 4, 8), np.float32)), "not shape"),
        (lambda: setattr(request.query_state()[0], "state", np.zeros((2, 5, 1, 8), np.float32)), "state 'past_k0'"),
    ]
    for wrong, what in cases:
        with pytest.raises(tunewright.InputError, match=what):
            wrong()
    with pytest.raises(tunewright.DeviceError, match="runs requests together"):
        tunewright.Core().compile_model(DECODER, "BATCH:CPU(2)", stateful="auto")


def test_a_size_that_nobody_knows_is_asked_for() -> None:
    nodes = [helper.make_node("Add", ["x", "state"], ["stateN"])]
    model = named({"x": [1, 3], "state": ["n", 3]}, {"stateN": ["n", 3]}, nodes)
    request = request_of("CPU.HOST", model)
    x = {"x": np.ones((1, 3), np.float32)}
    with pytest.raises(tunewright.InputError, match="size 'n' is not known"):
        request.infer(x)
    request.query_state()[0].state = np.zeros((2, 3), np.float32)
    for expected in (1, 2, 3):
        assert request.infer(x) == {} and (request.query_state()[0].state == np.full((2, 3), expected)).all()
