"""Ensembles of decision trees (ai.onnx.ml), evaluated for all samples and all trees at once.

The standard leaves two cases open: classes that no leaf scores, and two classes of which only one is scored. Both
follow ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from tunewright.ir.types import DType, TensorType, Type

from ..base import Array, Attrs, Operands, OpSpec
from ..shapes import tensor
from .common import DOMAIN, classified, labels, logistic, matrix, probit, rows, transform

_MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER")
_COMPARE = (np.less_equal, np.less, np.greater_equal, np.greater, np.equal, np.not_equal)
_MEMBER = 6
#: elements of an intermediate array (samples by trees)
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Forest:
    """The nodes of all trees in one list. A leaf is its own successor."""

    roots: Array
    feature: Array
    threshold: Array
    mode: Array
    true: Array
    false: Array
    nan_is_true: Array
    #: [nodes, targets]: the weight that a leaf adds, and whether the leaf scores the target
    weight: Array
    scored: Array
    members: dict[int, Array]

    @cached_property
    def kinds(self) -> Array:
        """The kinds of comparison that occur in the trees."""
        return np.unique(self.mode)

    def leaves(self, x: Array) -> Array:
        """The leaf in which each sample ends: [samples, trees]."""
        at = np.broadcast_to(self.roots, (len(x), len(self.roots))).copy()
        sample = np.arange(len(x))[:, None]
        for _ in range(len(self.true) + 1):
            after = np.where(self._goes_true(at, x[sample, self.feature[at]]), self.true[at], self.false[at])
            if (after == at).all():
                return at
            at = after
        raise ValueError("a tree has a cycle")

    def _goes_true(self, at: Array, value: Array) -> Array:
        mode, threshold = self.mode[at], self.threshold[at]
        result = np.zeros(at.shape, bool)
        for kind in self.kinds:
            if kind == _MEMBER:
                for node in np.unique(at[mode == _MEMBER]):
                    here = at == node
                    result[here] = np.isin(value[here], self.members[int(node)])
            else:
                result = np.where(mode == kind, _COMPARE[kind](value, threshold), result)
        return np.asarray(result | (self.nan_is_true[at] & np.isnan(value)))

    def score(self, x: Array, aggregate: str) -> tuple[Array, Array]:
        """The aggregate over the trees, and whether any leaf scored the target: both [samples, targets]."""
        step = max(1, _CHUNK // max(1, len(self.roots) * self.weight.shape[1]))
        parts = [self._score(x[i : i + step], aggregate) for i in range(0, max(1, len(x)), step)]
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])

    def _score(self, x: Array, aggregate: str) -> tuple[Array, Array]:
        leaf = self.leaves(x)
        weight, scored = self.weight[leaf], self.scored[leaf]
        any_scored = np.asarray(scored.any(1))
        if aggregate in ("MIN", "MAX"):
            empty = np.inf if aggregate == "MIN" else -np.inf
            chosen = np.where(scored, weight, empty)
            value = chosen.min(1) if aggregate == "MIN" else chosen.max(1)
            return np.where(any_scored, value, 0), any_scored
        total = weight.sum(1)
        return (total / len(self.roots) if aggregate == "AVERAGE" else total), any_scored


class _Identity:
    """A cache key that compares attributes by identity. The key holds the attributes, so their ids are not reused."""

    def __init__(self, attrs: Attrs, kind: str) -> None:
        self.attrs, self.kind = dict(attrs), kind
        self.key = (kind, *((k, id(v)) for k, v in self.attrs.items()))

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.key == other.key


def _numbers(attrs: Attrs, key: str) -> Array:
    """A list of floats. The attribute may also be a tensor."""
    given = attrs.get(f"{key}_as_tensor")
    return np.asarray(given) if given is not None and len(given) else np.asarray(attrs.get(key, ()), np.float32)


@lru_cache(maxsize=32)
def _forest(key: _Identity) -> Forest:
    return _of_leaves(key.attrs) if key.kind == "leaf" else _of_nodes(key.attrs, key.kind)


def _of_nodes(attrs: Attrs, kind: str) -> Forest:
    """A forest from the first form of the attributes: every node names its tree and its number. ``kind`` is class or
    target."""
    trees, numbers = attrs["nodes_treeids"], attrs["nodes_nodeids"]
    index = {pair: i for i, pair in enumerate(zip(trees, numbers, strict=True))}
    count = len(index)
    names = attrs["nodes_modes"]
    leaf = np.asarray([name == "LEAF" for name in names])
    own = np.arange(count)

    def successors(key: str) -> Array:
        found = [i if leaf[i] else index[t, n] for i, (t, n) in enumerate(zip(trees, attrs[key], strict=True))]
        return np.asarray(found, np.int64)

    targets = np.asarray(attrs[f"{kind}_ids"], np.int64)
    width = _width(attrs, kind)
    if targets.size and not 0 <= targets.min() <= targets.max() < width:
        raise ValueError(f"{kind}_ids must lie between 0 and {width - 1}")
    scored_at = zip(attrs[f"{kind}_treeids"], attrs[f"{kind}_nodeids"], strict=True)
    at = np.asarray([index[pair] for pair in scored_at], np.int64) * width + targets
    weight, scored = np.zeros(count * width), np.zeros(count * width, bool)
    np.add.at(weight, at, _numbers(attrs, f"{kind}_weights"))
    scored[at] = True
    missing = attrs.get("nodes_missing_value_tracks_true", ()) or np.zeros(count)
    first: dict[int, int] = {}
    for i, tree in enumerate(trees):
        first.setdefault(tree, i)
    return Forest(
        np.asarray(list(first.values())),
        np.where(leaf, 0, attrs["nodes_featureids"]),
        _numbers(attrs, "nodes_values"),
        np.asarray([0 if name == "LEAF" else _MODES.index(name) for name in names]),
        np.where(leaf, own, successors("nodes_truenodeids")),
        np.where(leaf, own, successors("nodes_falsenodeids")),
        np.asarray(missing, bool) & ~leaf,
        weight.reshape(count, width),
        scored.reshape(count, width),
        {},
    )


def _of_leaves(attrs: Attrs) -> Forest:
    """A forest from the newest form of the attributes: nodes and leaves are two lists and refer to positions."""
    nodes, leaves = len(attrs["nodes_featureids"]), len(attrs["leaf_targetids"])

    def joined(values: Any, rest: Any) -> Array:
        return np.concatenate([np.asarray(values), np.asarray(rest)])

    own = np.arange(nodes, nodes + leaves)
    ways = {}
    for way in ("true", "false"):
        to = np.asarray(attrs[f"nodes_{way}nodeids"], np.int64)
        to_leaf = np.asarray(attrs[f"nodes_{way}leafs"], bool)
        limit = np.where(to_leaf, leaves, nodes)
        if (to < 0).any() or (to >= limit).any():
            raise ValueError(f"nodes_{way}nodeids refers to a node that does not exist")
        ways[way] = joined(to + np.where(to_leaf, nodes, 0), own)
    modes = np.asarray(attrs["nodes_modes"], np.int64)
    members = np.asarray(attrs.get("membership_values", ()))
    sets = np.split(members, np.flatnonzero(np.isnan(members)) + 1) if members.size else []
    width = int(attrs["n_targets"])
    weight, scored = np.zeros((nodes + leaves, width)), np.zeros((nodes + leaves, width), bool)
    weight[own, list(attrs["leaf_targetids"])] = attrs["leaf_weights"]
    scored[own, list(attrs["leaf_targetids"])] = True
    missing = attrs.get("nodes_missing_value_tracks_true", ()) or np.zeros(nodes)
    return Forest(
        np.asarray(attrs["tree_roots"], np.int64),
        joined(attrs["nodes_featureids"], np.zeros(leaves, np.int64)),
        joined(attrs["nodes_splits"], np.zeros(leaves, np.asarray(attrs["nodes_splits"]).dtype)),
        joined(modes, np.zeros(leaves, np.int64)),
        ways["true"],
        ways["false"],
        joined(np.asarray(missing, bool), np.zeros(leaves, bool)),
        weight,
        scored,
        {int(node): sets[k] for k, node in enumerate(np.flatnonzero(modes == _MEMBER))},
    )


def _width(attrs: Attrs, kind: str) -> int:
    return int(attrs["n_targets"]) if kind == "target" else len(labels(attrs, "classlabels_int64s"))


def _regressor(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    x = matrix(inputs[0])
    scores, scored = _forest(_Identity(attrs, "target")).score(x, attrs.get("aggregate_function", "SUM"))
    post, base = attrs.get("post_transform", "NONE"), _numbers(attrs, "base_values")
    if base.size:
        scores = scores + base
    if scores.shape[1] == 1:
        return [(probit(scores) if post == "PROBIT" else scores).astype(np.float32)]
    return [transform(np.where(scored, scores, 0), post).astype(np.float32)]


def _infer_regressor(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    return [TensorType(DType.FLOAT32, (rows(operands), int(attrs["n_targets"])))]


def _classifier(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    names = labels(attrs, "classlabels_int64s")
    scores, scored = _forest(_Identity(attrs, "class")).score(matrix(inputs[0]), "SUM")
    post, base = attrs.get("post_transform", "NONE"), _numbers(attrs, "base_values")
    ids = set(attrs["class_ids"])
    if base.size:
        scores, scored = scores + base, np.ones_like(scored)
    if len(names) == 2 and len(ids) == 1:
        return _one_of_two(scores, ids.pop(), names, post, attrs)
    scores = np.where(scored, scores, 0)
    best = np.where(scored, scores, -np.inf).argmax(1)
    return [names[best], transform(scores, post).astype(np.float32)]


def _one_of_two(scores: Array, scored: int, names: Array, post: str, attrs: Attrs) -> Sequence[Any]:
    """Two classes of which only one is scored. A score of the first class is taken as the score of the second."""
    score = scores[:, scored]
    positive = (_numbers(attrs, "class_weights") >= 0).all()
    second = score > (0.5 if positive else 0)
    if scored == 1:
        pair = transform(scores, post)
    elif post == "PROBIT":
        pair = np.stack([probit(1 - score), probit(score)], 1)
    elif post == "LOGISTIC":
        pair = np.stack([logistic(-score), logistic(score)], 1)
    elif positive:
        pair = np.stack([1 - score, score], 1)
    else:
        pair = np.stack([-score, score], 1)
    return [names[second.astype(np.int64)], pair.astype(np.float32)]


def _infer_classifier(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    return classified(operands, attrs, len(labels(attrs, "classlabels_int64s")))


_AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
_TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")


def _ensemble(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    (x,) = inputs
    scores, _ = _forest(_Identity(attrs, "leaf")).score(matrix(x), _AGGREGATES[int(attrs.get("aggregate_function", 1))])
    post = _TRANSFORMS[int(attrs.get("post_transform", 0))]
    if scores.shape[1] > 1 or post == "PROBIT":
        scores = transform(scores, post)
    return [scores.astype(x.dtype)]


def _infer_ensemble(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    return [TensorType(tensor(operands, 0).dtype, (rows(operands), int(attrs["n_targets"])))]


OPS = (
    OpSpec(f"{DOMAIN}TreeEnsembleRegressor", _regressor, _infer_regressor),
    OpSpec(f"{DOMAIN}TreeEnsembleClassifier", _classifier, _infer_classifier),
    OpSpec(f"{DOMAIN}TreeEnsemble", _ensemble, _infer_ensemble),
)
