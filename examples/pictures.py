"""Pictures as a camera or OpenCV has them: bytes, blue first, channels last, of any size.

What the network needs done with them is compiled into it, so the bytes go to the device as they are.
"""

import numpy as np
from onnx import TensorProto, helper

import tunewright

x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 48, 64])
y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 3, 1, 1])
graph = helper.make_graph([helper.make_node("GlobalAveragePool", ["x"], ["y"])], "colour", [x], [y])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

camera = tunewright.Preprocess(
    dtype="u8",
    layout="HWC",  # one picture without an axis for the batch, as cv2.imread gives it
    reverse_channels=True,  # OpenCV's order is blue, green, red
    resize="linear",
    mean=(123.675, 116.28, 103.53),
    scale=(58.395, 57.12, 57.375),
)
compiled = tunewright.Core().compile_model(model, "CPU", preprocess={"x": camera})
print(compiled)

frame = np.zeros((480, 640, 3), np.uint8)
frame[..., 2] = 255  # red
print("red picture:", compiled({"x": frame})["y"].ravel().round(3))

# A part of a picture is a view whose rows do not lie one behind the other: it is copied once, by itself.
print("a part of it:", compiled({"x": frame[100:200, 50:300]})["y"].ravel().round(3))
