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
    "rows that data selects": frozenset({"Compress", "NonMaxSuppression", "NonZero"}),
    "resize": frozenset({"AffineGrid", "GridSample", "Resize", "RoiAlign", "Upsample"}),
    "recurrent": frozenset({"GRU", "LSTM", "RNN"}),
    "quantised": frozenset({
        "ConvInteger", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv", "QLinearMatMul",
        "QuantizeLinear",
    }),
    "attention": frozenset({"Attention", "RotaryEmbedding", "ai.onnx.preview.FlexAttention"}),
    "shape": frozenset({
        "Constant", "ConstantOfShape", "EyeLike", "Flatten", "Identity", "Range", "Reshape", "Shape", "Size", "Squeeze",
        "Unsqueeze",
    }),
}  # fmt: skip

OPERATIONS = frozenset().union(*FAMILIES.values())

#: element types that every kernel can load and store; half floats are computed in single precision
TYPES = frozenset({
    TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.BOOL,
    TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64,
    TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64,
})  # fmt: skip

#: operations that take more; 0 is what is no tensor
_FEW_BITS = frozenset({TensorProto.INT4, TensorProto.UINT4, TensorProto.INT2, TensorProto.UINT2})
MORE_TYPES = {"DequantizeLinear": _FEW_BITS, "QuantizeLinear": _FEW_BITS, "Identity": frozenset({0})}

#: tests of the families that need the host, with the reason; see also `excuse`
EXCEPTIONS: dict[str, str] = {}


def of_families(model: onnx.ModelProto) -> bool:
    """Every node is an operation of some family."""
    return OPERATIONS.issuperset(_operations(model))


def excuse(model: onnx.ModelProto) -> str | None:
    """Why a test of the families needs the host: its tensors are of a type that kernels do not take."""
    allowed = TYPES.union(*(MORE_TYPES.get(op, ()) for op in _operations(model)))
    for type in _types(model.graph):
        if type not in allowed:
            name = TensorProto.DataType.Name(type)
            return f"kernels do not take {name.lower()}" if type else "a sequence or an optional is no tensor"
    return None


def families(model: onnx.ModelProto) -> frozenset[str]:
    """Families whose operations a model has."""
    operations = _operations(model)
    return frozenset(name for name, members in FAMILIES.items() if members & operations)


def _operations(model: onnx.ModelProto) -> set[str]:
    return {(f"{n.domain}." if n.domain not in ("", "ai.onnx") else "") + n.op_type for n in model.graph.node}


def _types(graph: onnx.GraphProto) -> Iterator[int]:
    """Element types of inputs, outputs, weights, and of what nodes say that they make; 0 for what is no tensor."""
    for info in [*graph.input, *graph.output, *graph.value_info]:
        yield info.type.tensor_type.elem_type
    for tensor in graph.initializer:
        yield tensor.data_type
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype", "output_dtype") and attribute.i:
                yield attribute.i
