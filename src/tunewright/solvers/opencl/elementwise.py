"""Element-wise operations and broadcast chains of them, generated as one kernel."""

from __future__ import annotations

from ...devices.base import Target
from ..base import Config, Problem
from . import epilogue, expr
from .base import CSolver, both, tensor
from .emit import Call, In, Out, Source


class Elementwise(CSolver):
    """Equal shapes only, for a start."""

    family = "elementwise"
    ops = frozenset(expr.EXPRESSIONS)
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if any(epilogue.kind(problem, i, 1) not in ("full", "scalar") for i in range(len(problem.inputs))):
            return "broadcasts"
        return epilogue.why_not(problem)

    def calls(self, problem: Problem, config: Config, target: Target) -> list[Call]:
        out = tensor(problem.outputs[0])
        source = Source("elementwise", self.specialise)
        for i in range(len(problem.main_inputs)):
            source.buffer(f"x{i}", tensor(problem.inputs[i]).dtype, In(i))
        steps = epilogue.Epilogue(source, problem)
        source.buffer("y", out.dtype, Out())
        chunk = 4096
        source.dims(N=out.size)
        source.fixed(CHUNK=chunk)
        source.add("int begin = GID(0) * CHUNK, end = begin + CHUNK < N ? begin + CHUNK : N;")
        source.add("for (int i = begin; i < end; i++) {")
        args = []
        for i in range(len(problem.main_inputs)):
            at = "i" if epilogue.kind(problem, i, 1) == "full" else "0"
            source.add(f"{source.compute(f'x{i}')} a{i} = {source.load(f'x{i}', at)};")
            args.append(f"a{i}")
        dtypes = [tensor(t).dtype for t in problem.main_inputs]
        source.add(f"f32 v = {expr.expression(problem.op, args, dtypes, steps.dtypes[0], problem.attrs)};")
        lines, result = steps.apply("v", "0", "i")
        source.add(lines)
        source.add(source.store("y", "i", result))
        source.add("}")
        return [source.call([-(-out.size // chunk)])]


SOLVERS = both(Elementwise)
