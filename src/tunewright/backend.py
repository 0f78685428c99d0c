"""Implements onnx.backend.base on top of `Core`, for the ONNX conformance suite and other tools.

Use the module's functions or the class `TunewrightBackend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx.backend.base import Backend, BackendRep

from .core import Core
from .errors import DeviceError
from .plugins.single import open_device
from .runtime.requests.compiled import CompiledModel


class TunewrightRep(BackendRep):  # type: ignore[misc]
    """A compiled model behind the interface that the ONNX conformance suite calls."""

    def __init__(self, compiled: CompiledModel) -> None:
        self.compiled = compiled

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run an inference. ``inputs``: in the model's order, or by name. Returns the outputs in the model's order."""
        return tuple(self.compiled(inputs).values())


class TunewrightBackend(Backend):  # type: ignore[misc]
    """The backend as a class: ``TunewrightBackend.run_model(model, inputs)``."""

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        return all(Core().query_model(model, _device(device)).values())

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> TunewrightRep:
        """Compile a model. The keyword ``config`` holds settings."""
        return TunewrightRep(Core().compile_model(model, _device(device), kwargs.get("config")))

    @classmethod
    def run_model(cls, model: onnx.ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Run one node with the newest opset. Input types are taken from the arrays."""
        feeds = dict(zip(node.input, inputs, strict=False)) if not isinstance(inputs, dict) else inputs
        infos = [
            onnx.helper.make_tensor_value_info(k, onnx.helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for k, v in feeds.items()
        ]
        graph = onnx.helper.make_graph(
            [node], "node", infos, [onnx.helper.make_empty_tensor_value_info(o) for o in node.output if o]
        )
        return cls.run_model(onnx.helper.make_model(graph), feeds, device, **kwargs)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether the device can be opened on this machine."""
        try:
            open_device(_device(device))
        except DeviceError:
            return False
        return True


def _device(device: str) -> str:
    """Translate a device name of the onnx package: CUDA is GPU in Tunewright."""
    return "GPU" if device.upper().startswith("CUDA") else device


is_compatible = TunewrightBackend.is_compatible
prepare = TunewrightBackend.prepare
run_model = TunewrightBackend.run_model
run_node = TunewrightBackend.run_node
supports_device = TunewrightBackend.supports_device
