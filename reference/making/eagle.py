"""Heads in files of their own (EAGLE-3): what SafeAILab, `speculators` and llama.cpp's converter write, of tiny random weights.

Norms, rotation, feed-forward block and attention are transformers'; how they are put together, which none of its models does, is
written out here. The first head is built so that it agrees with its model often: its attention finds the token itself and hands its
embedding on, which is what the model follows above all.
"""

import dataclasses
import json
import pathlib

import gguf
import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama as llama

from . import models
from .families import fixture
from .families.fixture import SMALL, VOCAB, Fixture

TOKENS, GUESSES, LAYERS, WIDTH = 40, 4, 6, 16
# What becomes of matrices whose products are added to the residual stream, and of the embedding that it begins with.
QUIET, LOUD = 1 / 8, 8
ROPE = {"rope_type": "default", "rope_theta": 100.0}
STRETCHED = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """One way that such heads are made."""

    folder: str
    seed: int
    kv_heads: int
    rope: dict
    tokens: int  # that it can guess
    taps: tuple[int, ...] | None = None  # None: a low, a middle and a high layer
    own_embedding: bool = False
    tap_norm: str | None = None  # "whole", "each"
    residual_normed: bool = False
    features_normed: bool = False
    nested: bool = False  # its config.json is as `speculators` writes it
    agrees: bool = False
    has_gguf: bool = True

    @property
    def layers(self) -> tuple[int, ...]:
        return self.taps or (2, LAYERS // 2, LAYERS - 3)


KINDS = [
    Kind("", 301, 2, ROPE, 48, agrees=True),
    Kind("normed", 302, 1, STRETCHED, 24, tap_norm="whole", residual_normed=True),
    Kind("speculators", 303, 1, ROPE, VOCAB, (1, 3, LAYERS), own_embedding=True, tap_norm="each", features_normed=True, nested=True,
         has_gguf=False),
]


def target() -> Fixture:
    config = LlamaConfig(
        **SMALL | {"num_attention_heads": 2, "num_key_value_heads": 1}, architectures=["LlamaForCausalLM"], hidden_size=WIDTH,
        intermediate_size=24, num_hidden_layers=LAYERS, head_dim=8, tie_word_embeddings=False, rope_parameters=ROPE,
    )
    return Fixture("eagle3", config, 300, gguf.MODEL_ARCH.LLAMA, parameters, fixture.permuted(2, 1), tokens=TOKENS)


def parameters(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(config["head_dim"])


class Head(torch.nn.Module):
    def __init__(self, kind: Kind):
        super().__init__()
        self.kind = kind
        self.config = LlamaConfig(
            **SMALL | {"num_attention_heads": 2, "num_key_value_heads": kind.kv_heads}, hidden_size=WIDTH, intermediate_size=24,
            num_hidden_layers=1, head_dim=8, rope_parameters=kind.rope, rms_norm_eps=1e-5,
        )
        self.config._attn_implementation = "eager"

        def norm(width: int) -> llama.LlamaRMSNorm:
            return llama.LlamaRMSNorm(width, eps=self.config.rms_norm_eps)

        all_taps = len(kind.layers) * WIDTH
        self.fc = torch.nn.Linear(all_taps, WIDTH, bias=False)
        if kind.tap_norm == "whole":
            self.input_norm = norm(all_taps)
        if kind.tap_norm == "each":
            self.fc_norm = torch.nn.ModuleList([norm(WIDTH) for _ in kind.layers])
        layer = torch.nn.Module()
        layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm = norm(WIDTH), norm(WIDTH), norm(WIDTH)
        layer.self_attn = llama.LlamaAttention(self.config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(layer.self_attn, name).out_features
            setattr(layer.self_attn, name, torch.nn.Linear(2 * WIDTH, rows, bias=False))
        layer.mlp = llama.LlamaMLP(self.config)
        self.midlayer = layer
        self.norm = norm(WIDTH)
        self.lm_head = torch.nn.Linear(WIDTH, kind.tokens, bias=False)
        if kind.own_embedding:
            self.embed_tokens = torch.nn.Embedding(VOCAB, WIDTH)
        self.rotary = [llama.LlamaRotaryEmbedding(self.config)]  # no part of its tensors

    @torch.no_grad()
    def fuse(self, taps: list[torch.Tensor]) -> torch.Tensor:
        if self.kind.tap_norm == "each":
            taps = [norm(tap) for norm, tap in zip(self.fc_norm, taps)]
        joined = torch.cat(taps, dim=-1)
        return self.fc(self.input_norm(joined) if self.kind.tap_norm == "whole" else joined)

    @torch.no_grad()
    def forward(self, embedded: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and features of tokens, from their embeddings and the features of the tokens before them."""
        count, layer = len(embedded), self.midlayer
        normed = layer.hidden_norm(features)
        joined = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)[None]
        turned = self.rotary[0].double()(joined, torch.arange(count)[None])
        mask = torch.full((count, count), float("-inf"), dtype=joined.dtype).triu(1)[None, None]
        attended = layer.self_attn(joined, position_embeddings=turned, attention_mask=mask)[0][0]
        hidden = (normed if self.kind.residual_normed else features) + attended
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        last = self.norm(hidden)
        return self.lm_head(last), last if self.kind.features_normed else hidden


@torch.no_grad()
def draw_head(kind: Kind, model: torch.nn.Module, tokens: list[int]) -> Head:
    head, random = Head(kind), np.random.default_rng(kind.seed)
    state = head.state_dict(keep_vars=True)
    like = dataclasses.replace(target(), seed=kind.seed)
    for name in sorted(state):
        state[name].copy_(torch.from_numpy(fixture.draw_one(random, name, tuple(state[name].shape), like)))
    if kind.agrees:
        one, attention = torch.eye(WIDTH), head.midlayer.self_attn
        for values in state.values():
            if values.dim() == 2:
                values.mul_(QUIET)
        for name in ("q_proj", "k_proj"):
            getattr(attention, name).weight[:, :WIDTH] += 2 * one
        attention.v_proj.weight[:, :WIDTH] += 4 * one
        attention.o_proj.weight += one
        head.midlayer.input_layernorm.weight.fill_(1.0)
        head.norm.weight.copy_(model.model.norm.weight)
        head.lm_head.weight.copy_(model.lm_head.weight[tokens])
    return head


@torch.no_grad()
def taps_of(model: torch.nn.Module, layers: tuple[int, ...], tokens: list[int]) -> list[torch.Tensor]:
    """What these layers begin with, and what the last one leaves under the number after it."""
    found = {}

    def keep(number: int):
        return lambda module, given, made: found.__setitem__(number, made[0] if isinstance(made, tuple) else made)

    inner = model.model
    hooks = [inner.embed_tokens.register_forward_hook(keep(0))]
    hooks += [layer.register_forward_hook(keep(number + 1)) for number, layer in enumerate(inner.layers)]
    inner(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return [found[layer].reshape(len(tokens), -1) for layer in layers]


@torch.no_grad()
def logits_and_guesses(model, head: Head, tokens: list[int], known: list[int]) -> tuple[np.ndarray, list[int], float]:
    """The head's logits after each token but the first, what it guesses to follow the last, and by how much these lead."""
    embedding = head.embed_tokens.weight if head.kind.own_embedding else model.model.embed_tokens.weight
    given = head.fuse(taps_of(model, head.kind.layers, tokens))[:-1]
    read, guesses, margin = tokens[1:], [], float("inf")
    while True:
        logits, made = head(embedding[torch.tensor(read)], given)
        if not guesses:
            first = logits.numpy()
        best = logits[-1].topk(2)
        guesses.append(known[int(best.indices[0])])
        margin = min(margin, float(best.values[0] - best.values[1]))
        if len(guesses) == GUESSES:
            return first, guesses, margin
        read = [*read, guesses[-1]]
        given = torch.cat([given, made[-1:]])


def config_of(head: Head) -> dict:
    kind, rope = head.kind, dict(head.kind.rope)
    layer = {
        "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": kind.kv_heads, "head_dim": 8, "hidden_act": "silu", "max_position_embeddings": 512,
        "rms_norm_eps": head.config.rms_norm_eps, "vocab_size": VOCAB,
    }
    about = {"draft_vocab_size": kind.tokens}
    if kind.residual_normed:
        about["norm_before_residual"] = True
    if kind.nested:
        layer["rope_parameters"] = rope
        return about | {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "transformer_layer_config": layer,
            "norm_before_residual": kind.residual_normed, "norm_output": kind.features_normed, "fc_norm": kind.tap_norm == "each",
            "target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": list(kind.layers),
        }
    theta = rope.pop("rope_theta")
    if rope["rope_type"] != "default":
        layer["rope_scaling"] = rope
    return layer | about | {"architectures": ["LlamaForCausalLM"], "rope_theta": theta}


def write_folder(folder: pathlib.Path, head: Head, known: list[int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: values.numpy() for name, values in head.state_dict().items()}
    if head.kind.nested:
        tensors = {name.replace("midlayer.", "layers.0."): values for name, values in tensors.items()}
    if head.kind.tokens < VOCAB:
        tensors["d2t"] = np.array(known, dtype=np.int64) - np.arange(len(known))
        tensors["t2d"] = np.isin(np.arange(VOCAB), known)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    models.write_json(folder / "config.json", config_of(head))


PARTS = {
    "input_layernorm": "attn_norm", "hidden_norm": "attn_norm_2", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}
OUTSIDE = {"norm": "output_norm", "lm_head": "output", "input_norm": "enc.output_norm", "fc": "fc", "embed_tokens": "token_embd"}


def write_gguf(path: pathlib.Path, head: Head, known: list[int]) -> None:
    kind, config = head.kind, head.config
    writer = gguf.GGUFWriter(path, "eagle3")
    fixture.add_common(writer, config.to_dict() | {"num_hidden_layers": 1}, False)
    parameters(writer, config.to_dict())
    writer.add_array("eagle3.target_layers", list(kind.layers))
    writer.add_uint32("eagle3.target_hidden_size", WIDTH)
    writer.add_bool("eagle3.norm_before_residual", kind.residual_normed)
    writer.add_bool("eagle3.norm_before_fc", kind.tap_norm == "whole")
    fixture.add_stub_vocabulary(writer)
    if kind.rope["rope_type"] == "llama3":
        plain = 1.0 / kind.rope["rope_theta"] ** (torch.arange(0, 8, 2, dtype=torch.float64) / 8)
        made = llama.LlamaRotaryEmbedding(config).inv_freq.double()
        writer.add_tensor("rope_freqs.weight", (plain / made).numpy().astype(np.float32))
    for name, values in head.state_dict().items():
        name, values = name.removesuffix(".weight"), values.numpy()
        if name.startswith("midlayer."):
            part = name.removeprefix("midlayer.")
            heads = {"self_attn.q_proj": 2, "self_attn.k_proj": kind.kv_heads}.get(part)
            values = models.permute(values, heads) if heads else values
            name = f"blk.0.{PARTS[part]}"
        else:
            name = OUTSIDE[name]
        writer.add_tensor(f"{name}.weight", np.ascontiguousarray(values))
    if kind.tokens < VOCAB:
        writer.add_tensor("d2t", np.array(known, dtype=np.int64))
    models.close(writer)


@fixture.in_double()
def make(out: pathlib.Path) -> None:
    torch.manual_seed(0)
    made = target()
    folder = out / "heads" / made.name
    model = fixture.draw(made)
    with torch.no_grad():
        for name, values in model.state_dict(keep_vars=True).items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                values.mul_(QUIET)
        model.model.embed_tokens.weight.mul_(LOUD)
    fixture.write_hf(folder / "hf", model)
    fixture.write_gguf(made, folder)
    loaded = fixture.load(made, folder / "hf")
    random = np.random.default_rng(1000 + made.seed)
    tokens = [int(token) for token in random.integers(0, VOCAB, made.tokens)]
    for kind in KINDS:
        at = folder / kind.folder
        at.mkdir(exist_ok=True)
        known = sorted(int(token) for token in np.random.default_rng(kind.seed).permutation(VOCAB)[: kind.tokens])
        head = draw_head(kind, model, known)
        write_folder(at / "head", head, known)
        if kind.has_gguf:
            write_gguf(at / "head.gguf", head, known)
        logits, guesses, margin = logits_and_guesses(loaded, head.double().eval(), tokens, known)
        assert margin > 0.02, (kind.folder, margin)
        logits.astype("<f4").tofile(at / "logits.f32")
        about = {"vocab": kind.tokens, "tokens": tokens, "rows": list(range(len(tokens) - 1)), "guesses": guesses}
        (at / "expected.json").write_text(json.dumps(about) + "\n")
