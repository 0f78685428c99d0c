"""Cases of OpenVINO's simple layers in ONNX's terms."""

from __future__ import annotations

from golden.cases import Case, no

_X = "g (float[2,3,4,4] x) => (float[2,3,4,4] y)"
_INT = "g (int32[2,3,4,4] x) => (int32[2,3,4,4] y)"
_ = "org.openvinotoolkit."

OPENVINO = [
    Case("openvino-activation", f"{_X} {{ a = {_}ELU<alpha=0.5>(x) b = {_}TanH(a) y = {_}Copy(b) }}"),
    no("openvino-activation", f"{_INT} {{ y = {_}Copy(x) }}"),
    Case("openvino-relu", f"{_X} {{ a = {_}ReLU<negative_slope=0.1>(x) y = {_}ReLU(a) }}"),
    no("openvino-relu", f"{_INT} {{ y = {_}ReLU(x) }}"),
    Case("openvino-clamp", f"{_X} {{ a = {_}Clamp<min=-1.0, max=0.5>(x) y = {_}ReLU6(a) }}"),
    no("openvino-clamp", f"{_INT} {{ y = {_}Clamp<min=-1.0, max=4.5>(x) }}"),
    Case(
        "openvino-crop",
        f"g (float[2,3,4,5] x) => (float[2,2,4,3] y) {{ y = {_}Crop<axis=[1,3], offset=[1,2], dim=[2,3]>(x) }}",
    ),
    no(
        "openvino-crop",
        f"g (float[N,3,4,5] x) => (float[N,2,4,3] y) {{ y = {_}Crop<axis=[1,3], offset=[1,2], dim=[2,3]>(x) }}",
    ),
    Case("openvino-scale-shift", f"{_X} <float[3] w, float[3] b> {{ y = {_}ScaleShift(x, w, b) }}"),
    no(
        "openvino-scale-shift",
        f"g (float[2,3,4,4] x, float[M] w) => (float[2,3,4,4] y) <float[3] b> {{ y = {_}ScaleShift(x, w, b) }}",
    ),
    Case("openvino-prelu", f"{_X} <float[3] w> {{ y = {_}PReLU(x, w) }}"),
    no("openvino-prelu", f"g (float[2,3,4,4] x, float[M] w) => (float[2,3,4,4] y) {{ y = {_}PReLU(x, w) }}"),
    Case("openvino-power", f"{_X} {{ y = {_}Power<power=2.0, scale=0.5, shift=1.0>(x) }}"),
    no("openvino-power", f"{_INT} {{ y = {_}Power<power=2.0>(x) }}"),
    Case(
        "openvino-eltwise",
        f"""g (float[2,3] x, float[2,3] z) => (float[2,3] y)
        {{ a = {_}Eltwise<operation="sum", coeff=[1.0, 0.5]>(x, z) y = {_}Eltwise<operation="max">(a, z) }}""",
    ),
    no(
        "openvino-eltwise",
        f"""g (float[2,3] x, float[2,3] z) => (float[2,3] y) {{ y = {_}Eltwise<operation="squared_diff">(x, z) }}""",
    ),
    Case(
        "openvino-fully-connected",
        f"g (float[2,3,4] x) => (float[2,5] y) <float[5,12] w, float[5] b> {{ y = {_}FullyConnected(x, w, b) }}",
    ),
    no(
        "openvino-fully-connected",
        f"g (float[2,12] x, float[A,12] w) => (float[2,M] y) {{ y = {_}FullyConnected(x, w) }}",
    ),
]
