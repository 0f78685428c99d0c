"""Types and constants through a graph, in one forward sweep.

`propagate` infers the type of every value; where all inputs of a node are constant it runs the reference and makes the
outputs constants too (within a budget), so that shape arithmetic disappears as soon as the input shapes are known.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..errors import LimitError, ModelError, TunewrightError
from ..ir.graph import Graph, Node, Value
from ..ir.types import OptionalType, SequenceType, TensorType, Type, merge_shapes
from . import lookup
from .base import Operand, OpSpec

#: ops that run bodies: their bodies' types are inferred when they are specialised, at run time
CONTROL = frozenset({"If", "Loop", "Scan", "SequenceMap"})


@dataclass
class Budget:
    """What folding may create and take; `LimitError` beyond ``max_tensor_bytes``, which no plan may need at all."""

    fold_bytes: int = 64 << 20
    fold_seconds: float = 10.0
    max_tensor_bytes: int = 16 << 30
    spent: float = field(default=0.0, init=False)


def propagate(graph: Graph, budget: Budget | None = None) -> bool:
    """Infer types and fold constants in topological order; True when something changed. ``budget`` None: types only."""
    changed = False
    for node in graph.nodes:
        spec = lookup(node.op)
        if spec is None or node.op in CONTROL:
            continue
        changed |= infer_node(node, spec, budget.max_tensor_bytes if budget else 0)
        if budget is not None and fold_node(graph, node, spec, budget):
            changed = True
    return changed


def infer_node(node: Node, spec: OpSpec, max_bytes: int = 0) -> bool:
    """Refine the types of a node's outputs from its operands; True when one changed."""
    operands: list[Operand | None] = []
    for value in node.inputs:
        if value is not None and value.type is None:
            return False  # nothing is known of this input yet
        operands.append(None if value is None else Operand(value.type, value.const))  # type: ignore[arg-type]
    try:
        types = spec.infer(operands, node.attrs, len(node.outputs))
    except TunewrightError:
        raise
    except (ValueError, KeyError, IndexError, TypeError, ArithmeticError, RuntimeError, OverflowError) as error:
        raise ModelError(str(error) or repr(error), where=f"node {node.name!r} ({node.op})") from error
    changed = False
    for value, inferred in zip(node.outputs, types, strict=False):
        if inferred is None:
            continue
        merged = _merge(node, value, inferred)
        if isinstance(merged, TensorType) and merged.is_static:
            _check_size(node, merged, max_bytes)
        if merged != value.type:
            value.type, changed = merged, True
    return changed


def fold_node(graph: Graph, node: Node, spec: OpSpec, budget: Budget) -> bool:
    """Replace a node over constants by its results."""
    if not spec.pure or node.epilogue or not all(v is None or v.const is not None for v in node.inputs):
        return False
    nbytes = 0
    for value in node.outputs:
        if not isinstance(value.type, TensorType):
            return False
        nbytes += value.type.nbytes if value.type.is_static else 0
    if nbytes > budget.fold_bytes or budget.spent > budget.fold_seconds:
        return False
    begin = time.perf_counter()
    results = evaluate(node, spec, [None if v is None else v.const for v in node.inputs])
    budget.spent += time.perf_counter() - begin
    for value, result in zip(node.outputs, results, strict=False):
        if not isinstance(result, np.ndarray):
            return False
        if result.base is not None and result.nbytes * 2 < _root(result).nbytes:
            result = result.copy()  # a small view would keep the large array alive
        graph.replace(value, graph.constant(result, value.name))
    graph.remove(node)
    return True


def evaluate(node: Node, spec: OpSpec, arrays: Sequence[object]) -> Sequence[object]:
    """Run the reference; a refusal names the node."""
    try:
        with np.errstate(all="ignore"):
            return spec.reference(arrays, node.attrs, len(node.outputs))
    except TunewrightError:
        raise
    except MemoryError as error:
        raise LimitError("not enough memory", where=f"node {node.name!r} ({node.op})") from error
    except Exception as error:  # references are numpy code: any of its exceptions means that the inputs do not fit
        raise ModelError(f"cannot be computed: {error!r}", where=f"node {node.name!r} ({node.op})") from error


def _root(array: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _merge(node: Node, value: Value, inferred: Type) -> Type:
    """Inference and what the model declares must agree; the more precise of each dimension stays."""
    declared = value.type
    if declared is None:
        return inferred
    if isinstance(declared, TensorType) and isinstance(inferred, TensorType):
        if declared.dtype != inferred.dtype:
            raise ModelError(
                f"makes {inferred.dtype}, but {value.name!r} is declared {declared.dtype}",
                where=f"node {node.name!r} ({node.op})",
            )
        try:
            return TensorType(inferred.dtype, merge_shapes(inferred.shape, declared.shape), inferred.layout)
        except ValueError:
            return inferred  # models often declare stale shapes; what is computed counts
    if isinstance(declared, (SequenceType, OptionalType)) and type(declared) is type(inferred):
        return inferred if inferred.elem is not None else declared  # type: ignore[union-attr]
    return inferred


def _check_size(node: Node, type: TensorType, max_bytes: int) -> None:
    if any(d < 0 for d in type.dims):
        raise ModelError(f"makes a tensor of shape {list(type.dims)}", where=f"node {node.name!r} ({node.op})")
    if max_bytes and type.nbytes > max_bytes:
        raise LimitError(
            f"makes {type}, {type.nbytes:,} bytes", where=f"node {node.name!r} ({node.op})",
            hint=f"the limit is MAX_TENSOR_BYTES = {max_bytes:,}",
        )
