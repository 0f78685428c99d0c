"""The definition of an operator: the types it infers, the reference it must match, the work it costs.

A family is a module of this package with a tuple ``OPS`` of `OpSpec`. The reference has four uses: fallback solver,
constant folder, judge of candidates and test oracle.
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
    """An input during type inference: its type, and its value where the input is constant."""

    type: Type
    value: Array | None = None

    @property
    def tensor(self) -> TensorType:
        """The type of a tensor operand. Any other operand is a mistake in the model."""
        if not isinstance(self.type, TensorType):
            raise ValueError(f"a tensor is needed here, not {self.type}")
        return self.type


Operands: TypeAlias = Sequence[Operand | None]
#: (inputs, attrs, number of outputs) -> outputs. Inputs are read-only. A tensor is an ndarray, of rank 0 too, and never
#: a numpy scalar. A sequence is a list, an absent optional is None. The result may hold more outputs than requested,
#: never fewer.
Reference: TypeAlias = Callable[[Sequence[Any], Attrs, int], Sequence[Any]]
#: (operands, attrs, number of outputs) -> one type per output, None where the type is unknown. A mistake in the model
#: raises ValueError, which says which input or attribute is wrong.
Infer: TypeAlias = Callable[[Operands, Attrs, int], Sequence[Type | None]]

#: (operand types, result types, attrs) -> flops of one execution, for static types
Flops: TypeAlias = Callable[[Sequence[TensorType | None], Sequence[TensorType], Attrs], float]


@dataclass(frozen=True)
class Work:
    """The least arithmetic and memory traffic of one execution. The roofline floor follows from it."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Sample:
    """Inputs on which every implementation of an operator is checked against its reference."""

    inputs: Sequence[Any]
    attrs: Attrs
    outputs: int = 1


@dataclass(frozen=True)
class OpSpec:
    """The definition of one operator. ``name`` is ``Conv``, or ``domain::Name`` outside ONNX's own domain."""

    name: str
    reference: Reference
    infer: Infer
    #: None stands for one flop per output element
    flops: Flops | None = None
    samples: Callable[[np.random.Generator], Iterable[Sample]] | None = None
    #: True for numpy broadcasting where one element of each input makes one output element. The operator may run in
    #: place and as an epilogue.
    elementwise: bool = False
    #: True when the output has the bytes of the first input under another shape. The node may be optimised out.
    view: bool = False
    #: True when equal inputs always give equal outputs. The node may be folded and shared.
    pure: bool = True
    #: True when the operator is worth a kernel chosen for its shape. The plan is split in front of it when that shape
    #: depends on data.
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
    #: returns the value of the only output where types alone determine it (Shape of a static tensor), else None
    value_from_types: Callable[[Operands, Attrs], Array | None] | None = None

    def work(self, inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> Work:
        """The arithmetic and memory traffic of one execution, for static types."""
        traffic = sum(t.nbytes for t in [*inputs, *outputs] if t is not None)
        flops = self.flops(inputs, outputs, attrs) if self.flops else float(sum(t.size for t in outputs))
        return Work(flops, float(traffic))
