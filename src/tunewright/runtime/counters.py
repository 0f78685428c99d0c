"""Performance counters: one row per node of the model, inserted ones included."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from .plan import Step


class Status(enum.Enum):
    EXECUTED = "EXECUTED"
    OPTIMIZED_OUT = "OPTIMIZED_OUT"
    NOT_RUN = "NOT_RUN"


@dataclass
class Row:
    """One node: what ran for it, and how long (seconds, summed over ``calls``)."""

    name: str
    type: str
    status: Status
    kernel: str = ""
    device_seconds: float = 0.0
    host_seconds: float = 0.0
    calls: int = 0


class Counters:
    """Times of one request's last inference."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def clear(self) -> None:
        self.rows.clear()

    def record(self, step: Step, seconds: float) -> None:
        key = step.node.name or step.node.output.name
        row = self.rows.get(key)
        if row is None:
            kernel = step.kernel.name if step.kernel is not None else "control"
            row = self.rows[key] = Row(key, step.node.op, Status.EXECUTED, kernel)
        row.calls += 1
        if step.choice is not None and not step.choice.solver.host:
            row.device_seconds += seconds
        else:
            row.host_seconds += seconds

    def table(self, model: Iterable[tuple[str, str]]) -> list[Row]:
        """Executed rows, and a row for every other node of the model (name, op)."""
        rows = dict(self.rows)
        for name, op in model:
            if name not in rows:
                rows[name] = Row(name, op, Status.OPTIMIZED_OUT)
        return list(rows.values())
