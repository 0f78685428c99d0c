"""Options by which a command line describes an operation: its class, the names of its inputs, its attributes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

#: options of every operation
PLAIN = frozenset({"op", "input", "operand", "output", "epilogue", "attr", "problem"})
#: Kinds of ONNX attributes that have options of their own; others are given by --attr.
FLOAT, INT, STRING, FLOATS, INTS, STRINGS = _KINDS = (1, 2, 3, 6, 7, 8)
#: Inputs that are constant unless the command marks them as computed.
CONSTANT = frozenset({"weights", "recurrence", "bias", "scale", "mean", "variance", "zero-point"})


@dataclass(frozen=True)
class OpClass:
    """Operations that share a sub-command. ``default``: the operation that applies without --op."""

    about: str
    default: str | None
    #: names of operations, without their domains
    names: frozenset[str] = frozenset()
    #: an operation whose name contains one of these belongs to the class too
    parts: tuple[str, ...] = ()
    example: str = ""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: The classes. An operation belongs to the first class that names it, else to `elementwise` or `op`.
CLASSES: Mapping[str, OpClass] = {
    "conv": OpClass(
        "Convolutions.", "Conv", parts=("Conv",),
        example="conv --input 'float32[1,64,56,56]' --weights 'float32[64,64,3,3]' --pads 1,1,1,1",
    ),
    "matmul": OpClass(
        "Matrix products.", "MatMul", _names("Gemm QGemm"), ("MatMul",),
        example="matmul --a 'float32[128,768]' --b 'float32[768,768]!'",
    ),
    "pool": OpClass(
        "Pooling, with windows or global.", "MaxPool", parts=("Pool", "MaxUnpool"),
        example="pool --input 'float32[1,64,112,112]' --kernel-shape 3,3 --strides 2,2",
    ),
    "norm": OpClass(
        "Normalisations.", "LayerNormalization", _names("LRN"), ("Normalization",),
        example="norm --input 'float32[1,128,768]' --scale 'float32[768]' --bias 'float32[768]'",
    ),
    "softmax": OpClass(
        "Softmax and its kin.", "Softmax", _names("Hardmax"), ("Softmax",),
        example="softmax --input 'float32[12,128,128]' --axis=-1",
    ),
    "reduce": OpClass(
        "Reductions, arguments of extrema, running sums.", "ReduceMean",
        _names("ArgMax ArgMin CumSum CumProd TopK"), ("Reduce",),
        example="reduce --op ReduceSum --input 'float32[8,4096]' --axes '=[1]'",
    ),
    "recurrent": OpClass(
        "Recurrent layers.", "LSTM", parts=("LSTM", "GRU", "RNN"),
        example="recurrent --op GRU --input 'float32[16,1,64]' --weights 'float32[1,96,64]'"
        " --recurrence 'float32[1,96,32]' --hidden-size 32",
    ),
    "attention": OpClass(
        "Attention and position embeddings.", "Attention", parts=("Attention", "RotaryEmbedding"),
        example="attention --query 'float32[1,12,128,64]' --key 'float32[1,12,128,64]' --value 'float32[1,12,128,64]'",
    ),
    "quantize": OpClass(
        "To and from quantised integers.", "QuantizeLinear", parts=("QuantizeLinear", "DequantizeLinear"),
        example="quantize --input 'float32[1,64,56,56]' --scale 'float32[]' --zero-point '=0'",
    ),
    "sample": OpClass(
        "Resizing and sampling of images.", "Resize", _names("AffineGrid GridSample Resize RoiAlign"),
        example="sample --input 'float32[1,64,28,28]' --sizes '=[1,64,56,56]' --mode linear",
    ),
    "move": OpClass(
        "What moves or makes data and computes nothing.", None,
        _names(
            "Append BitCast CenterCropPad Compress Concat ConstantOfShape Copy Crop DepthToSpace Expand ExpandDims"
            " EyeLike Flatten Gather GatherElements GatherND Identity NonMaxSuppression NonZero OneHot Pad Pieces"
            " Pixels QLinearConcat Range Reorder ReorgYolo"
            " Reshape ReverseSequence Scatter ScatterElements ScatterND ShuffleChannels Slice SpaceToDepth Split"
            " Squeeze TensorScatter Tile Transpose Trilu Unique Unsqueeze"
        ),
        example="move --op Transpose --input 'float32[1,128,12,64]' --perm 0,2,1,3",
    ),
    "elementwise": OpClass(
        "Element by element, also with broadcasting.", None,
        _names(
            "Cast CastLike Equal Greater GreaterOrEqual IsInf IsNaN Less LessOrEqual QLinearAdd QLinearLeakyRelu"
            " QLinearMul QLinearSigmoid QLinearWhere SqueezeExcite"
        ),
        example="elementwise --op Add --input 'float32[1,64,56,56]' --input 'float32[64,1,1]!' --epilogue Relu",
    ),
    "op": OpClass(
        "Any operation; with --problem as JSON.", None,
        example="op --op NonZero --input 'float32[64]' --output 'int64[1,64]'",
    ),
}  # fmt: skip


def class_of(op: str) -> str:
    """Return the sub-command of an operation."""
    # imported late: the command line lists the classes without loading the operations
    from tunewright.ops import lookup

    spec = lookup(op)
    if spec is not None and spec.op_class:
        return spec.op_class
    name = op.rpartition("::")[2]
    for title, about in CLASSES.items():
        if name in about.names or any(part in name for part in about.parts):
            return title
    return "elementwise" if spec is not None and spec.elementwise else "op"


@dataclass(frozen=True)
class CommandForm:
    """Options of an operation: names of its inputs, and its attributes with their kinds."""

    roles: tuple[str, ...]
    kinds: Mapping[str, int]


@lru_cache(maxsize=1 << 10)  # bounded, because a user may type any name
def form(op: str) -> CommandForm:
    """Return the options: names of inputs as the operation's definition says, the rest by ONNX's newest schema.

    For operations of other domains the attributes are given by --attr, and without names the inputs in order.
    """
    import onnx.defs

    from tunewright.ops import lookup

    spec = lookup(op)
    roles = () if spec is None else spec.roles
    try:
        schema = onnx.defs.get_schema(op) if "::" not in op else None
    except onnx.defs.SchemaError:
        schema = None
    if schema is None:
        return CommandForm(roles, {})
    kinds = {name: int(a.type.value) for name, a in schema.attributes.items()}
    kinds = {name: kind for name, kind in kinds.items() if kind in _KINDS and name.replace("_", "-") not in PLAIN}
    single = [p for p in schema.inputs if p.option != onnx.defs.OpSchema.FormalParameterOption.Variadic]
    names = ["input", *(p.name.lower().replace("_", "-") for p in single[1:])] if single else []
    return CommandForm(roles or (tuple(names) if len(single) == len(schema.inputs) else ()), kinds)
