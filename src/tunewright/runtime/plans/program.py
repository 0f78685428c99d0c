"""A `Program`: a graph with open shapes, and a bounded cache with a plan for each set of concrete ones."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor as Threads
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias
from weakref import WeakSet, WeakValueDictionary

import numpy as np

from tunewright.devices import build_options, kernel_cache
from tunewright.devices.base import Device, on_lines
from tunewright.devices.c_device import NoCompiler
from tunewright.devices.host import HostDevice
from tunewright.devices.kernel_cache import KernelCache
from tunewright.errors import ModelError, TunewrightError
from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.stored_weights import Stored, stored
from tunewright.ir.types import DType, SequenceType, TensorType, Type
from tunewright.ir.weight_memory import LARGE
from tunewright.ops.control_types import know_sizes
from tunewright.passes.base import Context, any_layout, run_passes
from tunewright.passes.standard import SPECIALISE
from tunewright.settings import Settings
from tunewright.solvers.base import Array, Kernel, Packing, Problem
from tunewright.tuning.tuner import Choice, Tuner

from .load_phases import Phases, uncollected, yielding
from .plan import Counts, Plan

if TYPE_CHECKING:
    from ..requests.executor import Executor
    from .template import Traced

LOG = logging.getLogger("tunewright")
#: after this number of shapes without a plan for their class, no such plan is attempted any more
MOST_ATTEMPTS = 2
#: how many times as large or small sizes are for which another plan would do better
FAR = 8.0
#: seconds until a plan is begun that nobody waits for
SOON = 0.05
#: shapes that are remembered, for which plans were made beside what runs
MOST_BESIDE = 256


@dataclass
class Environment:
    """What lowering needs: the device, who chooses, and kernels that were compiled already."""

    device: Device
    tuner: Tuner
    settings: Settings
    context: Context
    #: kernels that some plan still uses
    kernels: WeakValueDictionary[tuple[str, str, str], Kernel] = field(default_factory=WeakValueDictionary)
    #: (constant, arrangement) -> the rearranged constant, as long as some plan uses it
    _packed: WeakValueDictionary[tuple[int | Stored, str], Packed] = field(default_factory=WeakValueDictionary)
    _on_host: Environment | None = None
    #: what making plans took so far
    phases: Phases = field(default_factory=Phases)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def serves_classes(self) -> bool:
        """Plans may be for classes of shapes: nothing is searched or locked for exact ones."""
        wanted = self.settings.shape_templates and self.device.serves_classes and self.device.compiles
        return wanted and self.tuner.serves_classes

    def compile(self, choice: Choice, problem: Problem) -> Kernel:
        """The kernel for a choice; equal problems share one. See `prepare`."""
        key = _name_of(choice, problem)
        with self._lock:
            kernel = self.kernels.get(key)
            if kernel is None:
                with self._building():
                    kernel = self.kernels[key] = choice.solver.compile(problem, choice.config, self.device)
            return kernel

    def beside(self, tuner: Tuner, kernels: Iterable[tuple[Choice, Problem, Kernel]]) -> Environment:
        """The same with another tuner, for a plan that is made while requests run: it shares what was compiled and
        packed, and no lock. ``kernels``: some that are compiled already, which the caller keeps until the plan is made.
        """
        with self._lock:
            known = WeakValueDictionary(self.kernels)
        known.update({_name_of(choice, problem): kernel for choice, problem, kernel in kernels})
        return replace(self, tuner=tuner, kernels=known, _on_host=None, phases=Phases(), _lock=threading.Lock())

    def giving_way(self) -> Environment:
        """The same for a plan that is made while requests run: compilers give way to them."""
        return replace(self.beside(self.tuner, ()), settings=replace(self.settings, gpu_host_task_priority="LOW"))

    def posed(self, choice: Choice, before: Kernel, problem: Problem) -> Kernel:
        """The kernel for a problem of a class of shapes: as chosen before, unless that does not solve it."""
        if self.tuner.why_not(choice.solver, problem, self.device) is not None:
            kernel = self.compile(self.tuner.choose(problem, self.device), problem)
        else:
            with self._building():
                kernel = choice.solver.compile_again(problem, choice.config, self.device, before)
        self.prepare(kernel)
        return kernel

    def prepare(self, kernel: Kernel) -> None:
        """Compile what a kernel needs to run."""
        with self.phases("kernels"), self._lock, self._building():
            kernel.prepare()

    def without_compiler(self, error: NoCompiler) -> Environment:
        """The same on the host, for what needs kernels that cannot be compiled here."""
        if not self.settings.host_fallback:
            raise error
        _tell(self.device.name, str(error))
        with self._lock:
            if self._on_host is None:
                context = replace(self.context, layouts=None, works_in=any_layout, knows=lambda op: True)
                host = HostDevice(self.device.name)
                self._on_host = Environment(host, self.tuner, self.settings, context, phases=self.phases)
            return self._on_host

    @contextmanager
    def _building(self) -> Iterator[None]:
        with build_options.using(self.settings), kernel_cache.using(KernelCache.of(self.settings)):
            yield

    def pack(self, packing: Packing, constant: Array, pool: Threads, keep: bool = True) -> Packed:
        """A constant rearranged for a kernel, by one of a pool's threads; equal wishes share one.

        Unless it is to ``keep`` the constant, nobody else will want it before it was read again.
        """
        origin = stored(constant)
        if origin is None and not keep:
            return Packed(None, pool.submit(self._arranged, packing, constant))
        key = (origin or id(constant), packing.key)
        with self._lock:
            packed = self._packed.get(key)
            if packed is None:
                job = pool.submit(self._arranged, packing, constant)
                packed = self._packed[key] = Packed(constant if origin is None else None, job)
            return packed

    def _arranged(self, packing: Packing, constant: Array) -> Array:
        array = packing.pack(constant)
        return on_lines(array) if self.device.shares_memory else array


def _name_of(choice: Choice, problem: Problem) -> tuple[str, str, str]:
    """The cache key of the kernel for a choice: equal keys share one kernel."""
    return choice.solver.id, problem.key(), repr(sorted(choice.config.items()))


@dataclass(eq=False)
class Packed:
    """A packed constant. Keeps the source array alive because its `id()` is the cache key."""

    source: Array | None
    _job: Future[Array]

    @property
    def array(self) -> Array:
        return self._job.result()


@cache
def _tell(device: str, why: str) -> None:
    LOG.warning("%s: models that lack a kernel compute in numpy, which takes many times as long: %s", device, why)


def like_nothing(array: Array) -> Array:
    """What an array was like, without its memory."""
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)


#: shapes and element types of arrays
ArraySignature: TypeAlias = Sequence[tuple[tuple[int, ...], np.dtype[Any]]]


def like(values: Sequence[Any], looks: ArraySignature) -> bool:
    """They are plain arrays of these shapes and element types."""
    if len(values) != len(looks):
        return False
    for value, (shape, dtype) in zip(values, looks, strict=True):
        if type(value) is not np.ndarray or value.shape != shape or value.dtype != dtype:
            return False
    return True


class Program:
    """Plans of one graph. Safe to use from several threads, and in a forked child."""

    _live: ClassVar[WeakSet[Program]] = WeakSet()

    def __init__(
        self, graph: Graph, env: Environment, is_part: bool = False, open: Collection[tuple[int, int]] = (),
        repeated: bool = False,
    ) -> None:  # fmt: skip
        """``is_part``: of a larger one. Then those sizes are ``open`` (input, axis) that are so in the larger one, and
        those that were seen to change, whatever is declared."""
        self.graph, self.env, self._is_part, self._open = graph, env, is_part, open
        #: it is the body of a loop, or inside of one
        self.repeated = repeated
        #: which steps that make rows are part of launches
        self.counts = Counts.BEHIND
        self._plans: OrderedDict[tuple[Type | None, ...], Plan] = OrderedDict()
        #: the last one that was asked for, with what arrays it was asked for: making and comparing types takes longer
        self._last: tuple[ArraySignature, Plan] | None = None
        self._lock = threading.Lock()
        #: plans for classes of shapes, the one that was made last at the end
        self._classes: list[Plan] = []
        #: of a body: the plans that are part of one for a class of shapes
        self._parts: dict[str, Plan] = {}
        self._serves_classes = env.serves_classes
        #: how often in a row none could be made
        self._untraceable = 0
        #: input types whose plan serves them although a class of shapes would
        self._preferred: set[tuple[Type | None, ...]] = set()
        #: changes whenever a plan takes the place of another, which is then `retired`
        self.generation = 0
        self.retired: tuple[weakref.ref[Plan], ...] = ()
        #: one is being made beside what runs, or could not be made
        self._growing = threading.Event()
        self._beginning = threading.Lock()
        #: what has memory for some of the plans
        self._executors: WeakSet[Executor] = WeakSet()
        #: what was begun beside what runs: by whom, and for which types
        self._made_beside: OrderedDict[tuple[str, tuple[Type | None, ...]], None] = OrderedDict()
        self._live.add(self)
        #: its weights are the only plan's
        self._spent = False
        #: weights that are only in their file, from one plan to the next
        self._stored: dict[Value, Stored] = {}

    @classmethod
    def in_child(cls) -> None:
        """Who held a lock in the parent of a fork is not here."""
        for program in list(cls._live):
            program._lock, program.env._lock = threading.Lock(), threading.Lock()
            program._beginning = threading.Lock()
            program._growing.clear()

    def plan_for(self, inputs: Sequence[Any]) -> Plan:
        """The plan for these values: one of a class of shapes where their sizes are open."""
        last = self._last
        if last is not None and like(inputs, last[0]):
            return last[1]
        types = tuple(type_of(v) for v in inputs) if self._preferred else ()
        plan = None if types in self._preferred else self._of_class(inputs)
        plan = plan or self.plan(types or tuple(type_of(v) for v in inputs))
        if all(type(v) is np.ndarray and v.dtype != object for v in inputs):
            self._last = [(v.shape, v.dtype) for v in inputs], plan
        return plan

    def serves(self, plan: Plan, sizes: tuple[int, ...], spare: int) -> bool:
        """Whether `plan_for` would answer this plan of a class of shapes for these sizes of its symbols, as it did for
        others before; False may also mean that this is not known. ``spare``: rows to spare that are asked for next."""
        classes, template = self._classes, plan.template
        if template is None or not classes or classes[-1] is not plan or self._preferred:
            return False
        return template.distance(sizes) < FAR and template.misses(sizes, spare) == 0 and not template.is_measured(sizes)

    def plan(self, types: tuple[Type | None, ...], only: bool = False) -> Plan:
        """The plan for these input types, made on first use; the least recently used one is dropped.

        Weights that can be read again are freed as soon as they are packed, and what the graph keeps of them is what
        they were like; if no other types will come (``only``), all are.
        """
        with self._lock:
            plan = self._plans.get(types)
            if plan is None:
                assert not self._spent, "weights of this graph were freed for its only plan"
                plan = self._plans[types] = self._make(types, only)
                while len(self._plans) > self.env.settings.plan_cache_size:
                    gone, _ = self._plans.popitem(last=False)
                    self._preferred.discard(gone)
            else:
                self._plans.move_to_end(types)
            return plan

    def part(self, types: tuple[Type | None, ...], node: Node, traced: Traced, key: str = "") -> Plan:
        """The plan of a node's body with symbolic sizes, made on first use, as part of a plan for a class of shapes.

        ``key``: which one, where its body is planned for several types.
        """
        with self._lock:
            if key not in self._parts:
                self._parts[key] = self._make(types, False, traced, node)
            return self._parts[key]

    def beside(self, types: tuple[Type | None, ...], env: Environment) -> Plan:
        """Another plan for these input types, which nobody uses yet, with the choices and kernels of ``env``.

        Requests need not wait for it: nothing is held while it is made. ModelError where weights are gone for good.
        """
        return self._typed(self._copy(), types, env, False, None)

    def _copy(self) -> Graph:
        """The graph with its weights, for a plan that is made beside what runs. ModelError where they are gone."""
        with self._lock:
            graph = self.graph.clone()
            origins = [self._stored.get(value) for value in self.graph.constants()]
        for value, origin in zip(graph.constants(), origins, strict=True):
            if origin is not None:
                value.const = origin.array()
            elif value.const is not None and value.const.nbytes >= LARGE and not any(value.const.strides):
                raise ModelError(
                    "its weights are no longer in memory, so no other plan can be made",
                    hint="compile it with TUNING_MODE = TUNING_BACKGROUND, or compile a Model instead of a path",
                )
        return graph

    def adopt(self, types: tuple[Type | None, ...], plan: Plan) -> None:
        """Serve these input types with a plan from the next inference on."""
        with self._lock:
            old = self._plans.get(types)
            if old is not None:
                alive = (one for one in self.retired if one() is not None)
                self.retired = (*alive, weakref.ref(old))
            self._plans[types] = plan
            self._plans.move_to_end(types)
            self._preferred.add(types)
            while len(self._plans) > self.env.settings.plan_cache_size:
                gone, _ = self._plans.popitem(last=False)
                self._preferred.discard(gone)
            self._last = None
            self.generation += 1

    def _of_class(self, inputs: Sequence[Any]) -> Plan | None:
        """The plan of a class of shapes that these inputs are of, made where there is none; None: there cannot be."""
        if not self._serves_classes or (self._is_part and not self._plans and not self._open):
            return None
        plan = self._nearest(inputs)
        if plan is not None:
            return plan
        types = tuple(type_of(v) for v in inputs)
        with self._lock:
            if self.env.device.prefers_exact and not self._plans and not self._classes and not self._is_part:
                self._preferred.add(types)  # most models only ever see one shape
                return None
            # a second look: another thread may have been here meanwhile
            plan = self._nearest(inputs, grow=False)
            if plan is not None or types in self._plans or self._untraceable >= MOST_ATTEMPTS:
                return plan
            made = self._traced(types)
            if made is None:
                return None
            self._untraceable = 0
            self._add(made)
        return self._nearest(inputs, grow=False)  # for these very shapes something else may be known

    def _add(self, plan: Plan) -> None:
        self._classes = [*self._classes, plan][-self.env.settings.plan_cache_size :]

    def _nearest(self, inputs: Sequence[Any], grow: bool = True) -> Plan | None:
        """Find the plan for a class of shapes that was made for the sizes closest to these.

        Where all were made for far other ones, one that suits these better is made beside.
        """
        found: tuple[int, float, Plan, tuple[int, ...]] | None = None
        for plan in reversed(self._classes):
            assert plan.template is not None
            sizes = plan.template.pattern.sizes(inputs)
            misses = None if sizes is None else plan.template.misses(sizes)
            if sizes is None or misses is None:
                continue
            distance = plan.template.distance(sizes)
            if found is None or (misses, distance) < found[:2]:
                found = misses, distance, plan, sizes
            if not misses and distance < FAR:
                break
        if found is None:
            return None
        misses, distance, plan, sizes = found
        assert plan.template is not None
        if distance >= FAR and grow and not self._growing.is_set():
            self._growing.set()
            self._begin(self._grow, inputs)
        elif grow and plan.template.is_measured(sizes):
            self._begin(self._serve_exactly, inputs)
        return plan if not misses or plan.template.fit(sizes) is not None else None

    def _begin(self, make: Callable[[tuple[Type | None, ...]], None], inputs: Sequence[Any]) -> None:
        """Make a plan for inputs like these beside what runs, once."""
        types = tuple(type_of(v) for v in inputs)
        with self._beginning:  # not the lock that others hold while they make a plan
            if (make.__name__, types) in self._made_beside:
                return
            self._made_beside[make.__name__, types] = None
            while len(self._made_beside) > MOST_BESIDE:
                self._made_beside.popitem(last=False)
        thread = threading.Timer(SOON, make, (types,))  # behind the request that asks for it
        thread.name, thread.daemon = "tunewright-plans", True
        thread.start()

    def _serve_exactly(self, types: tuple[Type | None, ...]) -> None:
        """Make a plan for these very shapes, for which something was measured, and serve them with it from then on."""
        try:
            with yielding(), uncollected():
                plan = self.beside(types, self.env.giving_way())
                self._prepare(plan)
            self.adopt(types, plan)
        except TunewrightError as error:
            LOG.debug("%s: no plan for the shapes that were measured: %s", self.graph.name, error)

    def _grow(self, types: tuple[Type | None, ...]) -> None:
        """Make one more plan for the class of shapes that these are of, while others run."""
        with yielding(), uncollected():
            made = self._traced(types, beside=True)
            if made is not None:
                self._prepare(made)
        if made is not None:
            with self._lock:
                self._add(made)
                self._last = None
            self._growing.clear()

    def runs_in(self, executor: Executor) -> None:
        """An executor has memory for some of the plans."""
        with self._beginning:
            self._executors.add(executor)

    def _prepare(self, plan: Plan) -> None:
        """Have memory for a plan in all executors, so that no inference waits for that."""
        with self._beginning:
            executors = list(self._executors)
        for executor in executors:
            executor.prepare(plan)

    def _symbol_of(self, types: Sequence[Type | None]) -> Callable[[int, int], str | None]:
        """Names the symbols of sizes that change: those that are declared open, or that were other ones before."""
        declared = [v.type.shape if isinstance(v.type, TensorType) else None for v in self.graph.inputs]
        seen = [key for key in list(self._plans) if [_kind(t) for t in key] == [_kind(t) for t in types]]

        def symbol_of(at: int, axis: int) -> str | None:
            shape = declared[at]
            size = None if shape is None or axis >= len(shape) else shape[axis]
            if not self._is_part and isinstance(size, int):
                return None
            is_fixed = self._is_part and (at, axis) not in self._open
            if is_fixed and all(key[at].dims[axis] == types[at].dims[axis] for key in seen):  # type: ignore[union-attr]
                return None
            return size if isinstance(size, str) else f"{self.graph.inputs[at].name}.{axis}"

        return symbol_of

    def _traced(self, types: tuple[Type | None, ...], beside: bool = False) -> Plan | None:
        """A plan for the class of shapes that these are of; ``beside``: requests run meanwhile, and nothing is held."""
        from .template import Traced, Untraceable, symbolic

        if len(types) != len(self.graph.inputs):
            return None
        try:
            names, grows = [v.name for v in self.graph.inputs], self.env.device.shares_memory
            trace, pattern, made = symbolic(types, self._symbol_of(types), names, grows)
            if not pattern.symbols:
                return None
            if beside:
                return self._typed(self._copy(), tuple(made), self.env.giving_way(), False, Traced(trace, pattern))
            return self._make(tuple(made), only=False, traced=Traced(trace, pattern))
        except Untraceable as reason:
            LOG.debug("%s: a plan for each shape: %s", self.graph.name, reason)
        except TunewrightError as error:  # of the model, at these sizes: a plan for them says so
            LOG.debug("%s: a plan for this shape: %s", self.graph.name, error)
            return None
        except Exception:  # a plan for the shapes at hand says what is wrong, if anything is
            LOG.debug("%s: a plan for each shape", self.graph.name, exc_info=True)
        self._untraceable += 1
        return None

    @property
    def plans(self) -> list[Plan]:
        with self._lock:
            return [*self._plans.values(), *self._classes, *self._parts.values()]

    @uncollected()
    def _make(
        self, types: tuple[Type | None, ...], only: bool, traced: Traced | None = None, body_of: Node | None = None
    ) -> Plan:
        for value, origin in self._stored.items():
            value.const = origin.array()
        graph = self.graph.clone()
        self._spent = only
        for value in self.graph.constants():
            if value.const is not None and value.const.nbytes >= LARGE:
                found = stored(value.const)
                if found is not None:
                    self._stored[value] = found
                if only or found is not None:
                    value.const = like_nothing(value.const)
        return self._typed(graph, types, self.env, only, traced, body_of)

    def _typed(
        self, graph: Graph, types: tuple[Type | None, ...], env: Environment, only: bool,
        traced: Traced | None, body_of: Node | None = None,
    ) -> Plan:  # fmt: skip
        """The plan of a graph of its own for these input types."""
        if len(types) != len(graph.inputs):
            raise ModelError(
                f"a body takes {len(graph.inputs)} inputs and is given {len(types)}", where=f"graph {graph.name!r}"
            )
        for value, type in zip(graph.inputs, types, strict=True):
            if isinstance(type, TensorType) or value.type is None:
                value.type = type
        if body_of is not None:
            know_sizes(body_of, graph)
        if env.device.compiles:
            return self._lower(graph, env, only, traced, body_of is not None)
        try:
            return self._lower(graph.clone(), env, only)
        except NoCompiler as error:
            return self._lower(graph, env.without_compiler(error), only)

    def _lower(
        self, graph: Graph, env: Environment, only: bool, traced: Traced | None = None, is_body: bool = False
    ) -> Plan:
        from .lower import lower

        with env.phases("passes"):
            run_passes(graph, SPECIALISE, env.context)
        with env.phases("planning"):
            return lower(graph, env, only, traced, self.repeated, is_body, Counts.NEVER if is_body else self.counts)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Program.in_child)


def _kind(type: Type | None) -> Any:
    return (type.dtype, len(type.dims)) if isinstance(type, TensorType) and type.is_static else type


def type_of(value: Any) -> Type | None:
    """The type of a run-time value; None where it cannot be part of a key (an absent optional, a map)."""
    if isinstance(value, np.ndarray):
        return TensorType.of(value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):  # in a device's memory
        return TensorType(DType.of_numpy(value.dtype), value.shape)
    return SequenceType() if isinstance(value, list) else None
