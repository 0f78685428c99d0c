"""What a device is: a target that names it in every key, memory, and a queue with a clock."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from ctypes import addressof, c_char
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import DeviceError, InputError, SettingsError
from ..ir.formulas import Formulas
from ..ir.types import DType, TensorType
from ..ir.weight_memory import LARGE, shared_pages
from ..settings import Settings
from . import dlpack, energy
from .executable import Executable, HostCall, Part
from .remote import RemoteTensor


def aligned(nbytes: int) -> np.ndarray[Any, Any]:
    """Bytes of the host's memory that begin where vectors do, with any content."""
    raw = np.empty(nbytes + 64, np.uint8)
    offset = -address(raw) % 64
    return raw[offset : offset + nbytes]


def in_order(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array whose elements lie one behind the other, each where its type may be: the array itself, if it is so.

    Kernels ask for no more than that. Of a view (a part of a picture, rows with padding behind them, every second
    column, channels in reverse) there is one copy, of its elements alone.
    """
    if array.dtype == object or (array.flags.c_contiguous and array.flags.aligned):
        return array if array.flags.c_contiguous else np.ascontiguousarray(array)  # which makes a row of a scalar
    made = np.ndarray(array.shape, array.dtype, aligned(array.nbytes))
    np.copyto(made, array)
    return made


def on_lines(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array, or a copy of it, that begins where a cache line does. Numpy's begin at any multiple of 16 bytes: from
    most of those places on, every second vector or each lies across two lines, which takes longer to read."""
    if array.dtype == object or (array.flags.c_contiguous and address(array) % 64 == 0):
        return array
    made = empty_on_lines(array.shape, array.dtype)
    np.copyto(made, array)
    return made


def empty_on_lines(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Memory with any content that begins where a cache line does: what is packed there needs no copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    return np.ndarray(shape, dtype, aligned(nbytes) if nbytes < LARGE else shared_pages(nbytes))


def address(array: Any) -> int:
    """Where an array's bytes begin. Numpy's own ways take four times as long, and a small network asks ten times."""
    try:
        return addressof(c_char.from_buffer(array))
    except (TypeError, ValueError):  # read-only, empty, or of a type that no buffer describes
        return int(array.__array_interface__["data"][0])


@dataclass(frozen=True)
class Traits:
    """The questions that solvers, measuring and plugins ask about the hardware of a target.

    The defaults are the answers for hardware of a kind that is not in `KINDS`.
    """

    #: kernels run on the cores that the threads of the host use; work beside them makes them slower
    shares_cores: bool = False
    #: a work-item has a core, and the caches nearest to it, to itself; the target's name may tell their sizes
    private_caches: bool = False
    #: kernels ask for memory before they use it
    prefetches: bool = False
    #: neighbouring work-items are lanes of one vector, and come in groups
    has_work_groups: bool = False
    #: a batch of inferences takes much less time than the same inferences one after the other
    batches_pay: bool = False
    #: a new process takes seconds to open the device
    opens_slowly: bool = False
    #: kernels compute nothing, and a script says how long each takes
    is_scripted: bool = False
    #: the properties whose names begin with ``GPU_`` apply
    has_gpu_properties: bool = False
    #: number of inferences that run at the same time unless settings say otherwise (with 2, one runs while data of the
    #: other is transferred), and the largest useful number (each needs memory); 0: one for each unit
    streams: int = 2
    most_streams: int = 8
    #: for a lower bound of times: bytes per clock of one unit of the fastest hardware of this kind
    bytes_per_clock: int = 64
    #: for estimates: operations and bytes per second of one unit; 0 operations: they follow from the vector registers
    unit_flops: float = 3e11
    unit_bandwidth: float = 25e9


#: The traits of each known kind of device (`Target.device`).
KINDS = {
    "cpu": Traits(
        shares_cores=True, private_caches=True, prefetches=True, streams=0, most_streams=0, unit_flops=0.0
    ),
    "gpu": Traits(
        has_work_groups=True, batches_pay=True, opens_slowly=True, has_gpu_properties=True, bytes_per_clock=4096
    ),
    "null": Traits(is_scripted=True),
}  # fmt: skip
_UNKNOWN = Traits()


@dataclass(frozen=True)
class Target:
    """What a kernel is compiled for; part of every key. Two runtimes on one processor are two targets."""

    device: str  # kind: cpu, gpu, null, or one of an extension
    name: str  # as the hardware calls itself
    arch: str
    units: int
    software: tuple[tuple[str, str], ...] = ()  # drivers, runtimes, compilers with their versions
    language: str = ""  # of the kernels that it compiles: "c", or none
    options: str = ""  # given to its compiler
    vector_bytes: int = 16  # of a vector register
    registers: int = 16  # number of vector registers
    lacks: tuple[str, ...] = ()  # what kernels must do without: fp64
    #: traits that differ from those of the kind; no part of keys
    own_traits: Traits | None = field(default=None, compare=False, repr=False)

    @property
    def traits(self) -> Traits:
        """The traits of the hardware: those of its kind, unless the device gives others."""
        return self.own_traits or KINDS.get(self.device, _UNKNOWN)

    @property
    def most_streams(self) -> int:
        """The largest number of parallel inferences that may be of use."""
        return self.traits.most_streams or self.units

    def has(self, feature: str) -> bool:
        """Kernels may use what not every processor of the architecture has: ``x86-64-v4+avx512vnni``."""
        return feature in self.arch.split("+")[1:]

    def __str__(self) -> str:
        software = ", ".join(f"{k} {v}" for k, v in self.software)
        return f"{self.name} ({self.arch}, {self.units} units; {software})"


@dataclass(frozen=True)
class Hints:
    """What a request asks of its queue (GPU_QUEUE_PRIORITY, GPU_QUEUE_THROTTLE): LOW, MEDIUM or HIGH."""

    priority: str = "MEDIUM"
    throttle: str = "MEDIUM"


class Queue(ABC):
    """In-order execution for one request, with a clock in seconds."""

    #: kernels launched so far
    launches: int = 0
    #: seconds that were spent waiting for kernels so far
    waited: float = 0.0
    #: `equal` compares where the buffers are, and fetches nothing
    compares: bool = False
    #: whose failures those of kernels are that are run by themselves (`Kernel.run`), for who looks at reports later
    running: object = None

    @property
    def watching(self) -> bool:
        """Kernels were launched that may report something (`devices.reports`), and nobody has looked yet."""
        return False

    def check(self) -> None:  # noqa: B027 (nothing is reported)
        """Wait for what was launched. KernelError where a kernel reports what is wrong with its inputs."""

    def forget(self) -> None:  # noqa: B027
        """Wait for what was launched, whatever kernels report."""

    @property
    def scratch_bytes(self) -> int:
        """Memory that it keeps for kernels."""
        return 0

    @abstractmethod
    def now(self) -> float:
        """The device's time once everything queued so far has finished."""

    def finish(self) -> None:  # noqa: B027 (nothing to wait for is a fine default)
        """Wait until everything queued so far has finished: the host may read its results."""

    def rouse(self) -> None:  # noqa: B027 (most have no threads that sleep)
        """Have the device ready at once for what is timed next, as it is in the middle of a network."""

    def fetch(self, values: Sequence[Any]) -> Sequence[Any]:
        """The values, finished and where the host can read them; what is not in a device's memory is as it was."""
        self.finish()
        return values

    def put(self, array: np.ndarray[Any, Any], to: Any) -> None:
        """Write an array of the host, or one that was adopted, into memory of the device that nothing queued uses."""
        np.copyto(to, array)

    def fill(self, to: Any, byte: int) -> None:
        """Write one byte all over a buffer of the device that nothing queued uses."""
        if isinstance(to, np.ndarray):
            to.fill(byte)
        else:
            self.put(np.full(to.nbytes, byte, np.uint8), to)

    def equal(self, one: Any, other: Any) -> bool:
        """Whether two buffers of the device hold the same bytes."""
        return bool(np.array_equal(*self.fetch([one, other])))

    def adopt(self, value: Any, writable: bool = False) -> Any:
        """A caller's tensor (a `RemoteTensor`, or one that speaks DLPack) as an array that `put`, `fetch` and kernels
        take, behind what its owner has enqueued. It is kept until `release`, and until what is queued has finished.

        InputError when it cannot be reached from here, or, with ``writable``, not be written.
        """
        if isinstance(value, RemoteTensor):
            if not isinstance(value.memory, np.ndarray):
                raise InputError(f"is in the memory of {value.device}", hint="copy it: x.numpy()")
            array = value.memory
        else:
            array = value if isinstance(value, np.ndarray) else host_array(value, writable)
        if writable and not array.flags.writeable:
            raise InputError("is read-only")
        return array

    def duplicate(self, value: Any) -> Any:
        """A copy in memory of the device that is nobody else's, of an array there or of the host."""
        return value.copy()

    def settle(self) -> Any:
        """Called when a request's results stay on the device: what tells that they are there, or None: they are."""
        self.finish()
        return None

    def release(self) -> None:  # noqa: B027 (most keep nothing)
        """Give back what was adopted: its users have finished, or are in order with its owner."""


def host_array(value: Any, writable: bool = False) -> np.ndarray[Any, Any]:
    """The bytes of a tensor that speaks DLPack, in the host's memory."""
    kind, number = dlpack.place(value)
    if kind not in dlpack.HOST:
        gpu = kind in (dlpack.CUDA, dlpack.CUDA_MANAGED)
        where = f"GPU.{number}'s memory" if gpu else f"memory of a device that DLPack calls ({kind}, {number})"
        raise InputError(f"is in {where}, which this device cannot reach", hint="copy it to the host first")
    try:
        return dlpack.array(value, writable)
    except (BufferError, RuntimeError) as error:
        raise InputError(f"cannot be shared through DLPack: {error}") from None


class Device(ABC):
    """A device that is open. Modules offer classes in ``DEVICES``; `available` is asked before `__init__`."""

    #: identifies the implementation (host, opencl, cuda, null)
    family: str
    #: among implementations that offer the same device name, the highest wins
    priority: int = 0
    #: what the names that it offers begin with (CPU, GPU): it is not asked for others. None: anything
    kinds: tuple[str, ...] | None = None
    #: what people call its devices where there are none
    title: str = ""

    #: how it computes where it stands in for another device, to warn users
    stand_in: str = ""

    name: str
    target: Target
    #: its kernels are the references, which numpy computes: nothing is compiled, searched or measured
    runs_references: bool = False
    #: lists of devices leave it out: users do not choose it
    is_hidden: bool = False
    #: kernels work on the host's own arrays; else `alloc` makes what only kernels, `Queue.fetch` and `Queue.put` access
    shares_memory: bool = True
    #: what networks of single-precision numbers are computed in, unless INFERENCE_PRECISION_HINT says otherwise
    precision: DType = DType.FLOAT32
    #: it computes half floats in single precision, which tensors of half networks have between layers then
    widens: bool = False
    #: it can compile kernels; else it runs what is in the kernel cache
    compiles: bool = True
    #: loops and branches may be part of its executables (`devices/control_rows.py`)
    runs_control: bool = False
    #: it runs plans that are made for classes of shapes
    serves_classes: bool = False
    #: plans for exact shapes are faster: the first shape of a model gets one
    prefers_exact: bool = False
    #: memory of the device, where it can be told
    memory_bytes: int | None = None
    #: where it is plugged in, where that is known (`devices.pci`)
    pci: str | None = None
    #: its last-level cache: what was used longer ago than this much comes from memory. 0: it has none
    cache_bytes: int = 0

    @classmethod
    @abstractmethod
    def available(cls) -> list[str] | str:
        """The device names that can be opened here, or the reason why there are none."""

    @classmethod  # noqa: B027 - most need nothing that takes long
    def begin(cls) -> None:
        """`available` will be asked soon: what that waits for may begin beside. Nothing is told of what goes wrong."""

    @classmethod
    def mistake(cls) -> SettingsError | None:
        """The setting because of which it offers nothing: who asks for such a device is told, and gets no other one."""
        return None

    @classmethod
    def unusable(cls) -> dict[str, str]:
        """Devices that are here and cannot be opened, with the reasons."""
        return {}

    @abstractmethod
    def __init__(self, name: str) -> None: ...

    @abstractmethod
    def queue(self) -> Queue: ...

    def link(self, parts: Sequence[Part]) -> Executable:
        """Parts of a plan as one executable: kernels that are `Kernel.is_linkable`, blocks where it `runs_control`.

        A device that links nothing has each kernel called by itself.
        """
        (part,) = parts
        return HostCall(part)

    def compute_formulas(self, formulas: Formulas) -> None:  # noqa: B027 (Python does it, too)
        """Have complete formulas computed by something faster than Python, where there is such."""

    def request_queue(self, hints: Hints) -> Queue:
        """A queue for requests, with these hints where the device knows them."""
        return self.queue()

    def lent(self, context: Any, queue: Any) -> Device:
        """The same device with a caller's context and queue, either may be None. DeviceError where it has no such."""
        raise DeviceError(f"{self.name} takes no context and no queue of a caller's",
                          hint="a device of OpenCL or CUDA does: docs/remote-tensors.md")  # fmt: skip

    def check_lent(self, memory: Any, nbytes: int) -> None:
        """InputError unless it is a caller's memory with room for tensors of this number of bytes."""
        raise InputError(f"{type(memory).__name__} is not memory that {self.name} can use",
                         hint="pass tensors that support DLPack as they are")  # fmt: skip

    def dlpack_device(self, memory: Any) -> tuple[int, int]:
        """Where DLPack says that an array of this device is."""
        if not isinstance(memory, np.ndarray):
            raise BufferError(f"DLPack has no tensors in the memory of {self.name}")
        return dlpack.CPU, 0

    def export(self, memory: Any, ready: Any, stream: int | None, given: dict[str, Any]) -> Any:
        """DLPack's capsule of an array of this device, for a reader's stream; ``given``: other arguments."""
        self.dlpack_device(memory)
        return memory.__dlpack__(**given)

    def with_threads(self, count: int) -> Device:
        """The same device with no more threads than ``count`` (0: all that the process may use), where it has some.

        The same count gives the same device. Its target tells it from others: what is best depends on it.
        """
        return self

    def configured(self, settings: Settings) -> Device:
        """The same device as settings want it: with no more threads than CPU_THREADS_NUM, where it has some."""
        return self.with_threads(settings.cpu_threads_num)

    @property
    def kernel_label(self) -> str:
        """What listings of the kernel cache say about programs for it."""
        return f"{self.target.device.upper()} {self.target.arch}"

    def broken(self) -> str:
        """Why this process cannot use it any more, whatever the cause; empty: it can."""
        return ""

    def alloc(self, nbytes: int) -> Any:
        """Memory for an arena, aligned for vectors. A device that shares memory with the host keeps this."""
        return aligned(nbytes)

    def host_memory(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Bytes of the host's memory for inputs that are written anew for each inference: the device takes them from
        there without a copy in between."""
        return aligned(nbytes)

    def view(self, buffer: Any, offset: int, type: TensorType) -> Any:
        """A tensor inside a buffer."""
        return np.ndarray(type.physical, type.dtype.numpy, buffer, offset)

    def constant(self, array: np.ndarray[Any, Any]) -> Any:
        """An array that nobody writes to, where kernels read it."""
        return array

    def convert(self, array: np.ndarray[Any, Any], dtype: DType) -> np.ndarray[Any, Any]:
        """An array of the host in another element type, in memory of its own."""
        return array.astype(dtype.numpy, order="C")

    def bind(self, mode: str) -> None:  # noqa: B027 (most have no threads of their own)
        """CPU_BIND_THREADS: where its threads may run, from now on."""

    def energy_meter(self) -> energy.EnergyMeter | str:
        """Return what measures its energy, or the reason why nothing does."""
        number = self.name.rpartition(".")[2]
        return energy.meter(self.target.device, int(number) if number.isdecimal() else 0)

    def held(self) -> dict[str, int]:
        """Bytes of its own memory that are in use, by purpose; empty where its memory is the host's."""
        return {}

    @property
    def free_bytes(self) -> int | None:
        """Memory that could still be taken, where it can be told."""
        return None

    @property
    def is_discrete(self) -> bool:
        """Whether the device has its own memory, separate from the host's."""
        return False

    @property
    def uuid(self) -> str | None:
        """What tells it from every other device of the world, where it says so."""
        return None

    def describe(self) -> dict[str, Any]:
        """What `tunewright devices` shows."""
        return {
            "name": self.name,
            "full_name": self.target.name,
            "kind": self.target.device,
            "family": self.family,
            "arch": self.target.arch,
            "units": self.target.units,
            "memory_bytes": self.memory_bytes,
            "pci": self.pci,
            "software": dict(self.target.software),
        }
