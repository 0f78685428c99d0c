"""What can be chosen: a `Problem`, the `Solver` that turns it into a `Kernel`, and the registry of solvers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

from .. import discovery
from ..devices.base import Device, Queue, Target
from ..ir.graph import Fused, Node, Value
from ..ir.text import format_attrs
from ..ir.types import Type

Config = Mapping[str, Any]


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

    def key(self) -> str:
        """Canonical text, compared in full, never by hash alone. A ! marks constants, a ; the epilogue's operands."""
        return self._key

    @cached_property
    def _key(self) -> str:
        given = [
            ("_" if t is None else str(t)) + ("!" if c else "") for t, c in zip(self.inputs, self.constant, strict=True)
        ]
        first = len(given) - self.operands
        inputs = ", ".join(given[:first]) + ("; " if self.operands else "") + ", ".join(given[first:])
        outputs = ", ".join("_" if t is None else str(t) for t in self.outputs)
        tail = "".join(f" | {s.op}({', '.join(map(str, s.args))}){format_attrs(s.attrs)}" for s in self.epilogue)
        attrs = f" {format_attrs(self.attrs)}" if self.attrs else ""
        return f"{self.op}({inputs}) -> {outputs}{attrs}{tail}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Problem) and self.key() == other.key()

    def __hash__(self) -> int:
        return hash(self.key())

    @property
    def is_static(self) -> bool:
        return all(t is None or t.is_static for t in [*self.inputs, *self.outputs])

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
        """The problem that a node poses; with ``operands``, the one it would pose with that epilogue."""
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
        )


class Kernel(ABC):
    """A compiled solution of one problem. Stateless: several requests may run it at the same time."""

    name: str

    @abstractmethod
    def run(self, queue: Queue, inputs: Sequence[Any], outputs: Sequence[Any]) -> Sequence[Any]:
        """Compute. Where ``outputs[i]`` is an array the result is written there; where it is None a new one is made.

        Returns the outputs. A device kernel may return before it has finished; `Queue.finish` waits for it.
        """

    def bind(self, queue: Queue, inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[[], Sequence[Any]]:
        """`run` for arguments that stay the same: a request asks once and then calls the result at each inference."""
        return partial(self.run, queue, inputs, outputs)


class Solver(ABC):
    """A way to solve problems. Stateless; everything it needs is in the problem, the config and the device."""

    id: str
    version: str = "1"
    #: order among untuned solvers that accept a problem: the lowest is the default
    rank: int = 100
    #: its kernels run on the host whatever the device is
    host: bool = False

    @abstractmethod
    def why_not(self, problem: Problem, target: Target) -> str | None:
        """None when this solver can solve the problem there; else the reason in words."""

    def default(self, problem: Problem, target: Target) -> Config:
        """The config used when nothing was measured."""
        return {}

    @abstractmethod
    def compile(self, problem: Problem, config: Config, device: Device) -> Kernel: ...


@cache
def solvers() -> tuple[Solver, ...]:
    """Every solver, ours and those of extensions, in order of rank."""
    found = discovery.find("tunewright.solvers", key=lambda s: s.id)
    return tuple(sorted(found.values(), key=lambda s: (s.rank, s.id)))
