"""CURRENT and NEXT: while a frame is inferred, the next one is decoded. Two requests take turns."""

import time
import zlib

import numpy as np
from onnx import TensorProto, helper, numpy_helper

import tunewright

HEIGHT, WIDTH, FRAMES = 240, 320, 16

rng = np.random.default_rng(0)
graph = helper.make_graph(
    [
        helper.make_node("Conv", ["x", "w1"], ["a"], pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "w2"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["c"], ["y"]),
    ],
    "small",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, HEIGHT, WIDTH])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 32, 1, 1])],
    [numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)
     for name, shape in (("w1", (32, 3, 3, 3)), ("w2", (32, 32, 3, 3)))],
)  # fmt: skip
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
bytes_last = tunewright.Preprocess(dtype="u8", layout="HWC", scale=255)
# One thread for the network: decoding has the other core to itself.
compiled = tunewright.Core().compile_model(model, "CPU", {"CPU_THREADS_NUM": 1}, preprocess=bytes_last)

# A video, if you like: what is stored compressed, and takes time to decode.
base = rng.integers(0, 64, (HEIGHT, WIDTH, 3), np.uint8)
video = [zlib.compress((base + number).tobytes(), 1) for number in range(FRAMES)]


def decode(number):
    """As cv2.VideoCapture.read does, it lets others run meanwhile."""
    return np.frombuffer(zlib.decompress(video[number]), np.uint8).reshape(HEIGHT, WIDTH, 3)


def one_after_the_other():
    request = compiled.create_infer_request()
    return [request.infer({"x": decode(number)})["y"].sum() for number in range(FRAMES)]


def overlapped():
    found = []
    current, following = compiled.create_infer_request(), compiled.create_infer_request()
    current.start_async({"x": decode(0)})
    for number in range(FRAMES):
        if number + 1 < FRAMES:
            frame = decode(number + 1)  # while the current one runs
            following.start_async({"x": frame})
        current.wait()
        found.append(current.results["y"].sum())
        current, following = following, current
    return found


ways = (one_after_the_other, overlapped)
sums = [way() for way in ways]
times = {way: [] for way in ways}
for _ in range(3):
    for way in ways:
        begin = time.perf_counter()
        way()
        times[way].append(time.perf_counter() - begin)
for way in ways:
    print(f"{way.__name__.replace('_', ' '):20} {FRAMES / min(times[way]):7.0f} frames per second")
print("the same results:", bool(np.allclose(*sums)))
