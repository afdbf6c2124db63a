"""Assistants of Gemma 4, in files of their own, by transformers: what they guess from rows that their model keeps.

Of a window they are given the rows that the token itself would see beside its own, one fewer than transformers gives them: those
that a cache still has. The first assistant is built so that it agrees with its model often, and has the tables too that pick
tokens before logits are computed, which are not used.
"""

import dataclasses
import json
import pathlib

import gguf
import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

from . import models
from .eagle import GUESSES, LOUD, QUIET
from .families import fixture, gemma
from .families.fixture import SMALL, VOCAB, Fixture

TOKENS = 40
PARTS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.q_norm": "attn_q_norm", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "post_feedforward_layernorm": "post_ffw_norm", "layer_scalar": "layer_output_scale",
}
OUTSIDE = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "pre_projection": "nextn.pre_projection",
    "post_projection": "nextn.post_projection",
}


def sharing_modes(config: Gemma4TextConfig) -> list[str | None]:
    """As transformers has them, which refuses layers that all read others' rows, and keeps none where no layer of a model does."""
    count, kinds = config.num_hidden_layers, config.layer_types
    first = count - config.num_kv_shared_layers
    modes = ["reuse" if layer >= first else None for layer in range(count)]
    for kind in set(kinds[:first]):
        modes[first - 1 - kinds[:first][::-1].index(kind)] = "store"
    return modes


Gemma4TextConfig.kv_sharing_modes = property(sharing_modes)


@dataclasses.dataclass(frozen=True)
class Kind:
    """An assistant, and the model that it is for."""

    name: str
    model: Fixture
    seed: int
    hidden: int
    agrees: bool

    def config(self) -> Gemma4AssistantConfig:
        theirs, layers = self.model.config, 4
        windowed, full = (theirs.per_layer_config[theirs.layer_types.index(f"{kind}_attention")] for kind in ("sliding", "full"))
        text = Gemma4TextConfig(
            **SMALL, hidden_size=self.hidden, intermediate_size=24, num_hidden_layers=layers, head_dim=windowed.head_dim,
            global_head_dim=full.head_dim, num_global_key_value_heads=full.num_key_value_heads, attention_k_eq_v=theirs.attention_k_eq_v,
            sliding_window=theirs.sliding_window, layer_types=["sliding_attention"] * (layers - 1) + ["full_attention"],
            rope_parameters=theirs.rope_parameters, num_kv_shared_layers=layers, hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=0,
        )
        config = Gemma4AssistantConfig(
            text_config=text, backbone_hidden_size=theirs.hidden_size, architectures=["Gemma4AssistantForCausalLM"],
        )
        config._attn_implementation = text._attn_implementation = "eager"
        return config


def kinds() -> list[Kind]:
    return [
        Kind("gemma4-assistant", gemma.gemma4(), 311, gemma.gemma4().config.hidden_size, True),
        Kind("gemma4-assistant-dense", gemma.gemma4_dense(), 312, 24, False),
    ]


@torch.no_grad()
def draw(kind: Kind, model: torch.nn.Module) -> Gemma4AssistantForCausalLM:
    made = Gemma4AssistantForCausalLM(kind.config())
    like = dataclasses.replace(kind.model, seed=kind.seed)
    random, state = np.random.default_rng(kind.seed), made.state_dict(keep_vars=True)
    for name in sorted(state):
        if name != "lm_head.weight":
            state[name].copy_(torch.from_numpy(fixture.draw_one(random, name, tuple(state[name].shape), like)))
    if kind.agrees:
        quiet(made)
        width = kind.hidden
        made.pre_projection.weight.mul_(QUIET)
        made.pre_projection.weight[:, :width] += torch.eye(width)
        made.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight)
        made.model.norm.weight.copy_(model.model.norm.weight)
    return made


@torch.no_grad()
def quiet(model: torch.nn.Module) -> None:
    """What layers add is small beside what they begin with; it is normed before it is added."""
    for name, values in model.state_dict(keep_vars=True).items():
        if "post_" in name and name.endswith("norm.weight"):
            values.mul_(QUIET)


@torch.no_grad()
def one(assistant, given: tuple, token: int, features: torch.Tensor, rows: dict, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and features of a token behind so many rows of its model."""
    embedding, window = given
    seen = {"full_attention": 0, "sliding_attention": max(0, position + 1 - window)}
    states = {kind: tuple(rows[kind][side][:, :, first:position] for side in (0, 1)) for kind, first in seen.items()}
    inputs = torch.cat([embedding(torch.tensor([[token]])), features[None, None]], dim=-1)
    made = assistant(inputs_embeds=inputs, position_ids=torch.tensor([[position]]), shared_kv_states=states)
    return made.logits[0, 0], made.last_hidden_state[0, 0]


@torch.no_grad()
def logits_and_guesses(kind: Kind, model, assistant, tokens: list[int]) -> tuple[np.ndarray, list[int], float]:
    """Logits after each token but the first, what is guessed to follow the last, and by how much these lead."""
    made = model(torch.tensor([tokens]), output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
    features, rows = made.hidden_states[-1][0], made.shared_kv_states
    given = (model.get_input_embeddings(), kind.model.config.sliding_window)
    logits = [one(assistant, given, tokens[at], features[at - 1], rows, at)[0] for at in range(1, len(tokens))]
    token, last, place, guesses, margin = tokens[-1], features[-2], len(tokens) - 1, [], float("inf")
    while len(guesses) < GUESSES:
        found, last = one(assistant, given, token, last, rows, place)
        best = found.topk(2)
        token = int(best.indices[0])
        guesses.append(token)
        margin = min(margin, float(best.values[0] - best.values[1]))
    return torch.stack(logits).numpy(), guesses, margin


def write_folder(kind: Kind, folder: pathlib.Path, assistant) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    assistant.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    file = folder / "model.safetensors"
    file.chmod(0o644)
    if kind.agrees:
        random = np.random.default_rng(kind.seed)
        tables = {
            "masked_embedding.centroids.weight": random.standard_normal((8, kind.hidden)).astype(np.float32),
            "masked_embedding.token_ordering": random.permutation(VOCAB).astype(np.int64),
        }
        save_file(load_file(file) | tables, file, metadata={"format": "pt"})
        file.chmod(0o644)
        path = folder / "config.json"
        models.write_json(path, json.loads(path.read_text()) | {"use_ordered_embeddings": True, "num_centroids": 8})


def write_gguf(kind: Kind, path: pathlib.Path, assistant) -> None:
    config = fixture.text_config(json.loads((path.parent / "head" / "config.json").read_text()))
    writer = gguf.GGUFWriter(path, "gemma4-assistant")
    fixture.add_common(writer, config, True)
    full = config["per_layer_config"][str(config["layer_types"].index("full_attention"))]
    windowed = [layer == "sliding_attention" for layer in config["layer_types"]]
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(windowed)
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_key_length(full["head_dim"])
    writer.add_value_length(full["head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    kv_heads = (full.get("num_key_value_heads", config["num_key_value_heads"]), config["num_key_value_heads"])
    writer.add_head_count_kv([kv_heads[window] for window in windowed])
    writer.add_rope_dimension_count(full["head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_uint32("gemma4-assistant.embedding_length_out", kind.model.config.hidden_size)
    writer.add_uint32("gemma4-assistant.nextn_predict_layers", config["num_hidden_layers"])
    fixture.add_stub_vocabulary(writer)
    for name, values in kind.model.extra.items():
        writer.add_tensor(name, values)
    for name, values in assistant.state_dict().items():
        part = name.removesuffix(".weight")
        if part == "lm_head":
            continue
        if part.startswith("model.layers."):
            layer, _, part = part.removeprefix("model.layers.").partition(".")
            gguf_name = f"blk.{layer}.{PARTS[part]}"
        else:
            gguf_name = OUTSIDE[part]
        writer.add_tensor(f"{gguf_name}.weight", np.ascontiguousarray(values.numpy()))
    models.close(writer)


@fixture.in_double()
def make(out: pathlib.Path) -> None:
    for kind in kinds():
        torch.manual_seed(0)
        folder = out / "heads" / kind.name
        folder.mkdir(parents=True, exist_ok=True)
        model = fixture.draw(kind.model)
        if kind.agrees:
            quiet(model)
            with torch.no_grad():
                model.model.embed_tokens.weight.mul_(LOUD)
        fixture.write_hf(folder / "hf", model)
        fixture.write_gguf(kind.model, folder)
        loaded = fixture.load(kind.model, folder / "hf")
        assistant = draw(kind, model)
        write_folder(kind, folder / "head", assistant)
        write_gguf(kind, folder / "head.gguf", assistant)
        random = np.random.default_rng(1000 + kind.seed)
        tokens = [int(token) for token in random.integers(0, VOCAB, TOKENS)]
        logits, guesses, margin = logits_and_guesses(kind, loaded, assistant.double().eval(), tokens)
        assert margin > 0.02, (kind.name, margin)
        logits.astype("<f4").tofile(folder / "logits.f32")
        about = {"vocab": VOCAB, "tokens": tokens, "rows": list(range(len(tokens) - 1)), "guesses": guesses}
        (folder / "expected.json").write_text(json.dumps(about) + "\n")
