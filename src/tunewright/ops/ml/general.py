"""Operators of ai.onnx.ml that onnx.reference lacks, or computes differently from ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tunewright.ir.types import Dim, DType, MapType, SequenceType, TensorType, Type

from ..base import Array, Attrs, Operands, OpSpec
from ..shapes import same_as, tensor
from .common import DOMAIN, classified, labels, logistic, matrix, probit, rows, strings, transform


def _floats(attrs: Attrs, key: str) -> Array:
    return np.asarray(attrs.get(key, ()), np.float32)


# -- linear models -----------------------------------------------------------------------------------------------------
def _linear(x: Array, attrs: Attrs, targets: int) -> Array:
    weights = _floats(attrs, "coefficients").reshape(targets, -1)
    intercepts = _floats(attrs, "intercepts")
    scores = matrix(x).astype(np.float32) @ weights.T
    return np.asarray(scores + intercepts if intercepts.size else scores)


def _regressor(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    scores = _linear(inputs[0], attrs, int(attrs.get("targets", 1)))
    post = attrs.get("post_transform", "NONE")
    if scores.shape[1] == 1:
        return [(probit(scores) if post == "PROBIT" else scores).astype(np.float32)]
    return [transform(scores, post).astype(np.float32)]


def _infer_regressor(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    return [TensorType(DType.FLOAT32, (rows(operands), int(attrs.get("targets", 1))))]


def _linear_scores(attrs: Attrs) -> int:
    """The number of scores: one per class, or a single one for two classes."""
    given = len(attrs.get("intercepts", ()))
    return given or max(1, len(labels(attrs, "classlabels_ints")))


def _linear_classifier(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    names, post = labels(attrs, "classlabels_ints"), attrs.get("post_transform", "NONE")
    scores = _linear(inputs[0], attrs, _linear_scores(attrs))
    if scores.shape[1] > 1:
        return [names[scores.argmax(1)], transform(scores, post).astype(np.float32)]
    names = names if len(names) == 2 else np.asarray([0, 1], np.int64)
    second = scores[:, 0]
    one = logistic(second) if post == "LOGISTIC" else second
    pair = np.stack([1 - one, one], 1)
    pair = probit(pair) if post == "PROBIT" else pair
    return [names[(second > 0).astype(np.int64)], pair.astype(np.float32)]


def _infer_linear_classifier(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    return classified(operands, attrs, max(2, _linear_scores(attrs)))


# -- support vector machines -------------------------------------------------------------------------------------------
def _kernel(x: Array, vectors: Array, attrs: Attrs) -> Array:
    """Kernel values of samples and support vectors: [samples, vectors]."""
    gamma, shift, degree = [*attrs.get("kernel_params", ()), 0.0, 0.0, 0.0][:3]
    kind = attrs.get("kernel_type", "LINEAR")
    if kind == "RBF":
        distance = (x**2).sum(1)[:, None] + (vectors**2).sum(1) - 2 * (x @ vectors.T)
        return np.asarray(np.exp(-gamma * np.maximum(distance, 0)))
    dot = x @ vectors.T
    if kind == "POLY":
        return np.asarray((gamma * dot + shift) ** degree)
    return np.asarray(np.tanh(gamma * dot + shift) if kind == "SIGMOID" else dot)


def _pairs(x: Array, attrs: Attrs, counts: Sequence[int]) -> tuple[Array, Array]:
    """One-against-one classification: the score of each pair of classes, and the votes of each class."""
    total, classes = sum(counts), len(counts)
    vectors = np.asarray(attrs["support_vectors"], np.float64).reshape(total, -1)
    weights = np.asarray(attrs["coefficients"], np.float64).reshape(-1, total)
    kernel = _kernel(x.astype(np.float64), vectors, attrs)
    ends = np.cumsum(counts)
    of = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    scores: list[Array] = []
    votes = np.zeros((len(x), classes))
    for i in range(classes):
        for j in range(i + 1, classes):
            score = kernel[:, of[i]] @ weights[j - 1, of[i]] + kernel[:, of[j]] @ weights[i, of[j]]
            score = score + attrs["rho"][len(scores)]
            scores.append(score)
            votes[:, i] += score > 0
            votes[:, j] += score <= 0
    return np.stack(scores, 1), votes


def _probabilities(scores: Array, attrs: Attrs, classes: int) -> Array:
    """Class probabilities from pair probabilities, by the method of libsvm (Wu, Lin and Weng 2004)."""
    pair = 1 - logistic(scores * np.asarray(attrs["prob_a"]) + np.asarray(attrs["prob_b"]))
    pair = np.clip(pair, 1e-7, 1 - 1e-7)
    r = np.zeros((len(scores), classes, classes))
    i, j = np.triu_indices(classes, 1)
    r[:, i, j], r[:, j, i] = pair, 1 - pair
    return np.stack([_couple(one) for one in r]) if len(r) else np.zeros((0, classes))


def _couple(r: Array) -> Array:
    k = len(r)
    q = -r * r.T
    q[np.diag_indices(k)] = (r**2).sum(0)
    p = np.full(k, 1 / k)
    for _ in range(max(100, k)):
        qp = q @ p
        pqp = p @ qp
        if np.abs(qp - pqp).max() < 0.005 / k:
            break
        for t in range(k):
            step = (pqp - qp[t]) / q[t, t]
            p[t] += step
            pqp = (pqp + step * (step * q[t, t] + 2 * qp[t])) / (1 + step) ** 2
            qp = (qp + step * q[t]) / (1 + step)
            p /= 1 + step
    return p


def _svm_classifier(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    x, post = matrix(inputs[0]), attrs.get("post_transform", "NONE")
    names = labels(attrs, "classlabels_ints")
    counts = [int(c) for c in attrs.get("vectors_per_class", ())]
    weights = np.asarray(attrs["coefficients"])
    if not sum(counts):
        scores = x.astype(np.float64) @ weights.reshape(max(1, len(names)), -1).T + attrs["rho"][0]
        return [names[scores.argmax(1)], transform(scores, post).astype(np.float32)]
    scores, votes = _pairs(x, attrs, counts)
    best = votes.argmax(1)
    if len(attrs.get("prob_a", ())):
        scores = _probabilities(scores, attrs, len(counts))
    elif len(counts) == 2 and (weights >= 0).all():
        best = np.ones_like(best)  # as in ONNX's reference; ONNX Runtime also uses the votes here
    if scores.shape[1] == 1:
        pair = np.concatenate([-scores, scores], 1)
        scores, post = (logistic(pair) if post == "LOGISTIC" else pair), "NONE"
    return [names[best], transform(scores, post).astype(np.float32)]


def _infer_svm_classifier(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    classes = len(labels(attrs, "classlabels_ints"))
    pairs = classes * (classes - 1) // 2
    scored = sum(attrs.get("vectors_per_class", ())) == 0 or len(attrs.get("prob_a", ())) > 0
    columns: Dim = classes if scored else max(2, pairs)
    return classified(operands, attrs, columns)


def _svm_regressor(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """Support vector regression. Without support vectors the model is linear. With one_class the result is the side of
    a sample: 1 or -1."""
    if (post := attrs.get("post_transform", "NONE")) != "NONE":
        raise ValueError(f"post_transform {post!r} of one value is not defined")
    x, count = matrix(inputs[0]).astype(np.float64), int(attrs.get("n_supports", 0))
    weights = np.asarray(attrs["coefficients"], np.float64)
    kernel = _kernel(x, np.asarray(attrs["support_vectors"], np.float64).reshape(count, -1), attrs) if count else x
    scores = kernel @ weights.reshape(-1, 1) + attrs["rho"][0]
    return [(np.where(scores > 0, 1, -1) if attrs.get("one_class", 0) else scores).astype(np.float32)]


def _infer_svm_regressor(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    return [TensorType(DType.FLOAT32, (rows(operands), 1))]


# -- features ----------------------------------------------------------------------------------------------------------
def _normalizer(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    (x,) = inputs
    flat = matrix(x).astype(np.float32)
    norms: dict[str, Callable[[Array], Array]] = {
        "MAX": lambda v: v.max(1, keepdims=True),
        "L1": lambda v: np.abs(v).sum(1, keepdims=True),
        "L2": lambda v: np.sqrt((v**2).sum(1, keepdims=True)),
    }
    size = norms[attrs.get("norm", "MAX")](flat)
    return [(flat / np.where(size == 0, 1, size)).reshape(x.shape).astype(np.float32)]


def _scaler(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    (x,) = inputs
    return [((x.astype(np.float32) - _floats(attrs, "offset")) * _floats(attrs, "scale")).astype(np.float32)]


def _feature_vectorizer(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """Concatenate the inputs. Each is cut or padded with zeros to its width."""
    parts = [matrix(x).astype(np.float32) for x in inputs if x is not None]
    widths = attrs.get("inputdimensions", ()) or [p.shape[1] for p in parts]
    result = np.zeros((parts[0].shape[0], sum(widths)), np.float32)
    at = 0
    for part, width in zip(parts, widths, strict=True):
        kept = part[:, :width]
        result[:, at : at + kept.shape[1]] = kept
        at += width
    return [result]


def _infer_feature_vectorizer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    widths = attrs.get("inputdimensions", ())
    return [TensorType(DType.FLOAT32, (rows(operands), sum(widths) if widths else None))]


def _category_mapper(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """Map names to numbers or numbers to names, depending on the input."""
    (x,) = inputs
    names, numbers = attrs.get("cats_strings", ()), attrs.get("cats_int64s", ())
    if x.dtype == object:
        to_number, missing = dict(zip(names, numbers, strict=True)), int(attrs.get("default_int64", -1))
        found = [to_number.get(v, missing) for v in x.ravel().tolist()]
        return [np.asarray(found, np.int64).reshape(x.shape)]
    to_name, other = dict(zip(numbers, names, strict=True)), attrs.get("default_string", "_Unused")
    return [strings([to_name.get(v, other) for v in x.ravel().tolist()]).reshape(x.shape)]


def _infer_category_mapper(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x = tensor(operands, 0)
    return [TensorType(DType.INT64 if x.dtype is DType.STRING else DType.STRING, x.shape)]


# -- maps --------------------------------------------------------------------------------------------------------------
def _zip_map(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """One dictionary per sample, from label to score."""
    keys = labels(attrs, "classlabels_int64s").tolist()
    return [[dict(zip(keys, row.tolist(), strict=True)) for row in matrix(inputs[0])]]


def _infer_zip_map(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    key = DType.STRING if attrs.get("classlabels_strings", ()) else DType.INT64
    return [SequenceType(MapType(key, TensorType(DType.FLOAT32, ())))]


def _dict_vectorizer(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """One row: the values of a dictionary in the order of the vocabulary. A missing key gives zero or an empty text."""
    (mapping,) = inputs
    vocabulary = attrs.get("string_vocabulary") or attrs.get("int64_vocabulary", ())
    if any(isinstance(item, str) for item in mapping.values()):
        return [strings([mapping.get(key, "") for key in vocabulary]).reshape(1, -1)]
    dtype = np.result_type(*mapping.values()) if mapping else np.float32
    return [np.asarray([[mapping.get(key, 0) for key in vocabulary]], dtype)]


def _infer_dict_vectorizer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    mapping = operands[0].type if operands[0] is not None else None
    if not isinstance(mapping, MapType) or not isinstance(mapping.value, TensorType):
        return [None]
    width = len(attrs.get("string_vocabulary") or attrs.get("int64_vocabulary", ()))
    return [TensorType(mapping.value.dtype, (1, width))]


def _cast_map(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """The values of a dictionary in the order of its keys. DENSE makes them adjacent, SPARSE puts each at its key."""
    (mapping,) = inputs
    keys = sorted(mapping)
    items = [mapping[k] for k in keys]
    sparse = attrs.get("map_form", "DENSE") == "SPARSE"
    size = int(attrs.get("max_map", 1)) if sparse else len(keys)
    at = keys if sparse else range(len(keys))
    to = attrs.get("cast_to", "TO_FLOAT")
    if to == "TO_STRING":
        names = strings([""] * size)
        for k, item in zip(at, items, strict=True):
            names[k] = str(item)
        return [names.reshape(1, -1)]
    numbers = np.zeros(size, np.float32 if to == "TO_FLOAT" else np.int64)
    for k, item in zip(at, items, strict=True):
        numbers[k] = float(item)
    return [numbers.reshape(1, -1)]


def _infer_cast_map(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    to = {"TO_STRING": DType.STRING, "TO_INT64": DType.INT64}.get(attrs.get("cast_to", "TO_FLOAT"), DType.FLOAT32)
    width = int(attrs.get("max_map", 1)) if attrs.get("map_form", "DENSE") == "SPARSE" else None
    return [TensorType(to, (1, width))]


OPS = (
    OpSpec(f"{DOMAIN}LinearRegressor", _regressor, _infer_regressor),
    OpSpec(f"{DOMAIN}LinearClassifier", _linear_classifier, _infer_linear_classifier),
    OpSpec(f"{DOMAIN}SVMClassifier", _svm_classifier, _infer_svm_classifier),
    OpSpec(f"{DOMAIN}SVMRegressor", _svm_regressor, _infer_svm_regressor),
    OpSpec(f"{DOMAIN}Normalizer", _normalizer, same_as(0, DType.FLOAT32)),
    OpSpec(f"{DOMAIN}Scaler", _scaler, same_as(0, DType.FLOAT32)),
    OpSpec(f"{DOMAIN}FeatureVectorizer", _feature_vectorizer, _infer_feature_vectorizer),
    OpSpec(f"{DOMAIN}CategoryMapper", _category_mapper, _infer_category_mapper),
    OpSpec(f"{DOMAIN}ZipMap", _zip_map, _infer_zip_map),
    OpSpec(f"{DOMAIN}DictVectorizer", _dict_vectorizer, _infer_dict_vectorizer),
    OpSpec(f"{DOMAIN}CastMap", _cast_map, _infer_cast_map),
)
