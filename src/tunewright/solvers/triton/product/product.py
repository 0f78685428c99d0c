"""Products and convolutions on tensor cores.

Rows are pixels of the result (images, heights, widths), columns its channels; the sum goes over taps and channels of
the input, whose channels lie last. Groups of a convolution are products of their own, and so are the matrices of a
MatMul of two activations. With ``split`` above one several programs share a tile: each writes its part of the sum to
scratch memory, and the one that comes last adds them up in order and goes on. So each run has the same result.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np

from tunewright.devices.base import Device, Target
from tunewright.devices.cuda.device import CudaDevice, CudaQueue
from tunewright.ir.types import NHWC, PLAIN, DType, Layout, TensorType
from tunewright.search.space import Space
from tunewright.solvers.base import Array, Config, Kernel, Packing, Problem
from tunewright.solvers.triton.source.cuda_kernel import Call, CudaSolver

from ..elementwise.elementwise import why_not_layouts
from ..source.text import load, why_not_chain
from . import precision
from .product_cost import Gpu, best, estimate, params, possible, promising
from .product_shape import BY_TAP, ProductShape, conv_shape, folded_weights, product_shape, why_not_size
from .product_text import Addend, text

FLOATS = frozenset({DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32})
#: a space leaves out configs that take this many times as long as the best one, by estimate
FAR = 1.75
#: programs on each multiprocessor, where each takes several tiles: of 8 warps, and of fewer
RESIDENT, RESIDENT_SMALL = 1, 2
#: the memory engine takes matrices that begin at a multiple of this number of bytes
ENGINE = 16


class TritonProduct(CudaSolver):
    """What `TritonConv`, `TritonMatMul` and `TritonGemm` share."""

    dtypes = FLOATS | {DType.BOOL, DType.INT32, DType.INT64}
    #: what it multiplies
    factors: ClassVar[frozenset[DType]] = FLOATS - {DType.FLOAT32}
    rank = 38
    version = "2.1"

    @abstractmethod
    def shape(self, problem: Problem) -> ProductShape:
        """What a static problem asks for."""

    def addend(self, problem: Problem) -> Addend:
        """What is done with input 2."""
        return Addend(given=problem.input(2) is not None)

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x, w = problem.input(0), problem.input(1)
        assert isinstance(x, TensorType) and isinstance(w, TensorType)
        if x.dtype not in self.factors or w.dtype is not x.dtype:
            return f"does not multiply {x.dtype} and {w.dtype}"
        first = len(problem.main_inputs)
        reason = why_not_chain(problem, main=False) or why_not_layouts(problem, first) if problem.epilogue else None
        return reason or why_not_size(problem)

    def inexact(self, problem: Problem, config: Config) -> str | None:
        return precision.inexact(config)

    def compile(self, problem: Problem, config: Config, device: Device) -> Kernel:
        return precision.marked(super().compile(problem, config, device), config)

    def space(self, problem: Problem, target: Target) -> Space:
        shape, gpu, dtype = self.shape(problem), Gpu.of(target), precision.dtype(problem)
        limit = FAR * best(shape, gpu, dtype)[1]

        def useful(config: Mapping[str, Any]) -> bool:
            return possible(shape, config, gpu, dtype) and estimate(shape, config, gpu, dtype) <= limit

        return Space(params(shape, gpu, dtype), useful, version="4")

    def default(self, problem: Problem, target: Target) -> Config:
        return dict(best(self.shape(problem), Gpu.of(target), precision.dtype(problem))[0])

    def likely(self, problem: Problem, target: Target) -> Sequence[Config]:
        return [dict(items) for items in promising(self.shape(problem), Gpu.of(target), precision.dtype(problem))]

    def source(self, problem: Problem, config: Config, target: Target) -> str:
        return text(problem, self.shape(problem), config, self.addend(problem), _programs(config, target))

    def call(self, problem: Problem, config: Config, device: CudaDevice) -> Call:
        shape, addend, split = self.shape(problem), self.addend(problem), int(config["split"])
        bm, bn, programs = int(config["bm"]), int(config["bn"]), _programs(config, device.target)
        tiles, first = shape.tiles(bm, bn), len(problem.main_inputs)
        options = {"num_warps": int(config["warps"]), "num_stages": int(config["stages"])}
        scratch = tiles * bm * bn * split * 4 if split > 1 else 0

        @cache
        def made(form: str) -> tuple[Any, tuple[int, int]]:
            kernel = load(text(problem, shape, {**config, "form": form}, addend, programs))
            return kernel, (tiles, split) if form == "tiles" else (min(tiles, programs), 1)

        def call(queue: CudaQueue, inputs: Any, outputs: Any) -> None:
            given = [inputs[0], inputs[1], *([inputs[2]] if addend.given else []), *inputs[first:], outputs[0]]
            form = str(config.get("form", "tiles"))
            if form != "tiles" and any(x.device.type != "meta" and x.data_ptr() % ENGINE for x in given[:2]):
                form = "tiles"  # a part of another tensor, which the memory engine does not read
            kernel, grid = made(form)
            if split > 1:
                given += [queue.scratch(scratch).view(precision.float32()), queue.zeros(tiles)]
            kernel[grid](*given, **options)

        made(str(config.get("form", "tiles")))
        return call


def _programs(config: Config, target: Target) -> int:
    """As many as run at the same time."""
    many = int(config["warps"]) < 8 and config.get("form") != "specialised"
    return max(target.units, 1) * (RESIDENT_SMALL if many else RESIDENT)


class TritonConv(TritonProduct):
    """Two spatial axes, channels last."""

    id = "triton.conv"
    ops = frozenset({"Conv"})
    layouts = frozenset({PLAIN.name, "nhwc"})

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x, out = problem.input(0), problem.outputs[0]
        assert isinstance(x, TensorType) and isinstance(out, TensorType)
        if len(x.dims) != 4:
            return "takes two spatial axes"
        if x.layout != NHWC or out.layout != NHWC:
            return "takes channels last"
        if not problem.constant[1]:
            return "its weights are not constant"
        return super().refuse(problem, target)

    def preferred(self, problem: Problem, target: Target) -> tuple[Layout, Layout] | None:
        x = problem.input(0)
        return (NHWC, NHWC) if isinstance(x, TensorType) and len(x.dims) == 4 else None

    def packings(self, problem: Problem, config: Config) -> Mapping[int, Packing]:
        return {1: folded_weights(self.shape(problem), config) if "fold" in config else BY_TAP}

    def shape(self, problem: Problem) -> ProductShape:
        return conv_shape(problem)


class TritonMatMul(TritonProduct):
    """Matrices, of weights or of activations."""

    id = "triton.matmul"
    ops = frozenset({"MatMul"})

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x, w = problem.input(0), problem.input(1)
        assert isinstance(x, TensorType) and isinstance(w, TensorType)
        if len(w.dims) < 2 or len(x.dims) < 2:
            return "takes matrices"
        return super().refuse(problem, target)

    def addend(self, problem: Problem) -> Addend:
        return Addend(given=False)

    def shape(self, problem: Problem) -> ProductShape:
        return product_shape(problem)


class TritonGemm(TritonProduct):
    """The product's sum, its factor, and a third operand of any shape that spreads over the result."""

    id = "triton.gemm"
    ops = frozenset({"Gemm"})

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x = problem.input(0)
        assert isinstance(x, TensorType)
        if problem.attrs.get("transA", 0) and x.dims[1] > 1 and x.dims[0] > 1:
            return "takes rows of the first matrix"
        if problem.attrs.get("transB", 0) and not problem.constant[1]:
            return "turns constant weights alone"
        return super().refuse(problem, target)

    def packings(self, problem: Problem, config: Config) -> Mapping[int, Packing]:
        return {1: TURNED} if problem.attrs.get("transB", 0) else {}

    def addend(self, problem: Problem) -> Addend:
        return gemm_addend(problem)

    def shape(self, problem: Problem) -> ProductShape:
        return gemm_shape(problem)


def gemm_shape(problem: Problem) -> ProductShape:
    """What a static Gemm asks for; its first matrix lies as rows (a vector always does)."""
    x, out = problem.input(0), problem.outputs[0]
    assert isinstance(x, TensorType) and isinstance(out, TensorType)
    rows, columns = out.dims
    return ProductShape(1, 1, rows, x.size // max(1, rows), 1, rows, columns)


def gemm_addend(problem: Problem) -> Addend:
    """What a Gemm does with its third operand."""
    c, alpha, beta = problem.input(2), *(float(problem.attrs.get(name, 1.0)) for name in ("alpha", "beta"))
    if not isinstance(c, TensorType):
        return Addend(alpha=alpha, given=False)
    high, wide = (*(1, 1), *c.dims)[-2:]
    return Addend(wide if high > 1 else 0, 1 if wide > 1 else 0, alpha, beta)


def _turned(weights: Array) -> Array:
    return np.ascontiguousarray(weights.T)


TURNED = Packing("turned", _turned)


class Single(TritonProduct):
    """Single precision, which no tensor core multiplies as it is: the vendor's library comes first."""

    factors = frozenset({DType.FLOAT32})
    rank = 45


class SingleConv(Single, TritonConv):
    id = "triton.conv_single"


class SingleMatMul(Single, TritonMatMul):
    id = "triton.matmul_single"


class SingleGemm(Single, TritonGemm):
    id = "triton.gemm_single"


SOLVERS = (TritonConv(), TritonMatMul(), TritonGemm(), SingleConv(), SingleMatMul(), SingleGemm())
