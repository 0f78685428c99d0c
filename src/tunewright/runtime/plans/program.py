"""A `Program`: a graph with open shapes, and a bounded cache of plans, one per set of input types."""

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
#: after this number of failures in a row, the program attempts no more plans for classes of shapes
MOST_ATTEMPTS = 2
#: factor between sizes from which on another plan would be faster
FAR = 8.0
#: delay in seconds before a plan is made that no request waits for
SOON = 0.05
#: how many plans made beside requests a program remembers, by types
MOST_BESIDE = 256


@dataclass
class Environment:
    """What lowering needs: the device, the tuner, the settings, and kernels that are already compiled."""

    device: Device
    tuner: Tuner
    settings: Settings
    context: Context
    #: kernels that some plan still uses
    kernels: WeakValueDictionary[tuple[str, str, str], Kernel] = field(default_factory=WeakValueDictionary)
    #: (constant, arrangement) -> the packed constant, as long as some plan uses it
    _packed: WeakValueDictionary[tuple[int | Stored, str], Packed] = field(default_factory=WeakValueDictionary)
    _on_host: Environment | None = None
    #: time that making plans has taken so far
    phases: Phases = field(default_factory=Phases)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def serves_classes(self) -> bool:
        """Whether plans may be for classes of shapes: nothing is searched or locked for exact shapes."""
        wanted = self.settings.shape_templates and self.device.serves_classes and self.device.compiles
        return wanted and self.tuner.serves_classes

    def compile(self, choice: Choice, problem: Problem) -> Kernel:
        """Return the kernel for a choice. Equal problems share one kernel. See `prepare`."""
        key = _name_of(choice, problem)
        with self._lock:
            kernel = self.kernels.get(key)
            if kernel is None:
                with self._building():
                    kernel = self.kernels[key] = choice.solver.compile(problem, choice.config, self.device)
            return kernel

    def beside(self, tuner: Tuner, kernels: Iterable[tuple[Choice, Problem, Kernel]]) -> Environment:
        """Copy this environment with another tuner, for a plan that is made while requests run.

        The copy shares compiled kernels and packed constants, but no lock. ``kernels``: more compiled kernels; the
        caller keeps them until the plan is made.
        """
        with self._lock:
            known = WeakValueDictionary(self.kernels)
        known.update({_name_of(choice, problem): kernel for choice, problem, kernel in kernels})
        return replace(self, tuner=tuner, kernels=known, _on_host=None, phases=Phases(), _lock=threading.Lock())

    def giving_way(self) -> Environment:
        """Copy this environment for a plan that is made while requests run: compilers give way to requests."""
        return replace(self.beside(self.tuner, ()), settings=replace(self.settings, gpu_host_task_priority="LOW"))

    def posed(self, choice: Choice, before: Kernel, problem: Problem) -> Kernel:
        """Return the kernel for a problem of a class of shapes, with the choice from before if this still solves it."""
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
        """Return this environment on the host, for models whose kernels cannot be compiled here."""
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
        """Pack a constant for a kernel, in a thread of the pool. Equal requests share one result.

        Without ``keep``, nobody else needs the constant before it is read again.
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
    """An array of the same shape and element type that takes no memory."""
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)


#: shapes and element types of arrays
ArraySignature: TypeAlias = Sequence[tuple[tuple[int, ...], np.dtype[Any]]]


def like(values: Sequence[Any], looks: ArraySignature) -> bool:
    """Whether all values are plain arrays of these shapes and element types."""
    if len(values) != len(looks):
        return False
    for value, (shape, dtype) in zip(values, looks, strict=True):
        if type(value) is not np.ndarray or value.shape != shape or value.dtype != dtype:
            return False
    return True


class Program:
    """The plans of one graph. Safe to use from several threads, and in a forked child."""

    _live: ClassVar[WeakSet[Program]] = WeakSet()

    def __init__(
        self, graph: Graph, env: Environment, is_part: bool = False, open: Collection[tuple[int, int]] = (),
        repeated: bool = False,
    ) -> None:  # fmt: skip
        """``is_part``: the graph is part of a larger one.

        Then the open sizes are those in ``open`` (input, axis) and those that were seen to change. Declared sizes do
        not count.
        """
        self.graph, self.env, self._is_part, self._open = graph, env, is_part, open
        #: the graph is the body of a loop, or lies inside one
        self.repeated = repeated
        #: which steps that make rows may be part of launches
        self.counts = Counts.BEHIND
        self._plans: OrderedDict[tuple[Type | None, ...], Plan] = OrderedDict()
        #: the last plan and the arrays it was asked for with: to make and compare types takes longer
        self._last: tuple[ArraySignature, Plan] | None = None
        self._lock = threading.Lock()
        #: plans for classes of shapes, the newest at the end
        self._classes: list[Plan] = []
        #: if the graph is a body: its plans that are part of a plan for a class of shapes
        self._parts: dict[str, Plan] = {}
        self._serves_classes = env.serves_classes
        #: how many attempts at such a plan have failed in a row
        self._untraceable = 0
        #: input types that their own plan serves, although a class of shapes could
        self._preferred: set[tuple[Type | None, ...]] = set()
        #: changes whenever a plan replaces another one, which is then `retired`
        self.generation = 0
        self.retired: tuple[weakref.ref[Plan], ...] = ()
        #: set while a plan is being made beside requests, and after that has failed
        self._growing = threading.Event()
        self._beginning = threading.Lock()
        #: executors that have memory for some of the plans
        self._executors: WeakSet[Executor] = WeakSet()
        #: plans that were begun beside requests: the function that makes the plan, and its types
        self._made_beside: OrderedDict[tuple[str, tuple[Type | None, ...]], None] = OrderedDict()
        self._live.add(self)
        #: its weights were freed for its only plan
        self._spent = False
        #: weights that are only in their file between two plans
        self._stored: dict[Value, Stored] = {}

    @classmethod
    def in_child(cls) -> None:
        """Replace the locks in a forked child: the threads that held them do not exist there."""
        for program in list(cls._live):
            program._lock, program.env._lock = threading.Lock(), threading.Lock()
            program._beginning = threading.Lock()
            program._growing.clear()

    def plan_for(self, inputs: Sequence[Any]) -> Plan:
        """Return the plan for these values: one for a class of shapes where their sizes are open."""
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
        """Whether `plan_for` would return this plan of a class of shapes for these sizes of its symbols.

        It did so for other sizes before. False may also mean that this is not known. ``spare``: the rows to spare that
        are asked for next.
        """
        classes, template = self._classes, plan.template
        if template is None or not classes or classes[-1] is not plan or self._preferred:
            return False
        return template.distance(sizes) < FAR and template.misses(sizes, spare) == 0 and not template.is_measured(sizes)

    def plan(self, types: tuple[Type | None, ...], only: bool = False) -> Plan:
        """Return the plan for these input types, made on first use. The cache drops the least recently used plan.

        Packing frees weights that can be read again; the graph keeps only their shape and type. If no other types will
        come (``only``), packing frees all weights.
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
        """Return the plan of a node's body with symbolic sizes, made on first use, for a plan for a class of shapes.

        ``key``: tells the plans apart where the body is planned for several types.
        """
        with self._lock:
            if key not in self._parts:
                self._parts[key] = self._make(types, False, traced, node)
            return self._parts[key]

    def beside(self, types: tuple[Type | None, ...], env: Environment) -> Plan:
        """Make another plan for these input types, with the choices and kernels of ``env``. Nobody uses the plan yet.

        Requests need not wait: no lock is held while the plan is made. Raises ModelError if the weights are gone for
        good.
        """
        return self._typed(self._copy(), types, env, False, None)

    def _copy(self) -> Graph:
        """Copy the graph with its weights, for a plan made beside requests. ModelError if the weights are gone."""
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
        """Serve these input types with this plan from the next inference on."""
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
        """Return the plan of the class of shapes of these inputs, made if missing. None: no such plan is possible."""
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
            # look again: another thread may have made a plan meanwhile
            plan = self._nearest(inputs, grow=False)
            if plan is not None or types in self._plans or self._untraceable >= MOST_ATTEMPTS:
                return plan
            made = self._traced(types)
            if made is None:
                return None
            self._untraceable = 0
            self._add(made)
        return self._nearest(inputs, grow=False)  # something else may be known for these exact shapes

    def _add(self, plan: Plan) -> None:
        self._classes = [*self._classes, plan][-self.env.settings.plan_cache_size :]

    def _nearest(self, inputs: Sequence[Any], grow: bool = True) -> Plan | None:
        """Find the plan for a class of shapes that was made for the sizes closest to these.

        If all plans were made for sizes far away, begin a closer one beside requests.
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
        """Make a plan for inputs like these beside requests, once."""
        types = tuple(type_of(v) for v in inputs)
        with self._beginning:  # not the lock that threads hold while they make a plan
            if (make.__name__, types) in self._made_beside:
                return
            self._made_beside[make.__name__, types] = None
            while len(self._made_beside) > MOST_BESIDE:
                self._made_beside.popitem(last=False)
        thread = threading.Timer(SOON, make, (types,))  # after the request that asks for it
        thread.name, thread.daemon = "tunewright-plans", True
        thread.start()

    def _serve_exactly(self, types: tuple[Type | None, ...]) -> None:
        """Make a plan for exactly these shapes, which have measurements, and serve them with it from then on."""
        try:
            with yielding(), uncollected():
                plan = self.beside(types, self.env.giving_way())
                self._prepare(plan)
            self.adopt(types, plan)
        except TunewrightError as error:
            LOG.debug("%s: no plan for the shapes that were measured: %s", self.graph.name, error)

    def _grow(self, types: tuple[Type | None, ...]) -> None:
        """Make one more plan for the class of these shapes, while requests run."""
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
        """Note that an executor has memory for some of the plans."""
        with self._beginning:
            self._executors.add(executor)

    def _prepare(self, plan: Plan) -> None:
        """Reserve memory for a plan in all executors, so that no inference waits for it."""
        with self._beginning:
            executors = list(self._executors)
        for executor in executors:
            executor.prepare(plan)

    def _symbol_of(self, types: Sequence[Type | None]) -> Callable[[int, int], str | None]:
        """Return a function that names the symbols of sizes that change: declared open, or seen with other values."""
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
        """Make a plan for the class of these shapes. ``beside``: requests run meanwhile, and no lock is held."""
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
        except TunewrightError as error:  # the model is wrong at these sizes: their own plan reports it
            LOG.debug("%s: a plan for this shape: %s", self.graph.name, error)
            return None
        except Exception:  # the plan for the exact shapes reports what is wrong, if anything is
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
        """Make the plan of a graph for these input types. The graph is changed."""
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
    """The type of a run-time value. None: the value cannot be part of a key (an absent optional, a map)."""
    if isinstance(value, np.ndarray):
        return TensorType.of(value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):  # in device memory
        return TensorType(DType.of_numpy(value.dtype), value.shape)
    return SequenceType() if isinstance(value, list) else None
