"""Operators with caches of their own: the same as ONNX Runtime's, and their caches grow in place."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import tunewright
from device.runtime.test_growing_caches import steps_of
from device.runtime.test_plan_templates import FLOAT, INT64, Build
from native.harness import native
from tunewright.ops.internal.append import APPEND
from tunewright.testing.kernelcheck import Case, check

ort = pytest.importorskip("onnxruntime")
pytestmark = native
INT32 = TensorProto.INT32
WIDTH, HEADS, EACH, LAYERS = 64, 4, 16, 2
IN_PLACE = {"tunewright::Append", "tunewright::StridedAttention"}
Feeds = dict[str, np.ndarray[Any, Any]]


def decoder(op: str, groups: int, room: int = 0, **options: Any) -> bytes:
    """Two layers of an attention with past keys and values, and a mask of the tokens there are."""
    b = Build(0)
    past: list[Any] = ["batch", groups, room or "past", EACH]
    inputs: dict[str, Any] = {"ids": (INT64, ["batch", "n"]), "mask": (INT64, ["batch", "total"])}
    x, outputs = b.add("Gather", b.weight(50, WIDTH), "ids"), []
    for layer in range(LAYERS):
        widths = [HEADS * EACH, groups * EACH, groups * EACH]
        q, k, v = (b.add("MatMul", x, b.weight(WIDTH, width)) for width in widths)
        names, made = ([f"{before}{n}{layer}" for n in "kv"] for before in ("past_", ""))
        inputs |= dict.fromkeys(names, (FLOAT, past))
        y, domain = f"y{layer}", "" if op == "Attention" else "com.microsoft"
        given, attrs = _attention(b, op, (q, k, v), names, groups, options)
        b.nodes.append(helper.make_node(op, given, [y, *made], domain=domain, **attrs))
        outputs += made
        x = b.add("Add", x, b.add("MatMul", y, b.weight(WIDTH, WIDTH)))
    b.nodes.append(helper.make_node("MatMul", [x, b.weight(WIDTH, 50)], ["logits"]))
    given_infos = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()]
    infos = [helper.make_tensor_value_info(name, FLOAT, None) for name in ["logits", *outputs]]
    graph = helper.make_graph(b.nodes, "decoder", given_infos, infos, b.weights)
    opsets = [helper.make_opsetid("", 23 if op == "Attention" else 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def _attention(
    b: Build, op: str, parts: tuple[str, str, str], names: list[str], groups: int, options: dict[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    options = dict(options)
    if options.pop("masked", False):
        seen = b.add("Unsqueeze", b.add("Cast", "mask", to=TensorProto.BOOL), b.ints(1, 2))
        bias = b.add("Where", seen, b.const(0.5), b.const(-3))
        rows = b.shape(b.size("ids", 0), 1, b.size("ids", 1), b.size("mask", 1))
        bias = b.add("Expand", bias, rows)
    else:
        bias = ""
    if op == "Attention":
        return [*parts, bias, *names], {"q_num_heads": HEADS, "kv_num_heads": groups, "is_causal": 1, **options}
    if op == "MultiHeadAttention":
        padding = b.add("Cast", "mask", to=INT32)
        attrs = {"num_heads": HEADS, "unidirectional": 1, **options}
        return [*parts, b.weight(3 * WIDTH), padding, bias, *names], attrs
    given = dict(options)
    q, k, v = parts
    if given.pop("packed", False):
        q, k, v = b.add("Concat", q, k, v, axis=2), "", ""
    ends = b.add("Sub", b.add("ReduceSum", "mask", b.ints(1), keepdims=0), b.const(1, np.int64))
    total = b.add("Cast", b.add("Gather", b.add("Shape", "mask"), b.const(1, np.int64)), to=INT32)
    more = [b.add("Cast", ends, to=INT32), total]
    if given.get("do_rotary"):
        angles = np.arange(200)[:, None] / 10.0 ** np.arange(EACH // 2)
        more += [b.const(np.cos(angles)), b.const(np.sin(angles))]
    if bias:
        more += [""] * (5 - len(more)) + [bias]
    return [q, k, v, *names, *more], {"num_heads": HEADS, "kv_num_heads": groups, **given}


class Both:
    """Ours and ONNX Runtime's, each with caches of its own."""

    def __init__(self, model: bytes, batch: int, groups: int, room: int = 0) -> None:
        self.compiled = tunewright.Core().compile_model(model, "CPU")
        self.request = self.compiled.create_infer_request()
        self.session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
        self.names = [o.name for o in self.session.get_outputs()]
        self.used = {i.name for i in self.session.get_inputs()}
        empty = np.zeros((batch, groups, room, EACH), np.float32)
        self.ours = self.theirs = {f"past_{name}": empty for name in self.names[1:]}
        self.rng, self.batch = np.random.default_rng(0), batch

    def step(self, count: int, mask: np.ndarray[Any, Any], tokens: Any = None) -> None:
        """``tokens``: of the new ones those that count, by sequence; ``mask`` says where sequences end."""
        feeds = {"ids": self.rng.integers(0, 50, (self.batch, count)), "mask": mask}
        feeds = {name: value for name, value in feeds.items() if name in self.used}
        expected = dict(zip(self.names, self.session.run(None, {**feeds, **self.theirs}), strict=True))
        got = self.request.infer({**feeds, **self.ours})
        for b, end in enumerate(self.ends(mask)):
            new = count if tokens is None else tokens[b]
            close(got["logits"][b, :new], expected["logits"][b, :new], "logits")
            for name in self.names[1:]:  # what is behind the end of a sequence is nobody's
                close(got[name][b, :, :end], expected[name][b, :, :end], name)
                assert got[name].shape == expected[name].shape
        self.ours = {f"past_{name}": got[name] for name in self.names[1:]}
        self.theirs = {f"past_{name}": expected[name] for name in self.names[1:]}

    def ends(self, mask: np.ndarray[Any, Any]) -> list[int]:
        """Rows of each sequence: what a mask leaves out in front of the last one is still there."""
        return [int(np.flatnonzero(row)[-1]) + 1 for row in mask]


def close(got: Any, expected: Any, name: str) -> None:
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4, err_msg=name)


MASKED = [("Attention", 2), ("MultiHeadAttention", 4), ("GroupQueryAttention", 2)]


@pytest.mark.parametrize(("op", "groups"), MASKED)
def test_masks_and_biases(op: str, groups: int) -> None:
    both, total = Both(decoder(op, groups, masked=True), 2, groups), 0
    for count in (5, *[1] * 20):
        total += count
        mask = np.ones((2, total), np.int64)
        if op != "GroupQueryAttention":  # which counts them
            mask[1, :3] = 0  # padding in front
        both.step(count, mask, [count, 0] if count > 1 else None)  # a row that sees nothing is nobody's
    assert {op for op, _ in steps_of(both.compiled)} >= IN_PLACE


CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("Attention", 4, {}),
    ("Attention", 2, {"scale": 0.2, "softcap": 3.0}),
    ("MultiHeadAttention", 4, {}),
    ("MultiHeadAttention", 4, {"scale": 0.3}),
    ("GroupQueryAttention", 2, {}),
    ("GroupQueryAttention", 4, {"do_rotary": 1}),
    ("GroupQueryAttention", 2, {"do_rotary": 1, "rotary_interleaved": 1, "packed": True}),
    ("GroupQueryAttention", 1, {"local_window_size": 6, "softcap": 4.0, "scale": 0.4}),
]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("op", "groups", "options"), CASES)
def test_decoders_of_all_operators(op: str, groups: int, options: dict[str, Any], batch: int) -> None:
    both, total = Both(decoder(op, groups, **options), batch, groups), 0
    for count in (5, *[1] * 70):
        total += count
        both.step(count, np.ones((batch, total), np.int64))
    made = {op for op, _ in steps_of(both.compiled)}
    in_place = IN_PLACE if batch * groups > 1 else {"tunewright::Append", "Attention"}  # one piece needs no strides
    assert made >= in_place and f"com.microsoft::{op}" not in made and "Slice" not in made, made
    assert len(both.compiled.program.plans) <= 4
    held = both.ours["past_k0"]
    assert held.base is not None and held.base.nbytes <= 4 * held.nbytes


@pytest.mark.parametrize("options", [{}, {"do_rotary": 1}])
def test_sequences_that_end_in_different_places(options: dict[str, Any]) -> None:
    """A prompt with padding behind shorter sequences; each goes on where it ends."""
    both = Both(decoder("GroupQueryAttention", 2, **options), 3, 2)
    lengths = np.array([6, 2, 4])
    both.step(6, (np.arange(6) < lengths[:, None]).astype(np.int64), lengths)
    for total in range(7, 40):
        lengths = lengths + 1
        both.step(1, (np.arange(total) < lengths[:, None]).astype(np.int64))


@pytest.mark.parametrize("options", [{}, {"do_rotary": 1, "packed": True}])
def test_caches_that_have_room_from_the_beginning(options: dict[str, Any]) -> None:
    both = Both(decoder("GroupQueryAttention", 2, room=40, **options), 2, 2, room=40)
    lengths = np.array([5, 3])
    both.step(5, (np.arange(5) < lengths[:, None]).astype(np.int64), lengths)
    for total in range(6, 40):
        lengths = lengths + 1
        both.step(1, (np.arange(total) < lengths[:, None]).astype(np.int64))
    assert "com.microsoft::GroupQueryAttention" not in {s.node.op for s in both.compiled.program.plans[-1].steps}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.bool_])
def test_the_kernel_computes_what_the_reference_does(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    for batch, groups, past, new, inner in [(1, 1, 0, 1, 1), (3, 2, 5, 1, 7), (2, 5, 33, 4, 16), (4, 1, 300, 16, 3)]:
        shapes = (batch, groups, past, inner), (batch, groups, new, inner)
        arrays = [rng.integers(-9, 9, shape).astype(dtype) for shape in shapes]
        for rows, ends in [(past + new, None), (past + new, past + new), (past, past)]:
            given, attrs = list(arrays), {"axis": 2, "rows": rows, "capacity": rows}  # spare rows hold anything
            if ends is not None:
                if rows < new:
                    continue
                given.append(rng.integers(new, ends + 1, batch))
            assert not check(Case(APPEND, given, attrs), "opencl.append", 1), (shapes, attrs)


def test_a_length_that_cannot_be_is_reported() -> None:
    both = Both(decoder("GroupQueryAttention", 2), 2, 2)
    both.step(5, np.ones((2, 5), np.int64))
    both.step(1, np.ones((2, 6), np.int64))
    wrong = np.ones((2, 7), np.int64)
    wrong[1] = -2
    with pytest.raises(tunewright.ExecutionError, match="out of range"):
        both.request.infer({"ids": np.ones((2, 1), np.int64), "mask": wrong, **both.ours})


@pytest.mark.parametrize("op", ["Attention", "GroupQueryAttention"])
def test_two_continuations_and_reordered_beams(op: str) -> None:
    both = Both(decoder(op, 2), 2, 2)
    both.step(5, np.ones((2, 5), np.int64))
    both.step(1, np.ones((2, 6), np.int64))
    ours, theirs = both.ours, both.theirs
    kept = {name: array.copy() for name, array in ours.items()}
    for turn in range(3):
        both.ours, both.theirs = ours, theirs
        if turn == 2:
            both.ours, both.theirs = ({n: a[[1, 0]] for n, a in state.items()} for state in (ours, theirs))
        for total in range(7, 12):
            both.step(1, np.ones((2, total), np.int64))
    assert all(np.array_equal(ours[name], kept[name]) for name in kept)


def test_states_of_a_model_with_a_mask_that_grows() -> None:
    model = decoder("GroupQueryAttention", 2)
    both = Both(model, 2, 2)
    request = tunewright.Core().compile_model(model, stateful="auto").create_infer_request()
    assert [v.name for v in request.query_state()] == ["past_k0", "past_v0", "past_k1", "past_v1"]
    for total in (5, *range(6, 20)):
        mask = np.ones((2, total), np.int64)
        feeds = {"ids": both.rng.integers(0, 50, (2, 5 if total == 5 else 1)), "mask": mask}
        expected = dict(zip(both.names, both.session.run(None, {**feeds, **both.theirs}), strict=True))
        close(request.infer(feeds)["logits"], expected["logits"], "logits")
        both.theirs = {f"past_{name}": expected[name] for name in both.names[1:]}


# ---- caches with room ----------------------------------------------------------------------------------------------


def scattering(batch: Any, room: int = 40) -> bytes:
    """A layer whose cache is filled by TensorScatter; the position is an input."""
    b = Build(1)
    x = b.add("Gather", b.weight(50, WIDTH), "ids")
    q, k, v = (b.add("MatMul", x, b.weight(WIDTH, WIDTH)) for _ in "qkv")
    apart = [b.add("Transpose", b.add("Reshape", y, b.ints(0, 0, HEADS, EACH)), perm=[0, 2, 1, 3]) for y in (q, k, v)]
    for name, new in zip("kv", apart[1:], strict=True):
        b.nodes.append(helper.make_node("TensorScatter", [f"past_{name}", new, "at"], [name], axis=2))
    lengths = b.add("Add", "at", b.const([1], np.int64))
    mixed = b.add("Attention", apart[0], "k", "v", "", "", "", lengths, is_causal=1)
    mixed = b.add("Reshape", b.add("Transpose", mixed, perm=[0, 2, 1, 3]), b.ints(0, 0, WIDTH))
    b.nodes.append(helper.make_node("MatMul", [mixed, b.weight(WIDTH, 50)], ["logits"]))
    inputs = {"ids": (INT64, [batch, 1]), "at": (INT64, [batch])}
    inputs |= dict.fromkeys(("past_k", "past_v"), (FLOAT, [batch, HEADS, room, EACH]))
    given = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()]
    made = [helper.make_tensor_value_info(name, FLOAT, None) for name in ("logits", "k", "v")]
    graph = helper.make_graph(b.nodes, "scattering", given, made, b.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11).SerializeToString()


def depth(array: Any) -> int:
    """How many arrays keep each other alive."""
    found = 0
    while isinstance(array, np.ndarray):
        array, found = array.base, found + 1
    return found


@pytest.mark.parametrize("batch", [2, "batch"])
def test_a_stateful_request_writes_into_its_cache(batch: Any) -> None:
    model, rng = scattering(batch), np.random.default_rng(0)
    host = tunewright.Core().compile_model(model, "CPU.HOST").create_infer_request()
    plain = tunewright.Core().compile_model(model, "CPU").create_infer_request()
    request = tunewright.Core().compile_model(model, "CPU", stateful="auto").create_infer_request()
    zeros = {name: np.zeros((2, HEADS, 40, EACH), np.float32) for name in ("past_k", "past_v")}
    theirs, ours, where, held = dict(zeros), dict(zeros), set(), []
    for step in range(30):
        feeds = {"ids": rng.integers(0, 50, (2, 1)), "at": np.array([step, 29 - step])}
        before = {name: value.copy() for name, value in ours.items()}
        expected, got = host.infer({**feeds, **theirs}), plain.infer({**feeds, **ours})
        assert all(np.array_equal(ours[name], before[name]) for name in ours), "what a caller holds does not change"
        mine = request.infer(feeds)
        theirs, ours = ({f"past_{n}": made[n] for n in "kv"} for made in (expected, got))
        close(got["logits"], expected["logits"], "logits")
        assert np.array_equal(mine["logits"], got["logits"]), "written in place or copied: the same bits"
        where.add(request._values["past_k"].__array_interface__["data"][0])
        if step in (10, 20):  # who looks at a state keeps what he saw
            held.append([(v.state, v.state.copy()) for v in request.query_state()])
    assert len(where) <= 4 and depth(request._values["past_k"]) <= 3
    assert all(np.array_equal(seen, copy) for one in held for seen, copy in one)
    for variable in request.query_state():
        close(variable.state, theirs[variable.name], variable.name)


def test_a_cache_with_room_after_a_mistake() -> None:
    request = tunewright.Core().compile_model(scattering(2), "CPU", stateful="auto").create_infer_request()
    other = tunewright.Core().compile_model(scattering(2), "CPU", stateful="auto").create_infer_request()
    for step in range(6):
        feeds = {"ids": np.full((2, 1), step), "at": np.full(2, step)}
        with pytest.raises(tunewright.ExecutionError, match="out of range"):
            request.infer({**feeds, "at": np.array([step, 40])})
        assert np.array_equal(request.infer(feeds)["logits"], other.infer(feeds)["logits"])


def test_grouped_queries_of_a_stateful_request_write_into_their_cache() -> None:
    both = Both(decoder("GroupQueryAttention", 2, room=40, do_rotary=1), 2, 2, room=40)
    request = (
        tunewright.Core()
        .compile_model(decoder("GroupQueryAttention", 2, room=40, do_rotary=1), "CPU", stateful="auto")
        .create_infer_request()
    )
    where = set()
    for total in (5, *range(6, 40)):
        count, mask = 5 if total == 5 else 1, np.ones((2, total), np.int64)
        feeds = {"ids": both.rng.integers(0, 50, (2, count)), "mask": mask}
        expected = dict(zip(both.names, both.session.run(None, {**feeds, **both.theirs}), strict=True))
        close(request.infer(feeds)["logits"], expected["logits"], "logits")
        both.theirs = {f"past_{name}": expected[name] for name in both.names[1:]}
        where.add(request._values["past_k0"].__array_interface__["data"][0])
    assert len(where) <= 3


@pytest.mark.parametrize("config", [{"SHAPE_TEMPLATES": "NO"}, {"JOIN_LAUNCHES": "NO"}, {"PERF_COUNT": "YES"}], ids=str)
def test_states_with_other_settings(config: dict[str, str]) -> None:
    """Where plans are for one shape, steps are launched one by one or counted, results are the same."""
    for model in (decoder("GroupQueryAttention", 2, room=40), decoder("Attention", 2), scattering(2)):
        usual, other = (tunewright.Core().compile_model(model, "CPU", way, stateful="auto") for way in ({}, config))
        one, two, rng = usual.create_infer_request(), other.create_infer_request(), np.random.default_rng(0)
        for total in range(1, 9):
            feeds = {"ids": rng.integers(0, 50, (2, 1)), "mask": np.ones((2, total), np.int64),
                     "at": np.full(2, total - 1)}  # fmt: skip
            feeds = {name: value for name, value in feeds.items() if name in usual.inputs}
            close(two.infer(feeds)["logits"], one.infer(feeds)["logits"], "logits")


@pytest.mark.parametrize("make", [lambda: decoder("GroupQueryAttention", 2), lambda: scattering(2)])
def test_many_sequences_on_threads_of_their_own(make: Any) -> None:
    compiled = tunewright.Core().compile_model(make(), "CPU", stateful="auto")

    def sequence(seed: int) -> list[Any]:
        request, rng, made = compiled.create_infer_request(), np.random.default_rng(seed), []
        for total in range(1, 30):
            feeds = {"ids": rng.integers(0, 50, (2, 1)), "mask": np.ones((2, total), np.int64),
                     "at": np.full(2, total - 1)}  # fmt: skip
            feeds = {name: value for name, value in feeds.items() if name in compiled.inputs}
            made.append(request.infer(feeds)["logits"].copy())
        return made

    alone = [sequence(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(sequence, range(4)))
    for one, other in zip(alone, together, strict=True):
        for a, b in zip(one, other, strict=True):
            close(b, a, "logits")
