"""ONNX's messages (`ModelProto`, `TensorProto`, ...), loaded without the rest of the onnx package.

Reading a model needs only the classes that protobuf makes from ONNX's format. Importing onnx also loads a checker, a
parser, type inference and their dependencies: 20 ms and 4 MB in every process that runs a model.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any


def _messages() -> Any:
    """Return the module of the messages, or onnx itself if it is already imported or its file is not as expected.

    The module is not registered in ``sys.modules``. A later import of onnx makes its own module with the same classes,
    because protobuf keeps one class per message.
    """
    found = None if "onnx" in sys.modules else find_spec("onnx")
    for folder in (found and found.submodule_search_locations) or ():
        spec = spec_from_file_location(f"{__name__}.onnx_ml_pb2", Path(folder) / "onnx_ml_pb2.py")
        if spec is None or spec.loader is None:
            continue
        made = module_from_spec(spec)
        try:
            spec.loader.exec_module(made)
            made.ModelProto.FromString(b"")
        except Exception:  # the file is not as expected: let the import of onnx succeed or report the error
            continue
        return made
    return import_module("onnx")


onnx = _messages()
