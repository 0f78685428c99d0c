"""Base classes of devices. A device has a target that is part of every key, memory, and a queue with a clock."""

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
    """Allocate uninitialized host memory, aligned for vectors."""
    raw = np.empty(nbytes + 64, np.uint8)
    offset = -address(raw) % 64
    return raw[offset : offset + nbytes]


def in_order(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a C-contiguous array with aligned elements: the array itself if it already is one, else a copy.

    Kernels ask for no more than that. A view (a part of a picture, padded rows, every second column, reversed channels)
    is copied once, and only its own elements.
    """
    if array.dtype == object or (array.flags.c_contiguous and array.flags.aligned):
        # ascontiguousarray turns a scalar into a row
        return array if array.flags.c_contiguous else np.ascontiguousarray(array)
    made = np.ndarray(array.shape, array.dtype, aligned(array.nbytes))
    np.copyto(made, array)
    return made


def on_lines(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the array aligned to a cache line: the array itself or a copy.

    Numpy aligns arrays to 16 bytes only. At most such addresses, every second vector, or each one, lies across two
    cache lines and takes longer to read.
    """
    if array.dtype == object or (array.flags.c_contiguous and address(array) % 64 == 0):
        return array
    made = empty_on_lines(array.shape, array.dtype)
    np.copyto(made, array)
    return made


def empty_on_lines(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Allocate an uninitialized array aligned to a cache line. A constant packed into it needs no copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    return np.ndarray(shape, dtype, aligned(nbytes) if nbytes < LARGE else shared_pages(nbytes))


def address(array: Any) -> int:
    """Return the address of an array's bytes. Numpy's own ways take four times as long, and a small network asks ten
    times."""
    try:
        return addressof(c_char.from_buffer(array))
    except (TypeError, ValueError):  # read-only, empty, or of a type that no buffer describes
        return int(array.__array_interface__["data"][0])


@dataclass(frozen=True)
class Traits:
    """What solvers, measuring and plugins ask about the hardware of a target.

    The defaults are for hardware whose kind is not in `KINDS`.
    """

    #: kernels run on the cores of the host's threads; other work on the host slows them down
    shares_cores: bool = False
    #: each work-item has a core and its nearest caches to itself; the target's name may tell the cache sizes
    private_caches: bool = False
    #: kernels prefetch memory
    prefetches: bool = False
    #: neighbouring work-items are lanes of one vector and form work groups
    has_work_groups: bool = False
    #: a batch of inferences takes much less time than the same inferences in sequence
    batches_pay: bool = False
    #: a new process takes seconds to open the device
    opens_slowly: bool = False
    #: kernels compute nothing, and a script sets how long each takes
    is_scripted: bool = False
    #: the properties whose names begin with ``GPU_`` apply
    has_gpu_properties: bool = False
    #: default number of parallel inferences (with 2, one runs while data of the other is transferred), and the largest
    #: useful number. Each needs memory. 0: one per unit
    streams: int = 2
    most_streams: int = 8
    #: for lower bounds of times: bytes per clock of one unit of the fastest hardware of this kind
    bytes_per_clock: int = 64
    #: for estimates: operations and bytes per second of one unit; 0 operations: derived from the vector registers
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
    """What a kernel is compiled for. Part of every key. Two runtimes on one processor are two targets."""

    device: str  # kind: cpu, gpu, null, or one of an extension
    name: str  # as the hardware calls itself
    arch: str
    units: int
    software: tuple[tuple[str, str], ...] = ()  # drivers, runtimes, compilers with their versions
    language: str = ""  # language of the kernels that it compiles: "c", or none
    options: str = ""  # options given to its compiler
    vector_bytes: int = 16  # bytes of a vector register
    registers: int = 16  # number of vector registers
    lacks: tuple[str, ...] = ()  # features that kernels must not use: fp64
    #: traits that differ from those of the kind; not part of keys
    own_traits: Traits | None = field(default=None, compare=False, repr=False)

    @property
    def traits(self) -> Traits:
        """The traits of the hardware: the device's own if it gives any, else those of its kind."""
        return self.own_traits or KINDS.get(self.device, _UNKNOWN)

    @property
    def most_streams(self) -> int:
        """The largest useful number of parallel inferences."""
        return self.traits.most_streams or self.units

    def has(self, feature: str) -> bool:
        """Whether kernels may use an optional feature of the architecture, as in ``x86-64-v4+avx512vnni``."""
        return feature in self.arch.split("+")[1:]

    def __str__(self) -> str:
        software = ", ".join(f"{k} {v}" for k, v in self.software)
        return f"{self.name} ({self.arch}, {self.units} units; {software})"


@dataclass(frozen=True)
class Hints:
    """The priority and throttle that a request asks of its queue (GPU_QUEUE_PRIORITY, GPU_QUEUE_THROTTLE): LOW, MEDIUM
    or HIGH."""

    priority: str = "MEDIUM"
    throttle: str = "MEDIUM"


class Queue(ABC):
    """An in-order queue for one request, with a clock in seconds."""

    #: number of kernels launched so far
    launches: int = 0
    #: seconds spent waiting for kernels so far
    waited: float = 0.0
    #: `equal` compares buffers in place and fetches nothing
    compares: bool = False
    #: the owner of failures of kernels that run by themselves (`Kernel.run`), for a later look at reports
    running: object = None

    @property
    def watching(self) -> bool:
        """Whether launched kernels may have reports (`devices.reports`) that nobody has read yet."""
        return False

    def check(self) -> None:  # noqa: B027 (nothing is reported)
        """Wait for launched kernels. Raise KernelError if a kernel reports that its inputs are wrong."""

    def forget(self) -> None:  # noqa: B027
        """Wait for launched kernels and ignore their reports."""

    @property
    def scratch_bytes(self) -> int:
        """Bytes of memory that the queue keeps for kernels."""
        return 0

    @abstractmethod
    def now(self) -> float:
        """The device's time at which everything queued so far has finished."""

    def finish(self) -> None:  # noqa: B027 (nothing to wait for is a fine default)
        """Wait until everything queued so far has finished. The host may then read the results."""

    def rouse(self) -> None:  # noqa: B027 (most have no threads that sleep)
        """Wake the device before a timed launch, so that it is as ready as in the middle of a network."""

    def fetch(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return the finished values where the host can read them. Values outside the device's memory are returned as
        they are."""
        self.finish()
        return values

    def put(self, array: np.ndarray[Any, Any], to: Any) -> None:
        """Write an array of the host, or an adopted one, into device memory that nothing queued uses."""
        np.copyto(to, array)

    def fill(self, to: Any, byte: int) -> None:
        """Fill a device buffer that nothing queued uses with one byte."""
        if isinstance(to, np.ndarray):
            to.fill(byte)
        else:
            self.put(np.full(to.nbytes, byte, np.uint8), to)

    def equal(self, one: Any, other: Any) -> bool:
        """Whether two buffers of the device hold the same bytes."""
        return bool(np.array_equal(*self.fetch([one, other])))

    def adopt(self, value: Any, writable: bool = False) -> Any:
        """Return a caller's tensor (a `RemoteTensor` or a DLPack tensor) as an array for `put`, `fetch` and kernels.

        Uses of the array come after the work that its owner has enqueued. The queue keeps it until `release`, and until
        queued work has finished. Raise InputError if the tensor cannot be reached or, with ``writable``, cannot be
        written.
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
        """Copy an array of the device or the host into new memory of the device."""
        return value.copy()

    def settle(self) -> Any:
        """Return an object that tells when results that stay on the device are ready, or None if they are ready."""
        self.finish()
        return None

    def release(self) -> None:  # noqa: B027 (most keep nothing)
        """Give back adopted tensors: the work that uses them has finished or is ordered with their owner."""


def host_array(value: Any, writable: bool = False) -> np.ndarray[Any, Any]:
    """Return the bytes of a DLPack tensor in host memory."""
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
    """An open device. Modules offer classes in ``DEVICES``; the caller asks `available` before `__init__`."""

    #: name of the implementation (host, opencl, cuda, null)
    family: str
    #: among implementations that offer the same device name, the highest wins
    priority: int = 0
    #: prefixes of the device names that it offers (CPU, GPU); it is asked for no others. None: any name
    kinds: tuple[str, ...] | None = None
    #: the name that users read for its devices where there are none
    title: str = ""

    #: how it computes when it stands in for another device, for warnings to users
    stand_in: str = ""

    name: str
    target: Target
    #: its kernels are the numpy references: nothing is compiled, searched or measured
    runs_references: bool = False
    #: device lists leave it out: users do not choose it
    is_hidden: bool = False
    #: kernels work on the host's own arrays; else only kernels, `Queue.fetch` and `Queue.put` access memory from
    #: `alloc`
    shares_memory: bool = True
    #: type in which single-precision networks are computed, unless INFERENCE_PRECISION_HINT names another
    precision: DType = DType.FLOAT32
    #: it computes half floats in single precision; tensors between layers of half networks are then single precision
    widens: bool = False
    #: it can compile kernels; else it runs only kernels of the kernel cache
    compiles: bool = True
    #: its executables may contain loops and branches (`devices/control_rows.py`)
    runs_control: bool = False
    #: it runs plans made for classes of shapes
    serves_classes: bool = False
    #: plans for exact shapes are faster: the first shape of a model gets such a plan
    prefers_exact: bool = False
    #: bytes of the device's memory, if known
    memory_bytes: int | None = None
    #: its PCI address, if known (`devices.pci`)
    pci: str | None = None
    #: size of its last-level cache: data not used within this many bytes comes from memory. 0: no such cache
    cache_bytes: int = 0

    @classmethod
    @abstractmethod
    def available(cls) -> list[str] | str:
        """Return the device names that can be opened here, or the reason why there are none."""

    @classmethod  # noqa: B027 - most need nothing that takes long
    def begin(cls) -> None:
        """Begin in the background what `available` will wait for. Errors are not reported here."""

    @classmethod
    def mistake(cls) -> SettingsError | None:
        """Return the wrong setting because of which the class offers no device. A caller that asks for such a device
        gets this error and no other device."""
        return None

    @classmethod
    def unusable(cls) -> dict[str, str]:
        """Return devices that are present but cannot be opened, with the reasons."""
        return {}

    @abstractmethod
    def __init__(self, name: str) -> None: ...

    @abstractmethod
    def queue(self) -> Queue: ...

    def link(self, parts: Sequence[Part]) -> Executable:
        """Link parts of a plan into one executable: kernels that are `Kernel.is_linkable`, and blocks if it
        `runs_control`.

        A device that links nothing has each kernel called by itself.
        """
        (part,) = parts
        return HostCall(part)

    def compute_formulas(self, formulas: Formulas) -> None:  # noqa: B027 (Python does it, too)
        """Have complete formulas computed by something faster than Python, if the device has it."""

    def request_queue(self, hints: Hints) -> Queue:
        """Return a queue for requests. The device applies the hints that it knows."""
        return self.queue()

    def lent(self, context: Any, queue: Any) -> Device:
        """Return the same device with a caller's context and queue; either may be None. Raise DeviceError if it
        supports neither."""
        raise DeviceError(f"{self.name} takes no context and no queue of a caller's",
                          hint="a device of OpenCL or CUDA does: docs/remote-tensors.md")  # fmt: skip

    def check_lent(self, memory: Any, nbytes: int) -> None:
        """Raise InputError unless ``memory`` is a caller's memory that can hold ``nbytes`` bytes of tensors."""
        raise InputError(f"{type(memory).__name__} is not memory that {self.name} can use",
                         hint="pass tensors that support DLPack as they are")  # fmt: skip

    def dlpack_device(self, memory: Any) -> tuple[int, int]:
        """Return the DLPack device of an array of this device."""
        if not isinstance(memory, np.ndarray):
            raise BufferError(f"DLPack has no tensors in the memory of {self.name}")
        return dlpack.CPU, 0

    def export(self, memory: Any, ready: Any, stream: int | None, given: dict[str, Any]) -> Any:
        """Return a DLPack capsule of an array of this device, for a reader's stream. ``given``: other arguments."""
        self.dlpack_device(memory)
        return memory.__dlpack__(**given)

    def with_threads(self, count: int) -> Device:
        """Return the same device with at most ``count`` threads (0: all that the process may use), if it has threads.

        The same count returns the same device. The thread count is part of the target, because the best choice depends
        on it.
        """
        return self

    def configured(self, settings: Settings) -> Device:
        """Return the same device as the settings ask: with at most CPU_THREADS_NUM threads, if it has threads."""
        return self.with_threads(settings.cpu_threads_num)

    @property
    def kernel_label(self) -> str:
        """The label of this device's programs in listings of the kernel cache."""
        return f"{self.target.device.upper()} {self.target.arch}"

    def broken(self) -> str:
        """Return why this process can no longer use the device, or an empty string if it can."""
        return ""

    def alloc(self, nbytes: int) -> Any:
        """Allocate memory for an arena, aligned for vectors. A device that shares memory with the host keeps this
        version."""
        return aligned(nbytes)

    def host_memory(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Allocate host memory for inputs that are rewritten for each inference. The device reads it without an extra
        copy."""
        return aligned(nbytes)

    def view(self, buffer: Any, offset: int, type: TensorType) -> Any:
        """Return a tensor inside a buffer."""
        return np.ndarray(type.physical, type.dtype.numpy, buffer, offset)

    def constant(self, array: np.ndarray[Any, Any]) -> Any:
        """Return a read-only array where kernels can read it."""
        return array

    def convert(self, array: np.ndarray[Any, Any], dtype: DType) -> np.ndarray[Any, Any]:
        """Convert an array of the host to another element type, in new memory."""
        return array.astype(dtype.numpy, order="C")

    def bind(self, mode: str) -> None:  # noqa: B027 (most have no threads of their own)
        """Apply CPU_BIND_THREADS: set where the device's threads may run from now on."""

    def energy_meter(self) -> energy.EnergyMeter | str:
        """Return the meter of the device's energy, or the reason why there is none."""
        number = self.name.rpartition(".")[2]
        return energy.meter(self.target.device, int(number) if number.isdecimal() else 0)

    def held(self) -> dict[str, int]:
        """Return the bytes in use of the device's own memory, by purpose. Empty if its memory is the host's."""
        return {}

    @property
    def free_bytes(self) -> int | None:
        """Bytes of memory that are still free, if known."""
        return None

    @property
    def is_discrete(self) -> bool:
        """Whether the device has its own memory, separate from the host's."""
        return False

    @property
    def uuid(self) -> str | None:
        """The device's globally unique id, if it reports one."""
        return None

    def describe(self) -> dict[str, Any]:
        """Return what `tunewright devices` shows."""
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
