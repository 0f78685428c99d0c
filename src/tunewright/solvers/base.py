"""A `Problem` to solve, the `Solver` that makes a `Kernel` for it, and the registry of solvers."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from .. import discovery
from ..devices.base import Device, Target
from ..devices.executable import Kernel as Kernel
from ..devices.executable import Packing as Packing
from ..ir.graph import Fused, Node, Value
from ..ir.graph_text import format_attrs
from ..ir.symbolic import SymArray, SymInt, at_hand, hint
from ..ir.types import DType, Layout, TensorType, Type
from ..search.space import Space

Config = Mapping[str, Any]
Array = np.ndarray[Any, Any]

#: A constant of up to this many integers is part of a problem: axes, shapes, starts, pads. Kernels are made for its
#: values.
MOST_VALUES = 64
#: Inputs whose float constants determine the operation, and are not data.
_FLOAT_VALUES = {"Resize": (1, 2), "OneHot": (1,), "Range": (0, 1, 2)}


@dataclass(frozen=True, eq=False)
class Problem:
    """One operation with its types: everything that may decide which kernel is best for it."""

    op: str
    inputs: tuple[Type | None, ...]
    outputs: tuple[Type | None, ...]
    attrs: Mapping[str, Any]
    epilogue: tuple[Fused, ...] = ()
    #: the number of last inputs that are operands only of the epilogue
    operands: int = 0
    #: which inputs are constant (weights may be packed once)
    constant: tuple[bool, ...] = ()
    #: (input, value) of the constants that determine the operation (see `MOST_VALUES`)
    values: tuple[tuple[int, Array], ...] = ()

    def key(self) -> str:
        """The canonical text of the problem; records compare it in full, not only by hash.

        A ! marks constants, a ; begins the operands of the epilogue.
        """
        return self._key

    def family(self) -> str:
        """The key without the sizes of tensors. Problems of one family are neighbours; `sizes` tells how near."""
        return self._family

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every dimension of the inputs and outputs of a static problem, in order."""
        return tuple(d for t in [*self.inputs, *self.outputs] if isinstance(t, TensorType) for d in t.dims)

    @cached_property
    def _key(self) -> str:
        return self._text(str)

    @cached_property
    def _family(self) -> str:
        return self._text(lambda t: _open(t.dtype, t.rank or 0, t.layout) if isinstance(t, TensorType) else str(t))

    def _text(self, show: Callable[[Type], str]) -> str:
        values = {i: f"={v.tolist()}" for i, v in self.values}
        given = [
            ("_" if t is None else show(t)) + ("!" if c else "") + values.get(i, "")
            for i, (t, c) in enumerate(zip(self.inputs, self.constant, strict=True))
        ]
        first = len(given) - self.operands
        inputs = ", ".join(given[:first]) + ("; " if self.operands else "") + ", ".join(given[first:])
        outputs = ", ".join("_" if t is None else show(t) for t in self.outputs)
        tail = "".join(f" | {s.op}({', '.join(map(str, s.args))}){format_attrs(s.attrs)}" for s in self.epilogue)
        attrs = f" {format_attrs(self.attrs)}" if self.attrs else ""
        return f"{self.op}({inputs}) -> {outputs}{attrs}{tail}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Problem) and self.key() == other.key()

    def __hash__(self) -> int:
        return hash(self.key())

    def input(self, i: int) -> Type | None:
        """The type of main input i, or None if it is absent."""
        return self.inputs[i] if i < len(self.inputs) - self.operands else None

    def value(self, i: int) -> Array | None:
        """The value of input i, if it is a constant that determines the operation (axes, pads, ...); else None."""
        return next((v for k, v in self.values if k == i), None)

    @property
    def is_static(self) -> bool:
        return all(t is None or t.is_static for t in [*self.inputs, *self.outputs])

    @property
    def at_hand(self) -> Problem:
        """The problem for the shapes at hand; a static problem returns itself."""
        attrs = attrs_at_hand(self.attrs)
        if attrs is self.attrs and not any(isinstance(v, SymArray) for _, v in self.values):
            types = [*self.inputs, *self.outputs]
            if not any(isinstance(t, TensorType) and t.is_symbolic for t in types):
                return self
        inputs, outputs = (
            tuple(t.at_hand if isinstance(t, TensorType) else t for t in types) for types in (self.inputs, self.outputs)
        )
        values = tuple((i, at_hand(v, tensor(self.inputs[i]).dtype.numpy)) for i, v in self.values)
        return Problem(self.op, inputs, outputs, attrs, self.epilogue, self.operands, self.constant, values)

    def in_layout(self, layout: Layout, inputs: Sequence[int]) -> Problem:
        """The same problem with the given inputs, and the outputs, in a layout."""

        def there(type: Type | None) -> Type | None:
            return type.with_layout(layout) if isinstance(type, TensorType) else type

        types = tuple(there(t) if i in inputs else t for i, t in enumerate(self.inputs))
        outputs = tuple(there(t) for t in self.outputs)
        return Problem(
            self.op, types, outputs, self.attrs, self.epilogue, self.operands, self.constant, self.values
        )  # fmt: skip

    @property
    def main_inputs(self) -> tuple[Type | None, ...]:
        """Types of the main operation's inputs, without the epilogue's operands."""
        return self.inputs[: len(self.inputs) - self.operands]

    @staticmethod
    def of(
        node: Node,
        operands: Sequence[Value] | None = None,
        epilogue: tuple[Fused, ...] = (),
        output: Value | None = None,
    ) -> Problem:
        """The problem of a node for the shapes at hand (see `of_class`).

        With ``operands``, the problem that the node would have with that epilogue.
        """
        return Problem.of_class(node, operands, epilogue, output).at_hand

    @staticmethod
    def of_class(
        node: Node,
        operands: Sequence[Value] | None = None,
        epilogue: tuple[Fused, ...] = (),
        output: Value | None = None,
    ) -> Problem:
        """The problem of a node for its whole class of shapes, where the node's shapes are symbolic."""
        if operands is None:
            values, count, epilogue = node.inputs, node.operands, node.epilogue
        else:
            values, count = [*node.main_inputs, *operands], len(operands)
        return Problem(
            node.op,
            tuple(None if v is None else v.type for v in values),
            tuple(v.type for v in (node.outputs if output is None else [output])),
            node.attrs,
            epilogue,
            count,
            tuple(v is not None and v.const is not None for v in values),
            tuple(
                (i, v.const)
                for i, v in enumerate(values)
                if v is not None and v.const is not None and is_value(node.op, i, v.const)
            ),
        )


def is_value(op: str, i: int, array: Array) -> bool:
    """Whether constant input i of an operation is part of the problem, and not of the data."""
    kinds = array.dtype.kind in "iub" or isinstance(array, SymArray) or i in _FLOAT_VALUES.get(op, ())
    return kinds and array.ndim <= 2 and array.size <= MOST_VALUES


@lru_cache(4096)
def _open(dtype: DType, rank: int, layout: Layout) -> str:
    """The text of a tensor type with open sizes."""
    return str(TensorType(dtype, (None,) * rank, layout))


def attrs_at_hand(attrs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The attributes with the values for the shapes at hand."""
    if not any(_depends(value) for value in attrs.values()):
        return attrs
    return {name: _value_at_hand(value) for name, value in attrs.items()}


def _depends(value: Any) -> bool:
    return isinstance(value, SymInt) or (isinstance(value, tuple) and any(map(_depends, value)))


def _value_at_hand(value: Any) -> Any:
    return tuple(map(_value_at_hand, value)) if isinstance(value, tuple) else hint(value)


def tensor(type: Type | None) -> TensorType:
    """The type as a tensor type; `why_not` has checked that it is one."""
    assert isinstance(type, TensorType)
    return type


def why_not_type(type: Type | None, dtypes: frozenset[DType], layouts: frozenset[str]) -> str | None:
    """Why an input or output of this type is refused where tensors of these element types and layouts are taken, or
    None."""
    if type is None:
        return None
    if not isinstance(type, TensorType):
        return f"{type} is no tensor"
    if type.dtype not in dtypes:
        return f"does not take {type.dtype}"
    if type.layout.name not in layouts:
        return f"does not take the layout {type.layout}"
    return None


class Missing(str):
    """A refusal because a type or an operand's value (axes, pads, ...) is unknown. Ask again when it is known."""

    __slots__ = ()


class Solver(ABC):
    """A way to solve problems. It is stateless: the problem, the config and the device contain everything it needs."""

    id: str
    #: major.minor. Measurements of another minor version are a good guess, those of another major version are void.
    version: str = "1.0"
    #: order among untuned solvers that accept a problem: the lowest is the default
    rank: int = 100
    #: whether its kernels run on the host, whatever the device is
    host: bool = False
    #: whether it is chosen only where it was measured, never by default
    tuned_only: bool = False
    #: the operations that it may accept; None: any
    ops: frozenset[str] | None = None
    #: The language of its kernels. It is asked only about devices that compile this language; None: about any device.
    language: str | None = None
    #: Whether its kernels can be made for a class of shapes: then it only uses sizes in arithmetic.
    serves_classes: bool = False
    #: Whether the same config gives the same bits in each run and in every process; a frozen model refuses other
    #: solvers.
    reproducible: bool = True

    @abstractmethod
    def why_not(self, problem: Problem, target: Target) -> str | None:
        """None when this solver can solve the problem on the target, else the reason in words."""

    def default(self, problem: Problem, target: Target) -> Config:
        """The config that is used when nothing was measured."""
        return {}

    def likely(self, problem: Problem, target: Target) -> Sequence[Config]:
        """Configs of the space that a search should try first, the most promising first."""
        return ()

    def space(self, problem: Problem, target: Target) -> Space:
        """The configs among which tuning may choose; the default is one of them."""
        return Space({})

    def inexact(self, problem: Problem, config: Config) -> str | None:
        """Why its results are less exact than direct summation in the problem's type; None when they are not.

        With a reason, EXECUTION_MODE_HINT = ACCURACY excludes the config.
        """
        return None

    def source(self, problem: Problem, config: Config, target: Target) -> str:
        """The text that would be compiled for a static problem; it is part of the key of measurements."""
        return ""

    def preferred(self, problem: Problem, target: Target) -> tuple[Layout, Layout] | None:
        """The layouts of first input and output that the solver prefers for a problem in the plain layout, or None."""
        return None

    def workspace(self, problem: Problem, config: Config, device: Device) -> int | None:
        """The bytes of scratch memory that the kernel needs; None if they are known only when it runs."""
        return None

    @abstractmethod
    def compile(self, problem: Problem, config: Config, device: Device) -> Kernel:
        """Make the kernel. With `serves_classes`, the problem may be one of a class of shapes."""

    def compile_again(self, problem: Problem, config: Config, device: Device, before: Kernel) -> Kernel:
        """Make the kernel, given ``before``, made with the same config for other sizes.

        It may reuse the compiled programs of ``before`` without a look-up.
        """
        return self.compile(problem, config, device)


#: The operations that the solvers of each module here may accept; modules are not imported for other operations. A
#: module without an entry is always imported. A test compares the table with the solvers
#: (tests/unit/runtime/test_load_memory.py).
TABLE = Path(__file__).parents[1] / "data" / "solvers.json"


@cache
def _served() -> Mapping[str, Sequence[str]]:
    table: Mapping[str, Sequence[str]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


@cache
def _language(package: str) -> str | None:
    """The language of all solvers in a package here: ``LANGUAGE`` of its `__init__`. None: of any language."""
    return getattr(import_module(f"{__package__}.{package}"), "LANGUAGE", None)


@lru_cache(maxsize=1 << 12)  # bounded, because models contain arbitrary operations
def solvers(language: str | None = None, op: str | None = None) -> tuple[Solver, ...]:
    """Every solver, the package's and those of extensions, in order of rank.

    Given a language or an operation, the result may lack solvers of other languages or operations.
    """

    def skip(name: str) -> bool:
        package, is_inside, _ = name.partition(".")
        if language is not None and is_inside and _language(package) not in (None, language):
            return True
        return op is not None and op not in _served().get(name, (op,))

    found = discovery.find("tunewright.solvers", key=lambda s: s.id, skip=skip)
    return tuple(sorted(found.values(), key=lambda s: (s.rank, s.id)))
