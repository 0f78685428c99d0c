"""Caches that grow in place: every continuation is right, and nothing that a caller holds changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper

import tunewright
from device.runtime.test_plan_templates import FLOAT, INT64, Build, decoder
from native.harness import native

ort = pytest.importorskip("onnxruntime")
pytestmark = native
MODEL = decoder()
State = dict[str, np.ndarray[Any, Any]]


class Pair:
    """Our request and ONNX Runtime, each with a state of its own."""

    def __init__(self, batch: int = 2, model: bytes = MODEL, groups: int = 4, **config: Any) -> None:
        self.compiled = tunewright.Core().compile_model(model, "CPU", config)
        self.request = self.compiled.create_infer_request()
        self.session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
        self.names = [o.name for o in self.session.get_outputs()]
        empty = np.zeros((batch, groups, 0, 8), np.float32)
        self.empty = {name: empty for name in self.compiled.inputs if name != "ids"}
        self.rng = np.random.default_rng(0)

    def ids(self, count: int = 1) -> np.ndarray[Any, Any]:
        batch = next(iter(self.empty.values())).shape[0]
        return self.rng.integers(0, 50, (batch, count))

    def step(self, ours: State, theirs: State, ids: np.ndarray[Any, Any], request: Any = None) -> tuple[State, State]:
        """One inference of both from their states; the states behind it."""
        expected = dict(zip(self.names, self.session.run(None, {"ids": ids, **theirs}), strict=True))
        got = (request or self.request).infer({"ids": ids, **ours})
        for name in self.names:
            np.testing.assert_allclose(got[name], expected[name], rtol=0, atol=1e-4, err_msg=name)
        after = [{f"past_{name}": made[name] for name in self.names if name != "logits"} for made in (got, expected)]
        return after[0], after[1]

    def run(self, steps: int, prompt: int = 5) -> tuple[State, State]:
        ours, theirs = self.step(self.empty, self.empty, self.ids(prompt))
        for _ in range(steps):
            ours, theirs = self.step(ours, theirs, self.ids())
        return ours, theirs


def address(array: np.ndarray[Any, Any]) -> int:
    return array.__array_interface__["data"][0]


def test_rows_are_appended_where_the_others_are() -> None:
    pair = Pair()
    ours, theirs = pair.run(3)
    where = {name: address(array) for name, array in ours.items()}
    moved = 0
    for _ in range(150):
        ours, theirs = pair.step(ours, theirs, pair.ids())
        now = {name: address(array) for name, array in ours.items()}
        moved += now != where
        where = now
    assert moved <= 3  # each time twice as large
    assert len(pair.compiled.program.plans) <= 5


def test_old_views_stay_and_can_be_continued_again() -> None:
    pair = Pair()
    seen = [pair.run(4)]
    for _ in range(6):
        seen.append(pair.step(*seen[-1], pair.ids()))
    kept = [{name: array.copy() for name, array in ours.items()} for ours, _ in seen]
    for at in (3, 0, 6, 3, 5):  # beams that begin anywhere
        ours, theirs = seen[at]
        for _ in range(3):
            ours, theirs = pair.step(ours, theirs, pair.ids())
    for (ours, _), before in zip(seen, kept, strict=True):
        assert all(np.array_equal(ours[name], before[name]) for name in ours)


def test_two_continuations_of_one_state_in_turns() -> None:
    pair = Pair()
    first = second = pair.run(4)
    other = pair.compiled.create_infer_request()
    for _ in range(10):
        first = pair.step(*first, pair.ids())
        second = pair.step(*second, pair.ids(), other)


def test_reordered_beams_and_copies() -> None:
    pair = Pair()
    ours, theirs = pair.run(4)
    for step in range(12):
        ours, theirs = pair.step(ours, theirs, pair.ids())
        if step % 3 == 0:
            ours, theirs = ({k: a[[1, 0]] for k, a in state.items()} for state in (ours, theirs))
        elif step % 3 == 1:
            ours = {k: np.ascontiguousarray(a) for k, a in ours.items()}
        else:
            ours = {k: a[:, :, :-2] for k, a in ours.items()}
            theirs = {k: a[:, :, :-2] for k, a in theirs.items()}


def test_states_of_one_model_are_mixed() -> None:
    pair = Pair()
    first, second = pair.run(4), pair.run(4)
    mixed = [{k: (a if k.endswith("0") else b[k]) for k, a in one.items()}
             for one, b in zip(first, second, strict=True)]  # fmt: skip
    for _ in range(4):
        mixed = list(pair.step(mixed[0], mixed[1], pair.ids()))


def test_several_tokens_at_once_and_asynchronously() -> None:
    pair = Pair()
    ours, theirs = pair.run(2)
    for count in (3, 1, 7, 1, 1, 20, 1):
        ours, theirs = pair.step(ours, theirs, pair.ids(count))
    ids = pair.ids()
    expected = pair.session.run(None, {"ids": ids, **theirs})[0]
    pair.request.start_async({"ids": ids, **ours})
    pair.request.wait()
    np.testing.assert_allclose(pair.request.results["logits"], expected, rtol=0, atol=1e-4)


def test_views_of_views() -> None:
    """All rows under another name are continued in place; parts that begin behind the first row are copied."""
    pair = Pair()
    ours, theirs = pair.run(8)
    where = {name: address(array) for name, array in ours.items()}
    ours, theirs = pair.step({name: array[:] for name, array in ours.items()}, theirs, pair.ids())
    assert where == {name: address(array) for name, array in ours.items()}
    for part in (np.s_[:, :, 2:], np.s_[::-1], np.s_[:1], np.s_[:, :, 1:-1]):
        ours, theirs = ({k: a[part] for k, a in state.items()} for state in (ours, theirs))
        ids = pair.ids()[: len(ours["past_k0"])]
        ours, theirs = pair.step(ours, theirs, ids)
        ours, theirs = pair.step(ours, theirs, ids)


def test_newest_states_that_another_request_continues_first() -> None:
    pair = Pair()
    ours, theirs = pair.run(6)
    other = pair.compiled.create_infer_request()
    its = pair.step(ours, theirs, pair.ids(), other)
    kept = {name: array.copy() for name, array in its[0].items()}
    for _ in range(3):
        ours, theirs = pair.step(ours, theirs, pair.ids())
    assert all(np.array_equal(its[0][name], kept[name]) for name in kept)
    for _ in range(3):
        its = pair.step(*its, pair.ids(), other)


def test_a_step_that_fails_can_be_repeated() -> None:
    pair = Pair()
    ours, theirs = pair.run(6)
    for _ in range(3):
        with pytest.raises(tunewright.errors.ExecutionError):
            pair.request.infer({"ids": pair.ids() + 1000, **ours})
        ours, theirs = pair.step(ours, theirs, pair.ids())
        ours, theirs = pair.step(ours, theirs, pair.ids())


def test_sizes_are_computed_once_for_a_token() -> None:
    pair = Pair()
    ours, theirs = pair.run(12)
    plan = pair.request._plan()
    assert plan is not None and plan.template is not None
    formulas, seen = plan.template.formulas, list[Any]()
    compiled = formulas.compiled
    assert compiled is not None
    formulas.compiled = lambda sizes: (seen.append(tuple(sizes)), compiled(sizes))[1]
    for _ in range(4):
        ours, theirs = pair.step(ours, theirs, pair.ids())
    assert len(seen) == len(set(seen)) == 4


def test_what_a_caller_holds_cannot_be_written_to() -> None:
    ours, _ = Pair().run(3)
    with pytest.raises(ValueError, match="read-only"):
        ours["past_k0"][...] = 0


def test_counters_and_outputs_of_the_callers() -> None:
    pair = Pair(PERF_COUNT="YES")
    ours, theirs = pair.run(6)
    assert any(row.kernel == "opencl.append" for row in pair.request.get_profiling_info())
    ids = pair.ids()
    expected = dict(zip(pair.names, pair.session.run(None, {"ids": ids, **theirs}), strict=True))
    mine = np.zeros_like(expected["k0"])
    got = pair.request.infer({"ids": ids, **ours}, outputs={"k0": mine})
    np.testing.assert_allclose(mine, expected["k0"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(got["v1"], expected["v1"], rtol=0, atol=1e-4)


def test_memory_is_that_of_the_caches() -> None:
    pair = Pair()
    ours, theirs = pair.run(3)
    for _ in range(60):
        ours, theirs = pair.step(ours, theirs, pair.ids())
    used = sum(a.nbytes for a in ours.values())
    held = sum(a.base.nbytes for a in ours.values())
    assert held <= 4 * used


# ---- heads that share keys ---------------------------------------------------------------------------------------


def repeated(how: str, layers: int = 2, width: int = 32, heads: int = 4, groups: int = 2) -> bytes:
    """A decoder that repeats keys and values for the heads that share them, as exporters write it."""
    b, inputs = Build(0), {"ids": (INT64, ["batch", "n"])}
    x, outputs, each = b.add("Gather", b.weight(50, width), "ids"), [], width // heads
    for layer in range(layers):
        parts = []
        for name in "qkv":
            count = heads if name == "q" else groups
            made = b.add("Reshape", b.add("MatMul", x, b.weight(width, count * each)), b.ints(0, 0, count, each))
            made = b.add("Transpose", made, perm=[0, 2, 1, 3])
            if name != "q":
                inputs[f"past_{name}{layer}"] = (FLOAT, ["batch", groups, "past", each])
                b.nodes.append(helper.make_node("Concat", [f"past_{name}{layer}", made], [f"{name}{layer}"], axis=2))
                made = f"{name}{layer}"
                outputs.append(made)
                batch, rows = b.size(made, 0), b.size(made, 2)
                made = b.add("Unsqueeze", made, b.ints(2))
                if how == "expand":
                    made = b.add("Expand", made, b.shape(batch, groups, heads // groups, rows, each))
                else:
                    made = b.add("Tile", made, b.ints(1, 1, heads // groups, 1, 1))
                made = b.add("Reshape", made, b.shape(batch, heads, rows, each))
            parts.append(made)
        q, k, v = parts
        scores = b.add("Mul", b.add("MatMul", q, b.add("Transpose", k, perm=[0, 1, 3, 2])), b.const(0.35))
        mixed = b.add("Transpose", b.add("MatMul", b.add("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
        mixed = b.add("Reshape", mixed, b.ints(0, 0, width))
        x = b.add("Add", x, b.add("MatMul", mixed, b.weight(width, width)))
    given = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()]
    b.nodes.append(helper.make_node("MatMul", [x, b.weight(width, 50)], ["logits"]))
    made = [helper.make_tensor_value_info(name, FLOAT, None) for name in ["logits", *outputs]]
    graph = helper.make_graph(b.nodes, "decoder", given, made, b.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9).SerializeToString()


def steps_of(compiled: Any) -> list[tuple[str, str]]:
    """(operation, kernel) of what the plan for further tokens runs."""
    plan = next(p for p in reversed(compiled.program.plans) if p.template is not None and p.template.states)
    return [(s.node.op, s.kernel.name) for s in plan.steps if not s.optimized_out and s.kernel is not None]


@pytest.mark.parametrize("how", ["expand", "tile"])
@pytest.mark.parametrize("batch", [1, 2])
def test_heads_that_share_keys_read_them_in_the_cache(how: str, batch: int) -> None:
    pair = Pair(batch, repeated(how), groups=2)
    ours, theirs = pair.run(60)
    ours, theirs = pair.step(ours, theirs, pair.ids(2))
    for _ in range(10):
        ours, theirs = pair.step(ours, theirs, pair.ids())
    made = steps_of(pair.compiled)
    assert {op for op, _ in made} == {"Gather", "MatMul", "tunewright::Append", "tunewright::StridedAttention"}, made
    assert len(pair.compiled.program.plans) <= 5


def test_other_batches_are_of_the_same_class() -> None:
    pair = Pair(2, repeated("expand"), groups=2)
    pair.run(4)
    plans = len(pair.compiled.program.plans)
    for batch in (3, 7, 12):
        pair.empty = {name: np.zeros((batch, 2, 0, 8), np.float32) for name in pair.empty}
        pair.run(4)
    assert len(pair.compiled.program.plans) <= plans + 1  # products of many rows may have another kernel
