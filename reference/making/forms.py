"""Folders whose weights are quantized, and what their matrices are worth: `forms/<name>/`.

Numbers are packed here as each format defines it. What they are worth is said by `mlx`, by `compressed-tensors`, by
transformers (MXFP4) and by PyTorch's own FP8 type where one of them reads the format.
"""

import json
import pathlib
import shutil
import tempfile

import mlx.core as mx
import numpy as np
import torch
from compressed_tensors.compressors import FloatQuantizationCompressor, IntQuantizationCompressor, PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3Config, Qwen3MoeConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from . import bpe, models
from .families import fixture

SIZES = fixture.SMALL | {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
DENSE = Qwen3Config(**SIZES, architectures=["Qwen3ForCausalLM"])
EXPERTS = Qwen3MoeConfig(
    **SIZES, architectures=["Qwen3MoeForCausalLM"], num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True,
)  # fmt: skip
GPT_OSS = GptOssConfig(
    **SIZES | {
        "tie_word_embeddings": False, "intermediate_size": 32, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 8, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16,
            "beta_fast": 4.0, "beta_slow": 1.0, "truncate": False,
        },
    },
    architectures=["GptOssForCausalLM"],
)  # fmt: skip
Tensors = dict[str, torch.Tensor]


class Folder:
    """Tensors as the folder stores them, and as they are worth."""

    def __init__(self, config, seed: int):
        self.config, self.settings = config, json.loads(config.to_json_string(use_diff=False))
        self.random = np.random.default_rng(seed)
        self.stored: Tensors = {}
        self.worth: Tensors = {}
        self.names: list[str] = []  # of quantized matrices
        self.stacked: Tensors = {}  # several of them, as one tensor is read
        with tempfile.TemporaryDirectory() as scratch:  # saved, so that names are those of the hub
            drawn = fixture.draw(fixture.Fixture("form", config, seed))
            drawn.save_pretrained(scratch)
            self.drawn = {
                name: torch.from_numpy(values) for name, values in fixture.load_file(f"{scratch}/model.safetensors").items()
            }

    def matrices(self, *parts: str) -> list[str]:
        """Modules that are quantized in all forms, or those that have one of these parts in their names."""
        usual = ("_proj",)
        names = (name.removesuffix(".weight") for name, values in self.drawn.items() if values.ndim == 2 and name.endswith(".weight"))
        return [name for name in names if any(part in name for part in parts or usual)]

    def put(self, module: str, worth: torch.Tensor, **parts: torch.Tensor) -> None:
        self.drawn.pop(f"{module}.weight")
        self.worth[f"{module}.weight"] = worth.to(torch.float32)
        self.names.append(f"{module}.weight")
        self.stored |= {f"{module}.{part}": values for part, values in parts.items()}

    def write(self, folder: pathlib.Path, name: str, shown: list[str], **settings) -> None:
        """`shown` are parts of the names of matrices whose values are kept."""
        folder = folder / name
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "hf").mkdir(parents=True)
        plain = {name: values.to(torch.bfloat16) for name, values in self.drawn.items()}
        models.save({name: values.contiguous() for name, values in (self.stored | plain).items()}, folder / "hf/model.safetensors")
        models.write_json(folder / "hf/config.json", self.settings | settings)
        made = bpe.tokenizer("qwen2", fixture.TOKENS, [("A", "B")], fixture.SPECIAL)
        (folder / "hf/tokenizer.json").write_text(made.to_str() + "\n", encoding="utf-8")
        worth = self.worth | {name: values.to(torch.float32) for name, values in plain.items()}
        about, logits = self.logits(worth)
        logits.astype("<f4").tofile(folder / "logits.f32")
        kept = {name: values for name, values in self.values().items() if any(part in name for part in shown)}
        assert kept, shown
        about["values"] = list(kept)
        np.concatenate([values.numpy().astype("<f4").ravel() for values in kept.values()]).tofile(folder / "values.f32")
        (folder / "expected.json").write_text(json.dumps(about) + "\n")

    def values(self) -> Tensors:
        return {name: self.worth[name] for name in self.names} | self.stacked

    @fixture.in_double()
    def logits(self, worth: Tensors) -> tuple[dict, np.ndarray]:
        with tempfile.TemporaryDirectory() as scratch:
            models.save({name: values.contiguous() for name, values in worth.items()}, pathlib.Path(scratch) / "model.safetensors")
            self.config.save_pretrained(scratch)
            loaded = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32, attn_implementation="eager")
        loaded.config._experts_implementation = "eager"
        tokens = [int(token) for token in self.random.integers(0, fixture.VOCAB, 20)]
        rows = [0, 7, 19]
        logits = models.logits(loaded.eval().double(), tokens)[rows]
        return {"vocab": fixture.VOCAB, "tokens": tokens, "rows": rows}, logits


# --- FP8 -------------------------------------------------------------------------------------


def fp8(values: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes, and what they are worth with `scales`, one for each element or fewer."""
    stored = (values / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return stored, stored.to(torch.float32) * scales


def spread(scales: torch.Tensor, block: tuple[int, int], shape) -> torch.Tensor:
    wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[: shape[0], : shape[1]]


def fp8_block(out: pathlib.Path, config, name: str, seed: int, shown: list[str]) -> None:
    """Blocks that divide neither rows nor columns."""
    folder, block = Folder(config, seed), (48, 40)
    for module in folder.matrices():
        values = folder.drawn[f"{module}.weight"]
        count = [-(-size // step) for size, step in zip(values.shape, block)]
        scales = torch.from_numpy(folder.random.uniform(0.3, 1.5, count).astype(np.float32)) / 448
        stored, worth = fp8(values, spread(scales, block, values.shape))
        folder.put(module, worth, weight=stored, weight_scale_inv=scales)
    folder.write(out, name, shown, quantization_config={
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(block),
    })  # fmt: skip


def fp8_tensor(out: pathlib.Path) -> None:
    """One scale for all of a matrix, and one of activations, which is not for us."""
    folder = Folder(DENSE, 202)
    for module in folder.matrices():
        values = folder.drawn[f"{module}.weight"]
        scale = (values.abs().max() / 448).to(torch.bfloat16)
        stored, worth = fp8(values, scale.to(torch.float32))
        folder.put(module, worth, weight=stored, weight_scale_inv=scale, activation_scale=torch.tensor(0.02))
    folder.write(out, "fp8-tensor", ["k_proj"], quantization_config={
        "quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "modules_to_not_convert": ["lm_head"],
    })  # fmt: skip


# --- compressed-tensors ----------------------------------------------------------------------

COMPRESSORS = {
    "pack-quantized": PackedQuantizationCompressor, "int-quantized": IntQuantizationCompressor,
    "float-quantized": FloatQuantizationCompressor,
}  # fmt: skip


def compressed(out: pathlib.Path, name: str, seed: int, kind: str, **weights) -> None:
    """Compressed and decompressed by the library."""
    folder = Folder(DENSE, seed)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor, bits = COMPRESSORS[kind], weights["num_bits"]
    for module in folder.matrices():
        values = folder.drawn[f"{module}.weight"].to(torch.float32)
        size = weights.get("group_size", values.shape[1])
        groups = values.reshape(values.shape[0], -1, size)
        if weights["type"] == "float":
            scale, zero = groups.abs().amax(-1) / 448, None
        elif weights["symmetric"]:
            scale, zero = groups.abs().amax(-1) / (2 ** (bits - 1) - 0.5), None
        else:
            low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
            scale = (high - low) / (2**bits - 1)
        # As such files have them; values are decompressed in this type otherwise.
        scale = scale.to(torch.bfloat16).to(torch.float32)
        if weights["type"] != "float" and not weights["symmetric"]:
            zero = (torch.round(-low / scale) - 2 ** (bits - 1)).clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).to(torch.int8)
        state = {"weight": values, "weight_scale": scale} | ({} if zero is None else {"weight_zero_point": zero})
        parts = compressor.compress(state, scheme)
        worth = compressor.decompress(parts, scheme)["weight"]
        parts["weight_scale"] = parts["weight_scale"].to(torch.bfloat16)
        folder.put(module, worth, **parts)
    folder.write(out, name, ["k_proj"], quantization_config={
        "quant_method": "compressed-tensors", "format": kind, "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "kv_cache_scheme": None,
    })  # fmt: skip


# --- GPTQ and AWQ ----------------------------------------------------------------------------


def pack(levels: np.ndarray, bits: int, order=None) -> torch.Tensor:
    """Along the last axis, the first number in the lowest bits."""
    each = 32 // bits
    levels = levels.astype(np.uint32).reshape(*levels.shape[:-1], -1, each)
    levels = levels if order is None else levels[..., order]
    words = (levels << (bits * np.arange(each, dtype=np.uint32))).sum(-1, dtype=np.uint64).astype(np.uint32)
    return torch.from_numpy(words.view(np.int32))


def quantized(folder: Folder, module: str, bits: int, group_of: np.ndarray, symmetric: bool):
    """Numbers `[inputs, outputs]`, zero points and scales `[groups, outputs]`, and what they are worth."""
    values = folder.drawn[f"{module}.weight"].numpy().T.astype(np.float64)
    count = int(group_of.max()) + 1
    parts = [values[group_of == group] for group in range(count)]
    most = 2**bits - 1
    low, high = (np.array([edge(part, axis=0) for part in parts]) for edge in (np.min, np.max))
    if symmetric:
        high = np.maximum(np.abs(low), np.abs(high))
        low = -high
    scales = ((high - low) / most).astype(np.float16)
    zeros = np.full(scales.shape, 2 ** (bits - 1)) if symmetric else np.clip(np.round(-low / scales), 0, most).astype(int)
    levels = np.clip(np.round(values / scales[group_of]) + zeros[group_of], 0, most).astype(int)
    worth = (levels - zeros[group_of]) * scales[group_of].astype(np.float32)
    return levels, zeros, scales, torch.from_numpy(worth.T.astype(np.float32))


def gptq(out: pathlib.Path, name: str, seed: int, bits: int, group: int, **settings) -> None:
    folder = Folder(DENSE, seed)
    for module in folder.matrices():
        inputs = folder.drawn[f"{module}.weight"].shape[1]
        group_of = np.arange(inputs) // (group if group > 0 else inputs)
        if settings["desc_act"]:
            group_of = folder.random.permutation(group_of)
        levels, zeros, scales, worth = quantized(folder, module, bits, group_of, settings["sym"])
        less = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
        folder.put(
            module, worth, qweight=pack(levels.T, bits).T, qzeros=pack((zeros - less) & (2**bits - 1), bits),
            scales=torch.from_numpy(scales), g_idx=torch.from_numpy(group_of.astype(np.int32)),
        )  # fmt: skip
    folder.write(out, name, ["k_proj"], quantization_config={
        "quant_method": "gptq", "bits": bits, "group_size": group, "damp_percent": 0.01, **settings,
    })  # fmt: skip


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def awq(out: pathlib.Path) -> None:
    folder = Folder(DENSE, 231)
    for module in folder.matrices():
        group_of = np.arange(folder.drawn[f"{module}.weight"].shape[1]) // 32
        levels, zeros, scales, worth = quantized(folder, module, 4, group_of, symmetric=False)
        folder.put(
            module, worth, qweight=pack(levels, 4, AWQ_ORDER), qzeros=pack(zeros, 4, AWQ_ORDER), scales=torch.from_numpy(scales),
        )  # fmt: skip
    folder.write(out, "awq", ["k_proj"], quantization_config={
        "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
    })  # fmt: skip


# --- MLX -------------------------------------------------------------------------------------


def to_torch(values: mx.array) -> torch.Tensor:
    if values.dtype == mx.bfloat16:
        return to_torch(values.view(mx.uint16)).view(torch.bfloat16)
    made = torch.from_numpy(np.array(values))
    return made.view(torch.int32).view(torch.uint32) if values.dtype == mx.uint32 else made


def mlx_quantized(values: torch.Tensor, group: int, bits: int) -> tuple[torch.Tensor, Tensors]:
    """By the library; dequantized in float32, as its kernels compute."""
    packed, scales, biases = mx.quantize(mx.array(values.numpy()).astype(mx.bfloat16), group_size=group, bits=bits)
    worth = mx.dequantize(packed, scales.astype(mx.float32), biases.astype(mx.float32), group_size=group, bits=bits)
    return to_torch(worth), {"weight": to_torch(packed), "scales": to_torch(scales), "biases": to_torch(biases)}


def mlx(out: pathlib.Path) -> None:
    """Four bits but where the description says otherwise; the embedding too."""
    folder = Folder(DENSE, 241)
    settings = {"group_size": 64, "bits": 4, "mode": "affine"}
    own = {"k_proj": (32, 8), "v_proj": (32, 6), "o_proj": (64, 5), "gate_proj": (32, 3), "up_proj": (64, 2)}
    for module in folder.matrices("_proj", "embed_tokens"):
        group, bits = next((found for part, found in own.items() if module.endswith(part)), (64, 4))
        if (group, bits) != (64, 4):
            settings[module] = {"group_size": group, "bits": bits}
        worth, parts = mlx_quantized(folder.drawn[f"{module}.weight"], group, bits)
        folder.put(module, worth, **parts)
    folder.write(out, "mlx", ["k_proj", "v_proj", "o_proj", "embed"], quantization=settings, quantization_config=settings)


def mlx_experts(out: pathlib.Path) -> None:
    """A layer's experts in one tensor, under MLX's own name; the router is of 8 bits."""
    folder = Folder(EXPERTS, 242)
    settings = {"group_size": 32, "bits": 4}
    for part in ("gate_proj", "up_proj", "down_proj"):
        block = "model.layers.0.mlp"
        experts = [folder.drawn[f"{block}.experts.{expert}.{part}.weight"] for expert in range(4)]
        for expert in range(4):
            del folder.drawn[f"{block}.experts.{expert}.{part}.weight"]
        worth, parts = mlx_quantized(torch.stack(experts), 32, 4)
        folder.stored |= {f"{block}.switch_mlp.{part}.{name}": values for name, values in parts.items()}
        folder.worth |= {f"{block}.experts.{expert}.{part}.weight": values for expert, values in enumerate(worth)}
        folder.stacked[f"{block}.experts.{part}.weight"] = worth
    for module in folder.matrices("_proj", "mlp.gate"):
        bits = 8 if module.endswith("gate") else 4
        if bits == 8:
            settings[module] = {"group_size": 64, "bits": 8}
        worth, parts = mlx_quantized(folder.drawn[f"{module}.weight"], settings.get(module, settings)["group_size"], bits)
        folder.put(module, worth, **parts)
    folder.write(out, "mlx-experts", ["experts.down_proj", "mlp.gate."], quantization=settings)


def mlx_mxfp4(out: pathlib.Path) -> None:
    """A matrix with settings of its own is affine unless they say otherwise."""
    folder = Folder(DENSE, 243)
    settings = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    for module in folder.matrices():
        if module.endswith("v_proj"):
            settings[module] = {"bits": 3}
            worth, parts = mlx_quantized(folder.drawn[f"{module}.weight"], 64, 3)
            folder.put(module, worth, **parts)
            continue
        packed, scales = mx.quantize(mx.array(folder.drawn[f"{module}.weight"].numpy()), group_size=32, bits=4, mode="mxfp4")
        worth = mx.dequantize(packed, scales, group_size=32, bits=4, mode="mxfp4", dtype=mx.float32)
        folder.put(module, to_torch(worth), weight=to_torch(packed), scales=to_torch(scales))
    folder.write(out, "mlx-mxfp4", ["k_proj", "v_proj"], quantization=settings)


# --- MXFP4 of gpt-oss ------------------------------------------------------------------------


def mxfp4(out: pathlib.Path) -> None:
    """Random floats; transformers says what they are worth."""
    folder = Folder(GPT_OSS, 251)
    for name in [name for name in folder.drawn if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = folder.drawn.pop(name).shape
        shape = (experts, rows, columns // 32)
        blocks = torch.from_numpy(folder.random.integers(0, 256, (*shape, 16)).astype(np.uint8))
        scales = torch.from_numpy(folder.random.integers(121, 124, shape).astype(np.uint8))
        folder.stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        worth = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        assert worth.shape == (experts, columns, rows), worth.shape
        folder.worth[name] = worth
        parts = {"down": worth} if "down" in name else {"gate": worth[..., ::2], "up": worth[..., 1::2]}
        module = name.replace("gate_up_proj", "{}_proj").replace("down_proj", "{}_proj")
        folder.stacked |= {f"{module.format(part)}.weight": values.swapaxes(1, 2) for part, values in parts.items()}
    folder.write(
        out, "mxfp4", ["layers.1.mlp"],
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    )  # fmt: skip


def make(out: pathlib.Path) -> None:
    out = out / "forms"
    out.mkdir(parents=True, exist_ok=True)
    fp8_block(out, DENSE, "fp8-block", 201, ["k_proj"])
    fp8_block(out, EXPERTS, "fp8-experts", 203, ["experts.2.down_proj"])
    fp8_tensor(out)
    group = {"strategy": "group", "group_size": 32, "num_bits": 4, "type": "int"}
    compressed(out, "compressed-int4", 211, "pack-quantized", symmetric=True, **group)
    compressed(out, "compressed-int4-zeros", 212, "pack-quantized", symmetric=False, **group)
    channel = {"strategy": "channel", "num_bits": 8}
    compressed(out, "compressed-int8", 213, "pack-quantized", symmetric=True, type="int", **channel)
    compressed(out, "compressed-bytes", 214, "int-quantized", symmetric=True, type="int", **channel)
    compressed(out, "compressed-fp8", 215, "float-quantized", symmetric=True, type="float", **channel)
    gptq(out, "gptq", 221, 4, 32, desc_act=False, sym=True)
    gptq(out, "gptq-zeros", 222, 4, -1, desc_act=True, sym=False)
    gptq(out, "gptq-order", 223, 4, 32, desc_act=True, sym=False, checkpoint_format="gptq_v2")
    gptq(out, "gptq-8", 224, 8, 64, desc_act=False, sym=True)
    awq(out)
    mlx(out)
    mlx_experts(out)
    mlx_mxfp4(out)
    mxfp4(out)
