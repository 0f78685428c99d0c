"""Normalisations: layer, RMS, instance, group, mean-variance, Lp, and com.microsoft's with a sum in front.

Statistics take two passes, first the mean and then the squares around it, so a large mean costs no digits. A row that
fits a tile is read once. Few long rows are split into parts; their statistics are combined in the order of the parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tunewright.devices.base import Target
from tunewright.devices.cuda.device import CudaDevice, CudaQueue
from tunewright.ir.types import PLAIN, TensorType
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Problem
from tunewright.solvers.triton.source.cuda_kernel import Call, CudaSolver

from ..elementwise.elementwise import why_not_layouts
from ..source import fold, rows
from ..source.expr import number
from ..source.rows import RowView, Tile, tensor
from ..source.text import NAMES, chain, load, why_not_chain

MS = "com.microsoft::"


@dataclass(frozen=True)
class TritonNormForm:
    """The inputs and outputs of one operation, by number. None where the operation lacks one."""

    #: layer: (x - mean) / sqrt(variance + epsilon); rms: no mean; deviation: epsilon added to the root; l1, l2: norms
    kind: str
    scale: int | None = None
    bias: int | None = None
    #: inputs that are added to the first before the normalisation
    skip: tuple[int, ...] = ()
    mean: int | None = None
    inverse: int | None = None
    total: int | None = None
    epsilon: float = 1e-5

    @property
    def centred(self) -> bool:
        return self.kind in ("layer", "deviation")


FORMS: dict[str, TritonNormForm] = {
    "LayerNormalization": TritonNormForm("layer", scale=1, bias=2, mean=1, inverse=2),
    "RMSNormalization": TritonNormForm("rms", scale=1),
    "SimplifiedLayerNormalization": TritonNormForm("rms", scale=1, inverse=1),
    MS + "SimplifiedLayerNormalization": TritonNormForm("rms", scale=1, inverse=1),
    MS + "SkipLayerNormalization": TritonNormForm(
        "layer", scale=2, bias=3, skip=(1, 4), mean=1, inverse=2, total=3, epsilon=1e-12
    ),
    MS + "SkipSimplifiedLayerNormalization": TritonNormForm(
        "rms", scale=2, skip=(1, 3), mean=1, inverse=2, total=3, epsilon=1e-12
    ),
    "InstanceNormalization": TritonNormForm("layer", scale=1, bias=2),
    "GroupNormalization": TritonNormForm("layer", scale=1, bias=2),
    "MeanVarianceNormalization": TritonNormForm("deviation", epsilon=1e-9),
    "LpNormalization": TritonNormForm("l2"),
}
_PER_CHANNEL = ("InstanceNormalization", "GroupNormalization")
#: the summand for each (centred) element d
_POWER: Mapping[str, str] = {"l1": "tl.abs(d)"}
_SQUARE = "d * d"


def form_of(problem: Problem) -> TritonNormForm:
    """The form of a problem, with its attributes applied."""
    form, attrs = FORMS[problem.op], problem.attrs
    if problem.op == "LpNormalization":
        return replace(form, kind=f"l{int(attrs.get('p', 2))}")
    if form.kind == "deviation":
        return form
    return replace(form, epsilon=float(attrs.get("epsilon", form.epsilon)))


def view_of(problem: Problem) -> RowView:
    """The rows to normalise."""
    x, attrs = tensor(problem.input(0)), problem.attrs
    rank = len(x.dims)
    if problem.op == "MeanVarianceNormalization":
        return RowView(x, frozenset(a % rank for a in attrs.get("axes", (0, 2, 3))))
    if problem.op == "LpNormalization":
        return RowView(x, frozenset({int(attrs.get("axis", -1)) % rank}))
    if problem.op == "GroupNormalization":
        return RowView(x, frozenset(range(1, rank)), int(attrs["num_groups"]))
    if problem.op == "InstanceNormalization":
        return RowView(x, frozenset(range(2, rank)))
    axis = -1 if FORMS[problem.op].total is not None else int(attrs.get("axis", -1))
    return RowView(x, frozenset(range(axis % rank, rank)))


def operand_type(problem: Problem, i: int) -> TensorType:
    """The type of an operand, shaped to broadcast over the normalised tensor."""
    type, x = tensor(problem.inputs[i]), tensor(problem.inputs[0])
    if problem.op in _PER_CHANNEL:
        return type.with_shape((*type.dims, *(1 for _ in x.dims[2:])))
    return type


class TritonNorm(CudaSolver):
    """Normalisations. A program handles some rows, or some adjacent columns."""

    id = "triton.norm"
    ops = frozenset(FORMS)
    layouts = frozenset({PLAIN.name, "nhwc"})
    dtypes = rows.FLOATS
    # One kernel; the library needs a second one to copy, or several where torch has no matching function.
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x, form = tensor(problem.input(0)), form_of(problem)
        if not x.dims:
            return "a scalar has no axis"
        if form.kind not in ("layer", "rms", "deviation", "l1", "l2"):
            return f"p {problem.attrs['p']} is not 1 or 2"
        if tensor(problem.outputs[0]).layout != x.layout:
            return "input and output differ in layout"
        if any(isinstance(t, TensorType) and t.layout != PLAIN and t.shape != x.shape for t in problem.inputs):
            return "parameters are plain"
        if any(isinstance(t, TensorType) and t.layout != PLAIN for t in problem.outputs[1:]):
            return "further outputs are plain"
        if len(problem.outputs) > 1 and x.layout != PLAIN:
            return "further outputs count elements of the plain layout"
        if not view_of(problem).count:
            return "normalises nothing"
        if problem.epilogue:
            if len(problem.outputs) > 1:
                return "an epilogue needs one output"
            first = len(problem.main_inputs)
            if reason := why_not_chain(problem, main=False) or why_not_layouts(problem, first):
                return reason
        return rows.why_not_size(problem)

    def space(self, problem: Problem, target: Target) -> Space:
        return rows.space(view_of(problem), target)

    def default(self, problem: Problem, target: Target) -> Config:
        return rows.default(view_of(problem), target)

    def source(self, problem: Problem, config: Config, target: Target) -> str:
        return "".join(TritonNormWriter(problem, config).texts())

    def call(self, problem: Problem, config: Config, device: CudaDevice) -> Call:
        writer = TritonNormWriter(problem, config)
        view, tile, warps = writer.view, writer.tile, int(config["warps"])
        kernels = [load(text) for text in writer.texts()]
        terms = [0, *writer.terms]
        used = [i for i, type in enumerate(problem.inputs) if type is not None]

        def call(queue: CudaQueue, inputs: Any, outputs: Any) -> None:
            if not view.x.size:
                return
            given = [*(inputs[i] for i in used), *outputs]
            if tile.split > 1:
                parts = rows.scratch(queue, 2 * tile.split * view.rows, writer.real)
                kernels[0][tile.grid](*(inputs[i] for i in terms), parts, num_warps=warps)
                given.append(parts)
            kernels[-1][tile.grid](*given, num_warps=warps)

        return call


class TritonNormWriter:
    """Writes the kernels of one problem and config."""

    def __init__(self, problem: Problem, config: Config) -> None:
        self.problem, self.form, self.view = problem, form_of(problem), view_of(problem)
        self.tile = Tile(self.view, config)
        self.real = fold.real(self.view.x.dtype)
        #: the inputs that are added to the first one before the normalisation
        self.terms = [i for i in self.form.skip if problem.input(i) is not None]

    def texts(self) -> list[str]:
        """The text of the kernel; for split rows, of the kernel of statistics and of the kernel that uses them."""
        return [self._finish()] if self.tile.split == 1 else [self._parts(), self._finish()]

    # -- statistics ---------------------------------------------------------------------------------------------------
    def _read(self) -> list[str]:
        """Statements that load ``v``, the elements. Beyond the end of a row they are 0."""
        lines = [f"v = tl.load(p0 + at, mask=ok, other=0.0).to({self.real})"]
        for i in self.terms:
            lines += [self.tile.operand(f"t{i}", f"p{i}", operand_type(self.problem, i)), f"v += t{i}"]
        if self.terms:
            lines.append("v = tl.where(live, v, 0.0)")
        return lines

    def _centred(self) -> str:
        return "d = tl.where(live, v - mean[:, None], 0.0)" if self.form.centred else "d = v"

    def _statistics(self, count: str) -> list[str]:
        """Statements for ``mean`` and ``power`` of a row or part. Where the row is read once, they keep ``v`` and
        ``d``."""
        tile, power = self.tile, _POWER.get(self.form.kind, _SQUARE)
        if tile.whole:
            mean = [f"mean = tl.sum(v, 1) / {count}"] if self.form.centred else []
            return [*self._read(), *mean, self._centred(), f"power = tl.sum({power}, 1)"]
        zeros = f"tl.zeros(({tile.rows}, {tile.block}), {self.real})"
        lines = []
        if self.form.centred:
            lines += [f"total = {zeros}", *tile.sweep(*self._read(), "total += v")]
            lines.append(f"mean = tl.sum(total, 1) / {count}")
        return [*lines, f"powers = {zeros}", *tile.sweep(*self._read(), self._centred(), f"powers += {power}"),
                "power = tl.sum(powers, 1)"]  # fmt: skip

    def _parts(self) -> str:
        many = self.tile.split * self.view.rows
        lines = [
            *self.tile.head(), f"count = tl.maximum(end - begin, 1).to({self.real})", *self._statistics("count"),
            f"here = parts + part * {self.view.rows} + row",
            *(["tl.store(here, mean, mask=inside)"] if self.form.centred else []),
            f"tl.store(here + {many}, power, mask=inside)",
        ]  # fmt: skip
        pointers = [f"p{i}" for i in (0, *self.terms)]
        return rows.kernel([*pointers, "parts"], lines)

    def _joined(self) -> list[str]:
        """Statements that combine ``mean`` and ``power`` of a row's parts. Each part's power is around its own mean."""
        tile, many = self.tile, self.tile.split * self.view.rows
        lines = [
            f"number = tl.arange(0, {tile.split})[None, :]",
            f"there = parts + number * {self.view.rows} + row[:, None]",
            f"powers = tl.load(there + {many}, mask=inside[:, None], other=0.0)",
        ]
        if self.form.centred:
            lines += [
                "means = tl.load(there, mask=inside[:, None], other=0.0)",
                f"counts = tl.minimum(tl.maximum({self.view.count} - number * {tile.each}, 0), {tile.each})"
                f".to({self.real})",
                f"mean = tl.sum(means * counts, 1) / {rows.real_text(self.view.count)}",
                "powers += counts * (means - mean[:, None]) * (means - mean[:, None])",
            ]
        return [*lines, "power = tl.sum(powers, 1)"]

    # -- results ------------------------------------------------------------------------------------------------------
    def _norm(self) -> str:
        epsilon, mean = number(self.form.epsilon), f"power / {rows.real_text(self.view.count)}"
        if self.form.kind in ("layer", "rms"):
            return f"1.0 / tl.sqrt({mean} + {epsilon})"
        if self.form.kind == "deviation":
            return f"1.0 / (tl.sqrt({mean}) + {epsilon})"
        return "power" if self.form.kind == "l1" else "tl.sqrt(power)"

    def _result(self) -> list[str]:
        if self.form.kind in ("l1", "l2"):  # multiplying by 1 / norm could lose digits, as it may be denormal
            return ["y = tl.where(norm[:, None] == 0, 0.0, d / norm[:, None])"]
        lines = ["y = d * norm[:, None]"]
        for name, i, operator in (("scale", self.form.scale, "*"), ("bias", self.form.bias, "+")):
            if i is not None and self.problem.input(i) is not None:
                lines += [self.tile.operand(name, f"p{i}", operand_type(self.problem, i)), f"y = y {operator} {name}"]
        return lines

    def _finish(self) -> str:
        problem, tile, form = self.problem, self.tile, self.form
        outputs = [tensor(t) for t in problem.outputs]
        count = rows.real_text(self.view.count)
        lines = [*tile.head(), *(self._joined() if tile.split > 1 else self._statistics(count))]
        lines.append(f"norm = {self._norm()}")
        alone = " & (part == 0)" if tile.split > 1 else ""
        mean = "mean" if form.centred else "norm * 0.0"
        for i, value in ((form.mean, mean), (form.inverse, "norm")):
            if i is not None and i < len(outputs):
                lines.append(f"tl.store(o{i} + row, ({value}).to({NAMES[outputs[i].dtype]}), mask=inside{alone})")
        body, last = chain(problem, "y", "at", "ok", last=tile.last, indent="")
        keep = []
        if form.total is not None and form.total < len(outputs):
            keep = [f"tl.store(o{form.total} + at, v.to({NAMES[outputs[form.total].dtype]}), mask=ok)"]
        read = [] if tile.whole else [*self._read(), self._centred()]
        store = f"tl.store(o0 + at, {last}.to({NAMES[outputs[0].dtype]}), mask=ok)"
        lines += tile.sweep(*read, *self._result(), *body, store, *keep)
        pointers = [f"p{i}" for i, type in enumerate(problem.inputs) if type is not None]
        pointers += [f"o{i}" for i in range(len(outputs))]
        return rows.kernel([*pointers, *(["parts"] if tile.split > 1 else [])], lines)


SOLVERS = (TritonNorm(),)
