"""Infer types and fold constants of a graph in one forward sweep.

`propagate` infers the type of every value. Where all inputs of a node are constant, it runs the reference within a
budget and makes the outputs constant. Shape arithmetic disappears as soon as the input shapes are known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..errors import LimitError, ModelError, TunewrightError, UnsupportedError
from ..ir.graph import Graph, Node, Value
from ..ir.symbolic import SymArray
from ..ir.types import MAX_RANK, OptionalType, SequenceType, TensorType, Type, merge_shapes
from . import lookup, symbolic
from .base import Operand, OpSpec
from .control_types import infer_control

#: exceptions that inference raises on invalid attributes and operands
MISTAKES = (ValueError, KeyError, IndexError, TypeError, AttributeError, ArithmeticError, RuntimeError)
#: With at most this many input elements, broadcasting cannot make an element-wise result too large.
FEW = 4096
#: Operators whose results are not much larger than the weights they move. They are folded whatever the size.
MOVES = frozenset({"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Cast"})
#: operators that read weights by rows or by columns (`passes.placement.weights`)
PRODUCTS = frozenset({"MatMul", "Gemm"})


@dataclass
class Budget:
    """Limits on the memory and the time of folding. A tensor above ``max_tensor_bytes`` raises `LimitError`."""

    fold_bytes: int = 64 << 20
    fold_seconds: float = 10.0
    max_tensor_bytes: int = 16 << 30
    spent: float = field(default=0.0, init=False)
    #: bytes of large weights moved or cast so far, at most ``max_tensor_bytes``
    moved: int = field(default=0, init=False)


def propagate(
    graph: Graph, budget: Budget | None = None, tolerant: bool = False, keep: Callable[[Node], bool] | None = None,
    bodies: bool = False,
) -> bool:  # fmt: skip
    """Infer types and fold constants in topological order. True when something changed. Without a ``budget``: types
    only.

    ``tolerant``: an invalid node stays unchanged and raises when it runs (in a branch that is never taken: never).
    ``keep``: selects nodes that are not folded although they could be. ``bodies``: infer the outputs of control flow
    from its bodies, where the shapes of all its inputs are known.
    """
    changed = False

    def inside(body: Graph) -> bool:
        return propagate(body, budget, tolerant=True, bodies=True)

    for node in graph.nodes:
        spec = lookup(node.op)
        if bodies and node.bodies:
            changed |= infer_control(node, inside, budget.max_tensor_bytes if budget else 0)
        if spec is None or node.bodies:  # the types inside a body are inferred when the body is specialised
            continue
        try:
            changed |= infer_node(node, spec, budget.max_tensor_bytes if budget else 0)
            if budget is not None and not (keep is not None and keep(node)) and fold_node(graph, node, spec, budget):
                changed = True
        except ModelError:
            if not tolerant:
                raise
    return changed


def infer_node(node: Node, spec: OpSpec, max_bytes: int = 0) -> bool:
    """Refine the types of a node's outputs from its operands. True when a type changed."""
    operands: list[Operand | None] = []
    for value in node.inputs:
        if value is not None and value.type is None:
            return False  # the type of this input is not known yet
        operands.append(None if value is None else Operand(value.type, value.const))  # type: ignore[arg-type]
    try:
        main = operands[: len(operands) - node.operands]
        types = list(spec.infer(main, node.attrs, len(node.outputs)))
        if node.epilogue:
            types[:1] = [_epilogue_type(node, types[0], operands)]
    except TunewrightError:
        raise
    except NotImplementedError as error:
        raise UnsupportedError(str(error), where=f"node {node.name!r} ({node.op})") from error
    except MISTAKES as error:
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


def _epilogue_type(node: Node, main: Type | None, operands: Sequence[Operand | None]) -> Type | None:
    """The type of the last result of an epilogue."""
    results = [main]
    for step in node.epilogue:
        types = [operands[i] if i >= 0 else None if results[~i] is None else Operand(results[~i]) for i in step.args]  # type: ignore[arg-type]
        spec = lookup(step.op)
        if spec is None or any(t is None for t, i in zip(types, step.args, strict=True) if i < 0):
            return None
        results.append(spec.infer(types, step.attrs, 1)[0])
    return results[-1]


def fold_node(graph: Graph, node: Node, spec: OpSpec, budget: Budget) -> bool:
    """Replace a node by its results, where its inputs are constant or their types determine the result."""
    if not spec.pure or any((step := lookup(s.op)) is None or not step.pure for s in node.epilogue):
        return False
    if spec.value_from_types is not None and not node.epilogue and _fold_from_types(graph, node, spec):
        return True
    if not all(v is None or v.const is not None for v in node.inputs):
        return False
    if any(v is not None and isinstance(v.const, SymArray) for v in node.inputs):
        return symbolic.fold(graph, node)
    nbytes = 0
    for value in node.outputs:
        if not isinstance(value.type, TensorType):
            return False
        nbytes += value.type.nbytes if value.type.is_static else 0
    if budget.spent > budget.fold_seconds or (nbytes > budget.fold_bytes and not _is_move(node, nbytes, budget)):
        return False
    begin = time.perf_counter()
    results = _with_epilogue(node, spec, [None if v is None else v.const for v in node.inputs])
    budget.spent += time.perf_counter() - begin
    for value, result in zip(node.outputs, results, strict=False):
        if not isinstance(result, np.ndarray):
            return False
        if not result.flags.c_contiguous or (result.base is not None and result.nbytes * 2 < _root(result).nbytes):
            result = result.copy()  # kernels need contiguous memory, and a small view would keep the large array alive
        graph.replace(value, graph.constant(result, value.name))
    graph.remove(node)
    return True


def _is_move(node: Node, nbytes: int, budget: Budget) -> bool:
    """Whether the node only moves or casts weights. Such a node is folded even where other arithmetic would be too
    large."""
    given = sum(v.const.nbytes for v in node.inputs if v is not None and v.const is not None)
    if node.op not in MOVES or node.epilogue or nbytes > 2 * given:
        return False
    if is_turned(node) and all(user.op in PRODUCTS for user in node.output.users):
        return False
    budget.moved += nbytes
    return not budget.max_tensor_bytes or budget.moved <= budget.max_tensor_bytes


def is_turned(node: Node) -> bool:
    """Whether the node is a Transpose that exchanges rows and columns of one matrix."""
    return node.op == "Transpose" and tuple(node.attrs.get("perm", (1, 0))) == (1, 0)


def _fold_from_types(graph: Graph, node: Node, spec: OpSpec) -> bool:
    """Fold shape arithmetic. The operands need not be constant; their types must be known well enough."""
    assert spec.value_from_types is not None
    if any(v is not None and v.type is None for v in node.inputs):
        return False
    operands = [None if v is None else Operand(v.type, v.const) for v in node.inputs]  # type: ignore[arg-type]
    result = spec.value_from_types(operands, node.attrs)
    if result is None:
        return False
    graph.replace(node.output, graph.constant(result, node.output.name))
    graph.remove(node)
    return True


def check_results(node: Node, spec: OpSpec, arrays: Sequence[object], max_bytes: int) -> None:
    """Refuse a node before it runs when its results would be too large. Its shapes depend on data that is known now."""
    main = arrays[: len(arrays) - node.operands]
    if spec.view or not all(a is None or isinstance(a, np.ndarray) for a in main):
        return
    tensors = [a for a in main if isinstance(a, np.ndarray)]
    if spec.elementwise and sum(a.size for a in tensors) <= FEW:
        return
    operands = [Operand(TensorType.of(a), a) if isinstance(a, np.ndarray) else None for a in main]
    try:
        types = spec.infer(operands, node.attrs, len(node.outputs))
    except MISTAKES:
        return  # the node itself gives the better error message for its inputs
    for type in types:
        if isinstance(type, TensorType) and type.is_static:
            _check_size(node, type, max_bytes)


def evaluate(node: Node, spec: OpSpec, arrays: Sequence[object]) -> Sequence[object]:
    """Run the reference. An error names the node."""
    try:
        with np.errstate(all="ignore"):
            return spec.reference(arrays, node.attrs, len(node.outputs))
    except TunewrightError:
        raise
    except MemoryError as error:
        raise LimitError("not enough memory", where=f"node {node.name!r} ({node.op})") from error
    except Exception as error:  # references are numpy code: any exception means that the inputs do not fit
        raise ModelError(f"cannot be computed: {error!r}", where=f"node {node.name!r} ({node.op})") from error


def _with_epilogue(node: Node, spec: OpSpec, arrays: Sequence[object]) -> Sequence[object]:
    """The outputs of a node over constants, epilogue included. Shape arithmetic may be fused before its shapes are
    known."""
    found = evaluate(node, spec, arrays[: len(arrays) - node.operands])
    if not node.epilogue:
        return found
    results = [found[0]]
    for step in node.epilogue:
        inner = lookup(step.op)
        assert inner is not None
        alone = Node(step.op, node.name, step.attrs)
        alone.outputs = node.outputs[:1]
        results.append(evaluate(alone, inner, [arrays[i] if i >= 0 else results[~i] for i in step.args])[0])
    return results[-1:]


def _root(array: np.ndarray) -> np.ndarray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _merge(node: Node, value: Value, inferred: Type) -> Type:
    """The common type of inference and declaration. The more precise of each dimension stays; different element types
    raise."""
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
            # References know plain tensors only. Where a pass has chosen a layout, the layout stays.
            return TensorType(inferred.dtype, merge_shapes(inferred.shape, declared.shape), declared.layout)
        except ValueError:
            return inferred  # models often declare stale shapes; the inferred one counts
    if isinstance(declared, (SequenceType, OptionalType)) and type(declared) is type(inferred):
        return inferred if inferred.elem is not None else declared
    return inferred


def _check_size(node: Node, type: TensorType, max_bytes: int) -> None:
    if any(d < 0 for d in type.dims):
        raise ModelError(f"makes a tensor of shape {list(type.dims)}", where=f"node {node.name!r} ({node.op})")
    if len(type.dims) > MAX_RANK:
        raise LimitError(f"makes a tensor of {len(type.dims)} dimensions", where=f"node {node.name!r} ({node.op})")
    if max_bytes and type.nbytes > max_bytes:
        raise LimitError(
            f"makes {type}, {type.nbytes:,} bytes",
            where=f"node {node.name!r} ({node.op})",
            hint=f"the limit is MAX_TENSOR_BYTES = {max_bytes:,}",
        )
