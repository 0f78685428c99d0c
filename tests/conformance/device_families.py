"""Which node tests of the ONNX suite run without the host: those of the families that have kernels of their own."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import TensorProto

#: family -> its operations
FAMILIES: dict[str, frozenset[str]] = {
    "convolution": frozenset({"Conv", "ConvTranspose"}),
    "product": frozenset({"Gemm", "MatMul"}),
    "pooling": frozenset({"AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LpPool", "MaxPool", "MaxUnpool"}),
    "element-wise": frozenset({
        "Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "BitCast", "BitShift", "BitwiseAnd",
        "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "CastLike", "Ceil", "Celu", "Clip", "Cos", "Cosh", "Div",
        "Elu", "Equal", "Erf", "Exp", "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "IsInf",
        "IsNaN", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "Not",
        "Or", "PRelu", "Pow", "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh",
        "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "SwiGLU", "Swish", "Tan", "Tanh", "ThresholdedRelu", "Where",
        "Xor",
    }),
    "reduction": frozenset({
        "ArgMax", "ArgMin", "CumProd", "CumSum", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax",
        "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", "TopK",
    }),
    "softmax": frozenset({"Hardmax", "LogSoftmax", "Softmax"}),
    "normalisation": frozenset({
        "BatchNormalization", "GroupNormalization", "InstanceNormalization", "LRN", "LayerNormalization",
        "LpNormalization", "MeanVarianceNormalization", "RMSNormalization",
    }),
    "movement": frozenset({
        "CenterCropPad", "Concat", "DepthToSpace", "Expand", "Pad", "ReverseSequence", "Slice", "SpaceToDepth", "Split",
        "Tile", "Transpose", "Trilu",
    }),
    "gather": frozenset({
        "Gather", "GatherElements", "GatherND", "OneHot", "Scatter", "ScatterElements", "ScatterND", "TensorScatter",
    }),
    "resize": frozenset({"AffineGrid", "GridSample", "Resize", "RoiAlign", "Upsample"}),
    "recurrent": frozenset({"GRU", "LSTM", "RNN"}),
    "quantised": frozenset({
        "ConvInteger", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv", "QLinearMatMul",
        "QuantizeLinear",
    }),
    "attention": frozenset({"Attention", "RotaryEmbedding"}),
    "shape": frozenset({
        "Constant", "ConstantOfShape", "EyeLike", "Flatten", "Identity", "Reshape", "Shape", "Size", "Squeeze",
        "Unsqueeze",
    }),
}  # fmt: skip

OPERATIONS = frozenset().union(*FAMILIES.values())

#: element types that a kernel can load and store; half floats are stored, and computed in single precision
TYPES = frozenset({
    TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.BOOL,
    TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64,
    TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64,
})  # fmt: skip

#: tests of the families that need the host, with the reason
EXCEPTIONS: dict[str, str] = {}


def belongs(model: onnx.ModelProto) -> bool:
    """Every node is of a family, and every tensor of a type that kernels take."""
    graph = model.graph
    operations = [node.op_type if node.domain in ("", "ai.onnx") else "" for node in graph.node]
    return OPERATIONS.issuperset(operations) and TYPES.issuperset(types(graph))


def types(graph: onnx.GraphProto) -> Iterator[int]:
    """Element types of inputs, outputs, weights and what else has one; 0 for what is no tensor."""
    for info in [*graph.input, *graph.output, *graph.value_info]:
        yield info.type.tensor_type.elem_type
    for tensor in graph.initializer:
        yield tensor.data_type
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name in ("to", "output_dtype", "dtype"):
                yield attribute.i


def families(model: onnx.ModelProto) -> frozenset[str]:
    """Families whose operations a model has."""
    operations = {node.op_type for node in model.graph.node}
    return frozenset(name for name, members in FAMILIES.items() if members & operations)
