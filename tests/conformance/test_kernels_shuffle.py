"""Channels exchanged between groups: the kernel against the reference, and the three nodes that it stands for."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tunewright import Core
from tunewright.ir.types import PLAIN, Layout, blocked
from tunewright.plugins.single import open_device
from tunewright.testing.kernelcheck import Case, check

BLOCK = blocked(open_device("CPU").target.vector_bytes // 4)
SHUFFLE = "org.openvinotoolkit::ShuffleChannels"


def case(shape: tuple[int, ...], group: int, layout: Layout = PLAIN, dtype: type = np.float32) -> Case:
    x = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    return Case(SHUFFLE, [x], {"axis": 1, "group": group}, layouts=(layout, layout))


CASES = {
    "plain": case((2, 12, 5, 7), 3),
    "plain, 1D, bytes": case((1, 10, 33), 5, dtype=np.uint8),
    "plain, one group": case((1, 6, 4, 4), 1),
    "plain, 3D, wide elements": case((1, 6, 2, 3, 4), 2, dtype=np.complex128),
    "blocks": case((2, 32, 6, 5), 4, BLOCK),
    "blocks, a part of one": case((1, 6, 5, 5), 2, BLOCK),
    "blocks, the last not full": case((2, 34, 3, 5), 2, BLOCK),
    "blocks, many": case((1, 136, 14, 14), 4, BLOCK),
    "blocks, pairs of channels": case((3, 2 * BLOCK.block * (BLOCK.block // 2), 3, 5), BLOCK.block // 2, BLOCK),
    "blocks, pairs of bytes": case((1, 4 * BLOCK.block, 3, 5), BLOCK.block // 2, BLOCK, dtype=np.uint8),
    "blocks, two groups": case((2, 5 * BLOCK.block, 4, 5), 2, BLOCK),
    "blocks, groups that end inside of neighbours": case((1, 5 * BLOCK.block, 4, 5), 4, BLOCK),
    "blocks, more groups than lanes": case((1, 4 * BLOCK.block, 4, 5), 2 * BLOCK.block, BLOCK),
}


@pytest.mark.parametrize("name", CASES)
def test_against_reference(name):
    few = name in ("plain", "blocks", "blocks, many", "blocks, pairs of channels")
    assert check(CASES[name], only="opencl.shuffle", configs=2 if few else 0, specialised=few) == []


def model(middle: list[int], perm: list[int], shape: list[int]) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Reshape", ["x", "split"], ["a"]),
        helper.make_node("Transpose", ["a"], ["b"], perm=perm),
        helper.make_node("Reshape", ["b", "whole"], ["y"]),
    ]
    constants = [
        numpy_helper.from_array(np.array(middle), "split"), numpy_helper.from_array(np.array(shape), "whole"),
    ]  # fmt: skip
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in "xy"]
    graph = helper.make_graph(nodes, "shuffle", ends[:1], ends[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize(
    ("middle", "perm", "known"),
    [
        ([2, 3, 4, 5, 5], [0, 2, 1, 3, 4], True),
        ([2, 3, 4, 25], [0, 2, 1, 3], False),
        ([2, 3, 4, 5, 5], [0, 2, 1, 4, 3], False),
        ([2, 6, 2, 5, 5], [0, 1, 2, 3, 4], False),
    ],
)
def test_three_nodes_are_one(middle, perm, known):
    shape = [2, 12, 5, 5]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    compiled = Core().compile_model(model(middle, perm, shape).SerializeToString(), "CPU")
    assert any(node.op == SHUFFLE for node in compiled.graph.nodes) == known
    want = x.reshape(middle).transpose(perm).reshape(shape)
    np.testing.assert_array_equal(compiled([x])["y"], want)
