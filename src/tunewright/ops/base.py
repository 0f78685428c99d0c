"""What an operation is: the types it infers, the reference it must match, the work it costs.

A family is a module in this package with a tuple ``OPS`` of `OpSpec`. The reference is one definition with four uses:
fallback solver, constant folder, judge of candidates, test oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..ir.types import TensorType, Type

if TYPE_CHECKING:
    from .batch_rules import BatchRule

Array: TypeAlias = np.ndarray[Any, Any]
Attrs: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Operand:
    """What is known of an input while types are inferred: its type, and its value where it is constant."""

    type: Type
    value: Array | None = None

    @property
    def tensor(self) -> TensorType:
        """The type of a tensor operand; anything else is a mistake in the model."""
        if not isinstance(self.type, TensorType):
            raise ValueError(f"a tensor is needed here, not {self.type}")
        return self.type


Operands: TypeAlias = Sequence[Operand | None]
#: (inputs, attrs, number of outputs) -> outputs. Inputs are read-only. A tensor is an ndarray (rank 0 too, never a
#: numpy scalar), a sequence a list, an absent optional None. May return more outputs than asked for; never fewer.
Reference: TypeAlias = Callable[[Sequence[Any], Attrs, int], Sequence[Any]]
#: (operands, attrs, number of outputs) -> a type per output, None where nothing is known. Raises ValueError on a
#: mistake in the model, saying which input or attribute is wrong.
Infer: TypeAlias = Callable[[Operands, Attrs, int], Sequence[Type | None]]

#: (operand types, result types, attrs) -> flops of one execution, for static types
Flops: TypeAlias = Callable[[Sequence[TensorType | None], Sequence[TensorType], Attrs], float]


@dataclass(frozen=True)
class Work:
    """What one execution costs at least: arithmetic and memory traffic. The roofline floor follows from it."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Sample:
    """Inputs on which every implementation of an op is checked against its reference."""

    inputs: Sequence[Any]
    attrs: Attrs
    outputs: int = 1


@dataclass(frozen=True)
class OpSpec:
    """One operation. ``name`` is ``Conv``, or ``domain::Name`` outside ONNX's own domain."""

    name: str
    reference: Reference
    infer: Infer
    #: None: one per output element
    flops: Flops | None = None
    samples: Callable[[np.random.Generator], Iterable[Sample]] | None = None
    #: numpy broadcasting, one output element from one element of each input: may run in place and as an epilogue
    elementwise: bool = False
    #: the output is the first input's bytes under another shape: may be optimised out
    view: bool = False
    #: the same inputs always give the same outputs: may be folded and shared
    pure: bool = True
    #: worth a kernel chosen for its shape: a plan is split in front of it when the shape depends on data
    heavy: bool = False
    #: where the examples of a batch are in its results (`batch_rules`). None: it may mix examples, unless it is
    #: element-wise or a view
    batch: BatchRule | None = None
    #: inputs that only hold sizes, which the types of the results show anyway
    size_inputs: tuple[int, ...] = ()
    #: it picks elements out of its inputs, and reads at most as many bytes of each as it writes results
    picks: bool = False
    #: rounding of large numbers decides its results: exponentials of sums, and recurrences
    steep: bool = False
    #: names of its inputs, in order, as options of `tunewright driver`. Empty: those of ONNX's schema
    roles: tuple[str, ...] = ()
    #: the sub-command of `tunewright driver` that serves it, such as ``conv``. Empty: it follows from its name
    op_class: str = ""
    #: the value of the only output where types alone tell it (Shape of a static tensor), else None
    value_from_types: Callable[[Operands, Attrs], Array | None] | None = None

    def work(self, inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> Work:
        """Arithmetic and traffic for static types."""
        traffic = sum(t.nbytes for t in [*inputs, *outputs] if t is not None)
        flops = self.flops(inputs, outputs, attrs) if self.flops else float(sum(t.size for t in outputs))
        return Work(flops, float(traffic))
