"""Sequences that a loop appends to: as ONNX Runtime joins them, and scan outputs where that is the same."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import parser

from tunewright import Core

ort = pytest.importorskip("onnxruntime")

TEXT = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[2,3] x, int64 n) => (float[2,3] y, float[{rank}] z{more})
{{
    t = Constant <value = bool {{1}}> ()
    e = SequenceEmpty ()
    {before}
    s, y = Loop (n, t, e, x) <body = b (int64 i, bool go, seq(float[2,3]) s0, float[2,3] x0)
        => (bool on, seq(float[2,3]) s1, float[2,3] x1)
    {{
        on = Identity(go)
        x1 = Tanh(x0)
        v = Neg({item})
        {insert}
    }}>
    z = ConcatFromSequence <axis = {axis}, new_axis = {new}> (s)
    {after}
}}
"""


def check(collected: bool = True, trips: tuple[int, ...] = (1, 2, 7), **parts: object) -> None:
    """The results are those of ONNX Runtime; ``collected``: without a sequence."""
    insert = "s1 = SequenceInsert(s0, v)"
    parts = {"axis": 0, "new": 1, "item": "x1", "insert": insert, "more": "", "before": "", "after": ""} | parts
    text = TEXT.format(rank="a,b,c" if parts["new"] else "a,b", **parts)
    model = parser.parse_model(text)
    core = Core({"ENABLE_LOOP_UNROLLING": "NO"})
    one = core.compile_model(core.read_model(model), "CPU")
    ops = {node.op for graph in one.program.graph.walk() for node in graph.nodes}
    assert ("ConcatFromSequence" not in ops) == collected, ops
    session, request = ort.InferenceSession(model.SerializeToString()), one.create_infer_request()
    for n in trips:
        feed = {"x": np.random.default_rng(n).standard_normal((2, 3)).astype(np.float32), "n": np.array(n)}
        found = request.infer(feed)
        for output, value in zip(model.graph.output, session.run(None, feed), strict=True):
            assert found[output.name].shape == np.shape(value)
            np.testing.assert_allclose(found[output.name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_stacked(axis: int) -> None:
    check(axis=axis)


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_joined(axis: int) -> None:
    check(axis=axis, new=0)


def test_several_readers_and_sequences() -> None:
    check(
        more=", float[d,e] w", after="w = ConcatFromSequence <axis = 1, new_axis = 0> (s)", item="x0",
    )  # fmt: skip


def test_what_else_is_asked_of_a_sequence_keeps_it() -> None:
    check(collected=False, more=", int64 k", after="k = SequenceLength(s)")
    check(collected=False, insert="p = Constant <value = int64 {0}> () s1 = SequenceInsert(s0, v, p)")
    check(collected=False, before="", insert="s2 = SequenceInsert(s0, v) s1 = SequenceInsert(s2, x0)")
