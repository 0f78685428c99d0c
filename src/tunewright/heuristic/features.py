"""Features of a problem and of a candidate for the heuristic: a few named numbers.

Problems of one `kind` (operation, element types, layouts) have the same features. Sizes are base-two logarithms, so a
distance of one is a doubling at any size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..devices.base import Target
from ..ir.types import TensorType, Type
from ..measure.ceilings import work_of
from ..ops.base import Work
from ..search.space import Scalar
from ..solvers.base import Config, Problem

Floats = npt.NDArray[np.float64]

#: Matrix products: m, n and k describe them, and the rank adds nothing.
_PRODUCTS = frozenset({"MatMul", "Gemm", "com.microsoft::FusedMatMul", "com.microsoft::TransposeMatMul"})
#: Index of the weights among the inputs of a convolution.
_WEIGHTS = {"Conv": 1, "ConvTranspose": 1, "ConvInteger": 1, "QLinearConv": 3}
#: Fused steps that take as long as many simple ones.
_DEAR = frozenset({"Exp", "Log", "Pow", "Tanh", "Sigmoid", "Erf", "Gelu", "Softplus", "Swish", "Mish", "Selu", "Elu"})
#: A cache in the name of a processor.
_CACHE = re.compile(r"\bL(\d) (\d+) KiB")
#: Largest batch that counts as a few images.
FEW_IMAGES = 16
#: The value of a parameter that a candidate does not have.
ABSENT = -1.0


def kind(problem: Problem) -> str:
    """Return the group of problems that share trees: operation, types, layouts, constant operands, rank."""
    given = [
        _type_text(t) + ("!" if c else "") for t, c in zip(problem.main_inputs[:2], problem.constant[:2], strict=False)
    ]
    made = _type_text(problem.outputs[0] if problem.outputs else None)
    first = problem.inputs[0] if problem.inputs else None
    rank = f" of rank {first.rank}" if isinstance(first, TensorType) and problem.op not in _PRODUCTS else ""
    return f"{problem.op}({', '.join(given)}) -> {made}{rank}"


def _type_text(type: Type | None) -> str:
    if not isinstance(type, TensorType):
        return "_" if type is None else "?"
    layout = "" if type.layout.name == "plain" else f"@{type.layout}"
    return f"{type.dtype.value}{layout}"


#: Features that follow from others.
TOTALS = frozenset({"outputs", "inputs", "flops", "intensity", "constant bytes"})


def features(problem: Problem, target: Target) -> dict[str, float]:
    """Return the features of a static problem on a device."""
    made = _dims(problem.outputs[0] if problem.outputs else None)
    given = _dims(problem.inputs[0] if problem.inputs else None)
    work = work_of(problem)
    if isinstance(work, str):
        work = Work(float(math.prod(made)), float(_nbytes(problem.inputs) + _nbytes(problem.outputs)))
    constant = [t for t, c in zip(problem.inputs, problem.constant, strict=True) if c]
    operands = problem.inputs[len(problem.inputs) - problem.operands :] if problem.operands else ()
    return {
        "units": _log(target.units),
        **_caches(target),
        "outputs": _log(math.prod(made)),
        "inputs": _log(math.prod(given)),
        "row": _log(_at(made, -1)),
        "flops": _log(work.flops),
        "intensity": _log(work.flops) - _log(work.bytes),
        "constant bytes": _log(_nbytes(constant)),
        "fused": float(len(problem.epilogue)),
        "dear fused": float(sum(step.op in _DEAR for step in problem.epilogue)),
        "fused tensors": float(sum(math.prod(_dims(t)) > 1 for t in operands)),
        **_shape(problem, given, made),
    }


def _caches(target: Target) -> dict[str, float]:
    """Return the size of each cache of a processor, if its name tells (see `devices.native.processor`)."""
    return {f"L{level}": _log(int(size)) for level, size in _CACHE.findall(target.name) if target.traits.private_caches}


def one_image(problem: Problem) -> Problem | None:
    """Return the same problem with one image, for a convolution or pooling of a few images; else None."""
    x = _dims(problem.inputs[0] if problem.inputs else None)
    if not 1 < _at(x, 0) <= FEW_IMAGES or len(x) < 3 or not (problem.op in _WEIGHTS or problem.op.endswith("Pool")):
        return None

    def one(type: Type | None) -> Type | None:
        whole = isinstance(type, TensorType) and len(type.dims) == len(x) and type.dims[0] == x[0]
        return replace(type, shape=(1, *type.dims[1:])) if whole and isinstance(type, TensorType) else type

    inputs = tuple(t if c else one(t) for t, c in zip(problem.inputs, problem.constant, strict=True))
    return replace(problem, inputs=inputs, outputs=tuple(map(one, problem.outputs)))


def _shape(problem: Problem, given: Sequence[int], made: Sequence[int]) -> dict[str, float]:
    """Return the features that depend on the operation."""
    if problem.op in _WEIGHTS:
        return _convolution(problem, given, made)
    if problem.op in _PRODUCTS:
        return _product(problem, given, made)
    axis = problem.attrs.get("axis")
    return {
        "first": _log(_at(made, 0)),
        "second": _log(_at(made, 1)),
        "along": _log(given[axis % len(given)] if isinstance(axis, int) and given else 1),
        **_window(problem, problem.attrs.get("kernel_shape", ())),
    }


def _convolution(problem: Problem, given: Sequence[int], made: Sequence[int]) -> dict[str, float]:
    weights = _dims(problem.inputs[_WEIGHTS[problem.op]])
    groups = max(int(problem.attrs.get("group", 1)), 1)
    channels, filters = _at(given, 1), _at(made, 1)
    pads = problem.attrs.get("pads", ())
    return {
        "batch": _log(_at(given, 0)),
        "channels": _log(channels / groups),
        "filters": _log(filters / groups),
        "groups": _log(groups),
        "pixels": _log(math.prod(made[2:])),
        # kernels cut rows into tiles, and incomplete tiles at the end cost time
        "twos in row": _twos(_at(made, -1)),
        "twos in filters": _twos(max(filters // groups, 1)),
        "padded": float(any(pads)),
        **_window(problem, weights[2:]),
    }


def _window(problem: Problem, kernel: Sequence[int]) -> dict[str, float]:
    strides, dilations = problem.attrs.get("strides", ()), problem.attrs.get("dilations", ())
    return {
        "kernel": _log(math.prod(kernel)),
        "kernel row": _log(_at(kernel, -1)),
        "stride": _log(_at(strides, -1)),
        "dilation": _log(_at(dilations, -1)),
    }


def _product(problem: Problem, given: Sequence[int], made: Sequence[int]) -> dict[str, float]:
    other = _dims(problem.inputs[1])
    count = math.prod(other[:-2])
    n = _at(made, -1)
    turned = bool(problem.attrs.get("transA", 0))
    return {
        "count": _log(count),
        "m": _log(math.prod(made) / max(count * n, 1)),
        "n": _log(n),
        "k": _log(_at(given, -2 if turned else -1)),
        "twos in n": _twos(n),
        "turned": float(turned),
        "other turned": float(bool(problem.attrs.get("transB", 0))),
    }


def _dims(type: Type | None) -> Sequence[int]:
    return type.dims if isinstance(type, TensorType) else ()


def _nbytes(types: Sequence[Type | None]) -> int:
    return sum(t.nbytes for t in types if isinstance(t, TensorType))


def _at(dims: Sequence[int], i: int) -> int:
    return int(dims[i]) if -len(dims) <= i < len(dims) else 1


def _log(x: float) -> float:
    return math.log2(max(x, 1.0))


def _twos(x: int) -> float:
    """Return how often two divides ``x``, scaled so that four times or more is 1.

    It matters for tiles, little for distance.
    """
    return min(((x & -x).bit_length() - 1) if x > 0 else 0, 4) / 4


@dataclass(frozen=True)
class Column:
    """A feature of a candidate: whether a solver makes it, a parameter's size, or whether a parameter has some text."""

    #: "solver", "size" or "text"
    form: str
    #: name of the solver or of the parameter
    name: str
    text: str = ""

    def of(self, solver: str, config: Config) -> float:
        if self.form == "solver":
            return float(solver == self.name)
        value = config.get(self.name)
        if self.form == "text":
            return float(value == self.text)
        return ABSENT if isinstance(value, str) or value is None else _size(value)


def _size(value: bool | int | float) -> float:
    return float(value) if isinstance(value, bool) else math.copysign(math.log2(1 + abs(value)), value)


def columns(candidates: Sequence[tuple[str, Mapping[str, Scalar]]]) -> list[Column]:
    """Return the columns that tell these candidates apart."""
    names = sorted({solver for solver, _ in candidates})
    sizes = sorted({k for _, config in candidates for k, v in config.items() if not isinstance(v, str)})
    texts = sorted({(k, v) for _, config in candidates for k, v in config.items() if isinstance(v, str)})
    return [
        *(Column("solver", name) for name in names),
        *(Column("size", name) for name in sizes),
        *(Column("text", name, text) for name, text in texts),
    ]
