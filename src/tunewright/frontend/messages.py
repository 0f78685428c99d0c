"""ONNX's messages (`ModelProto`, `TensorProto`, ...), without the rest of its package.

Reading a model takes the classes that protobuf makes of ONNX's format, and nothing else. Importing onnx brings a
checker, a parser, an inference of types and all that these need: 20 ms and 4 MB of every process that runs a model.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any


def _messages() -> Any:
    """The module of the messages; onnx itself where it is imported already, or where they are not as expected.

    To others it is no module of onnx's: that makes its own, of the same classes, since protobuf has one per message.
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
        except Exception:  # the file of another package's: onnx says what is wrong, or is right in its own way
            continue
        return made
    return import_module("onnx")


onnx = _messages()
