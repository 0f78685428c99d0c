"""What can be chosen: a `Problem`, the `Solver` that turns it into a `Kernel`, and the registry of solvers."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from .. import discovery
from ..devices.base import Device, Target
from ..devices.executable import Kernel as Kernel
from ..devices.executable import Packing as Packing
from ..ir.graph import Fused, Node, Value
from ..ir.symbolic import SymArray, SymInt, at_hand, hint
from ..ir.text import format_attrs
from ..ir.types import DType, Layout, TensorType, Type
from ..search.space import Space

Config = Mapping[str, Any]
Array = np.ndarray[Any, Any]

#: Constant integers up to this many are part of a problem: axes, shapes, starts, pads. A kernel is made for them.
MOST_VALUES = 64
#: float constants that say what an operation does, not what it works on
_FLOAT_VALUES = {"Resize": (1, 2), "OneHot": (1,), "Range": (0, 1, 2)}


@dataclass(frozen=True, eq=False)
class Problem:
    """One operation with its types: everything that may decide which kernel is best for it."""

    op: str
    inputs: tuple[Type | None, ...]
    outputs: tuple[Type | None, ...]
    attrs: Mapping[str, Any]
    epilogue: tuple[Fused, ...] = ()
    #: how many of the last inputs are operands of the epilogue alone
    operands: int = 0
    #: which inputs are constant (weights may be packed once)
    constant: tuple[bool, ...] = ()
    #: (input, value) of the constants that say what to do (see `MOST_VALUES`)
    values: tuple[tuple[int, Array], ...] = ()

    def key(self) -> str:
        """Canonical text, compared in full, never by hash alone. A ! marks constants, a ; the epilogue's operands."""
        return self._key

    def family(self) -> str:
        """The key with the sizes of tensors left open: problems of one family are neighbours, `sizes` says how near."""
        return self._family

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every dimension of inputs and outputs, in order, of a static problem."""
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
        """Type of main input i, None where it is absent."""
        return self.inputs[i] if i < len(self.inputs) - self.operands else None

    def value(self, i: int) -> Array | None:
        """The value of input i, where it is a constant that says what to do (axes, shapes, pads, ...)."""
        return next((v for k, v in self.values if k == i), None)

    @property
    def is_static(self) -> bool:
        return all(t is None or t.is_static for t in [*self.inputs, *self.outputs])

    @property
    def at_hand(self) -> Problem:
        """The problem for the shapes at hand, where it is one of a class of shapes."""
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
        """The same with some inputs and the output in a layout."""

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
        """The problem that a node poses; with ``operands``, the one it would pose with that epilogue.

        It is the one of the shapes at hand; see `of_class`.
        """
        return Problem.of_class(node, operands, epilogue, output).at_hand

    @staticmethod
    def of_class(
        node: Node,
        operands: Sequence[Value] | None = None,
        epilogue: tuple[Fused, ...] = (),
        output: Value | None = None,
    ) -> Problem:
        """The same for a whole class of shapes, where the node's are symbolic."""
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
    """A constant input of this kind is part of the problem, not of the data."""
    kinds = array.dtype.kind in "iub" or isinstance(array, SymArray) or i in _FLOAT_VALUES.get(op, ())
    return kinds and array.ndim <= 2 and array.size <= MOST_VALUES


@lru_cache(4096)
def _open(dtype: DType, rank: int, layout: Layout) -> str:
    """The text of a tensor type whose sizes are left open."""
    return str(TensorType(dtype, (None,) * rank, layout))


def attrs_at_hand(attrs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Attributes for the shapes at hand."""
    if not any(_depends(value) for value in attrs.values()):
        return attrs
    return {name: _value_at_hand(value) for name, value in attrs.items()}


def _depends(value: Any) -> bool:
    return isinstance(value, SymInt) or (isinstance(value, tuple) and any(map(_depends, value)))


def _value_at_hand(value: Any) -> Any:
    return tuple(map(_value_at_hand, value)) if isinstance(value, tuple) else hint(value)


def tensor(type: Type | None) -> TensorType:
    """A type that `why_not` has checked to be a tensor."""
    assert isinstance(type, TensorType)
    return type


def why_not_type(type: Type | None, dtypes: frozenset[DType], layouts: frozenset[str]) -> str | None:
    """What speaks against an input or output where tensors of these element types and layouts are taken."""
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
    """A refusal for want of a type or an operand's value (axes, starts, pads, ...): once it is there, ask again."""

    __slots__ = ()


class Solver(ABC):
    """A way to solve problems. Stateless; everything it needs is in the problem, the config and the device."""

    id: str
    #: major.minor: what was measured of another minor version is a good guess, of another major one it is void
    version: str = "1.0"
    #: order among untuned solvers that accept a problem: the lowest is the default
    rank: int = 100
    #: its kernels run on the host whatever the device is
    host: bool = False
    #: chosen only where it was measured, never by default
    tuned_only: bool = False
    #: operations that it may be asked about; None: any
    ops: frozenset[str] | None = None
    #: what its kernels are written in: asked about devices that compile it; None: about any
    language: str | None = None
    #: its kernels can be made for a class of shapes: what it computes from sizes is arithmetic alone
    serves_classes: bool = False
    #: the same config gives the same bits at each run, in every process; else a frozen model refuses it
    reproducible: bool = True

    @abstractmethod
    def why_not(self, problem: Problem, target: Target) -> str | None:
        """None when this solver can solve the problem there; else the reason in words."""

    def default(self, problem: Problem, target: Target) -> Config:
        """The config used when nothing was measured."""
        return {}

    def likely(self, problem: Problem, target: Target) -> Sequence[Config]:
        """Configs of the space that a search had better try first, the most promising first."""
        return ()

    def space(self, problem: Problem, target: Target) -> Space:
        """The configs among which tuning may choose; the default is one of them."""
        return Space({})

    def inexact(self, problem: Problem, config: Config) -> str | None:
        """Why its results are worse than those of direct summation in the problem's type; None when they are not.

        EXECUTION_MODE_HINT = ACCURACY excludes it then.
        """
        return None

    def source(self, problem: Problem, config: Config, target: Target) -> str:
        """The text that would be compiled for a static problem: part of the key of what is measured."""
        return ""

    def preferred(self, problem: Problem, target: Target) -> tuple[Layout, Layout] | None:
        """The layouts of first input and output in which it would rather solve a problem that is plain."""
        return None

    def workspace(self, problem: Problem, config: Config, device: Device) -> int | None:
        """Bytes of scratch memory that the kernel asks for; None where that is known only when it runs."""
        return None

    @abstractmethod
    def compile(self, problem: Problem, config: Config, device: Device) -> Kernel:
        """The kernel. `serves_classes`: its problem may be of a class of shapes."""

    def compile_again(self, problem: Problem, config: Config, device: Device, before: Kernel) -> Kernel:
        """The same, where ``before`` was made with the same config for other sizes: what it compiled is not looked for
        again."""
        return self.compile(problem, config, device)


#: of modules here whose solvers have one language, which: for a device that compiles another they are not imported
LANGUAGES = {"opencl": "c", "cuda": "cuda", "triton": "cuda", "vendor": "cuda"}


#: Of modules here, the operations that their solvers may be asked about: for others they are not imported. One that is
#: not in this table is imported in any case. A test compares it with the solvers (tests/unit/test_load_memory.py).
TABLE = Path(__file__).parents[1] / "data" / "solvers.json"


@cache
def _served() -> Mapping[str, Sequence[str]]:
    table: Mapping[str, Sequence[str]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


@lru_cache(maxsize=1 << 12)  # bounded: an operation is whatever a model says
def solvers(language: str | None = None, op: str | None = None) -> tuple[Solver, ...]:
    """Every solver, ours and those of extensions, in order of rank. Given a language, or an operation: at least all
    that devices which compile it can be asked about, or that can be asked about it."""

    def skip(name: str) -> bool:
        if language is not None and LANGUAGES.get(name.partition(".")[0], language) != language:
            return True
        return op is not None and op not in _served().get(name, (op,))

    found = discovery.find("tunewright.solvers", key=lambda s: s.id, skip=skip)
    return tuple(sorted(found.values(), key=lambda s: (s.rank, s.id)))
