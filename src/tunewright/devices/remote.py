"""Memory that stays where kernels work: tensors lent to a device, or received from it (docs/remote-tensors.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError
from ..ir.types import DType, TensorType

if TYPE_CHECKING:
    from .base import Device

Array = np.ndarray[Any, Any]


class RemoteTensor:
    """A tensor in memory that a device's kernels reach, with contiguous elements.

    A call with ``remote=True`` returns its results as remote tensors, which the caller owns. A tensor supports DLPack
    if its memory is the host's or a GPU's through CUDA: ``torch.from_dlpack(tensor)`` shares it.
    """

    __slots__ = ("__weakref__", "context", "dtype", "memory", "ready", "shape")

    def __init__(
        self, context: RemoteContext, memory: Any, shape: Sequence[int], dtype: np.dtype[Any], ready: Any = None
    ) -> None:
        self.context = context
        #: the device's array, or the caller's memory: a Buffer or SVM of pyopencl
        self.memory = memory
        self.shape, self.dtype = tuple(shape), dtype
        #: an event of the device after which the tensor has its values; None: it has them
        self.ready = ready

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def device(self) -> str:
        """Name of the tensor's device."""
        return self.context.device.name

    def __repr__(self) -> str:
        return f"<RemoteTensor {self.dtype}{list(self.shape)} on {self.device}>"

    def numpy(self) -> Array:
        """Copy the values to the host's memory, once they are there."""
        queue = self.context.device.queue()
        try:
            (found,) = queue.fetch([queue.adopt(self)])
            return np.array(found)
        finally:
            queue.release()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("a remote tensor is copied to become an array")
        found = self.numpy()
        return found if dtype is None else found.astype(dtype, copy=False)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.context.device.dlpack_device(self.memory)

    def __dlpack__(self, *, stream: int | None = None, **given: Any) -> Any:
        """Export the memory to another library. ``stream`` (of a GPU, by DLPack's numbers) waits until the values are
        there."""
        kept = {key: value for key, value in given.items() if value is not None}
        return self.context.device.export(self.memory, self.ready, stream, kept)


class RemoteContext:
    """Where a model's tensors may stay: its device, with a caller's OpenCL context and queue, or CUDA stream, if given.

    >>> context = core.create_context("GPU.0", queue=torch.cuda.current_stream())
    >>> compiled = core.compile_model(model, context)
    >>> y = torch.from_dlpack(compiled({"x": x}, remote=True)["y"])
    """

    def __init__(self, device: Device) -> None:
        self.device = device

    def __repr__(self) -> str:
        return f"<RemoteContext of {self.device.name}>"

    def empty(self, shape: Sequence[int], dtype: Any) -> RemoteTensor:
        """Allocate uninitialized device memory, for an input that the caller fills, or for an output.

        >>> y = context.empty((1, 1000), "float32")
        >>> compiled({"x": x}, outputs={"y": y})
        """
        type = _type(shape, dtype)
        memory = self.device.view(self.device.alloc(type.nbytes), 0, type)
        return RemoteTensor(self, memory, type.dims, type.dtype.numpy)

    def tensor(self, memory: Any, shape: Sequence[int], dtype: Any) -> RemoteTensor:
        """Wrap a caller's memory that has no shape (a Buffer or SVM of pyopencl) as a tensor, without a copy.

        A DLPack tensor needs no wrapper: it is an input as it is.

        >>> x = context.tensor(pyopencl.Buffer(...), (1, 3, 224, 224), "float32")
        """
        type = _type(shape, dtype)
        self.device.check_lent(memory, type.nbytes)
        return RemoteTensor(self, memory, type.dims, type.dtype.numpy)


def _type(shape: Sequence[int], dtype: Any) -> TensorType:
    try:
        known = dtype if isinstance(dtype, DType) else DType.of_numpy(np.dtype(dtype))
    except (KeyError, TypeError):
        try:
            known = DType(str(dtype).removeprefix("torch."))  # numpy knows neither the name bfloat16 nor torch's types
        except ValueError:
            raise InputError(f"there are no tensors of {dtype!r}", hint="for example: float32") from None
    sizes = tuple(int(size) for size in shape)
    if known is DType.STRING or any(size < 0 for size in sizes):
        raise InputError(f"{known}{list(sizes)} is no tensor in a device's memory")
    return TensorType(known, sizes)
