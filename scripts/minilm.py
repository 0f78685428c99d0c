"""all-MiniLM-L6-v2 as an ONNX model, written out of its safetensors the way exporters decompose it."""

import json
import struct
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HEADS, LAYERS, HIDDEN, EPSILON = 12, 6, 384, 1e-12


def load_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The fp32 tensors of a safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    base = 8 + length
    return {
        name: np.frombuffer(
            data[base + entry["data_offsets"][0] : base + entry["data_offsets"][1]], np.float32
        ).reshape(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__" and entry["dtype"] == "F32"
    }


class Builder:
    def __init__(self, weights):
        self.weights, self.nodes, self.initializers, self.count = weights, [], {}, 0

    def op(self, kind, *inputs, **attrs):
        self.count += 1
        out = f"{kind.lower()}_{self.count}"
        self.nodes.append(helper.make_node(kind, list(inputs), [out], name=out, **attrs))
        return out

    def const(self, array, name=None):
        array = np.asarray(array)
        name = name or f"c_{array.dtype}_{'x'.join(map(str, array.shape))}_{abs(hash(array.tobytes()))}"
        self.initializers[name] = array
        return name

    def linear(self, x, name):
        w = self.const(np.ascontiguousarray(self.weights[f"{name}.weight"].T), f"{name}.weight")
        return self.op("Add", self.const(self.weights[f"{name}.bias"], f"{name}.bias"), self.op("MatMul", x, w))

    def layer_norm(self, x, name):
        centred = self.op("Sub", x, self.op("ReduceMean", x, axes=[-1]))
        variance = self.op("ReduceMean", self.op("Pow", centred, self.const(np.float32(2))), axes=[-1])
        root = self.op("Sqrt", self.op("Add", variance, self.const(np.float32(EPSILON))))
        scaled = self.op(
            "Mul", self.op("Div", centred, root), self.const(self.weights[f"{name}.weight"], f"{name}.weight")
        )
        return self.op("Add", scaled, self.const(self.weights[f"{name}.bias"], f"{name}.bias"))

    def gelu(self, x):
        erf = self.op("Erf", self.op("Div", x, self.const(np.float32(np.sqrt(2)))))
        grown = self.op("Mul", x, self.op("Add", erf, self.const(np.float32(1))))
        return self.op("Mul", grown, self.const(np.float32(0.5)))

    def attention(self, x, mask, name):
        shape = self.const(np.array([0, 0, HEADS, HIDDEN // HEADS], np.int64))
        q, k, v = (
            self.op("Reshape", self.linear(x, f"{name}.self.{part}"), shape) for part in ("query", "key", "value")
        )
        q, v = (self.op("Transpose", t, perm=[0, 2, 1, 3]) for t in (q, v))
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 2, 3, 1]))
        scaled = self.op("Div", scores, self.const(np.float32(np.sqrt(HIDDEN / HEADS))))
        mixed = self.op("MatMul", self.op("Softmax", self.op("Add", scaled, mask), axis=-1), v)
        merged = self.op(
            "Reshape", self.op("Transpose", mixed, perm=[0, 2, 1, 3]), self.const(np.array([0, 0, HIDDEN], np.int64))
        )
        return self.layer_norm(
            self.op("Add", self.linear(merged, f"{name}.output.dense"), x), f"{name}.output.LayerNorm"
        )


def build(safetensors: Path) -> onnx.ModelProto:
    """Inputs input_ids, attention_mask, token_type_ids: int64[batch, sequence]; output last_hidden_state."""
    b = Builder(load_safetensors(safetensors))
    table = {
        n: b.const(b.weights[f"embeddings.{n}.weight"], n)
        for n in ("word_embeddings", "position_embeddings", "token_type_embeddings")
    }
    length = b.op("Gather", b.op("Shape", "input_ids"), b.const(np.int64(1)))
    positions = b.op("Range", b.const(np.int64(0)), length, b.const(np.int64(1)))
    words = b.op(
        "Add",
        b.op("Gather", table["word_embeddings"], "input_ids"),
        b.op("Gather", table["token_type_embeddings"], "token_type_ids"),
    )
    x = b.layer_norm(
        b.op("Add", words, b.op("Gather", table["position_embeddings"], positions)), "embeddings.LayerNorm"
    )
    wide = b.op("Cast", b.op("Unsqueeze", "attention_mask", axes=[1, 2]), to=TensorProto.FLOAT)
    mask = b.op("Mul", b.op("Sub", b.const(np.float32(1)), wide), b.const(np.float32(-10000)))
    for i in range(LAYERS):
        layer = f"encoder.layer.{i}"
        x = b.attention(x, mask, f"{layer}.attention")
        inner = b.gelu(b.linear(x, f"{layer}.intermediate.dense"))
        x = b.layer_norm(b.op("Add", b.linear(inner, f"{layer}.output.dense"), x), f"{layer}.output.LayerNorm")
    b.nodes.append(helper.make_node("Identity", [x], ["last_hidden_state"]))
    ids = [
        helper.make_tensor_value_info(n, TensorProto.INT64, ["batch", "sequence"])
        for n in ("input_ids", "attention_mask", "token_type_ids")
    ]
    out = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["batch", "sequence", HIDDEN])
    weights = [numpy_helper.from_array(array, name) for name, array in b.initializers.items()]
    graph = helper.make_graph(b.nodes, "minilm", ids, [out], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 12)], ir_version=8)
