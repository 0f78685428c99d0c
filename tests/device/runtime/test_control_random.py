"""Random loops, scans and branches in each other, whose values come from anywhere: as ONNX Runtime has them."""

from __future__ import annotations

import os
import random
from itertools import count

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper, numpy_helper

from tunewright import Core
from tunewright.plugins.single import open_device

ort = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.skipif(open_device("CPU").family != "native", reason="needs the native CPU device")
SHAPES = [(3,), (2, 3), (1, 4)]
#: the same with open sizes
OPEN: list[tuple] = [("k",), (2, "k"), (1, "m")]


TENTH = np.full((3,), 0.1, np.float32)


class Writer:
    """Grows graphs. Values are (name, shape) of floats within [-1, 1] or so."""

    def __init__(self, seed: int, shapes: list[tuple]) -> None:
        self.rng, self.numbers, self.size, self.shapes = random.Random(seed), count(), 0, shapes

    def name(self, stem: str = "v") -> str:
        return f"{stem}{next(self.numbers)}"

    def constant(self, nodes: list, array: np.ndarray) -> str:
        name = self.name("c")
        nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array)))
        return name

    def pick(self, known: list, shape: tuple | None = None) -> tuple:
        found = [v for v in known if shape is None or v[1] == shape]
        return self.rng.choice(found) if found else None

    def of_shape(self, nodes: list, known: list, shape: tuple) -> tuple:
        """A value of a shape: one that is there, or a constant."""
        found = self.pick(known, shape)
        if found is None or self.rng.random() < 0.1:
            found = self.fresh(nodes, shape), shape
        return found

    def fresh(self, nodes: list, shape: tuple) -> str:
        """A constant; of open sizes it is made out of an input."""
        if self.is_open:
            factor = self.constant(nodes, np.array(self.rng.uniform(-1, 1), np.float32))
            return self.node(nodes, "Mul", [f"x{self.shapes.index(shape)}", factor])[0]
        values = np.random.default_rng(self.rng.randrange(2**31)).uniform(-1, 1, shape)
        return self.constant(nodes, values.astype(np.float32))

    @property
    def is_open(self) -> bool:
        return self.shapes is OPEN

    def length(self, nodes: list) -> str:
        """How many rows there are, as a trip count."""
        zero = self.constant(nodes, np.array(0, np.int64))
        return self.node(nodes, "Gather", [self.node(nodes, "Shape", ["rows0"])[0], zero])[0]

    def fill(self, nodes: list, known: list, depth: int) -> None:
        for _ in range(self.rng.randint(0, 4)):
            self.size += 1
            kind = self.rng.choice(["unary", "unary", "binary", "binary", "parts", "If", "Loop", "Scan"])
            if kind in ("If", "Loop", "Scan") and (depth == 3 or self.size > 60):
                kind = "unary"
            getattr(self, "add_" + kind.lower())(nodes, known, depth)

    def node(self, nodes: list, op: str, ins: list, outs: int = 1, **attrs: object) -> list:
        made = [self.name() for _ in range(outs)]
        nodes.append(helper.make_node(op, ins, made, name=self.name(op), **attrs))
        return made

    def add_unary(self, nodes: list, known: list, _: int) -> None:
        name, shape = self.pick(known)
        known.append((self.node(nodes, self.rng.choice(["Tanh", "Neg", "Identity", "Abs", "Sin"]), [name])[0], shape))

    def add_binary(self, nodes: list, known: list, _: int) -> None:
        name, shape = self.pick(known)
        other = self.of_shape(nodes, known, shape)[0]
        mixed = self.node(nodes, self.rng.choice(["Add", "Sub", "Mul"]), [name, other])[0]
        known.append((self.node(nodes, "Tanh", [mixed])[0], shape))

    def add_parts(self, nodes: list, known: list, _: int) -> None:
        """Both halves of a concatenation: views, and values that are written in place."""
        name, shape = self.pick(known)
        if self.rng.random() < 0.5:
            name = self.node(nodes, "Cos", [name])[0]
        other = self.of_shape(nodes, known, shape)[0]
        whole = self.node(nodes, "Concat", [name, other], axis=0)[0]
        if self.rng.random() < 0.5:
            whole = self.node(nodes, "Tanh", [whole])[0]
        known += [(v, shape) for v in self.node(nodes, "Split", [whole], 2, axis=0)]

    def value(self, v: tuple, dtype: int = T.FLOAT) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(v[0], dtype, v[1])

    def condition(self, nodes: list, known: list) -> str:
        """A bool that a value decides."""
        largest = self.node(nodes, "ReduceMax", [self.pick(known)[0]], keepdims=0)[0]
        bound = self.constant(nodes, np.array(self.rng.uniform(-0.5, 0.9), np.float32))
        return self.node(nodes, "Less", [largest, bound])[0]

    def add_if(self, nodes: list, known: list, depth: int) -> None:
        shapes = [self.rng.choice(self.shapes) for _ in range(self.rng.randint(1, 3))]
        bodies = []
        for branch in ("then", "else"):
            inner, there = [], list(known)
            self.fill(inner, there, depth + 1)
            outs = [self.returned(inner, there, shape) for shape in shapes]
            bodies.append(helper.make_graph(inner, self.name(branch), [], [self.value(v) for v in outs]))
        branches = dict(zip(("then_branch", "else_branch"), bodies, strict=True))
        made = self.node(nodes, "If", [self.condition(nodes, known)], len(shapes), **branches)
        known += zip(made, shapes, strict=True)

    def returned(self, nodes: list, known: list, shape: tuple, fresh: set | None = None) -> tuple:
        """An output of a body, under a name that it has not yet: the checker wants different ones."""
        return self.node(nodes, "Identity", [self.of_shape(nodes, known, shape)[0]])[0], shape

    def add_loop(self, nodes: list, known: list, depth: int) -> None:
        states = [self.rng.choice(self.shapes) for _ in range(self.rng.randint(0, 3))]
        first = [self.of_shape(nodes, known, shape)[0] for shape in states]
        inner: list = []
        i, go, *carried = [self.name("i") for _ in range(2 + len(states))]
        there = [*known, *zip(carried, states, strict=True)]
        if self.rng.random() < 0.5:
            number = self.node(inner, "Cast", [i], to=T.FLOAT)[0]
            tenth = self.fresh(inner, self.shapes[0]) if self.is_open else self.constant(inner, TENTH)
            there.append((self.node(inner, "Mul", [number, tenth])[0], self.shapes[0]))
        self.fill(inner, there, depth + 1)
        kind = self.rng.choice(["given", "given", "computed", "counted"])
        on = self.node(inner, "Identity", [go])[0] if kind == "given" else ""
        if kind == "computed":
            on = self.condition(inner, there)
        if kind == "counted":
            end = self.constant(inner, np.array(self.rng.randint(-1, 6), np.int64))
            on = self.node(inner, "And", [self.node(inner, "Less", [i, end])[0], go])[0]
        most = 2 if depth == 0 or kind == "given" else 0
        scans = [self.rng.choice(self.shapes) for _ in range(self.rng.randint(0, most))]
        outs = [self.returned(inner, there, shape) for shape in (*states, *scans)]
        if not outs:
            return
        given = zip(carried, states, strict=True)
        body = helper.make_graph(
            inner, self.name("body"),
            [self.value((i, ()), T.INT64), self.value((go, ()), T.BOOL), *(self.value(v) for v in given)],
            [self.value((on, ()), T.BOOL), *(self.value(v) for v in outs)],
        )  # fmt: skip
        trips = self.rng.randint(0 if not scans else 1, 6)
        is_size = self.is_open and self.rng.random() < 0.4
        limit = self.length(nodes) if is_size else self.constant(nodes, np.array(trips, np.int64))
        start = self.rng.choice(["", self.constant(nodes, np.array(True))])
        made = self.node(nodes, "Loop", [limit, start, *first], len(outs), body=body)
        known += zip(made, states, strict=False)
        self.summed(nodes, known, made[len(states) :], scans)

    def add_scan(self, nodes: list, known: list, depth: int) -> None:
        states = [self.rng.choice(self.shapes) for _ in range(self.rng.randint(0, 2))]
        rows = [self.rng.choice(self.shapes) for _ in range(self.rng.randint(1, 2))]
        length, taken, wholes = self.rng.randint(1, 5), [], []
        if self.is_open and self.rng.random() < 0.7:  # what is scanned is an input of open length
            wholes, taken = [f"rows{self.shapes.index(shape)}" for shape in rows], [0 for _ in rows]
        for shape in rows[len(taken) :]:
            axis = self.rng.choice([0, 0, len(shape), -1])
            taken.append(axis)
            parts = [self.of_shape(nodes, known, shape)[0] for _ in range(length)]
            at = self.constant(nodes, np.array([axis], np.int64))
            parts = [self.node(nodes, "Unsqueeze", [part, at])[0] for part in parts]
            wholes.append(self.node(nodes, "Concat", parts, axis=axis)[0])
        first = [self.of_shape(nodes, known, shape)[0] for shape in states]
        inner, names = [], [self.name("s") for _ in (*states, *rows)]
        there = [*known, *zip(names, (*states, *rows), strict=True)]
        self.fill(inner, there, depth + 1)
        scans = [self.rng.choice(self.shapes) for _ in range(self.rng.randint(0 if states else 1, 2))]
        outs = [self.returned(inner, there, shape) for shape in (*states, *scans)]
        body = helper.make_graph(
            inner, self.name("scan"), [self.value(v) for v in zip(names, (*states, *rows), strict=True)],
            [self.value(v) for v in outs],
        )  # fmt: skip
        axes = [self.rng.choice([0, 0, len(shape)]) for shape in scans]
        directions = [self.rng.randint(0, 1) for _ in scans]
        made = self.node(
            nodes, "Scan", [*first, *wholes], len(outs), body=body, num_scan_inputs=len(rows), scan_input_axes=taken,
            scan_input_directions=[self.rng.randint(0, 1) for _ in rows],
            **({"scan_output_directions": directions, "scan_output_axes": axes} if scans else {}),
        )  # fmt: skip
        known += zip(made, states, strict=False)
        self.summed(nodes, known, made[len(states) :], scans, axes)

    def summed(self, nodes: list, known: list, stacked: list, shapes: list, axes: list | None = None) -> None:
        """Scan outputs as values of a known shape."""
        for k, (name, shape) in enumerate(zip(stacked, shapes, strict=True)):
            at = self.constant(nodes, np.array([axes[k] if axes else 0], np.int64))
            known.append((self.node(nodes, "ReduceSum", [name, at], keepdims=0)[0], shape))


def random_model(seed: int, shapes: list[tuple] = SHAPES) -> onnx.ModelProto:
    writer = Writer(seed, shapes)
    inputs = [(f"x{k}", shape) for k, shape in enumerate(shapes)]
    nodes, known = [], list(inputs)
    if shapes is OPEN:
        inputs += [(f"rows{k}", ("t", *shape)) for k, shape in enumerate(shapes)]
    while not any(node.op_type in ("If", "Loop", "Scan") for node in nodes):
        writer.fill(nodes, known, 0)
    made = {v for node in nodes for v in node.output}
    outputs = [v for v in known if v[0] in made]
    graph = helper.make_graph(nodes, "g", [writer.value(v) for v in inputs], [writer.value(v) for v in outputs])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model


def check(seed: int, shapes: list[tuple] = SHAPES, **sizes: list[int]) -> tuple[int, int]:
    """How many control-flow nodes are part of a launch, of how many. ``sizes``: those that open dimensions have."""
    model = random_model(seed, shapes)
    feeds = []
    for n in range(max(3, *map(len, sizes.values())) if sizes else 3):
        rng, these = np.random.default_rng(seed + n), {name: values[n] for name, values in sizes.items()}
        feeds.append({v.name: rng.uniform(-1, 1, dims_of(v, these)).astype(np.float32) for v in model.graph.input})
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    other = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    core = Core({"ENABLE_LOOP_UNROLLING": random.Random(seed).choice(["NO", "NO", "YES"])})
    compiled = core.compile_model(core.read_model(model), "CPU")
    each = core.compile_model(core.read_model(model), "CPU", {"SHAPE_TEMPLATES": "NO"}) if sizes else compiled
    request = compiled.create_infer_request()
    for feed in feeds * 2:
        found, alone = request.infer(feed), each(feed) if sizes else {}
        for value, expected in zip(model.graph.output, other.run(None, feed), strict=True):
            assert found[value.name].shape == expected.shape, (seed, value.name)
            where = f"seed {seed}, {value.name}, {[a.shape for a in feed.values()]}"
            scale = max(1.0, float(np.abs(expected).max(initial=0)) if sizes else 1.0)  # sums of many rows cancel out
            np.testing.assert_allclose(found[value.name], expected, rtol=1e-3, atol=1e-4 * scale, err_msg=where)
            if sizes:  # the same kernels run, in whichever plan
                np.testing.assert_array_equal(found[value.name], alone[value.name], err_msg=where)
    plans = compiled.program.plans
    assert not sizes or any(plan.template is not None for plan in plans), f"seed {seed}: no plan serves a class"
    steps = [step for plan in plans for step in plan.steps if step.control is not None]
    return sum(step.block is not None for step in steps), len(steps)


def dims_of(value: onnx.ValueInfoProto, sizes: dict[str, int]) -> list[int]:
    return [sizes[d.dim_param] if d.dim_param else d.dim_value for d in value.type.tensor_type.shape.dim]


#: TUNEWRIGHT_TEST_CONTROL=FIRST:LAST runs any others
FIRST, LAST = map(int, os.environ.get("TUNEWRIGHT_TEST_CONTROL", "0:60").split(":"))


def test_random_control_flow() -> None:
    done = [check(seed) for seed in range(FIRST, LAST)]
    rows, all_ = map(sum, zip(*done, strict=True))
    assert rows > 0.8 * all_, (rows, all_)


@pytest.mark.soak
def test_much_random_control_flow() -> None:
    for seed in range(60, 3000):
        check(seed)


def open_sizes(seed: int, count: int) -> dict[str, list[int]]:
    """One and two are among them: what a single row makes is another class of shapes."""
    rng = np.random.default_rng(seed)
    return {name: [int(n) for n in rng.choice([1, 2, 3, 5, 8, 13, 40], count)] for name in "kmt"}


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_control_flow_over_open_sizes(first: int) -> None:
    done = [check(seed, OPEN, **open_sizes(seed, 6)) for seed in range(first, first + 10)]
    rows, all_ = map(sum, zip(*done, strict=True))
    assert rows > 0.8 * all_, (rows, all_)


@pytest.mark.soak
def test_much_random_control_flow_over_open_sizes() -> None:
    for seed in range(40, 1500):
        check(seed, OPEN, **open_sizes(seed, 12))
