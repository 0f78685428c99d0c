"""Inputs that callers lend, and outputs that stay in a device's memory (docs/remote-tensors.md)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tunewright.devices import dlpack
from tunewright.devices.base import Queue, address, host_array
from tunewright.devices.remote import RemoteContext, RemoteTensor
from tunewright.errors import InputError
from tunewright.ir.types import TensorType, Type

from ..plans.plan import Plan, SlotPlace


def is_lent(value: object) -> bool:
    """Whether a value is a caller's tensor, used in place. numpy arrays are the host's common case and do not count."""
    return not isinstance(value, np.ndarray) and (isinstance(value, RemoteTensor) or dlpack.is_tensor(value))


def on_host(value: Any) -> np.ndarray[Any, Any]:
    """Return a lent tensor as an array of the host. Lists need it, because only the host can use their elements."""
    return value.numpy() if isinstance(value, RemoteTensor) else host_array(value)


class Stay:
    """The destinations of a request's outputs: tensors of the caller, the device's memory (``remote``), or the host."""

    def __init__(
        self, remote: bool, into: Mapping[int, Any], names: Mapping[int, str], kept: Collection[int] = ()
    ) -> None:  # fmt: skip
        #: ``kept``: numbers of outputs that stay on the device, because the request's next inference takes them
        self.remote, self.kept = remote, frozenset(kept)
        #: by an output's number: the array (of the device or the host) to write it to, and its name
        self.into, self.names = dict(into), dict(names)

    @staticmethod
    def of(
        outputs: Mapping[str, Any] | None, declared: Mapping[str, Type | None], remote: bool, queue: Queue
    ) -> Stay:  # fmt: skip
        """Make it from a caller's arguments. ``outputs``: tensors to write to, by name."""
        into: dict[int, Any] = {}
        names = list(declared)
        for name, tensor in (outputs or {}).items():
            where = f"output {name!r}"
            if name not in declared:
                raise InputError(f"there is no output {name!r}", hint=f"the outputs are {', '.join(names)}")
            if not is_lent(tensor) and not isinstance(tensor, np.ndarray):
                raise InputError(f"{type(tensor).__name__} is no tensor that can be written to", where=where,
                                 hint="give a RemoteTensor, or one that speaks DLPack")  # fmt: skip
            into[names.index(name)] = array = adopt(queue, tensor, where, writable=True)
            type_ = declared[name]
            if not isinstance(type_, TensorType) or type_.dtype.numpy != array.dtype or not _fits(type_, array.shape):
                raise InputError(f"is {type_}, not {array.dtype}{list(array.shape)}", where=where)
        return Stay(remote, into, {at: names[at] for at in into})

    def rest(self, plan: Plan) -> Stay:
        """Return the destinations for the program that follows a plan, whose outputs have other numbers."""
        numbers = {at: i for at, (kind, i) in enumerate(plan.outputs) if kind == "rest" and at in self.into}
        return Stay(self.remote, {i: self.into[at] for at, i in numbers.items()},
                    {i: self.names[at] for at, i in numbers.items()},
                    {i for at, (kind, i) in enumerate(plan.outputs) if kind == "rest" and at in self.kept})  # fmt: skip

    def storages(
        self, plan: Plan, inputs: Sequence[Any], shapes: Mapping[int, tuple[int, ...]], sizes: Mapping[int, int]
    ) -> dict[int, Any]:
        """Find the storages of a plan that may lie in the caller's memory. For devices that share the host's memory.

        ``shapes`` of slots and ``sizes`` of storages in bytes are those of this inference.
        """
        found: dict[int, Any] = {}
        for at, array in self.into.items():
            kind, i = plan.outputs[at]
            slot = plan.slots[i] if kind == "slot" else None
            if slot is None or slot.place is not SlotPlace.RESULT or slot.offset or slot.storage in found:
                continue
            if shapes.get(i) != array.shape:
                continue
            # Kernels may write a storage before they have read all inputs, and rely on its alignment.
            fits = sizes[slot.storage] == array.nbytes and array.flags.c_contiguous and not address(array) % 64
            others = [v for v in (*inputs, *found.values()) if isinstance(v, np.ndarray)]
            if fits and array.size and not any(np.may_share_memory(array, x) for x in others):
                found[slot.storage] = array.reshape(-1).view(np.uint8)
        return found

    def keep(self, plan: Plan, values: Sequence[Any], queue: Queue, in_place: Collection[int]) -> list[Any]:
        """Write a plan's outputs to ``into``, copy them on the device, or fetch them. For devices with memory of their
        own.

        Outputs in ``in_place`` stay where they are until the next inference is over.
        """
        found: list[Any] = []
        for at, value in enumerate(values):
            if at in self.into and value is not None:
                self.write(at, value, queue)
                found.append(None)
            elif at in self.kept and at in in_place:
                found.append(value)
            elif self._stays(at, value):
                found.append(queue.duplicate(value))
            else:
                found.append(value)
        if not self.remote:
            fetched = iter(queue.fetch([v for at, v in enumerate(found) if at not in self.kept]))
            found = [v if at in self.kept else next(fetched) for at, v in enumerate(found)]
        return [self.into[at] if at in self.into and v is None else v for at, v in enumerate(found)]

    def _stays(self, at: int, value: Any) -> bool:
        return (self.remote or at in self.kept) and hasattr(value, "shape") and value.dtype != object

    def write(self, at: int, value: Any, queue: Queue) -> None:
        array = self.into[at]
        if (value.shape, value.dtype) != (array.shape, array.dtype):
            what = f"{value.dtype}{list(value.shape)}"
            raise InputError(f"is {what} for these inputs, not {array.dtype}{list(array.shape)}",
                             where=f"output {self.names[at]!r}")  # fmt: skip
        if isinstance(array, np.ndarray):
            np.copyto(array, queue.fetch([value])[0])
        else:
            queue.put(value, array)

    def results(
        self, made: Sequence[Any], names: Sequence[str], given: Mapping[str, Any], context: RemoteContext, queue: Queue
    ) -> dict[str, Any]:
        """Return the caller's results: the given tensors, remote tensors, and values that no device has (lists,
        strings)."""
        for at, array in self.into.items():  # in shared memory the result may already be in place
            if made[at] is not array and not (array.size and address(made[at]) == address(array)):
                self.write(at, made[at], queue)
        ready = queue.settle() if self.remote else None
        found: dict[str, Any] = {}
        for at, (name, value) in enumerate(zip(names, made, strict=True)):
            if name in given:
                found[name] = given[name]
                if isinstance(given[name], RemoteTensor):
                    given[name].ready = ready
            elif self._stays(at, value):
                found[name] = RemoteTensor(context, value, value.shape, value.dtype, ready)
            else:
                found[name] = value
        return found


def adopt(queue: Queue, value: Any, where: str, writable: bool = False) -> Any:
    """Return a lent tensor as an array of the queue's device or of the host. Errors name the tensor (``where``)."""
    try:
        return queue.adopt(value, writable)
    except InputError as error:
        raise InputError(error.what, where=where, hint=error.hint) from None


def _fits(type: TensorType, shape: tuple[int, ...]) -> bool:
    if type.shape is None:
        return True
    pairs = zip(shape, type.shape, strict=False)
    return len(shape) == len(type.shape) and all(not isinstance(want, int) or want == got for got, want in pairs)
