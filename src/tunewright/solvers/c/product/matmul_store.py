"""The end of a matrix product: the steps between a sum and its store."""

from __future__ import annotations

from tunewright.solvers.base import Problem, tensor

from ..source import epilogue
from ..source.emit import COMPUTE, In, Out, Source
from .matmul_product import MatrixProduct


class Store:
    """Declares the addend, the epilogue's operands and the result in a source; `element` writes the statements."""

    def __init__(self, source: Source, problem: Problem, product: MatrixProduct) -> None:
        self.source, self.product = source, product
        if product.c is not None:
            source.buffer("c", tensor(problem.inputs[2]).dtype, In(2))
            source.dims(C_ROW=product.c.row)
        self.steps = epilogue.Epilogue(source, problem, -1)
        self.floats = self.steps.dtypes[0].is_float
        if self.floats:
            source.numbers(ALPHA=product.alpha)
            if product.c is not None:
                source.numbers(BETA=product.beta)
        source.buffer("y", tensor(problem.outputs[0]).dtype, Out())

    def element(self, total: str, m: str, n: str, at: str) -> str:
        """Statements that store y[at], which is element (m, n) of its matrix, from the sum ``total``."""
        main, c = COMPUTE[self.steps.dtypes[0]], self.product.c
        value = f"ALPHA * ({total})" if self.floats else f"({main})({total})"
        if c is not None:
            addend = self.source.load("c", f"({m}) * C_ROW + {n}" if c.column else f"({m}) * C_ROW")
            value += f" + BETA * {addend}" if self.floats else f" + {addend}"
        lines, result = self.steps.apply("v", n, at)
        return "\n".join(["{", f"{main} v = {value};", lines, self.source.store("y", at, result), "}"])
