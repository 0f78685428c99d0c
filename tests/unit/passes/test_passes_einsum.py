"""Einsum becomes products, sums and moves, and numpy agrees."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import tunewright

SIZES = dict(zip("abcdefghijklmn", (2, 3, 4, 5, 2, 3, 4, 5, 6, 7, 2, 3, 4, 5), strict=True))
EQUATIONS = (
    "ij,jk->ik", "ij,jk", "ij,kj->ki", "bij,bjk->bik", "ibh,hnd->ibnd", "ibnd,jbnd->bnij", "bnij,jbnd->ibnd",
    "ibnd,jbnd->ijbn", "ibnd,mnd->ibnm", "ij->ji", "ij->", "ij->i", "ij->j", "ii->i", "ii", "ii->", "iji->ij",
    "bii,i->bi", "i,j->ij", "i,i->", "i,i->i", "ij,i->ij", "ij,ij->ij", "ij,ij->", "ij,j->i", "i,ij->j",
    "abcd,abed->abce", "abc,cd,de->abe", "ab,bc,cd,da->", "ij,jk,k->i", "...ij,...jk->...ik", "...ij,jk->...ik",
    "b...i,b...j->b...ij", "...i,...i->...", "i...->...", "...ij->...ji", "abc,abd->abcd", "ba,bc->cab",
    "abcd,cdef->abef", "hnd,ibh->ibnd", "abcd,bd->ac", "ab,cd->acbd", "ijk,ijl,ijm->klm", "a,b,c->cba", "ij,jk->",
)  # fmt: skip


def shape(term: str, dots: tuple[int, ...]) -> list[int]:
    before, found, after = term.partition("...")
    return [*(SIZES[c] for c in before), *(dots if found else ()), *(SIZES[c] for c in after)]


def run(equation: str, arrays: list[np.ndarray], constant: tuple[int, ...] = (), names: bool = False) -> tuple:
    """Results of the CPU, and the operations that ran."""
    inputs, weights = [], []
    for i, array in enumerate(arrays):
        if i in constant:
            weights.append(onnx.numpy_helper.from_array(array, f"x{i}"))
        else:
            dims = [f"d{n}" for n in array.shape] if names else array.shape
            inputs.append(helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, dims))
    node = helper.make_node("Einsum", [f"x{i}" for i in range(len(arrays))], ["y"], equation=equation)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "g", inputs, [y], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    compiled = tunewright.Core().compile_model(model, "CPU")
    got = compiled({i.name: arrays[int(i.name[1:])] for i in inputs})["y"]
    return got, [s.node.op for s in compiled.program.plans[-1].steps]


@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize("names", [False, True], ids=["sizes", "names"])
def test_numpy_agrees(equation: str, names: bool) -> None:
    rng = np.random.default_rng(0)
    terms = equation.partition("->")[0].split(",")
    for dots in [(2, 3), ()] if "..." in equation else [()]:
        arrays = [rng.standard_normal(shape(t, dots)).astype(np.float32) for t in terms]
        want = np.einsum(equation, *arrays)
        got, ops = run(equation, arrays, names=names)
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
        assert "Einsum" not in ops


@pytest.mark.parametrize(("equation", "constant"), [("ibh,hnd->ibnd", 1), ("hnd,ibh->ibnd", 0), ("ibnd,hnd->ibh", 1)])
def test_weights_are_moved_once(equation: str, constant: int) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape(t, ())).astype(np.float32) for t in equation.partition("->")[0].split(",")]
    got, ops = run(equation, arrays, (constant,))
    np.testing.assert_allclose(got, np.einsum(equation, *arrays), rtol=1e-4, atol=1e-4)
    assert "Transpose" not in ops and "Einsum" not in ops and ops.count("MatMul") == 1


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [("...ij,...jk->...ik", ((1, 3, 2, 4), (5, 1, 4, 3))), ("bij,bjk->bik", ((1, 2, 3), (4, 3, 2))),
     ("...i,...i->...", ((2, 1, 5), (3, 5)))],
)  # fmt: skip
def test_axes_of_one_element_are_spread(equation: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    got, ops = run(equation, arrays)
    np.testing.assert_allclose(got, np.einsum(equation, *arrays), rtol=1e-4, atol=1e-4)
    assert "Einsum" not in ops


@pytest.mark.parametrize("taken", [False, True])
def test_a_mistake_in_a_branch_waits_until_it_is_taken(taken: bool) -> None:
    text = """<ir_version: 10, opset_import: ["" : 18]> g (bool c, float[N,3] x, float[M,4] z) => (y) {
      y = If(c)<then_branch = t () => (a) { a = Einsum<equation="ij,kj->ik">(x, z) },
                else_branch = e () => (b) { b = Identity(x) }>
    }"""
    compiled = tunewright.Core().compile_model(onnx.parser.parse_model(text), "CPU")
    inputs = {"c": np.array(taken), "x": np.ones((2, 3), np.float32), "z": np.ones((2, 4), np.float32)}
    if taken:
        with pytest.raises(tunewright.TunewrightError, match="Einsum"):
            compiled(inputs)
    else:
        np.testing.assert_array_equal(compiled(inputs)["y"], inputs["x"])
