"""Operators of ai.onnx.ml against onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tunewright import Core

ort = pytest.importorskip("onnxruntime")

SEED = 3


def f(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def floats(rng: np.random.Generator, n: int) -> list[float]:
    return f(rng, n).tolist()


def strings(*values: str) -> np.ndarray:
    return np.asarray(values, object)


def check(op: str, inputs: list[np.ndarray], outputs: int = 1, version: int = 3, **attrs: Any) -> None:
    names = [f"x{i}" for i in range(len(inputs))]
    results = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op, names, results, domain="ai.onnx.ml", **attrs)
    kinds = [TensorProto.STRING if x.dtype == object else helper.np_dtype_to_tensor_dtype(x.dtype) for x in inputs]
    infos = [helper.make_tensor_value_info(n, k, x.shape) for n, k, x in zip(names, kinds, inputs, strict=True)]
    graph = helper.make_graph([node], "g", infos, [helper.make_empty_tensor_value_info(y) for y in results])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", version)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    feeds = dict(zip(names, inputs, strict=True))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for got, want in zip(Core().compile_model(model)(feeds).values(), session.run(None, feeds), strict=True):
        if isinstance(want, list):
            assert got == want
            continue
        assert got.shape == want.shape and got.dtype == want.dtype
        if want.dtype == object:
            assert got.tolist() == want.tolist()
        else:
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO")


@pytest.mark.parametrize("post", TRANSFORMS)
def test_linear(rng: np.random.Generator, post: str) -> None:
    x = f(rng, 5, 3)
    check(
        "LinearRegressor", [x], coefficients=floats(rng, 6), intercepts=floats(rng, 2), targets=2, post_transform=post
    )
    for classes, labels in ((3, {"classlabels_ints": [4, 5, 6]}), (1, {"classlabels_ints": [4, 5]})):
        check(
            "LinearClassifier",
            [x],
            2,
            coefficients=floats(rng, 3 * classes),
            intercepts=floats(rng, classes),
            post_transform=post,
            **labels,
        )
    check(
        "LinearClassifier",
        [x],
        2,
        coefficients=floats(rng, 6),
        intercepts=floats(rng, 2),
        classlabels_strings=["a", "b"],
        post_transform=post,
    )


@pytest.mark.parametrize("kernel", ["LINEAR", "POLY", "RBF", "SIGMOID"])
@pytest.mark.parametrize("counts", [[2, 2], [2, 1, 2]], ids=["two", "three"])
@pytest.mark.parametrize("probabilities", [False, True], ids=["votes", "probabilities"])
def test_support_vector_classifier(
    rng: np.random.Generator, kernel: str, counts: list[int], probabilities: bool
) -> None:
    classes, vectors = len(counts), sum(counts)
    pairs = classes * (classes - 1) // 2
    extra = {"prob_a": floats(rng, pairs), "prob_b": floats(rng, pairs)} if probabilities else {}
    check(
        "SVMClassifier",
        [f(rng, 6, 3)],
        2,
        kernel_type=kernel,
        kernel_params=[0.4, 0.2, 3.0],
        vectors_per_class=counts,
        support_vectors=floats(rng, 3 * vectors),
        coefficients=floats(rng, (classes - 1) * vectors),
        rho=floats(rng, pairs),
        classlabels_ints=list(range(10, 10 + classes)),
        **extra,
    )


@pytest.mark.parametrize("kernel", ["LINEAR", "POLY", "RBF", "SIGMOID"])
def test_support_vector_regressor(rng: np.random.Generator, kernel: str) -> None:
    check(
        "SVMRegressor",
        [f(rng, 5, 3)],
        kernel_type=kernel,
        kernel_params=[0.4, 0.2, 3.0],
        n_supports=4,
        support_vectors=floats(rng, 12),
        coefficients=floats(rng, 4),
        rho=[0.3],
    )


def forest(
    rng: np.random.Generator, trees: int, features: int, mode: str
) -> tuple[dict[str, list[Any]], list[tuple[int, int]]]:
    """Random trees as attributes, and their leaves as (tree, node)."""
    keys = (
        "treeids",
        "nodeids",
        "featureids",
        "values",
        "truenodeids",
        "falsenodeids",
        "modes",
        "missing_value_tracks_true",
    )
    columns: dict[str, list[Any]] = {f"nodes_{k}": [] for k in keys}
    leaves: list[tuple[int, int]] = []

    def grow(tree: int, count: list[int], depth: int) -> int:
        node, at = count[0], len(columns["nodes_treeids"])
        count[0] += 1
        leaf = depth == 0 or rng.random() < 0.2
        values = (
            tree,
            node,
            int(rng.integers(features)),
            float(rng.standard_normal()),
            0,
            0,
            "LEAF" if leaf else mode,
            0 if leaf else int(rng.integers(2)),
        )
        for key, value in zip(keys, values, strict=True):
            columns[f"nodes_{key}"].append(value)
        if leaf:
            leaves.append((tree, node))
        else:
            columns["nodes_truenodeids"][at] = grow(tree, count, depth - 1)
            columns["nodes_falsenodeids"][at] = grow(tree, count, depth - 1)
        return node

    for tree in range(trees):
        grow(tree, [0], 4)
    return columns, leaves


def scored(
    rng: np.random.Generator, leaves: list[tuple[int, int]], targets: list[list[int]], kind: str, positive: bool
) -> dict[str, list[Any]]:
    entries = [(t, n, c) for (t, n), ids in zip(leaves, targets, strict=True) for c in ids]
    weights = f(rng, len(entries))
    return {
        f"{kind}_treeids": [e[0] for e in entries],
        f"{kind}_nodeids": [e[1] for e in entries],
        f"{kind}_ids": [e[2] for e in entries],
        f"{kind}_weights": (np.abs(weights) if positive else weights).tolist(),
    }


MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")


def samples(rng: np.random.Generator) -> np.ndarray:
    x = f(rng, 7, 4)
    x[0, 1] = np.nan
    return x


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
def test_trees_regress(rng: np.random.Generator, mode: str, aggregate: str) -> None:
    columns, leaves = forest(rng, 5, 4, mode)
    some = [[int(rng.integers(3))] for _ in leaves]
    for targets, extra in ((some, {}), ([[0, 1, 2]] * len(leaves), {"base_values": floats(rng, 3)})):
        check(
            "TreeEnsembleRegressor",
            [samples(rng)],
            n_targets=3,
            aggregate_function=aggregate,
            **columns,
            **scored(rng, leaves, targets, "target", False),
            **extra,
        )
    check(
        "TreeEnsembleRegressor",
        [samples(rng)],
        n_targets=1,
        aggregate_function=aggregate,
        base_values=[0.5],
        **columns,
        **scored(rng, leaves, [[0]] * len(leaves), "target", False),
    )


@pytest.mark.parametrize("post", TRANSFORMS)
@pytest.mark.parametrize("positive", [True, False], ids=["positive", "mixed"])
def test_trees_classify(rng: np.random.Generator, post: str, positive: bool) -> None:
    columns, leaves = forest(rng, 5, 4, "BRANCH_LEQ")
    for labels, ids in (
        ({"classlabels_int64s": [7, 8, 9]}, [[0, 1, 2]] * len(leaves)),
        ({"classlabels_strings": ["a", "b", "c"]}, [[int(rng.integers(3))] for _ in leaves]),
        ({"classlabels_int64s": [7, 8]}, [[0]] * len(leaves)),
        ({"classlabels_strings": ["n", "y"]}, [[1]] * len(leaves)),
    ):
        check(
            "TreeEnsembleClassifier",
            [samples(rng)],
            2,
            post_transform=post,
            **columns,
            **labels,
            **scored(rng, leaves, ids, "class", positive),
        )


def test_two_scored_classes_take_the_larger_score(rng: np.random.Generator) -> None:
    """onnxruntime answers 1 whenever the second score is positive here; the standard asks for the best class."""
    columns, leaves = forest(rng, 3, 4, "BRANCH_LEQ")
    attrs = {**columns, **scored(rng, leaves, [[0, 1]] * len(leaves), "class", True), "classlabels_strings": ["n", "y"]}
    node = helper.make_node("TreeEnsembleClassifier", ["x"], ["label", "score"], domain="ai.onnx.ml", **attrs)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", 1, [7, 4])],
        [helper.make_empty_tensor_value_info(n) for n in ("label", "score")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("ai.onnx.ml", 1)], ir_version=8)
    result = Core().compile_model(model)({"x": samples(rng)})
    assert result["label"].tolist() == ["ny"[k] for k in result["score"].argmax(1)]


def test_trees_in_double(rng: np.random.Generator) -> None:
    columns, leaves = forest(rng, 4, 4, "BRANCH_LEQ")
    values = columns.pop("nodes_values")
    targets = scored(rng, leaves, [[0]] * len(leaves), "target", False)
    weights = targets.pop("target_weights")
    check(
        "TreeEnsembleRegressor",
        [rng.standard_normal((6, 4))],
        n_targets=1,
        **columns,
        **targets,
        nodes_values_as_tensor=onnx.numpy_helper.from_array(np.asarray(values, np.float64)),
        target_weights_as_tensor=onnx.numpy_helper.from_array(np.asarray(weights, np.float64)),
    )


@pytest.mark.parametrize("norm", ["MAX", "L1", "L2"])
def test_normalizer(rng: np.random.Generator, norm: str) -> None:
    check("Normalizer", [f(rng, 5, 3)], norm=norm)
    check("Normalizer", [f(rng, 4)], norm=norm)


def test_features(rng: np.random.Generator) -> None:
    check("Scaler", [rng.integers(0, 9, (4, 3))], offset=[1.0, 2.0, 3.0], scale=[2.0, 0.5, 1.0])
    check("Scaler", [f(rng, 4, 3)], offset=[1.0], scale=[2.0])
    check("FeatureVectorizer", [rng.integers(0, 9, (5, 3)), rng.integers(0, 9, (5, 1))], inputdimensions=[2, 3])
    check("ArrayFeatureExtractor", [f(rng, 5, 3), np.asarray([[0, 2]])])
    check("Binarizer", [f(rng, 5, 3)], threshold=0.2)
    check("Imputer", [np.asarray([[1, 2], [3, 1]])], imputed_value_int64s=[9], replaced_value_int64=1)
    check("OneHotEncoder", [np.asarray([1, 2, 7])], cats_int64s=[1, 2, 3], zeros=1)


def test_labels() -> None:
    names = {"cats_strings": ["a", "b"], "cats_int64s": [3, 4]}
    check("CategoryMapper", [strings("a", "b", "z")], default_int64=-7, **names)
    check("CategoryMapper", [np.asarray([3, 4, 9])], default_string="no", **names)
    check("LabelEncoder", [strings("a", "b", "q")], version=2, keys_strings=["a", "b"], values_int64s=[5, 6])
    check("LabelEncoder", [np.asarray([1, 2, 3])], version=2, keys_int64s=[1, 2], values_floats=[0.5, 0.6])


def test_zip_map(rng: np.random.Generator) -> None:
    check("ZipMap", [np.abs(f(rng, 3, 2))], classlabels_strings=["a", "b"])
    check("ZipMap", [np.abs(f(rng, 3, 2))], classlabels_int64s=[4, 8])
