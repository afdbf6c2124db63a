"""The head that guesses tokens in files of Ling 2.0: a block behind the layers, built as those with experts are.

As in `heads`, the layer is transformers' own (that of GLM 4.5, see `families.bailing`) and what is around it is written out here.
"""

import copy
import dataclasses
import json
import pathlib

import gguf
import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import Glm4MoeConfig
from transformers.models.glm4_moe import modeling_glm4_moe as glm

from . import heads, models
from .families import bailing, fixture
from .families.fixture import VOCAB, Fixture, Tensors

NAMES = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "final_layernorm"}


class Head(torch.nn.Module):
    """The block behind the last layer."""

    def __init__(self, config: Glm4MoeConfig):
        super().__init__()
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.pre_fc_norm_embedding = glm.Glm4MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = glm.Glm4MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layer = glm.Glm4MoeDecoderLayer(config, config.num_hidden_layers)
        self.norm = glm.Glm4MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = [glm.Glm4MoeRotaryEmbedding(config)]  # no part of its tensors

    @torch.no_grad()
    def forward(self, embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Features of tokens, from their embeddings and the features of the tokens before them."""
        count = len(embedded)
        joined = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(features)], dim=-1)
        hidden = self.fc(joined)[None]
        positions = torch.arange(count)[None]
        turned = self.rotary[0].double()(hidden, positions)
        mask = torch.full((count, count), float("-inf"), dtype=hidden.dtype).triu(1)[None, None]
        return self.norm(self.layer(hidden, position_embeddings=turned, attention_mask=mask, position_ids=positions))[0]


def ling() -> Fixture:
    made = bailing.bailing_moe_v2()
    config = copy.deepcopy(made.config)
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    return dataclasses.replace(made, name="ling", config=config, seed=191, tokens=heads.TOKENS)


@torch.no_grad()
def quiet(state: dict[str, torch.Tensor]) -> None:
    heads.quiet(state)
    for name, values in state.items():
        if name.endswith("experts.down_proj"):
            values.mul_(heads.QUIET)


@torch.no_grad()
def draw_head(made: Fixture, model: torch.nn.Module) -> Head:
    """A head that hands on the token's embedding, and a little of all else, to a norm like the model's."""
    head, random = Head(made.config), np.random.default_rng(made.seed + 1)
    state = head.state_dict(keep_vars=True)
    for name in sorted(state):
        state[name].copy_(torch.from_numpy(fixture.draw_one(random, name, tuple(state[name].shape), made)))
    quiet(state)
    head.fc.weight.mul_(heads.QUIET)
    head.fc.weight[:, : made.config.hidden_size] += torch.eye(made.config.hidden_size)
    head.norm.weight.sub_(1).mul_(heads.QUIET).add_(model.model.norm.weight)
    return head


def published(head: Head, layer: int) -> Tensors:
    """The head's tensors as folders have them."""
    made = {}
    for name, values in head.state_dict().items():
        values, block = values.numpy(), f"model.layers.{layer}."
        part = name.removesuffix(".weight")
        if part in NAMES:
            made[f"{block}{NAMES[part]}.weight"] = values
        elif name.endswith("experts.gate_up_proj"):
            for expert, one in enumerate(values):
                gate, up = np.split(one, 2)
                at = f"{block}mlp.experts.{expert}"
                made |= {f"{at}.gate_proj.weight": np.ascontiguousarray(gate), f"{at}.up_proj.weight": np.ascontiguousarray(up)}
        elif name.endswith("experts.down_proj"):
            made |= {f"{block}mlp.experts.{expert}.down_proj.weight": one for expert, one in enumerate(values)}
        else:
            made[block + name.removeprefix("layer.")] = values
    return bailing.rename(made)


@fixture.in_double()
def make_one(folder: pathlib.Path, made: Fixture) -> None:
    torch.manual_seed(0)
    model = fixture.draw(made)
    head = draw_head(made, model)
    with torch.no_grad():
        quiet(model.state_dict(keep_vars=True))
        model.model.embed_tokens.weight.mul_(heads.LOUD)
    fixture.write_hf(folder / "hf", model)
    loaded = fixture.load(made, folder / "hf")
    fixture.publish(made, folder / "hf")
    file = folder / "hf" / "model.safetensors"
    save_file(load_file(file) | published(head, made.config.num_hidden_layers), file, metadata={"format": "pt"})
    file.chmod(0o644)
    path = folder / "hf" / "config.json"
    config = json.loads(path.read_text()) | {"num_nextn_predict_layers": 1}
    models.write_json(path, config)
    write_gguf(made, folder, config)
    random = np.random.default_rng(1000 + made.seed)
    tokens = [int(token) for token in random.integers(0, VOCAB, made.tokens)]
    logits, guesses, margin = heads.logits_and_guesses(loaded, head.double().eval(), tokens)
    assert margin > 0.02, margin
    logits.astype("<f4").tofile(folder / "logits.f32")
    about = {"vocab": VOCAB, "tokens": tokens, "rows": list(range(len(tokens) - 1)), "guesses": guesses}
    (folder / "expected.json").write_text(json.dumps(about) + "\n")


def write_gguf(made: Fixture, folder: pathlib.Path, config: dict) -> None:
    """As `fixture.write_gguf`, with the head's block counted among the layers."""
    config = config | {"num_hidden_layers": config["num_hidden_layers"] + config["num_nextn_predict_layers"]}
    writer = gguf.GGUFWriter(folder / "model.gguf", gguf.MODEL_ARCH_NAMES[made.architecture])
    fixture.add_common(writer, config, made.says_heads)
    made.parameters(writer, config)
    writer.add_nextn_predict_layers(config["num_nextn_predict_layers"])
    fixture.add_stub_vocabulary(writer)
    for name, values in fixture.gguf_tensors(made, folder, config["num_hidden_layers"]).items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    models.close(writer)


def make(out: pathlib.Path) -> None:
    made = ling()
    make_one(out / "heads" / made.name, made)
