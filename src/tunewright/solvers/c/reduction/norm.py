"""Normalisations over rows: layer, RMS, instance, group, mean-variance, Lp, and those of com.microsoft that sum first.

Statistics take two passes, the mean and then the squares around it, so that a large mean loses no digits. The mean is
summed around the first element for the same reason.

A tensor is viewed as [K0][R0][K1][R1] (the innermost part is normalised: *rows*) or [R0][K0][R1][K1] (the innermost
part is kept: *columns*). K are kept and R normalised dimensions. Most problems have only K0 and R1 above 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater, lesser
from tunewright.ir.types import DType, TensorType
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Problem, tensor

from ..source.base import CSolver, both
from ..source.emit import COMPUTE, EmittedLaunch, In, Out, Source

MS = "com.microsoft::"
FLOATS = frozenset({DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16})

#: Elements that are summed before their sum is added to the total; this keeps long sums exact.
BLOCK = 4096
#: A dimension of a grid stays below the limit for which the runtime has one variant of a kernel.
MOST_ITEMS = 32768


@dataclass(frozen=True)
class NormForm:
    """One operation: the numbers of its inputs and outputs by role; None where it has no such input or output."""

    #: layer: (x - mean) / sqrt(variance + epsilon); rms: without the mean; deviation: epsilon outside of the root; l1,
    #: l2
    kind: str
    scale: int | None = None
    bias: int | None = None
    #: further terms of the sum that is normalised
    skip: int | None = None
    skip_bias: int | None = None
    mean: int | None = None
    inverse: int | None = None
    total: int | None = None
    epsilon: float = 1e-5


FORMS: dict[str, NormForm] = {
    "LayerNormalization": NormForm("layer", scale=1, bias=2, mean=1, inverse=2),
    "RMSNormalization": NormForm("rms", scale=1),
    "SimplifiedLayerNormalization": NormForm("rms", scale=1, inverse=1),
    MS + "SimplifiedLayerNormalization": NormForm("rms", scale=1, inverse=1),
    MS + "SkipLayerNormalization": NormForm(
        "layer", scale=2, bias=3, skip=1, skip_bias=4, mean=1, inverse=2, total=3, epsilon=1e-12
    ),
    MS + "SkipSimplifiedLayerNormalization": NormForm(
        "rms", scale=2, skip=1, skip_bias=3, mean=1, inverse=2, total=3, epsilon=1e-12
    ),
    MS + "EmbedLayerNormalization": NormForm("layer", scale=5, bias=6, total=2, epsilon=1e-12),
    "InstanceNormalization": NormForm("layer", scale=1, bias=2),
    "GroupNormalization": NormForm("layer", scale=1, bias=2),
    "MeanVarianceNormalization": NormForm("deviation", epsilon=1e-9),
    "LpNormalization": NormForm("l2"),
}
_EMBED = MS + "EmbedLayerNormalization"
_PER_CHANNEL = ("InstanceNormalization", "GroupNormalization")


@dataclass(frozen=True)
class NormView:
    """The sizes of the four parts of a tensor, and whether the innermost part is kept."""

    k0: int
    r0: int
    k1: int
    r1: int
    columns: bool = False

    @property
    def rows(self) -> int:
        return self.k0 * self.k1

    @property
    def count(self) -> int:
        """The number of elements over which a statistic is taken."""
        return self.r0 * self.r1


def reduced_axes(problem: Problem, rank: int) -> frozenset[int]:
    """The axes over which statistics are taken, in the main input or its (group) view [N, G, C / G, ...]."""
    attrs = problem.attrs
    if problem.op == "MeanVarianceNormalization":
        return frozenset(a % rank for a in attrs.get("axes", (0, 2, 3)))
    if problem.op == "LpNormalization":
        return frozenset({int(attrs.get("axis", -1)) % rank})
    if problem.op in _PER_CHANNEL:
        return frozenset(range(2, rank))
    axis = -1 if FORMS[problem.op].total is not None else int(attrs.get("axis", -1))
    return frozenset(range(axis % rank, rank))


def view(dims: Sequence[int], axes: frozenset[int]) -> NormView | None:
    """The four parts of a tensor, or None where kept and normalised axes alternate more often."""
    parts: list[tuple[bool, int]] = []
    for axis, size in enumerate(dims):
        if size == 1:
            continue
        if parts and parts[-1][0] == (axis in axes):
            parts[-1] = (parts[-1][0], parts[-1][1] * size)
        else:
            parts.append((axis in axes, size))
    columns = bool(parts) and not parts[-1][0]
    wanted = [True, False, True, False] if columns else [False, True, False, True]
    sizes = [1, 1, 1, 1]
    at = 4
    for reduced, size in reversed(parts):
        at -= 1
        if at >= 0 and wanted[at] != reduced:
            at -= 1
        if at < 0:
            return None
        sizes[at] = size
    if columns and sizes[0] == sizes[2] == 1:  # With nothing to sum, rows have one element.
        return NormView(math.prod(sizes), 1, 1, 1)
    if columns:
        return NormView(sizes[1], sizes[0], sizes[3], sizes[2], True)
    return NormView(sizes[0], sizes[1], sizes[2], sizes[3])


def main_dims(problem: Problem) -> tuple[int, ...]:
    """The dimensions of the normalised tensor; groups are separated from the channels."""
    if problem.op == _EMBED:
        return (*tensor(problem.inputs[0]).dims, tensor(problem.inputs[2]).dims[1])
    dims = tensor(problem.inputs[0]).dims
    if problem.op == "GroupNormalization":
        groups = int(problem.attrs["num_groups"])
        return (dims[0], groups, dims[1] // groups * math.prod(dims[2:]))
    return dims


@dataclass(frozen=True)
class BroadcastFactor:
    """How the kernel reads an operand that is broadcast to the input: element (flat / divisor) % modulus."""

    divisor: int
    modulus: int

    @property
    def per_element(self) -> bool:
        """Whether neighbouring elements have different values; else a run of ``divisor`` elements shares one."""
        return self.divisor == 1 and self.modulus > 1

    @property
    def run(self) -> int:
        """The number of elements within which the index is constant or counts up; 0: all."""
        return self.modulus if self.per_element else self.divisor if self.modulus > 1 else 0


def factor(operand: Sequence[int], dims: Sequence[int]) -> BroadcastFactor | None:
    """How an operand lies in an input; None where the dimensions along which it varies are not adjacent."""
    if len(operand) > len(dims):
        return None
    padded = (1,) * (len(dims) - len(operand)) + tuple(operand)
    varying = [axis for axis, (p, d) in enumerate(zip(padded, dims, strict=True)) if p != 1 and d != 1]
    if any(p not in (1, d) for p, d in zip(padded, dims, strict=True)):
        return None
    if not varying:
        return BroadcastFactor(1, 1)
    if any(padded[a] == 1 and dims[a] != 1 for a in range(varying[0], varying[-1])):
        return None
    return BroadcastFactor(math.prod(dims[varying[-1] + 1 :]), math.prod(operand))


def affine(problem: Problem, i: int) -> BroadcastFactor | None:
    """How the kernel reads the scale or bias at input i."""
    operand, dims = tensor(problem.inputs[i]).dims, tensor(problem.inputs[0]).dims
    if problem.op in _PER_CHANNEL:
        return BroadcastFactor(math.prod(dims[2:]), dims[1])
    return factor(operand, main_dims(problem) if problem.op == _EMBED else dims)


class Norm(CSolver):
    """A work-item normalises some rows, or a tile of columns."""

    family = "norm"
    ops = frozenset(FORMS)
    dtypes = FLOATS | {DType.INT32, DType.INT64}
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if problem.epilogue:
            return "takes no epilogue"
        form, first = FORMS[problem.op], problem.input(0)
        indices = {0, 1, 7, 8} if problem.op == _EMBED else set()
        for i, type in enumerate(problem.main_inputs):
            if isinstance(type, TensorType) and (type.dtype in FLOATS) == (i in indices):
                return f"input {i} is {type.dtype}"
        if problem.op == "LpNormalization" and int(problem.attrs.get("p", 2)) not in (1, 2):
            return f"p {problem.attrs['p']} is not 1 or 2"
        if not isinstance(first, TensorType) or not problem.is_static:
            return None
        if not first.dims:
            return "a scalar has no axis"
        for at in (form.scale, form.bias):
            if at is not None and problem.input(at) is not None and affine(problem, at) is None:
                return f"input {at}, {problem.inputs[at]}, is not constant over whole dimensions of {first}"
        for at in (form.skip, form.skip_bias):
            type = None if at is None else problem.input(at)
            if isinstance(type, TensorType) and not _repeats(type, first):
                return f"input {at}, {type}, does not repeat along rows of {first}"
        dims = main_dims(problem)
        if view(dims, reduced_axes(problem, len(dims))) is None:
            return "kept and normalised axes alternate too often"
        return None

    def default(self, problem: Problem, target: Target) -> Config:
        return {"elements": 8192, "columns": 128}

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({"elements": [2048, 8192, 32768], "columns": [32, 64, 128, 256]})

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        dims = main_dims(problem)
        seen = view(dims, reduced_axes(problem, len(dims)))
        assert seen is not None
        if not math.prod(dims) and not seen.rows:
            return []
        source = Source("norm", self.specialise)
        writer = NormWriter(source, problem, seen)
        if seen.columns:
            return [writer.columns(config)]
        return [writer.rows(config)]


def _repeats(type: TensorType, first: TensorType) -> bool:
    """Whether the operand consists of whole rows that repeat along the input."""
    found = factor(type.dims, first.dims)
    return found is not None and found.divisor == 1 and type.size % greater(first.dims[-1], 1) == 0


@dataclass
class NormWriter:
    """Writes the kernel of one problem."""

    source: Source
    problem: Problem
    view: NormView
    form: NormForm = field(init=False)
    #: statements that compute where a row's terms begin
    starts: list[str] = field(default_factory=list)
    terms: list[str] = field(default_factory=list)
    #: statements that check for indices out of range, before all rows
    checks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        source, problem, seen = self.source, self.problem, self.view
        self.form = FORMS[problem.op]
        data = tensor(problem.inputs[2 if problem.op == _EMBED else 0]).dtype
        real = COMPUTE[data]
        source.fixed(REAL=real, SQRT=f"{real}_sqrt", ABS=f"{real}_fabs", BLOCK=BLOCK)
        default = 1e-9 if self.form.kind == "deviation" else problem.attrs.get("epsilon", self.form.epsilon)
        if real == "f64":
            source.fixed(EPSILON=repr(float(default)))
        else:
            source.numbers(EPSILON=float(default))
        source.dims(ROWS=seen.rows, K1=seen.k1, R0=seen.r0, R1=seen.r1)
        if problem.op == _EMBED:
            self._embedding()
        else:
            self._sum()
        source.buffer("y", tensor(problem.outputs[0]).dtype, Out())
        source.function(f"#define VALUE(j) ({' + '.join(self.terms)})")
        # An infinite pivot would make NaN of an infinite mean.
        source.function("INLINE REAL PIVOT(REAL x) { return x - x == 0 ? x : 0; }")

    @property
    def kind(self) -> str:
        if self.problem.op == "LpNormalization":
            return "l1" if int(self.problem.attrs.get("p", 2)) == 1 else "l2"
        return self.form.kind

    @property
    def centred(self) -> bool:
        return self.kind in ("layer", "deviation")

    # -- terms --------------------------------------------------------------------------------------------------------
    def _term(self, name: str, i: int, start: str) -> None:
        self.source.buffer(name, tensor(self.problem.inputs[i]).dtype, In(i))
        self.starts.append(f"int {name}_at = {start};")
        self.terms.append(self.source.load(name, f"{name}_at + (j)"))

    def _sum(self) -> None:
        self._term("x", 0, "at")
        for name, i in (("skip", self.form.skip), ("more", self.form.skip_bias)):
            if i is not None and self.problem.input(i) is not None:
                self.source.dims(**{f"{name.upper()}_SIZE": tensor(self.problem.inputs[i]).size})
                self._term(name, i, f"row * R1 % {name.upper()}_SIZE")

    def _embedding(self) -> None:
        """Adds word, position and segment vectors as terms. An index out of range is reported and clamped."""
        problem, source = self.problem, self.source
        source.function("INLINE int within(i64 i, int n) { return (int)(i < 0 ? 0 : i < n ? i : n - 1); }")
        source.dims(LENGTH=tensor(problem.inputs[0]).dims[1])
        positions = problem.input(8)
        if positions is not None:
            source.dims(POSITIONS=tensor(positions).size)
        tables: list[tuple[str, int, int | None, str]] = [
            ("word", 2, 0, "row"),
            ("position", 3, None, "row % LENGTH") if positions is None else ("position", 3, 8, "row % POSITIONS"),
        ]
        if problem.input(1) is not None and problem.input(4) is not None:
            tables.append(("segment", 4, 1, "row"))
        for name, i, indices, at in tables:
            count = f"{name.upper()}_ROWS"
            source.dims(**{count: tensor(problem.inputs[i]).dims[0]})
            if indices is not None:
                source.buffer(f"{name}_ids", tensor(problem.inputs[indices]).dtype, In(indices))
                at = f"{name}_ids[{at}]"
            self._term(name, i, f"within({at}, {count}) * R1")
            if indices is not None or tensor(problem.inputs[0]).dims[1] > tensor(problem.inputs[i]).dims[0]:
                self.checks.append(f"if ({at} < 0 || {at} >= {count}) wrong(report, WRONG_ROW, {at}, {count});")

    def _count_mask(self) -> str:
        """Statements for the second output, the number of ones in each row of the mask; a sequence's first token counts
        them."""
        if self.problem.op != _EMBED or len(self.problem.outputs) < 2:
            return ""
        self.source.buffer("ones", DType.INT32, Out(1))
        if self.problem.input(7) is None:
            return "if (row % LENGTH == 0) ones[row / LENGTH] = 0;"
        self.source.buffer("mask", tensor(self.problem.inputs[7]).dtype, In(7))
        return """if (row % LENGTH == 0) {
  int found = 0;
  for (int j = 0; j < LENGTH; j++) found += mask[row + j] == 1;
  ones[row / LENGTH] = found;
}"""

    # -- rows --------------------------------------------------------------------------------------------------------
    def _start(self, column: str = "0") -> str:
        return " ".join([f"int at UNUSED = base + r0 * (K1 * R1) + {column};", *self.starts])

    def _total(self, name: str, value: str, term: str) -> str:
        """Statements that sum a term in v over a row, in blocks.

        Four quarters are summed side by side: a single sum would wait for its previous addition at every step.
        """

        def add(part: str, j: str) -> str:
            return f"{{ REAL v = {value.replace('(j)', f'({j})')}; {part} += {term}; }}"

        quarters = " ".join(add(f"part{k}", f"j + {k} * quarter") for k in range(4))
        return f"""REAL {name} = 0;
for (int r0 = 0; r0 < R0; r0++) {{
  {self._start()}
  for (int begin = 0; begin < R1; begin += BLOCK) {{
    REASSOCIATE
    int end = R1 - begin < BLOCK ? R1 : begin + BLOCK, quarter = (end - begin) / 64 * 16;
    REAL part0 = 0, part1 = 0, part2 = 0, part3 = 0;
    for (int j = begin; j < begin + quarter; j++) {{ {quarters} }}
    for (int j = begin + 4 * quarter; j < end; j++) {add("part0", "j")}
    {name} += (part0 + part1) + (part2 + part3);
  }}
}}"""

    def _statistics(self) -> str:
        mean, value = "REAL mean UNUSED = 0;", "VALUE(j)"
        if self.centred:
            first = f"REAL pivot;\n{{ int r0 = 0, j = 0; {self._start()} pivot = PIVOT(VALUE(j)); }}"
            total = self._total("sum", value, "v - pivot")
            mean, value = f"{first}\n{total}\nREAL mean = pivot + sum / (R0 * R1);", "VALUE(j) - mean"
        power = self._total("power", value, _POWER[self.kind])
        return f"{mean}\n{power}\nREAL norm = {_NORM[self.kind]};"

    def _affine(self) -> tuple[list[str], str, int]:
        """Statements in front of a run, the expression of the result from v, and the run's length."""
        lines, value, run = [], "v", self.view.r1
        for name, i, operator in (("scale", self.form.scale, "*"), ("bias", self.form.bias, "+")):
            if i is None or self.problem.input(i) is None:
                continue
            found = affine(self.problem, i)
            assert found is not None
            upper = name.upper()
            self.source.buffer(name, tensor(self.problem.inputs[i]).dtype, In(i))
            divisor, modulus = greater(found.divisor, 1), greater(found.modulus, 1)
            self.source.dims(**{f"{upper}_DIVISOR": divisor, f"{upper}_MODULUS": modulus})
            lines.append(f"int {name}_at = (at + c) / {upper}_DIVISOR % {upper}_MODULUS;")
            if found.per_element:
                term = self.source.load(name, f"{name}_at + s")
            else:
                lines.append(f"{self.source.compute(name)} {name}_v = {self.source.load(name, f'{name}_at')};")
                term = f"{name}_v"
            value = f"{value} {operator} {term}"
            run = lesser(run, found.run or run)
        return lines, value, run

    def rows(self, config: Config) -> EmittedLaunch:
        source, problem, seen = self.source, self.problem, self.view
        rows = greater(1, int(config["elements"]) // greater(seen.count, 1), -(-seen.rows // MOST_ITEMS))
        lines, value, run = self._affine()
        source.dims(PER_ITEM=rows, RUN=greater(run, 1))
        stores = [source.store("y", "at + c + s", value)]
        kept = []
        for what, i in (("mean", self.form.mean), ("norm", self.form.inverse), ("total", self.form.total)):
            if i is None or i >= len(problem.outputs):
                continue
            source.buffer(f"{what}_out", tensor(problem.outputs[i]).dtype, Out(i))
            if what == "total":
                stores.append(source.store("total_out", "at + c + s", "VALUE(c + s)"))
            else:
                kept.append(source.store(f"{what}_out", "row", what))
        checks = f"for (int row = first; row < last; row++) {{ {' '.join(self.checks)} }}\n" if self.checks else ""
        source.add(f"""int first = GID(0) * PER_ITEM, last = ROWS - first < PER_ITEM ? ROWS : first + PER_ITEM;
{checks}for (int row = first; row < last; row++) {{
  int base = row / K1 * (R0 * K1 * R1) + row % K1 * R1;
  {self._count_mask()}
  {self._statistics()}
  {" ".join(kept)}
  for (int r0 = 0; r0 < R0; r0++) {{
    {self._start()}
    for (int c = 0; c < R1; c += RUN) {{
      {" ".join(lines)}
      for (int s = 0; s < RUN; s++) {{
        REAL v = {_RESULT[self.kind].format(v="VALUE(c + s)", mean="mean", norm="norm")};
        {" ".join(stores)}
      }}
    }}
  }}
}}""")
        return source.call([-(-seen.rows // rows)])

    # -- columns -----------------------------------------------------------------------------------------------------
    def columns(self, config: Config) -> EmittedLaunch:
        """The launch that computes the statistics of a tile of neighbouring columns at once.

        Only operations of one operand use it.
        """
        source, seen = self.source, self.view
        source.fixed(TILE=int(config["columns"]))
        tiles = -(-seen.k1 // int(config["columns"]))
        per_item = -(-seen.k0 * tiles // MOST_ITEMS)
        source.dims(K0=seen.k0, TILES=tiles, PER_ITEM=per_item, ITEMS=seen.k0 * tiles)

        def sweep(body: str) -> str:
            return f"""for (int r0 = 0; r0 < R0; r0++) for (int r1 = 0; r1 < R1; r1++) {{
  int x_at = ((r0 * K0 + k0) * R1 + r1) * K1 + column;
  for (int j = 0; j < n; j++) {{ {body} }}
}}"""

        mean, value = "", "VALUE(j)"
        if self.centred:
            first = """int x_at = k0 * R1 * K1 + column;
  for (int j = 0; j < n; j++) pivot[j] = PIVOT(VALUE(j));"""
            total = sweep("mean[j] += VALUE(j) - pivot[j];")
            divided = "for (int j = 0; j < n; j++) mean[j] = pivot[j] + mean[j] / (R0 * R1);"
            mean = f"REAL pivot[TILE]; {{ {first} }}\n{total}\n{divided}"
            value = "VALUE(j) - mean[j]"
        power = sweep(f"REAL v = {value}; norm[j] += {_POWER[self.kind]};")
        result = _RESULT[self.kind].format(v="VALUE(j)", mean="mean[j]", norm="norm[j]")
        source.add(f"""int first = GID(0) * PER_ITEM, last = ITEMS - first < PER_ITEM ? ITEMS : first + PER_ITEM;
for (int item = first; item < last; item++) {{
  int k0 = item / TILES, column = item % TILES * TILE, n = K1 - column < TILE ? K1 - column : TILE;
  REAL mean[TILE], norm[TILE];
  for (int j = 0; j < n; j++) mean[j] = norm[j] = 0;
  {mean}
  {power}
  for (int j = 0; j < n; j++) {{ REAL power = norm[j]; norm[j] = {_NORM[self.kind]}; }}
  {sweep(f"REAL v = {result}; {source.store('y', 'x_at + j', 'v')}")}
}}""")
        return source.call([-(-seen.k0 * tiles // per_item)])


#: the term of each (centred) element v in the sum
_POWER: Mapping[str, str] = {"layer": "v * v", "rms": "v * v", "deviation": "v * v", "l2": "v * v", "l1": "ABS(v)"}
#: the factor, or (l1, l2) the divisor, from that sum
_NORM: Mapping[str, str] = {
    "layer": "1 / SQRT(power / (R0 * R1) + EPSILON)",
    "rms": "1 / SQRT(power / (R0 * R1) + EPSILON)",
    "deviation": "1 / (SQRT(power / (R0 * R1)) + EPSILON)",
    "l2": "SQRT(power)",
    "l1": "power",
}
_CENTRED = "({v} - {mean}) * {norm}"
_DIVIDED = "{norm} == 0 ? 0 : {v} / {norm}"  # a factor of 1 / norm could be denormal
_RESULT: Mapping[str, str] = {
    "layer": _CENTRED, "rms": "{v} * {norm}", "deviation": _CENTRED, "l2": _DIVIDED, "l1": _DIVIDED,
}  # fmt: skip

SOLVERS = both(Norm)
