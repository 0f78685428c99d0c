"""Sequences, optionals, strings and random numbers by what ONNX says of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tunewright.ir.types import DType, OptionalType, SequenceType, TensorType
from tunewright.ops import lookup
from tunewright.ops.base import Operand


def run(op: str, *inputs: Any, n: int = 1, **attrs: Any) -> list[Any]:
    spec = lookup(op)
    assert spec is not None
    return list(spec.reference(inputs, attrs, n))


def infer(op: str, *types: Any, n: int = 1, **attrs: Any) -> list[Any]:
    spec = lookup(op)
    assert spec is not None
    return list(spec.infer([None if t is None else Operand(t) for t in types], attrs, n))


A, B = np.arange(3.0), np.arange(4.0)
F3 = TensorType(DType.FLOAT64, (3,))


def equal(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_positions_count_from_both_ends() -> None:
    (items,) = run("SequenceConstruct", A, B)
    assert equal(run("SequenceInsert", items, B, np.asarray(-2))[0], [B, A, B])
    assert equal(run("SequenceInsert", items, A)[0], [A, B, A])
    assert equal(run("SequenceErase", items)[0], [A])
    assert equal(run("SequenceAt", items, np.asarray(-1)), [B])
    assert run("SequenceLength", items)[0] == 2
    for op, at in (("SequenceAt", 2), ("SequenceAt", -3), ("SequenceErase", 2)):
        with pytest.raises(ValueError, match=f"position {at}"):
            run(op, items, np.asarray(at))
    with pytest.raises(ValueError, match="position 3"):
        run("SequenceInsert", items, A, np.asarray(3))


def test_split_to_sequence() -> None:
    x = np.arange(10.0).reshape(5, 2)
    assert [p.shape for p in run("SplitToSequence", x, np.asarray(2))[0]] == [(2, 2), (2, 2), (1, 2)]
    assert [p.shape for p in run("SplitToSequence", x, np.asarray([4, 1]))[0]] == [(4, 2), (1, 2)]
    assert [p.shape for p in run("SplitToSequence", x, axis=1)[0]] == [(5, 1), (5, 1)]
    assert [p.shape for p in run("SplitToSequence", x, axis=1, keepdims=0)[0]] == [(5,), (5,)]
    assert run("SplitToSequence", np.zeros((0, 2)))[0] == []
    with pytest.raises(ValueError, match="do not make up"):
        run("SplitToSequence", x, np.asarray([4, 2]))


def test_types_of_sequences_never_claim_too_much() -> None:
    other = TensorType(DType.FLOAT64, (4,))
    (both,) = infer("SequenceConstruct", F3, other)
    assert both == SequenceType(TensorType(DType.FLOAT64, (None,)))
    assert infer("SequenceInsert", SequenceType(F3), other) == [both]
    assert infer("SequenceInsert", SequenceType(), other) == [SequenceType()]
    assert infer("SequenceAt", both, TensorType(DType.INT64, ())) == [both.elem]
    assert infer("SequenceLength", SequenceType()) == [TensorType(DType.INT64, ())]
    assert infer("ConcatFromSequence", SequenceType(F3), axis=0) == [TensorType(DType.FLOAT64, (None,))]
    assert infer("ConcatFromSequence", SequenceType(F3), axis=-1, new_axis=1) == [TensorType(DType.FLOAT64, (3, None))]
    assert infer("ConcatFromSequence", SequenceType(), axis=0) == [None]
    with pytest.raises(ValueError, match="cannot hold both"):
        infer("SequenceConstruct", F3, TensorType(DType.INT64, (3,)))
    with pytest.raises(ValueError, match="must be a sequence"):
        infer("SequenceLength", F3)


def test_an_absent_optional_is_none() -> None:
    assert run("Optional", type=F3) == [None]
    assert not run("OptionalHasElement", None)[0] and not run("OptionalHasElement")[0]
    assert run("OptionalHasElement", [])[0]
    assert infer("Optional", type=F3) == [OptionalType(F3)]
    assert infer("OptionalGetElement", OptionalType(F3)) == infer("OptionalGetElement", F3) == [F3]
    with pytest.raises(ValueError, match="empty"):
        run("OptionalGetElement", None)


def test_strings() -> None:
    words = np.asarray([["a b", ""], ["c  d e", "x"]], object)
    parts, counts = run("StringSplit", words, n=2)
    assert parts.shape == (2, 2, 3) and counts.tolist() == [[2, 0], [3, 1]]
    assert parts[1, 0].tolist() == ["c", "d", "e"] and parts[0, 1].tolist() == ["", "", ""]
    assert run("StringSplit", words, delimiter=" ", maxsplit=1, n=2)[0][1, 0].tolist() == ["c", " d e"]
    assert run("StringConcat", words, np.asarray("!", object))[0].tolist() == [["a b!", "!"], ["c  d e!", "x!"]]
    assert run("RegexFullMatch", words, pattern="[a-c ]*")[0].tolist() == [[True, True], [False, False]]
    days = np.asarray([["Mon", "tue"]], object)
    assert run("StringNormalizer", days, case_change_action="UPPER", stopwords=("mon",))[0].tolist() == [["TUE"]]
    assert run("StringNormalizer", days, is_case_sensitive=1, stopwords=("Mon", "tue"))[0].tolist() == [[""]]


@pytest.mark.parametrize(
    ("op", "attrs", "mean", "spread"),
    [
        ("RandomNormal", {"mean": 3.0, "scale": 2.0, "shape": (200, 200)}, 3.0, 2.0),
        ("RandomUniform", {"low": -1.0, "high": 3.0, "shape": (200, 200)}, 1.0, 4 / 12**0.5),
    ],
)
def test_distributions(op: str, attrs: dict[str, Any], mean: float, spread: float) -> None:
    (x,) = run(op, **attrs)
    assert x.dtype == np.float32 and infer(op, **attrs) == [TensorType.of(x)]
    assert abs(x.mean() - mean) < 0.05 and abs(x.std() - spread) < 0.05
    assert not np.array_equal(x, run(op, **attrs)[0])
    assert np.array_equal(run(op, seed=1.0, **attrs)[0], run(op, seed=1.0, **attrs)[0])
    like = {k: v for k, v in attrs.items() if k != "shape"}
    (y,) = run(f"{op}Like", np.zeros((3, 4), np.float16), **like)
    assert y.shape == (3, 4) and y.dtype == np.float16


def test_multinomial_follows_the_weights() -> None:
    weights = np.log(np.asarray([[0.1, 0.6, 0.3], [0.0, 0.0, 1.0]], np.float32) + 1e-30)
    (x,) = run("Multinomial", weights, sample_size=20000, dtype=7)
    assert x.dtype == np.int64 and x.shape == (2, 20000)
    np.testing.assert_allclose(np.bincount(x[0], minlength=3) / 20000, [0.1, 0.6, 0.3], atol=0.02)
    assert (x[1] == 2).all()


def test_dropout_copies_unless_it_trains() -> None:
    x = np.ones((50, 50), np.float32)
    y, mask = run("Dropout", x, np.asarray(0.7, np.float32), n=2)
    assert np.array_equal(x, y) and mask.all()
    y, mask = run("Dropout", x, np.asarray(0.75, np.float32), np.asarray(True), n=2)
    np.testing.assert_array_equal(y, mask * np.float32(4))
    assert 0.2 < mask.mean() < 0.3
