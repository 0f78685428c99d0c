"""Exports transformers as their users do: `transformers` configs with random weights, both of torch's exporters.

    python bench/zoo_transformers.py export --folder zoo --only bert,llama
    python bench/zoo_transformers.py check --folder zoo

`export` needs torch, transformers and onnxscript, which nothing else here does. `check` runs every model of the folder,
compares it with ONNX Runtime without optimisations, and says how many attentions were recognised, which operations run
on the host, and the time of an inference beside ONNX Runtime's, measured in turns.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

Arrays = dict[str, np.ndarray[Any, Any]]
#: of two inferences: results in fp16 differ by the order of sums
TOLERANCE = {"fp32": 2e-4, "fp16": 3e-2, "int8": 5e-2, "int4": 2e-3}
#: nodes that stand between a softmax and the product with values, or in front of it behind the scores
BETWEEN = frozenset(
    {"Where", "Cast", "Identity", "Dropout", "Mul", "Add", "Sub", "Div", "Reshape", "Squeeze", "Unsqueeze", "Transpose"}
    | {"Expand", "IsNaN", "Concat", "Slice", "Max", "Min", "Clip", "Tanh", "CastLike", "Pad", "Neg"}
)
PRODUCTS = frozenset({"MatMul", "Einsum", "Gemm"})


@dataclass(frozen=True)
class Family:
    """One architecture: ``make`` gives a module and its example inputs for an implementation of attention."""

    name: str
    make: Callable[[str], tuple[Any, dict[str, Any]]]
    #: implementations of attention that it has
    forms: tuple[str, ...] = ("sdpa", "eager")


@dataclass(frozen=True)
class Variant:
    """One way to export: exporter, opset, precision; ``open``: batch and lengths have names instead of sizes."""

    exporter: str
    opset: int
    precision: str
    open: bool = False

    def __str__(self) -> str:
        return f"{self.exporter}{self.opset}{'open' if self.open else ''}-{self.precision}"


VARIANTS = (
    Variant("dynamo", 18, "fp32"), Variant("dynamo", 23, "fp32"), Variant("legacy", 18, "fp32"),
    Variant("dynamo", 18, "fp16"), Variant("legacy", 18, "fp16"),
    Variant("dynamo", 18, "fp32", True), Variant("legacy", 18, "fp32", True),
    # made of the fp32 model by ONNX Runtime's quantisers
    Variant("dynamo", 18, "int8"), Variant("dynamo", 18, "int4"),
)  # fmt: skip
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
LARGER = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 1024}
TOKENS = 19


def _tokens(length: int = TOKENS, batch: int = 2, top: int = 90) -> Any:
    import torch

    return torch.randint(3, top, (batch, length))


def _mask(length: int = TOKENS, batch: int = 2) -> Any:
    import torch

    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[-1, length - 4 :] = 0
    return mask


def text(config: str, model: str, masked: bool = True, **options: Any) -> Callable[[str], tuple[Any, dict[str, Any]]]:
    """A network over token ids."""

    def make(form: str) -> tuple[Any, dict[str, Any]]:
        import transformers

        made = getattr(transformers, config)(vocab_size=100, **options)
        made._attn_implementation = form
        made.use_cache = False
        inputs = {"input_ids": _tokens(), **({"attention_mask": _mask()} if masked else {})}
        return getattr(transformers, model)(made), inputs

    return make


def picture(config: str, model: str, size: int = 32, **options: Any) -> Callable[[str], tuple[Any, dict[str, Any]]]:
    """A network over pictures."""

    def make(form: str) -> tuple[Any, dict[str, Any]]:
        import torch
        import transformers

        made = getattr(transformers, config)(**options)
        made._attn_implementation = form
        return getattr(transformers, model)(made), {"pixel_values": torch.randn(2, 3, size, size)}

    return make


def two_sided(config: str, model: str, **options: Any) -> Callable[[str], tuple[Any, dict[str, Any]]]:
    """An encoder and a decoder over token ids."""

    def make(form: str) -> tuple[Any, dict[str, Any]]:
        import transformers

        made = getattr(transformers, config)(vocab_size=100, decoder_start_token_id=0, pad_token_id=1, **options)
        made._attn_implementation = form
        made.use_cache = False
        inputs = {"input_ids": _tokens(), "attention_mask": _mask(), "decoder_input_ids": _tokens(7)}
        return getattr(transformers, model)(made), inputs

    return make


def whisper(form: str) -> tuple[Any, dict[str, Any]]:
    import torch
    import transformers

    made = transformers.WhisperConfig(
        vocab_size=100, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, num_mel_bins=16, max_source_positions=24,
        max_target_positions=32, decoder_start_token_id=0, pad_token_id=1, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    made._attn_implementation = form
    made.use_cache = False
    inputs = {"input_features": torch.randn(1, 16, 48), "decoder_input_ids": _tokens(7, 1)}
    return transformers.WhisperForConditionalGeneration(made), inputs


def cached(config: str, model: str, **options: Any) -> Callable[[str], tuple[Any, dict[str, Any]]]:
    """A decoder with keys and values of the past as inputs, and longer ones as results."""

    def make(form: str) -> tuple[Any, dict[str, Any]]:
        import torch
        import transformers

        made = getattr(transformers, config)(vocab_size=100, **options)
        made._attn_implementation = form
        inner = getattr(transformers, model)(made)
        groups = getattr(made, "num_key_value_heads", None) or made.num_attention_heads
        shape = (1, groups, 11, made.hidden_size // made.num_attention_heads)

        class Step(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, input_ids: Any, attention_mask: Any, past: Sequence[Any]) -> Any:
                cache = transformers.DynamicCache()
                for layer in range(made.num_hidden_layers):
                    cache.update(past[2 * layer], past[2 * layer + 1], layer)
                out = self.inner(
                    input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True
                )
                present = [t for layer in out.past_key_values.layers for t in (layer.keys, layer.values)]
                return (out[0], *present)

        past = [torch.randn(shape) for _ in range(2 * made.num_hidden_layers)]
        return Step(), {"input_ids": _tokens(1, 1), "attention_mask": _mask(12, 1), "past": past}

    return make


_BART = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 64,
}  # fmt: skip
_GROUPED = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 64}

FAMILIES = (
    Family("bert", text("BertConfig", "BertModel", **SMALL)),
    Family("distilbert", text("DistilBertConfig", "DistilBertModel", dim=64, n_layers=2, n_heads=4, hidden_dim=128)),
    Family("roberta", text("RobertaConfig", "RobertaModel", **SMALL)),
    Family("electra", text("ElectraConfig", "ElectraModel", embedding_size=32, **SMALL)),
    Family("albert", text("AlbertConfig", "AlbertModel", embedding_size=32, **SMALL)),
    Family("mpnet", text("MPNetConfig", "MPNetModel", **SMALL), ("eager",)),
    Family("deberta", text("DebertaV2Config", "DebertaV2Model", relative_attention=True, pos_att_type=["p2c", "c2p"],
                           position_buckets=16, **SMALL), ("eager",)),
    Family("modernbert", text("ModernBertConfig", "ModernBertModel", pad_token_id=0, cls_token_id=1, sep_token_id=2,
                              bos_token_id=1, eos_token_id=2, local_attention=8, **SMALL)),
    Family("gpt2", text("GPT2Config", "GPT2LMHeadModel", n_embd=64, n_layer=2, n_head=4)),
    Family("gpt-neox", text("GPTNeoXConfig", "GPTNeoXForCausalLM", **SMALL)),
    Family("opt", text("OPTConfig", "OPTForCausalLM", ffn_dim=128, word_embed_proj_dim=64, hidden_size=64,
                       num_hidden_layers=2, num_attention_heads=4)),
    Family("bloom", text("BloomConfig", "BloomForCausalLM", hidden_size=64, n_layer=2, n_head=4), ("eager",)),
    Family("falcon", text("FalconConfig", "FalconForCausalLM", hidden_size=64, num_hidden_layers=2,
                          num_attention_heads=4)),
    Family("llama", text("LlamaConfig", "LlamaForCausalLM", **_GROUPED)),
    Family("mistral", text("MistralConfig", "MistralForCausalLM", sliding_window=8, **_GROUPED)),
    Family("qwen2", text("Qwen2Config", "Qwen2ForCausalLM", **_GROUPED)),
    Family("qwen3", text("Qwen3Config", "Qwen3ForCausalLM", head_dim=16, **_GROUPED)),
    Family("gemma", text("GemmaConfig", "GemmaForCausalLM", head_dim=16, **_GROUPED)),
    Family("gemma2", text("Gemma2Config", "Gemma2ForCausalLM", head_dim=16, sliding_window=8, **_GROUPED), ("eager",)),
    Family("phi", text("PhiConfig", "PhiForCausalLM", **SMALL)),
    Family("xlnet", text("XLNetConfig", "XLNetModel", d_model=64, n_layer=2, n_head=4, d_inner=128), ("eager",)),
    Family("t5", two_sided("T5Config", "T5ForConditionalGeneration", d_model=64, d_kv=16, d_ff=128, num_layers=2,
                           num_heads=4), ("sdpa", "eager")),
    Family("bart", two_sided("BartConfig", "BartForConditionalGeneration", **_BART)),
    Family("marian", two_sided("MarianConfig", "MarianMTModel", **_BART)),
    Family("whisper", whisper),
    Family("vit", picture("ViTConfig", "ViTModel", image_size=32, patch_size=8, **SMALL)),
    Family("deit", picture("DeiTConfig", "DeiTModel", image_size=32, patch_size=8, **SMALL)),
    Family("beit", picture("BeitConfig", "BeitModel", image_size=32, patch_size=8, use_relative_position_bias=True,
                           **SMALL)),
    Family("swin", picture("SwinConfig", "SwinModel", image_size=32, patch_size=2, embed_dim=32, depths=[2, 2],
                           num_heads=[2, 4], window_size=4), ("eager",)),
    Family("segformer", picture("SegformerConfig", "SegformerModel", size=64), ("eager",)),
    Family("llama-cached", cached("LlamaConfig", "LlamaForCausalLM", **_GROUPED)),
    Family("gpt2-cached", cached("GPT2Config", "GPT2LMHeadModel", n_embd=64, n_layer=2, n_head=4)),
    Family("bert-large", text("BertConfig", "BertModel", **LARGER)),
    Family("llama-large", text("LlamaConfig", "LlamaForCausalLM", num_key_value_heads=2, **LARGER)),
)  # fmt: skip


# -- export -----------------------------------------------------------------------------------------------------------


def export(folder: Path, only: Sequence[str]) -> None:
    """Writes each model with its inputs; a model that torch cannot export is told and left out."""
    import torch

    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    folder.mkdir(parents=True, exist_ok=True)
    for family in FAMILIES:
        for form in family.forms if not only or family.name in only else ():
            for variant in VARIANTS:
                name = f"{family.name}.{form}.{variant}"
                if (folder / f"{name}.onnx").exists():
                    continue
                torch.manual_seed(0)
                try:
                    if variant.precision.startswith("int"):
                        _quantise(folder, f"{family.name}.{form}.dynamo18-fp32", name, variant.precision)
                    else:
                        _export_one(folder, name, *family.make(form), variant)
                except Exception as error:  # exporters raise anything
                    sys.stdout.write(f"{name}: not exported: {str(error).strip().splitlines()[:1]}\n")
                else:
                    sys.stdout.write(f"{name}\n")
                sys.stdout.flush()


def _export_one(folder: Path, name: str, module: Any, inputs: dict[str, Any], variant: Variant) -> None:
    import torch

    module = module.eval()
    with torch.no_grad():  # fresh weights are ones and zeros here and there, which passes would see through
        for weight in module.parameters():
            if weight.dim() == 1:
                weight.add_(0.2 * torch.randn_like(weight))
    if variant.precision == "fp16":
        module = module.half()
        inputs = {k: _half(v) for k, v in inputs.items()}
    path = folder / f"{name}.onnx"
    flat = {k: v for key, value in inputs.items() for k, v in _named(key, value)}
    with torch.no_grad():
        if variant.exporter == "dynamo":
            made = torch.onnx.export(
                module, (), kwargs=inputs, dynamo=True, opset_version=variant.opset, verbose=False,
                external_data=False, dynamic_shapes=_dynamic(inputs) if variant.open else None,
            )  # fmt: skip
            made.save(str(path))
        else:
            torch.onnx.export(
                _positional(module, inputs), tuple(flat.values()), str(path), dynamo=False,
                opset_version=variant.opset, input_names=list(flat),
                dynamic_axes={k: _axes(v) for k, v in flat.items()} if variant.open else None,
            )  # fmt: skip
    given = [i.name for i in onnx.load(str(path), load_external_data=False).graph.input]
    arrays = {name: tensor.numpy() for name, tensor in zip(given, flat.values(), strict=True)}
    np.savez(folder / f"{name}.npz", **arrays)


def _axes(tensor: Any) -> list[int]:
    """Axes whose sizes change: batch and length of tokens, batch and length of a past, the batch of anything else."""
    return [0] if tensor.is_floating_point() and tensor.shape[0] == 2 else [0, 2] if tensor.dim() == 4 else [0, 1]


def _dynamic(value: Any) -> Any:
    import torch

    if isinstance(value, dict):
        return {k: _dynamic(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_dynamic(v) for v in value]
    return dict.fromkeys(_axes(value), torch.export.Dim.AUTO)


def _quantise(folder: Path, source: str, name: str, precision: str) -> None:
    """A model with products of bytes, or with weights of four bits."""
    given, made = folder / f"{source}.onnx", folder / f"{name}.onnx"
    if precision == "int8":
        from onnxruntime.quantization import QuantType, quantize_dynamic

        quantize_dynamic(given, made, weight_type=QuantType.QInt8, op_types_to_quantize=["MatMul", "Gemm"])
    else:
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

        quantiser = MatMulNBitsQuantizer(onnx.load(str(given)), block_size=32, is_symmetric=False)
        quantiser.process()
        onnx.save(quantiser.model.model, str(made))
    np.savez(folder / f"{name}.npz", **np.load(given.with_suffix(".npz")))


def _positional(module: Any, inputs: dict[str, Any]) -> Any:
    """The module as the legacy exporter takes it: flat arguments, the first result alone."""
    import torch

    class Positional(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, *given: Any) -> Any:
            left = iter(given)
            made = {k: [next(left) for _ in v] if isinstance(v, list) else next(left) for k, v in inputs.items()}
            out = self.inner(**made)
            return out if isinstance(out, tuple) else out[0]

    return Positional().eval()


def _half(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_half, value))
    return value.half() if value.is_floating_point() else value


def _named(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        for i, one in enumerate(value):
            yield f"{name}_{i}", one
    else:
        yield name, value


# -- check ------------------------------------------------------------------------------------------------------------


def attentions(model: onnx.ModelProto) -> int:
    """Softmaxes between two products, and attentions that the file names: counted in the file itself."""
    nodes = list(model.graph.node)
    makers = {out: node for node in nodes for out in node.output}
    users: dict[str, list[onnx.NodeProto]] = {}
    for node in nodes:
        for name in node.input:
            users.setdefault(name, []).append(node)

    def reaches(start: onnx.NodeProto, step: Callable[[onnx.NodeProto], Sequence[onnx.NodeProto]]) -> bool:
        seen: set[int] = set()
        queue = [(n, 0) for n in step(start)]
        while queue:
            node, depth = queue.pop()
            if node.op_type in PRODUCTS:
                return True
            if node.op_type in BETWEEN and id(node) not in seen and depth < 12:
                seen.add(id(node))
                queue += [(n, depth + 1) for n in step(node)]
        return False

    def before(node: onnx.NodeProto) -> list[onnx.NodeProto]:
        return [makers[name] for name in node.input if name in makers]

    def behind(node: onnx.NodeProto) -> list[onnx.NodeProto]:
        return [user for name in node.output for user in users.get(name, [])]

    loose = sum(n.op_type == "Softmax" and reaches(n, before) and reaches(n, behind) for n in nodes)
    return loose + sum("Attention" in n.op_type for n in nodes)


@dataclass(frozen=True)
class Found:
    """What became of one model."""

    name: str
    wrong: str
    meant: int
    recognised: int
    host: dict[str, int]
    ours: float
    theirs: float
    steps: dict[str, int]


def check_one(path: Path, device: str, seconds: float) -> Found:
    import onnxruntime as ort

    import tunewright

    model = onnx.load(str(path))
    arrays = dict(np.load(path.with_suffix(".npz")))
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    want = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, arrays)
    compiled = tunewright.Core().compile_model(path, device)
    got = compiled(arrays)
    wrong = _difference([got[o.name] for o in model.graph.output], want, TOLERANCE[path.stem.rsplit("-", 1)[1]])
    steps = [s for p in compiled.program.plans[-1:] for s in p.steps if not s.optimized_out]
    ops = Counter(s.node.op for s in steps)
    recognised = sum(n for op, n in ops.items() if "Attention" in op)
    host = Counter(s.node.op for s in steps if s.on_host)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    peer = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    ours, theirs = turns([lambda: compiled(arrays), lambda: peer.run(None, arrays)], seconds)
    return Found(path.stem, wrong, attentions(model), recognised, dict(host), ours, theirs, dict(ops.most_common()))


def _difference(got: Sequence[Any], want: Sequence[Any], tolerance: float) -> str:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if x.shape != y.shape:
            return f"output {i} has shape {x.shape}, not {y.shape}"
        if not np.array_equal(np.isnan(x), np.isnan(y)):
            return f"output {i} has NaNs elsewhere"
        x, y = np.nan_to_num(x), np.nan_to_num(y)
        worst = float(np.abs(x - y).max(initial=0) / np.abs(y).max(initial=1))
        if worst > tolerance:
            return f"output {i} differs by {worst:.1e}"
    return ""


def turns(calls: Sequence[Callable[[], Any]], seconds: float) -> list[float]:
    """The least time of each call, in turns."""
    best = [float("inf")] * len(calls)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, call in enumerate(calls):
            for _ in range(3):
                begin = time.perf_counter()
                call()
                best[i] = min(best[i], time.perf_counter() - begin)
    return best


def check(folder: Path, only: Sequence[str], device: str, seconds: float, out: Path | None) -> None:
    found: list[Found] = []
    for path in sorted(folder.glob("*.onnx")):
        if only and not any(path.name.startswith(f"{o}.") or o == path.stem for o in only):
            continue
        try:
            one = check_one(path, device, seconds)
        except Exception as error:
            sys.stdout.write(f"{path.stem}: {type(error).__name__}: {str(error).splitlines()[:1]}\n")
            continue
        found.append(one)
        host = " ".join(f"{op}:{n}" for op, n in one.host.items())
        sys.stdout.write(
            f"{one.name:38} {one.recognised:2}/{one.meant:2} {1e3 * one.ours:7.3f} {1e3 * one.theirs:7.3f} "
            f"{one.theirs / one.ours:5.2f} {sum(one.steps.values()):4} {host} {one.wrong}\n"
        )
        sys.stdout.flush()
    if found:
        ratio = float(np.exp(np.mean([np.log(f.theirs / f.ours) for f in found])))
        meant, seen = sum(f.meant for f in found), sum(min(f.recognised, f.meant) for f in found)
        sys.stdout.write(
            f"{len(found)} models, {seen} of {meant} attentions recognised, {sum(sum(f.host.values()) for f in found)} "
            f"host operations, geometric mean {ratio:.2f}, {sum(bool(f.wrong) for f in found)} wrong\n"
        )
    if out is not None:
        out.write_text(json.dumps([vars(f) for f in found], indent=1), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("export", "check"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--only", default="", help="families (or, for check, models), separated by commas")
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each comparison of speed")
    parser.add_argument("--json", type=Path, help="also write what was found to this file")
    given = parser.parse_args()
    only = [name for name in given.only.split(",") if name]
    if given.what == "export":
        export(given.folder, only)
    else:
        check(given.folder, only, given.device, given.seconds, given.json)


if __name__ == "__main__":
    main()
