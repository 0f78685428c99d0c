"""Products and convolutions on tensor cores.

Rows are pixels of the result (images, heights, widths), columns are its channels. The sum runs over taps and input
channels, which lie last. Each group of a convolution is a separate product, and so is each matrix of a MatMul of two
activations. With ``split`` above one, several programs share a tile. Each writes its part of the sum to scratch memory.
The last program to arrive adds the parts in order and finishes the tile, so every run has the same result.
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
from ..source.sizes_page import of_class
from ..source.text import load, why_not_chain
from . import precision
from .product_cost import Gpu, best, estimate, params, possible, promising
from .product_shape import BY_TAP, ProductShape, conv_shape, folded_weights, product_shape, why_not_size
from .product_text import Addend, text

FLOATS = frozenset({DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32})
#: A space omits configs whose estimate is this many times that of the best config.
FAR = 1.75
#: Programs per multiprocessor where each program computes several tiles: with 8 warps, and with fewer.
RESIDENT, RESIDENT_SMALL = 1, 2
#: The memory engine (TMA) requires matrices that start at a multiple of this number of bytes.
ENGINE = 16


class TritonProduct(CudaSolver):
    """The common base of `TritonConv`, `TritonMatMul` and `TritonGemm`."""

    dtypes = FLOATS | {DType.BOOL, DType.INT32, DType.INT64}
    #: supported types of the factors
    factors: ClassVar[frozenset[DType]] = FLOATS - {DType.FLOAT32}
    rank = 38
    version = "2.1"

    @abstractmethod
    def shape(self, problem: Problem) -> ProductShape:
        """The shape of a static problem's product."""

    def addend(self, problem: Problem) -> Addend:
        """How the kernel adds input 2."""
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
        # the memory engine's matrices have rows of a known size
        wanted = "tiles" if of_class() else str(config.get("form", "tiles"))
        options = {"num_warps": int(config["warps"]), "num_stages": int(config["stages"])}
        scratch = tiles * bm * bn * split * 4 if split > 1 else 0

        @cache
        def made(form: str) -> tuple[Any, tuple[int, int]]:
            kernel = load(text(problem, shape, {**config, "form": form}, addend, programs))
            return kernel, (tiles, split) if form == "tiles" else (min(tiles, programs), 1)

        def call(queue: CudaQueue, inputs: Any, outputs: Any) -> None:
            given = [inputs[0], inputs[1], *([inputs[2]] if addend.given else []), *inputs[first:], outputs[0]]
            form = wanted
            if form != "tiles" and any(x.device.type != "meta" and x.data_ptr() % ENGINE for x in given[:2]):
                form = "tiles"  # a part of another tensor, at an address that the memory engine cannot read
            kernel, grid = made(form)
            if split > 1:
                given += [queue.scratch(scratch).view(precision.float32()), queue.zeros(tiles)]
            kernel[grid](*given, **options)

        made(wanted)
        return call


def _programs(config: Config, target: Target) -> int:
    """The number of programs that run at the same time."""
    many = int(config["warps"]) < 8 and config.get("form") != "specialised"
    return max(target.units, 1) * (RESIDENT_SMALL if many else RESIDENT)


class TritonConv(TritonProduct):
    """Convolutions with two spatial axes, channels last."""

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
    """Products of matrices, with weights or with other activations."""

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
    """Gemm: alpha times the product, plus beta times an operand of any shape that broadcasts to the result."""

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
    """The shape of a static Gemm. Its first matrix is stored by rows, which always holds for a vector."""
    x, out = problem.input(0), problem.outputs[0]
    assert isinstance(x, TensorType) and isinstance(out, TensorType)
    rows, columns = out.dims
    return ProductShape(1, 1, rows, x.size // max(1, rows), 1, rows, columns)


def gemm_addend(problem: Problem) -> Addend:
    """How a Gemm adds its third operand."""
    c, alpha, beta = problem.input(2), *(float(problem.attrs.get(name, 1.0)) for name in ("alpha", "beta"))
    if not isinstance(c, TensorType):
        return Addend(alpha=alpha, given=False)
    high, wide = (*(1, 1), *c.dims)[-2:]
    return Addend(wide if high > 1 else 0, 1 if wide > 1 else 0, alpha, beta)


def _turned(weights: Array) -> Array:
    return np.ascontiguousarray(weights.T)


TURNED = Packing("turned", _turned)


class Single(TritonProduct):
    """Single-precision products. Tensor cores cannot multiply these exactly, so the vendor's library ranks first."""

    factors = frozenset({DType.FLOAT32})
    rank = 45


class SingleConv(Single, TritonConv):
    id = "triton.conv_single"


class SingleMatMul(Single, TritonMatMul):
    id = "triton.matmul_single"


class SingleGemm(Single, TritonGemm):
    id = "triton.gemm_single"


SOLVERS = (TritonConv(), TritonMatMul(), TritonGemm(), SingleConv(), SingleMatMul(), SingleGemm())
