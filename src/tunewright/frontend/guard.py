"""What a file may ask for, bounded before folding or native code sees it; each limit is a setting."""

from __future__ import annotations

from pathlib import Path

import onnx

from ..errors import LimitError, ModelError
from ..settings import Settings


def read_file(path: Path, settings: Settings) -> bytes:
    """The bytes of a model file, if it is a file of acceptable size."""
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise ModelError("is not a file", where=str(path))
        if size > settings.max_file_bytes:
            raise LimitError(f"has {size:,} bytes", where=str(path), hint=f"the limit is MAX_FILE_BYTES = {settings.max_file_bytes:,}")
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror or error}", where=str(path)) from None


def check(model: onnx.ModelProto, settings: Settings) -> None:
    """Count what the model would expand to, without expanding it."""
    if len(model.graph.node) > settings.max_nodes:
        raise LimitError(f"has {len(model.graph.node):,} nodes", where="graph", hint=f"the limit is MAX_NODES = {settings.max_nodes:,}")
