"""Makes a plan from a graph, with the tuner's choices.

Values of known shape get a place in the arena. Views, slices and concatenations share storage where the bytes allow it.
Values that depend on data have memory of their own. The plan is cut in front of a heavy node that depends on data, and
the rest is planned once its shapes are known.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from tunewright.devices.control_rows import Block
from tunewright.devices.executable import Executable, HostCall
from tunewright.errors import ExecutionError, LimitError, LockError, ModelError, UnsupportedError
from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.launch_symbols import is_late, upper
from tunewright.ir.stored_weights import stored
from tunewright.ir.symbolic import SymArray, SymInt, at_hand, hint, same
from tunewright.ir.types import MAX_RANK, TensorType
from tunewright.ir.weight_memory import LARGE
from tunewright.ops import lookup
from tunewright.ops.infer import check_results
from tunewright.ops.internal.append import APPEND
from tunewright.ops.internal.row_counts import PLAIN_OP
from tunewright.solvers.base import Kernel, Problem, attrs_at_hand
from tunewright.solvers.shape_classes import numbers
from tunewright.tuning.policy import Search
from tunewright.tuning.tuner import Choice, Origin

from ..control.control_rows import block_of
from ..control.interpreter import Control, make_control
from ..control.row_counts import gather, opened
from . import alias
from .deferred_kernels import LateKernel, ShapeKernel, follows_from_shapes
from .growing_buffers import Filled, GrowingState
from .memory_layout import Lifetime, Stack, pack
from .plan import Counts, Plan, Segment, Slot, SlotPlace, Step, static_tensor
from .program import Environment, Packed, Program, like_nothing
from .template import Open, OpenKernel, Template, Traced, Untraceable, bring_at_hand

LOG = logging.getLogger("tunewright")
#: most nodes that an error names
MOST_NAMED = 10
#: threads that pack weights
PACKERS = min(4, os.cpu_count() or 1)


def lower(
    graph: Graph, env: Environment, only: bool = False, traced: Traced | None = None, repeated: bool = False,
    is_body: bool = False, counts: Counts = Counts.NEVER,
) -> Plan:  # fmt: skip
    """Make a plan for a graph whose types are inferred, with all kernels compiled.

    ``only``: nobody else needs the weights. ``traced``: the types are those of a class of shapes. ``repeated``: a loop
    runs the graph. ``is_body``: the plan becomes part of the one around it. ``counts``: which steps may be part of a
    launch whose sizes depend on data.
    """
    graph, counted = gather(graph, env, traced, repeated, counts)
    now, later = split(graph)
    rest: Graph | None = None
    boundary: list[Value] = []
    if later:
        rest, boundary = extract(graph, later)
    return _Lowering(graph, now, boundary, env, only, traced, repeated, is_body, counted).run(rest)


def split(graph: Graph) -> tuple[list[Node], list[Node]]:
    """Divide the nodes into those to run now and those to plan later.

    Later run heavy nodes with an input of unknown shape, and the nodes behind them.
    """
    postponed: set[Value] = set()
    now: list[Node] = []
    later: list[Node] = []
    for node in graph.nodes:
        spec = lookup(node.op)
        waits = any(v in postponed for v in node.inputs if v is not None)
        if not waits and spec is not None and spec.heavy:
            # A shape is unknown only behind something that depends on data (or an input without a shape).
            waits = any(isinstance(v.type, TensorType | None) and _open(v) for v in node.inputs if v is not None)
        if waits:
            later.append(node)
            postponed.update(node.outputs)
        else:
            now.append(node)
    return (now, later) if now else (later, [])


def _open(value: Value) -> bool:
    return value.type is None or not value.type.is_static


def extract(graph: Graph, nodes: Iterable[Node]) -> tuple[Graph, list[Value]]:
    """Copy ``nodes`` into a graph of their own. Returns it and the values that it takes as inputs, in order.

    The part is planned later, when the trace of this graph is over: sizes that are symbolic here are open there. Raises
    Untraceable.
    """
    part = Graph(f"{graph.name}+")
    mapping: dict[Value, Value] = {}
    boundary: list[Value] = []

    def of(value: Value) -> Value:
        if value not in mapping:
            if isinstance(value.const, SymArray):
                raise Untraceable("shapes that depend on data also depend on open sizes")
            if value.const is not None:
                mapping[value] = part.constant(value.const, value.name)
            else:
                mapping[value] = part.add_input(value.name, opened(value.type))
                boundary.append(value)
        return mapping[value]

    made: set[Value] = set()
    for node in nodes:
        if attrs_at_hand(node.attrs) is not node.attrs:
            raise Untraceable(f"node {node.name!r} ({node.op}) is made for open sizes, and its shapes depend on data")
        inputs = [None if v is None else of(v) for v in node.inputs]
        twin = part.add_copy(node, inputs, [opened(v.type) for v in node.outputs])
        mapping.update(zip(node.outputs, twin.outputs, strict=True))
        made.update(node.outputs)
    for value in dict.fromkeys(graph.outputs):
        if value in made:
            part.add_output(mapping[value], value.name)
    return part, boundary


def _open_sizes(part: Graph) -> set[tuple[int, int]]:
    """(input, axis) of each unknown size of a part's inputs."""
    shapes = [v.type.shape if isinstance(v.type, TensorType) else None for v in part.inputs]
    return {
        (at, axis)
        for at, shape in enumerate(shapes)
        for axis, size in enumerate((None,) * MAX_RANK if shape is None else shape)
        if not isinstance(size, int)
    }


@dataclass
class _Lowering:
    graph: Graph
    nodes: list[Node]
    boundary: list[Value]
    env: Environment
    #: weights may be freed once they are packed
    only: bool = False
    traced: Traced | None = None
    #: the graph is inside a loop
    repeated: bool = False
    #: the plan is of a body, and becomes part of another plan
    is_body: bool = False
    #: steps that make as many rows as the data says, with their blocks
    counted: Mapping[Node, tuple[Control, Block]] = field(default_factory=dict)
    #: the parts of the plan that depend on symbolic sizes
    open: Open = field(default_factory=Open)
    slots: list[Slot] = field(default_factory=list)
    index: dict[Value, int] = field(default_factory=dict)
    packed: dict[Packed, int] = field(default_factory=dict)
    packers: futures.Executor = field(init=False)
    #: choices by the key of the problem
    choices: dict[str, Choice] = field(default_factory=dict)
    #: control-flow nodes, and those of them that are part of a launch
    controls: dict[Node, Control] = field(default_factory=dict)
    blocks: dict[Node, Block] = field(default_factory=dict)
    #: values in planned memory that control flow writes
    written: set[Value] = field(default_factory=set)

    def run(self, rest: Graph | None) -> Plan:
        made = {v for n in self.nodes for v in n.outputs}
        leaving = [v for v in self.graph.outputs if v in made]
        self.compile_control()
        sharing = alias.share(self.nodes, leaving, self.boundary, self.written)
        lifetimes, offsets, total, results = self.place(sharing, leaving)
        inputs = tuple(self.slot(v, Slot(v.name, SlotPlace.INPUT, v.type)) for v in self.graph.inputs)
        for node in self.nodes:
            for v in node.inputs:
                self.constant(v)
            for v in node.outputs:
                self.slot(v, self.output_slot(v, sharing, results))
        for v in [*self.graph.outputs, *self.boundary]:
            self.constant(v)
        # Numpy releases the GIL, so threads pack weights while this one chooses kernels.
        with ThreadPoolExecutor(PACKERS) as self.packers:
            steps = self.steps(sharing)
            with self.env.phases("packing"):
                self.fill()
        self.prepare(steps)
        self.release(steps)
        rest_outputs = {} if rest is None else {name: i for i, name in enumerate(rest.output_names)}
        plan = Plan(
            device=self.env.device,
            types=tuple(v.type for v in self.graph.inputs),
            inputs=inputs,
            slots=self.slots,
            steps=steps,
            arena_offsets=offsets,
            arena_bytes=total,
            results=results,
            outputs=[
                ("slot", self.index[v]) if v in self.index else ("rest", rest_outputs[v.name])
                for v in self.graph.outputs
            ],
            rest=None if rest is None else Program(rest, self.env, True, _open_sizes(rest), self.repeated),
            rest_inputs=tuple(self.index[v] for v in self.boundary),
            segments=self.segments(steps),
        )
        plan.filled = self.filled(plan)
        if self.traced is None:
            return plan
        stack = Stack(lifetimes, offsets)
        return self.of_body(plan, stack) if self.is_body else self.of_class(plan, stack)

    def of_body(self, plan: Plan, stack: Stack) -> Plan:
        """Make the plan a part of one for a class of shapes, whose trace goes on."""
        assert self.traced is not None
        self.open.arena_offsets, self.open.arena_bytes = stack.expressions(self.open.arena)
        plan.open = self.open
        plan.types = tuple(t.at_hand if isinstance(t, TensorType) else t for t in plan.types)
        self.traced.graphs.append(self.graph)
        return plan

    def of_class(self, plan: Plan, stack: Stack) -> Plan:
        """Make the plan one for the shapes at hand, with a template for other shapes of its class."""
        assert self.traced is not None
        self.open.keep_used(self.traced.kernels, plan.steps)
        depending = {one.kernel for one in self.open.kernels}
        for step in plan.steps:
            if step.kernel in depending and not self.is_linked(step):
                raise Untraceable(f"node {step.node.name!r} ({step.node.op}) is launched by itself")
        self.open.states = self.states(plan)
        self.open.stored = {
            i: (slot.storage, self.open.offsets.get(i, slot.offset))
            for i, slot in enumerate(plan.slots) if slot.place is SlotPlace.ARENA
        }  # fmt: skip
        plan.template = Template(self.traced, self.open, stack, plan.device, self.env.settings.max_memory_bytes)
        for graph in (self.graph, *self.traced.graphs):
            bring_at_hand(graph)
        plan.types = tuple(v.type for v in self.graph.inputs)
        return plan

    def states(self, plan: Plan) -> list[GrowingState]:
        """Inputs that results continue (`passes/attention/grow_states.py`)."""
        found = []
        for output, value in enumerate(self.graph.outputs):
            node = value.producer
            if node is None or node.op != APPEND or same([node.attrs["rows"]], [node.attrs["capacity"]]):
                continue  # without rows to spare it is a copy
            slot, past, axis = self.index[value], node.inputs[0], int(node.attrs["axis"])
            assert past is not None and past.tensor is not None
            rows = node.attrs["rows"] - past.tensor.dims[axis]
            storage, step = plan.slots[slot].storage, self.nodes.index(node)
            found.append(GrowingState(self.graph.inputs.index(past), output, slot, storage, step, axis, int(rows)))
        return found

    def filled(self, plan: Plan) -> list[Filled]:
        """Caches with room: inputs of an append that a result of the same shape continues."""
        found = []
        for output, value in enumerate(self.graph.outputs):
            node = value.producer
            if node is None or node.op != APPEND or value not in self.index or node.inputs[0] not in self.graph.inputs:
                continue
            past, slot, at = node.inputs[0], plan.slots[self.index[value]], self.nodes.index(node)
            assert past is not None and past.tensor is not None and value.tensor is not None
            fits = same(past.tensor.dims, value.tensor.dims) and len(past.uses) == 1
            fits = fits and self.env.device.shares_memory and self.env.device.serves_classes
            if fits and slot.place is SlotPlace.RESULT and not hint(slot.offset) and self.is_linked(plan.steps[at]):
                found.append(Filled(self.graph.inputs.index(past), output, slot.storage, at))
        return found

    def place(
        self, sharing: alias.Sharing, leaving: list[Value]
    ) -> tuple[dict[int, Lifetime], dict[int, int], int, dict[int, int]]:
        """Decide which storages lie in the arena, with lifetimes and offsets, and which each inference makes anew."""
        kept = {sharing.place[v][0] for v in leaving if v in sharing.place}
        # The rest of the plan reads these: they must outlive the arena, which the next inference overwrites.
        kept |= {sharing.place[v][0] for v in self.boundary if v in sharing.place}
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for at, node in enumerate(self.nodes):
            for v in [*node.inputs, *node.outputs]:
                if v is not None and v in sharing.place:
                    storage = sharing.place[v][0]
                    first.setdefault(storage, at)
                    last[storage] = at
        arena = sorted(s for s in first if s not in kept)
        lifetimes = {s: Lifetime(hint(sharing.sizes[s]), first[s], last[s]) for s in arena}
        offsets, total = pack([*lifetimes.values()])
        if total > self.env.settings.max_memory_bytes:
            raise LimitError(
                f"the model needs {total:,} bytes of working memory",
                hint=f"the limit is MAX_MEMORY_BYTES = {self.env.settings.max_memory_bytes:,}",
            )
        if self.traced is not None:
            self.open.arena = {s: upper(sharing.sizes[s], self.traced.bounds) for s in arena}
            self.open.results = {s: sharing.sizes[s] for s in sorted(kept)}
        results = {s: hint(sharing.sizes[s]) for s in sorted(kept)}
        return lifetimes, dict(zip(arena, offsets, strict=True)), total, results

    def compile_control(self) -> None:
        """Find the control-flow nodes that can be part of a launch."""
        for node in self.nodes:
            known = self.counted.get(node)
            runner = make_control(node, self.env, self.repeated) if known is None else known[0]
            if runner is None:
                continue
            self.controls[node] = runner
            found: Block | str
            if known is not None:
                found = known[1]
            elif all(v is None or v.const is not None or self.has_place(v) for v in node.inputs):
                found = block_of(runner, self.repeated, self.traced)
            else:
                found = "the shapes of its inputs are not known"
            if isinstance(found, str):
                runner.why_not_compiled = found
                if self.traced is not None:
                    self.run_by_request(node)
                continue
            self.blocks[node] = found
            self.open.blocks.append(found)
            ragged = {one.output for one in found.ragged}
            self.written.update(v for i, v in enumerate(node.outputs) if i not in ragged)

    def run_by_request(self, node: Node) -> None:
        """Let the request run control flow that is not part of a launch, in a plan for a class of shapes."""
        captured = node.inputs[len(node.inputs) - node.captures :]
        if any(v is not None and isinstance(v.const, SymArray) for v in captured):
            raise Untraceable(f"shapes depend on open sizes in the bodies of node {node.name!r} ({node.op})")
        # the kernels that follow are linked: the results are copied to where these kernels read them
        self.written.update(v for v in node.outputs if static_tensor(v.type) is not None)

    def has_place(self, value: Value) -> bool:
        """Whether the value will lie in memory that is known before the value is computed."""
        made_by = value.producer
        return static_tensor(value.type) is not None and (
            made_by is None or not made_by.bodies or value in self.written
        )

    def output_slot(self, value: Value, sharing: alias.Sharing, results: dict[int, int]) -> Slot:
        if value not in sharing.place:
            return Slot(value.name, SlotPlace.DYNAMIC, value.type)
        storage, offset = sharing.place[value]
        place = SlotPlace.RESULT if storage in results else SlotPlace.ARENA
        return Slot(value.name, place, value.type, storage=storage, offset=offset)

    def slot(self, value: Value, slot: Slot) -> int:
        at = self.index[value] = len(self.slots)
        type = slot.type
        if isinstance(type, TensorType) and type.is_symbolic and not type.is_static:  # the size also depends on data
            slot = replace(slot, type=opened(type))
        elif isinstance(type, TensorType) and type.is_symbolic:
            self.open.shapes[at] = type.physical
            self.open.texts[at] = f"[{','.join(d.text if isinstance(d, SymInt) else str(d) for d in type.dims)}]"
            slot = replace(slot, type=type.at_hand)
        if isinstance(slot.offset, SymInt):
            self.open.offsets[at] = slot.offset
            slot = replace(slot, offset=hint(slot.offset))
        if isinstance(value.const, SymArray):
            self.open.constants[at] = value.const
        self.slots.append(slot)
        return at

    def constant(self, value: Value | None) -> None:
        if value is not None and value.const is not None and value not in self.index:
            self.slot(value, Slot(value.name, SlotPlace.CONST, value.type))

    def fill(self) -> None:
        """Put constants into their slots, plain or packed. From here on nobody frees a constant."""
        for value, at in self.index.items():
            if value.const is not None:
                assert isinstance(value.type, TensorType)
                self.slots[at] = replace(self.slots[at], const=at_hand(value.const, value.type.dtype.numpy))
        for packed, at in self.packed.items():
            self.slots[at] = replace(self.slots[at], const=packed.array)

    def is_spent(self, value: Value) -> bool:
        """Whether a value is a constant that nobody needs once it is packed."""
        array = value.const
        if array is None or array.nbytes < LARGE or not (self.only or stored(array)):
            return False
        return len(value.uses) == 1 and not self.graph.is_output(value) and self.holders[id(array)] == 1

    @cached_property
    def holders(self) -> Counter[int]:
        """How many constants hold each array, by `id()`."""
        return Counter(id(v.const) for g in self.graph.walk() for v in g.constants())

    def steps(self, sharing: alias.Sharing) -> list[Step]:
        """Make a step per node. One error names all nodes that nothing can run."""
        with self.tuning(sharing):
            return self._steps(sharing)

    def tuning(self, sharing: alias.Sharing) -> AbstractContextManager[None]:
        """Return the context in which to choose kernels: these problems share search time and count as progress."""
        if self.env.tuner.policy.search is Search.NEVER:
            return nullcontext()
        from tunewright.tuning.online import coming

        apart = {*self.controls, *sharing.free, *(node for node in self.nodes if node.op in PLAIN_OP)}
        plain = [node for node in self.nodes if node not in apart]
        return coming(self.env.tuner, (Problem.of_class(node).at_hand for node in plain), self.env.device)

    def _steps(self, sharing: alias.Sharing) -> list[Step]:
        steps, refused = [], list[str]()
        for node in self.nodes:
            try:
                steps.append(self.step(node, sharing))
            except Untraceable as error:
                error.node = error.node or node
                raise
            except LockError as error:
                where = f"node {node.name!r} ({node.op})"
                raise LockError(error.what, where=where, hint=error.hint) from error
            except ModelError as error:
                if not isinstance(error, UnsupportedError):
                    where = error.where or f"node {node.name!r} ({node.op})"
                    raise ModelError(error.what, where=where, hint=error.hint) from error
                refused.append(f"node {node.name!r} ({node.op}): {error.what}")
        if refused:
            more = f"; and {len(refused) - MOST_NAMED} more" if len(refused) > MOST_NAMED else ""
            hint = "" if self.env.settings.host_fallback else "HOST_FALLBACK = YES runs them on the host"
            raise UnsupportedError("; ".join(refused[:MOST_NAMED]) + more, hint=hint)
        return steps

    def step(self, node: Node, sharing: alias.Sharing) -> Step:
        ins = tuple(-1 if v is None else self.index[v] for v in node.inputs)
        outs = tuple(self.index[v] for v in node.outputs)
        if node in self.controls:
            return Step(node, ins, outs, control=self.controls[node], block=self.blocks.get(node))
        if node in sharing.free:
            return Step(node, ins, outs, optimized_out=True)
        if not self.env.settings.host_fallback and follows_from_shapes(node):
            return Step(node, ins, outs, ShapeKernel(node))
        of_class = Problem.of_class(node)
        problem = of_class.at_hand
        if self.env.tuner.is_late(problem, self.env.device):
            return Step(node, ins, outs, LateKernel(node, self.env))
        with self.env.phases("choosing"):
            choice = self.choose(problem)
        # tuned for exactly these shapes; others use the default
        if problem is not of_class and choice.solver.tuned_only:
            choice = self.env.tuner.default(problem, self.env.device)
        if choice.solver.host and attrs_at_hand(node.attrs) is not node.attrs:
            raise Untraceable(f"node {node.name!r} ({node.op}) is made for open sizes, and runs on the host")
        with self.env.phases("kernels"):
            whole = problem is of_class or choice.solver.host  # the host reads shapes as it runs
            kernel = self.env.compile(choice, problem) if whole else self.of_sizes(of_class, choice)
        return Step(node, self.pack(node, ins, kernel), outs, kernel, choice=choice)

    def of_sizes(self, problem: Problem, choice: Choice) -> Kernel:
        """Return the kernel for a problem of a class of shapes."""
        assert self.traced is not None
        env, solver = self.env, choice.solver
        if not solver.serves_classes:
            raise Untraceable(f"{solver.id} is for one shape")
        if any(map(is_late, numbers(problem))):
            return self.of_late_sizes(problem, choice)
        with self.traced.trace.scope() as guards:
            reason = env.tuner.why_not(solver, problem, env.device)
            kernel = env.compile(choice, problem)
        if reason is not None:
            raise Untraceable(f"{solver.id} refuses the class of shapes: {reason}")
        if all(one.kernel is not kernel for one in self.traced.kernels):
            measured = env.tuner.lookup.measured_sizes(problem.at_hand, env.device.target)
            pose = partial(env.posed, choice, kernel)
            self.traced.kernels.append(OpenKernel(problem, kernel, guards, measured, pose))
        return kernel

    def of_late_sizes(self, problem: Problem, choice: Choice) -> Kernel:
        """Return the kernel for a problem whose sizes the launch computes itself. The launch checks guards on them."""
        assert self.traced is not None
        env, solver = self.env, choice.solver
        reason = env.tuner.why_not(solver, problem, env.device)
        if reason is not None:
            raise Untraceable(f"{solver.id} refuses the class of shapes: {reason}")
        kernel = env.compile(choice, problem)
        of_kernel = getattr(kernel, "open", None)
        if of_kernel is None:
            return kernel
        for _, _, table in of_kernel.tables:
            if table.is_late and not (table.listed and all(not size < 0 for size in table.sizes)):
                raise Untraceable(f"{solver.id} makes tables of sizes")
        kernel.limit_scratch({name: upper(nbytes, self.traced.bounds) for name, nbytes in of_kernel.scratch.items()})
        return kernel

    def choose(self, problem: Problem) -> Choice:
        """Choose a solver for a problem. Equal layers share a choice, except one that comes from a search."""
        choice = self.choices.get(problem.key())
        if choice is None:
            choice = self.env.tuner.choose(problem, self.env.device)
            if choice.origin is not Origin.SEARCH:
                self.choices[problem.key()] = choice
        return choice

    def prepare(self, steps: list[Step]) -> None:
        """Compile what is not compiled yet. Kernel texts compile in parallel from when the kernels are made."""
        for step in steps:
            if step.kernel is None:
                continue
            try:
                self.env.prepare(step.kernel)
            except ExecutionError as error:
                where = error.where or f"node {step.node.name!r} ({step.node.op})"
                raise type(error)(error.what, where=where, hint=error.hint) from error

    def segments(self, steps: list[Step]) -> list[Segment]:
        """Group the steps that run, in order. Neighbouring steps that the device links form one executable."""
        groups: list[list[Step]] = []
        before = False
        for step in steps:
            if step.optimized_out:
                continue
            joins = self.env.settings.join_launches and self.is_linked(step)
            if joins and before:
                groups[-1].append(step)
            else:
                groups.append([step])
            before = joins
        return [Segment(group, self.link(group)) for group in groups]

    def link(self, steps: list[Step]) -> Callable[[], Executable] | None:
        """Return what makes the executable of a segment. None: the request runs it."""
        first, device = steps[0], self.env.device
        if self.is_linked(first):
            return partial(device.link, [step.part for step in steps])
        if first.kernel is None:
            return None
        limit = partial(_check_results, first.node, self.env.settings.max_tensor_bytes)
        return partial(HostCall, first.part, first.on_host, first.on_host and not device.shares_memory, limit)

    def is_linked(self, step: Step) -> bool:
        """Whether the device links the step.

        Its results must have a place. So must its inputs, unless the device reads any memory.
        """
        if step.on_host or not (step.block is not None or (step.kernel is not None and step.kernel.is_linkable)):
            return False
        ragged = () if step.block is None else [one.output for one in step.block.ragged]
        slots = [i for output, i in enumerate(step.outs) if output not in ragged]
        if not self.env.device.shares_memory:
            slots += step.ins
        return all(self.slots[i].place is not SlotPlace.DYNAMIC for i in slots if i >= 0)

    def pack(self, node: Node, ins: tuple[int, ...], kernel: Kernel) -> tuple[int, ...]:
        """Return the step's inputs, with packed constants where the kernel wants them."""
        found = list(ins)
        for i, packing in kernel.packings.items():
            value = node.inputs[i]
            assert value is not None and value.const is not None
            spent = self.is_spent(value)
            packed = self.env.pack(packing, value.const, self.packers, keep=not spent)
            if spent:
                value.const = like_nothing(value.const)
            if packed not in self.packed:
                self.packed[packed] = len(self.slots)
                name = f"{value.name}@{packing.key}"
                self.slots.append(Slot(name, SlotPlace.CONST, value.type, packed=packed))
            found[i] = self.packed[packed]
        return tuple(found)

    def release(self, steps: list[Step]) -> None:
        """Release dynamic values after their last reader."""
        kept = {self.index[v] for v in [*self.graph.outputs, *self.boundary] if v in self.index}
        last: dict[int, Step] = {}
        for step in steps:
            for i in [*step.ins, *step.outs]:
                if i >= 0 and self.slots[i].place is SlotPlace.DYNAMIC and i not in kept:
                    last[i] = step
        dying: dict[Step, list[int]] = {}
        for i, step in last.items():
            dying.setdefault(step, []).append(i)
        for step, slots in dying.items():
            step.release = tuple(slots)


def _check_results(node: Node, most_bytes: int, inputs: Sequence[Any]) -> None:
    """Limit the results of a step that allocates them itself."""
    spec = lookup(node.op)
    if spec is not None:
        check_results(node, spec, inputs, most_bytes)
