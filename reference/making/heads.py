"""Heads that guess tokens (multi-token prediction), as Qwen3.5 has one.

The head's layer is transformers' own; what is around it is written out here, since transformers leaves it out. What layers add
is small beside the embedding, so that both the model and its head follow the last token above all, and agree often.
"""

import copy
import dataclasses
import json
import pathlib

import gguf
import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from . import assistant, eagle, ling, models
from .families import delta, fixture
from .families.fixture import VOCAB, Fixture, Tensors

HEAD_NAMES = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}
TOKENS, GUESSES = 40, 4
# What becomes of matrices whose products are added to the residual stream, and of the embedding that it begins with.
QUIET, LOUD = 1 / 8, 8


class Head(torch.nn.Module):
    """`mtp.*` of a Qwen3.5 model."""

    def __init__(self, config: Qwen3_5TextConfig):
        super().__init__()
        one = copy.deepcopy(config)
        one.num_hidden_layers, one.layer_types = 1, ["full_attention"]
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.pre_fc_norm_embedding = qwen.Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = qwen.Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = torch.nn.ModuleList([qwen.Qwen3_5DecoderLayer(one, 0)])
        self.norm = qwen.Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = [qwen.Qwen3_5TextRotaryEmbedding(one)]  # no part of its tensors

    @torch.no_grad()
    def forward(self, embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Features of tokens, from their embeddings and the features of the tokens before them."""
        count = len(embedded)
        joined = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(features)], dim=-1)
        hidden = self.fc(joined)[None]
        positions = torch.arange(count)[None]
        turned = self.rotary[0].double()(hidden, positions)
        mask = torch.full((count, count), float("-inf"), dtype=hidden.dtype).triu(1)[None, None]
        made = self.layers[0](hidden, position_embeddings=turned, attention_mask=mask, position_ids=positions)
        return self.norm(made[0] if isinstance(made, tuple) else made)[0]


def qwen3_5() -> Fixture:
    config = Qwen3_5TextConfig(**delta.SIZES, architectures=["Qwen3_5ForCausalLM"], tie_word_embeddings=False)
    config._attn_implementation = "eager"
    made = Fixture("qwen3.5", config, 190, gguf.MODEL_ARCH.QWEN35, parameters, convert, **delta.SHAPED)
    return dataclasses.replace(made, tokens=TOKENS)


def parameters(writer: gguf.GGUFWriter, config: dict) -> None:
    layers = config["num_hidden_layers"]
    delta.parameters(writer, config | {"layer_types": [*config["layer_types"], "full_attention"][:layers]})
    writer.add_uint32(f"{writer.arch}.nextn_predict_layers", 1)


def convert(tensors: Tensors) -> Tensors:
    last = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    renamed = {}
    for name, values in tensors.items():
        part = name.removeprefix("mtp.").removesuffix(".weight")
        if part in HEAD_NAMES and name.startswith("mtp."):
            renamed[f"blk.{last}.nextn.{HEAD_NAMES[part]}.weight"] = values
        else:
            renamed[name.replace("mtp.layers.0.", f"model.layers.{last}.")] = values
    return delta.convert(True)(renamed)


def quiet(state: dict[str, torch.Tensor]) -> None:
    for name, values in state.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            values.mul_(QUIET)


@torch.no_grad()
def draw_head(made: Fixture, model: torch.nn.Module) -> Head:
    """A head that hands on the token's embedding, and a little of all else, to a norm like the model's."""
    head, random = Head(made.config), np.random.default_rng(made.seed + 1)
    state = head.state_dict(keep_vars=True)
    for name in sorted(state):
        state[name].copy_(torch.from_numpy(fixture.draw_one(random, name, tuple(state[name].shape), made)))
    quiet(state)
    width = made.config.hidden_size
    head.fc.weight.mul_(QUIET)
    head.fc.weight[:, :width] += torch.eye(width)
    head.pre_fc_norm_embedding.weight.mul_(QUIET)
    head.norm.weight.mul_(QUIET).add_(model.model.norm.weight)
    return head


@torch.no_grad()
def logits_and_guesses(loaded, head: Head, tokens: list[int]) -> tuple[np.ndarray, list[int], float]:
    """The head's logits after each token but the first, what it guesses to follow the last, and by how much these lead."""
    embedding, output = loaded.model.embed_tokens.weight, loaded.lm_head.weight
    features = loaded.model(torch.tensor([tokens])).last_hidden_state[0]
    given, known, guesses, margin = features[:-1], tokens[1:], [], float("inf")
    while True:
        made = head(embedding[torch.tensor(known)], given)
        logits = made @ output.T
        if not guesses:
            first = logits.numpy()
        best = logits[-1].topk(2)
        guesses.append(int(best.indices[0]))
        margin = min(margin, float(best.values[0] - best.values[1]))
        if len(guesses) == GUESSES:
            return first, guesses, margin
        known = [*known, guesses[-1]]
        given = torch.cat([given, made[-1:]])


@fixture.in_double()
def make_one(folder: pathlib.Path, made: Fixture) -> None:
    torch.manual_seed(0)
    model = fixture.draw(made)
    head = draw_head(made, model)
    with torch.no_grad():
        quiet(model.state_dict(keep_vars=True))
        model.model.embed_tokens.weight.mul_(LOUD)
    fixture.write_hf(folder / "hf", model)
    file = folder / "hf" / "model.safetensors"
    of_head = {f"mtp.{name}": values.numpy() for name, values in head.state_dict().items()}
    save_file(load_file(file) | of_head, file, metadata={"format": "pt"})
    file.chmod(0o644)
    path = folder / "hf" / "config.json"
    config = json.loads(path.read_text())
    models.write_json(path, config | {"mtp_num_hidden_layers": 1})
    write_gguf(made, folder, config)
    loaded = fixture.load(made, folder / "hf")
    random = np.random.default_rng(1000 + made.seed)
    tokens = [int(token) for token in random.integers(0, VOCAB, made.tokens)]
    logits, guesses, margin = logits_and_guesses(loaded, head.double().eval(), tokens)
    assert margin > 0.02, margin
    logits.astype("<f4").tofile(folder / "logits.f32")
    about = {"vocab": VOCAB, "tokens": tokens, "rows": list(range(len(tokens) - 1)), "guesses": guesses}
    (folder / "expected.json").write_text(json.dumps(about) + "\n")


def write_gguf(made: Fixture, folder: pathlib.Path, config: dict) -> None:
    """As `fixture.write_gguf`, with the head's layer counted among the others."""
    config = fixture.text_config(config | {"num_hidden_layers": config["num_hidden_layers"] + 1})
    writer = gguf.GGUFWriter(folder / "model.gguf", gguf.MODEL_ARCH_NAMES[made.architecture])
    fixture.add_common(writer, config, made.says_heads)
    parameters(writer, config)
    fixture.add_stub_vocabulary(writer)
    for name, values in fixture.gguf_tensors(made, folder, config["num_hidden_layers"]).items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    models.close(writer)


def make(out: pathlib.Path) -> None:
    made = qwen3_5()
    make_one(out / "heads" / made.name, made)
    ling.make(out)
    eagle.make(out)
    assistant.make(out)
