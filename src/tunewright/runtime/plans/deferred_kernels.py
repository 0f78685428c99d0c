"""Steps that wait for values: a Slice with computed starts gets its kernel when the starts are known.

Used only where the host may not run the step (HOST_FALLBACK = NO). Heavy operations never come here: the plan is cut in
front of them (see `lower.split`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from tunewright.devices.base import Queue
from tunewright.devices.c_device import NoCompiler
from tunewright.errors import ExecutionError, LockError, UnsupportedError
from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.types import TensorType
from tunewright.ops import lookup
from tunewright.ops.base import Operand
from tunewright.ops.infer import infer_node
from tunewright.solvers.base import Kernel, Problem, is_value
from tunewright.tuning.tuner import Choice

from .program import Environment


class ShapeKernel(Kernel):
    """Computes a result from the shapes of the inputs (Shape, Size). It reads no values and launches nothing."""

    name = "from shapes"

    def __init__(self, node: Node) -> None:
        self.node = node

    def run(self, queue: Queue, inputs: Sequence[Any], outputs: Sequence[Any]) -> Sequence[Any]:
        spec = lookup(self.node.op)
        assert spec is not None and spec.value_from_types is not None
        operands = [None if a is None else Operand(TensorType.of(a)) for a in inputs]
        value = spec.value_from_types(operands, self.node.attrs)
        if value is None:
            raise ExecutionError("its result does not follow from shapes alone")
        if outputs[0] is None:
            return [value]
        queue.put(value, outputs[0])
        return outputs


def follows_from_shapes(node: Node) -> bool:
    """Whether a `ShapeKernel` can run the node."""
    spec = lookup(node.op)
    return spec is not None and spec.value_from_types is not None


class LateKernel(Kernel):
    """Poses the problem anew at each run. Values that are part of the problem become constants."""

    name = "chosen as it runs"
    #: most kernels kept; the least recently used one is dropped
    MOST: ClassVar[int] = 16

    def __init__(self, node: Node, env: Environment) -> None:
        self.node, self.env = node, env
        self._kernels: OrderedDict[str, Kernel] = OrderedDict()

    def run(self, queue: Queue, inputs: Sequence[Any], outputs: Sequence[Any]) -> Sequence[Any]:
        inputs = queue.fetch(inputs)  # posing the problem reads the values
        problem = self.pose(inputs)
        kernel = self._kernels.pop(problem.key(), None)
        if kernel is None:
            kernel = self.compiled(problem)
        self._kernels[problem.key()] = kernel
        if len(self._kernels) > self.MOST:
            self._kernels.popitem(last=False)
        given = [kernel.packings[i].pack(a) if i in kernel.packings else a for i, a in enumerate(inputs)]
        return kernel.run(queue, given, outputs)

    def compiled(self, problem: Problem) -> Kernel:
        try:
            kernel = self.env.compile(self.choose(problem), problem)
            self.env.prepare(kernel)
        except NoCompiler as error:
            host = self.env.without_compiler(error)
            return host.compile(self.choose(problem, host), problem)
        return kernel

    @property
    def problems(self) -> list[str]:
        """Keys of the problems whose kernels it keeps."""
        return list(self._kernels)

    def choose(self, problem: Problem, env: Environment | None = None) -> Choice:
        where = f"node {self.node.name!r} ({self.node.op})"
        try:
            env = env or self.env
            return env.tuner.choose(problem, env.device)
        except LockError as error:
            raise LockError(error.what, where=where, hint=error.hint) from error
        except UnsupportedError as error:
            hint = "HOST_FALLBACK = YES runs it on the host"
            raise UnsupportedError(error.what, where=where, hint=hint) from error

    def pose(self, inputs: Sequence[Any]) -> Problem:
        """Build the problem for these inputs."""
        graph = Graph("late")
        values: list[Value | None] = []
        for i, array in enumerate(inputs):
            if array is None:
                values.append(None)
            elif isinstance(array, np.ndarray) and is_value(self.node.op, i, array):
                values.append(graph.constant(array, f"i{i}"))
            else:
                type = TensorType.of(array) if isinstance(array, np.ndarray) else None
                values.append(graph.add_input(f"i{i}", type))
        twin = graph.add_copy(self.node, values, [None] * len(self.node.outputs))
        spec = lookup(twin.op)
        assert spec is not None
        infer_node(twin, spec, self.env.settings.max_tensor_bytes)
        return Problem.of(twin)
