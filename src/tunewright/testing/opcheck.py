"""opcheck: checks that operations keep their promises. It serves built-in operations and those of an extension::

    from tunewright.testing.opcheck import assert_op

    def test_my_op():
        assert_op(my_spec)                      # the spec's own samples
        assert_op(my_spec, oracle=my_oracle)    # and the outputs compared with another engine's

An op promises that its inference agrees with its reference on types and shapes, even if the operands' types are partly
unknown. It also promises that the reference does not change its inputs, and that its flags (``elementwise``, ``view``,
``value_from_types``) are true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..ir.types import Dim, Shape, TensorType, Type
from ..ops.base import Operand, OpSpec, Sample
from ..ops.tolerance import compare

#: Returns the expected outputs, or None where the oracle has none.
Oracle: TypeAlias = Callable[[OpSpec, Sample], Sequence[Any] | None]


def assert_op(
    spec: OpSpec, samples: Iterable[Sample] | None = None, oracle: Oracle | None = None, seed: int = 0
) -> None:
    """Raise AssertionError with every broken promise of an op."""
    found = list(violations(spec, samples, oracle, seed))
    if found:
        raise AssertionError(f"{spec.name}: " + "; ".join(found[:10]))


def violations(
    spec: OpSpec, samples: Iterable[Sample] | None = None, oracle: Oracle | None = None, seed: int = 0
) -> Iterator[str]:
    """Yield every broken promise, in words. Without ``samples`` the spec's own are used."""
    if samples is None:
        samples = spec.samples(np.random.default_rng(seed)) if spec.samples is not None else ()
    for number, sample in enumerate(samples):
        for text in _check(spec, sample, oracle):
            yield f"sample {number}: {text}"


def _check(spec: OpSpec, sample: Sample, oracle: Oracle | None) -> Iterator[str]:
    before = [x.copy() if isinstance(x, np.ndarray) else x for x in sample.inputs]
    try:
        with np.errstate(all="ignore"):
            results = list(spec.reference([_locked(x) for x in sample.inputs], sample.attrs, sample.outputs))
    except Exception as error:  # any exception of a reference on its own sample is a broken promise
        yield f"the reference raises {error!r}"
        return
    for i, (old, new) in enumerate(zip(before, sample.inputs, strict=True)):
        if isinstance(old, np.ndarray) and not _same(old, new):
            yield f"the reference changes input {i}"
    if len(results) < sample.outputs:
        yield f"the reference makes {len(results)} outputs instead of {sample.outputs}"
        return
    results = results[: sample.outputs]
    if not all(isinstance(r, np.ndarray) for r in results):
        kinds = ", ".join(type(r).__name__ for r in results)
        yield f"the outputs are {kinds} instead of ndarrays"
        return
    actual = [TensorType.of(r) for r in results]
    yield from _check_inference(spec, sample, actual)
    yield from _check_flags(spec, sample, results)
    if oracle is not None:
        expected = oracle(spec, sample)
        for i, (mine, other) in enumerate(zip(results, expected or (), strict=False)):
            difference = compare(mine, np.asarray(other))
            if difference:
                yield f"output {i}: {difference}"


def _locked(x: Any) -> Any:
    """A read-only view: writing into it raises."""
    if not isinstance(x, np.ndarray):
        return x
    view = x.view()
    view.flags.writeable = False
    return view


def _same(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    if a.dtype == object:
        return a.shape == b.shape and bool(a.tolist() == b.tolist())
    return a.shape == b.shape and a.tobytes() == b.tobytes()


# -- inference --------------------------------------------------------------------------------------------------------
def _check_inference(spec: OpSpec, sample: Sample, actual: Sequence[TensorType]) -> Iterator[str]:
    for what, operands in partial_operands(sample):
        try:
            inferred = list(spec.infer(operands, sample.attrs, sample.outputs))
        except Exception as error:  # the operands are legal, only partly unknown: nothing may be raised
            yield f"inference raises {error!r} {what}"
            continue
        if len(inferred) < len(actual):
            yield f"inference tells {len(inferred)} outputs of {len(actual)} {what}"
        for i, (claim, fact) in enumerate(zip(inferred, actual, strict=False)):
            if contradicts(claim, fact):
                yield f"inference claims {claim} for output {i}, which is {fact}, {what}"
        if spec.value_from_types is not None:
            value = spec.value_from_types(operands, sample.attrs)
            if value is not None and TensorType.of(value) != actual[0]:
                yield f"value_from_types makes {TensorType.of(value)} of output 0, which is {actual[0]}, {what}"


def contradicts(claim: Type | None, fact: TensorType) -> bool:
    """Whether an inferred type disagrees with the actual one. It may leave parts open."""
    if claim is None:
        return False
    if not isinstance(claim, TensorType) or claim.dtype is not fact.dtype:
        return True
    if claim.shape is None:
        return False
    if len(claim.shape) != len(fact.dims):
        return True
    return any(isinstance(c, int) and c != f for c, f in zip(claim.shape, fact.dims, strict=True))


def partial_operands(sample: Sample) -> Iterator[tuple[str, list[Operand | None]]]:
    """Yield a sample's operands as inference may meet them: with and without values, open dimensions, unknown ranks."""
    types = [TensorType.of(x) if isinstance(x, np.ndarray) else None for x in sample.inputs]
    values = [x if isinstance(x, np.ndarray) else None for x in sample.inputs]

    def operands(shapes: Sequence[Shape | None], known: Sequence[Any]) -> list[Operand | None]:
        return [
            None if t is None else Operand(TensorType(t.dtype, s), k)
            for t, s, k in zip(types, shapes, known, strict=True)
        ]

    full: list[Shape | None] = [None if t is None else t.shape for t in types]
    nothing: list[Any] = [None] * len(values)
    yield "with everything known", operands(full, values)
    yield "without constant values", operands(full, nothing)
    for i, t in enumerate(types):
        if t is None:
            continue
        yield f"with only input {i} constant", operands(full, [v if k == i else None for k, v in enumerate(values)])
        rest = [None if k == i else v for k, v in enumerate(values)]
        yield f"with input {i} not constant", operands(full, rest)
        yield f"without the rank of input {i}", operands([None if k == i else s for k, s in enumerate(full)], rest)
        for axis in range(len(t.dims)):
            for open_dim in (None, "N"):
                dims: list[Dim] = list(t.dims)
                dims[axis] = open_dim
                shapes = [tuple(dims) if k == i else s for k, s in enumerate(full)]
                yield f"with dimension {axis} of input {i} open", operands(shapes, rest)
    yield "with all dimensions open", operands([None if t is None else (None,) * len(t.dims) for t in types], values)
    yield "without any rank", operands([None] * len(types), nothing)


# -- flags ------------------------------------------------------------------------------------------------------------
def _check_flags(spec: OpSpec, sample: Sample, results: Sequence[np.ndarray[Any, Any]]) -> Iterator[str]:
    arrays = [x for x in sample.inputs if isinstance(x, np.ndarray)]
    if spec.elementwise and arrays:
        shape = np.broadcast_shapes(*(x.shape for x in arrays))
        if results[0].shape != shape:
            yield f"is marked elementwise, but makes {list(results[0].shape)} where broadcasting gives {list(shape)}"
        if not any(x.dtype == results[0].dtype for x in arrays):
            yield f"is marked elementwise, but makes {results[0].dtype} of none of its inputs' types"
    if spec.view and arrays and results[0].dtype != object:
        source, target = arrays[0], results[0]
        if source.dtype != target.dtype or source.tobytes() != target.tobytes():
            yield "is marked a view, but its output holds other bytes than its first input"
    if spec.flops is not None:
        types = [TensorType.of(x) if isinstance(x, np.ndarray) else None for x in sample.inputs]
        work = spec.work(types, [TensorType.of(r) for r in results], sample.attrs)
        if not (0 <= work.flops < float("inf")):
            yield f"says it costs {work.flops} flops"
