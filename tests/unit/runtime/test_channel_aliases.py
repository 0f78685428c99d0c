"""Parts of tensors whose channels lie last: which of them are one piece of memory."""

from __future__ import annotations

import numpy as np
import pytest

from tunewright.ir.graph import Graph, Node
from tunewright.ir.types import NHWC, PLAIN, DType, Layout, TensorType
from tunewright.runtime.plans.alias import _concat_parts, _view_offsets


def tensor(shape: tuple[int, ...], layout: Layout) -> TensorType:
    return TensorType(DType.FLOAT32, shape, layout)


def cut(op: str, shape: tuple[int, ...], axis: int, layout: Layout) -> Node:
    """Two halves of a tensor, or its second half."""
    graph = Graph()
    x = graph.add_input("x", tensor(shape, layout))
    half = tensor(tuple(n // 2 if k == axis else n for k, n in enumerate(shape)), layout)
    if op == "Split":
        return graph.add("Split", [x], {"axis": axis, "num_outputs": 2}, outputs=2, types=[half, half])
    given = [graph.constant(np.array([n])) for n in (shape[axis] // 2, shape[axis], axis)]
    return graph.add("Slice", [x, *given], types=[half])


@pytest.mark.parametrize("op", ["Split", "Slice"])
@pytest.mark.parametrize(
    ("shape", "axis", "layout", "half"),
    [
        ((1, 4, 2, 6), 1, PLAIN, 96), ((1, 4, 2, 6), 2, PLAIN, None), ((1, 4, 1, 1), 1, NHWC, 8),
        ((1, 4, 2, 6), 1, NHWC, None), ((1, 4, 2, 6), 2, NHWC, 96), ((1, 4, 2, 6), 3, NHWC, None),
        ((2, 4, 2, 6), 0, NHWC, 192), ((2, 4, 2, 6), 2, NHWC, None),
    ],
)  # fmt: skip
def test_a_part_is_a_view_where_it_lies_in_one_piece(
    op: str, shape: tuple[int, ...], axis: int, layout: Layout, half: int | None
) -> None:
    found = _view_offsets(cut(op, shape, axis, layout))
    expected = [] if half is None else [0, half] if op == "Split" else [half]
    assert found == expected


@pytest.mark.parametrize(
    ("axis", "layout", "fits"), [(1, PLAIN, True), (2, PLAIN, False), (1, NHWC, False), (2, NHWC, True)]
)
def test_a_concatenation_is_written_in_place_where_its_parts_are_pieces(axis: int, layout: Layout, fits: bool) -> None:
    graph = Graph()
    part, dims = tensor((1, 4, 2, 6), layout), [1, 4, 2, 6]
    dims[axis] *= 2
    parts = [graph.add("Relu", [graph.add_input(name, part)], types=[part]).output for name in "ab"]
    node = graph.add("Concat", parts, {"axis": axis}, types=[tensor(tuple(dims), layout)])
    found = _concat_parts(graph.nodes, set())
    assert found == ({node: {parts[0]: 0, parts[1]: 192}} if fits else {})
