"""The processor, as the device ``CPU``: clang compiles kernels in C, and our own thread pool runs them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import threading
import time
from collections.abc import Sequence
from functools import cache, cached_property, lru_cache

from tunewright.errors import DeviceError, SettingsError
from tunewright.ir.formulas import Formulas
from tunewright.settings import Settings

from ..base import Device, Target
from ..c_device import CDevice, CQueue
from ..executable import Part
from ..host import cache_bytes, cpu_flags, free_bytes, memory_bytes
from . import isa
from .compiler import FLAGS
from .formulas import Evaluator
from .isa import Level
from .pool import ThreadPool
from .processor import begin, find_compiler, processor, thread_pool, why_not
from .programs import LoadedProgram, NativePrograms
from .table import LaunchTable

#: flags of a processor whose clock has a constant rate, and seconds over which the rate is measured
EVEN, CALIBRATION = frozenset({"constant_tsc", "nonstop_tsc"}), 0.02


class NativeQueue(CQueue):
    """A queue whose kernels run inside the call that launches them. The call raises what they report."""

    watching = False

    def __init__(self, device: NativeDevice) -> None:
        super().__init__()
        self._device = device

    def rouse(self) -> None:
        self._device.pool.rouse(self._device.target.units)

    def finish(self) -> None:
        if self.kept:
            self.kept.clear()


class NativeDevice(CDevice):
    """The processor. Its memory is the host's: kernels work on numpy's own bytes."""

    family = "native"
    priority = 20
    kinds = ("CPU",)
    title = "CPU.NATIVE"
    dialect = "c"
    serves_classes = True
    runs_control = True
    widens = True

    @classmethod
    def available(cls) -> list[str] | str:
        error = _refusal(Settings.from_environment())
        return ["CPU", "CPU.NATIVE"] if error is None else str(error)

    @classmethod
    def begin(cls) -> None:
        begin()

    @classmethod
    def mistake(cls) -> SettingsError | None:
        error = _refusal(Settings.from_environment())
        if not isinstance(error, SettingsError):
            return None
        return SettingsError(error.what, where=error.where, hint=error.hint)

    def __init__(self, name: str = "CPU") -> None:
        self.name = name
        settings = Settings.from_environment()
        self.pool = _pool(settings.cpu_bind_threads)
        self.memory_bytes, self.cache_bytes = memory_bytes(), cache_bytes()
        #: the same device for other instruction sets and compilers, and with fewer threads; all of them share this
        self._variants: dict[tuple[str, str, int], NativeDevice] = {}
        self._lock = threading.Lock()
        self._compile_for(processor().level(settings.cpu_isa), settings.cpu_compiler)
        self._variants[self.level.name, self._named, self.pool.cores] = self
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._in_child)

    def _in_child(self) -> None:
        """Replace the lock after a fork: the thread that held it exists only in the parent."""
        lock = threading.Lock()
        for made in list(self._variants.values()):
            made._lock = lock

    def _compile_for(self, level: Level, named: str) -> None:
        """Switch to another instruction set, or another compiler."""
        why = why_not(level, named)
        if why:
            raise DeviceError(why)
        compiler = find_compiler(named)
        self.level, self._named, self.compiles = level, named, compiler is not None
        self._programs = NativePrograms(level.flags, compiler, f"CPU {level.title}")
        version = compiler.version if compiler is not None else "no compiler"
        self.target = Target(
            "cpu", processor().name, level.title, self.pool.cores, (("runtime", "native"), ("compiler", version)), "c",
            " ".join(FLAGS), level.vector_bytes, level.registers,
        )  # fmt: skip

    def configured(self, settings: Settings) -> Device:
        level = processor().level(settings.cpu_isa)
        return self._variant(level, settings.cpu_compiler, settings.cpu_threads_num)

    def with_threads(self, count: int) -> Device:
        return self._variant(self.level, self._named, count)

    def _variant(self, level: Level, named: str, threads: int) -> NativeDevice:
        units = min(threads or self.pool.cores, self.pool.cores)
        with self._lock:
            made = self._variants.get((level.name, named, units))
            if made is None:
                whole = self._variants.get((level.name, named, self.pool.cores))
                made = copy.copy(whole or self)
                if whole is None:
                    made._compile_for(level, named)
                made.target = dataclasses.replace(made.target, units=units)
                self._variants[level.name, named, units] = made
            return made

    def bind(self, mode: str) -> None:
        self.pool.bind(mode)

    def queue(self) -> NativeQueue:
        return NativeQueue(self)

    def link(self, parts: Sequence[Part]) -> LaunchTable:
        return LaunchTable(self, parts)

    def compute_formulas(self, formulas: Formulas) -> None:
        with contextlib.suppress(OverflowError):  # a constant is too large
            formulas.compiled = Evaluator(formulas.flat(), lambda: self.pool.quick)

    def build(self, source: str) -> LoadedProgram:
        return self._programs.build(source)

    def begin_build(self, sources: Sequence[str]) -> None:
        for source in sources:
            self._programs.begin(source)

    @cached_property
    def tick(self) -> float:
        """Seconds per tick of the clock that the pool reads; 0 if its rate is not constant."""
        if isa.machine() == "x86_64" and not cpu_flags() >= EVEN:
            return 0.0

        def point() -> tuple[float, int]:
            found = []
            for _ in range(10):
                begin = time.perf_counter()
                at = self.pool.ticks()
                end = time.perf_counter()
                found.append((end - begin, (begin + end) / 2, at))
            return min(found)[1:]

        first = point()
        time.sleep(CALIBRATION)
        last = point()
        return (last[0] - first[0]) / (last[1] - first[1]) if last[1] > first[1] else 0.0

    @property
    def free_bytes(self) -> int | None:
        return free_bytes()


@lru_cache(4)
def _refusal(settings: Settings) -> DeviceError | SettingsError | None:
    """Return why kernels do not run here, or None if they do."""
    try:
        why = why_not(processor().level(settings.cpu_isa), settings.cpu_compiler)
    except (DeviceError, SettingsError) as error:
        return error
    return DeviceError(why) if why else None


@cache
def _pool(mode: str) -> ThreadPool:
    return ThreadPool(thread_pool, mode)


DEVICES = (NativeDevice,)
