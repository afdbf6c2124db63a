#!/usr/bin/env python3
"""Trains an EAGLE-3 head for a small model of Llama's family, on what the model itself writes, and writes it as GGUF.

    eagle_head.py smollm2.gguf head.gguf
    lacuna bench speculate smollm2.gguf --draft-model head.gguf

Published heads are for models of billions of parameters. This makes one for whatever fits, in minutes on a processor, to measure
how guessing with a head behaves; a better one takes more text and more time. Texts are questions and answers that the model draws
after the beginning of a conversation. Needs torch, transformers, accelerate and gguf.
"""

import argparse
import time

import gguf
import numpy as np
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

LENGTH, BATCH, GUESSES = 256, 8, 4
TEMPERATURES = (0.0001, 0.5, 0.8, 1.0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("head")
    parser.add_argument("--tokens", type=int, default=200_000, help="tokens of text that the model writes to train on")
    parser.add_argument("--steps", type=int, default=800, help=f"steps of training, of {BATCH * LENGTH} tokens each")
    parser.add_argument("--vocabulary", type=int, default=8192, help="tokens that the head can guess, the most frequent ones")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


@torch.no_grad()
def write_texts(model, tokenizer, count: int) -> torch.Tensor:
    """Conversations, a row each: a question that the model makes up, what it answers, and what it goes on with."""
    begin = tokenizer("<|im_start|>user\n", add_special_tokens=False).input_ids
    narrow, rows = model.to(torch.bfloat16), []
    while len(rows) * LENGTH < count:
        tokens = torch.tensor([begin] * 64)
        # Questions vary, answers are as somebody would draw them.
        asked = narrow.generate(tokens, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=24, eos_token_id=-1)
        answer = tokenizer("<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False).input_ids
        asked = torch.cat([asked, torch.tensor([answer] * 64)], dim=1)
        rest = LENGTH - asked.shape[1]
        temperature = TEMPERATURES[len(rows) // 64 % len(TEMPERATURES)]
        made = narrow.generate(asked, do_sample=True, temperature=temperature, top_k=0, max_new_tokens=rest, eos_token_id=-1)
        rows.extend(made)
        print(f"written {len(rows) * LENGTH} tokens", flush=True)
    model.to(torch.float32)
    return torch.stack(rows)


@torch.no_grad()
def read(model, tokens: torch.Tensor, layers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """What these layers begin with, and what logits are made of."""
    taps, last = [], []
    for rows in tokens.split(BATCH):
        made = model.model(rows, output_hidden_states=True)
        taps.append(torch.cat([made.hidden_states[layer] for layer in layers], dim=-1).to(torch.bfloat16))
        last.append(made.last_hidden_state.to(torch.bfloat16))
    return torch.cat(taps), torch.cat(last)


class Norm(torch.nn.Module):
    def __init__(self, weight: torch.Tensor, epsilon: float):
        super().__init__()
        self.weight, self.epsilon = torch.nn.Parameter(weight.clone()), epsilon

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.float()
        return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.epsilon) * self.weight


class Head(torch.nn.Module):
    """One layer over the embedding of a token and the features of the one before it."""

    def __init__(self, model, known: torch.Tensor, taps: int):
        super().__init__()
        config, last = model.config, model.model.layers[-1]
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.size, width = config.hidden_size // config.num_attention_heads, config.hidden_size
        self.theta, self.epsilon = config.rope_parameters["rope_theta"], config.rms_norm_eps

        def linear(weight: torch.Tensor) -> torch.nn.Linear:
            made = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            made.weight = torch.nn.Parameter(weight.detach().clone())
            return made

        def joined(weight: torch.Tensor) -> torch.nn.Linear:
            return linear(torch.cat([weight + 0.02 * torch.randn_like(weight), weight], dim=1))

        # It begins as the model's last layer over what the last tap has.
        fuse = 0.01 * torch.randn(width, taps * width)
        fuse[:, -width:] += torch.eye(width)
        self.fc = linear(fuse)
        attention, mlp = last.self_attn, last.mlp
        self.query, self.key, self.value = joined(attention.q_proj.weight), joined(attention.k_proj.weight), joined(attention.v_proj.weight)
        self.output = linear(attention.o_proj.weight)
        self.gate, self.up, self.down = linear(mlp.gate_proj.weight), linear(mlp.up_proj.weight), linear(mlp.down_proj.weight)
        ones = torch.ones(width)
        self.norm_embedding, self.norm_features = Norm(ones, self.epsilon), Norm(last.input_layernorm.weight, self.epsilon)
        self.norm_block = Norm(last.post_attention_layernorm.weight, self.epsilon)
        self.norm_last = Norm(model.model.norm.weight, self.epsilon)
        self.guess = linear(model.lm_head.weight[known])

    def turned(self, rows: torch.Tensor, first: int) -> torch.Tensor:
        """Rotated by positions from `first` on; `[batch, heads, rows, size]`."""
        inverse = self.theta ** (-torch.arange(0, self.size, 2).float() / self.size)
        angles = (first + torch.arange(rows.shape[2])).float()[:, None] * inverse
        cosine, sine = (torch.cat([made, made], dim=-1) for made in (angles.cos(), angles.sin()))
        a, b = rows.chunk(2, dim=-1)
        return rows * cosine + torch.cat([-b, a], dim=-1) * sine

    def step(self, embedded: torch.Tensor, features: torch.Tensor, kept: list) -> tuple[torch.Tensor, torch.Tensor]:
        """Guesses number `len(kept)` in a row from every token on. The rows of `kept` are those of the guesses before."""
        batch, count, _ = embedded.shape
        x = torch.cat([self.norm_embedding(embedded), self.norm_features(features)], dim=-1)

        def heads(rows: torch.Tensor, number: int) -> torch.Tensor:
            return rows.view(batch, count, number, self.size).transpose(1, 2)

        first = len(kept)
        query = self.turned(heads(self.query(x), self.heads).float(), first)
        key = self.turned(heads(self.key(x), self.kv_heads).float(), first)
        value = heads(self.value(x), self.kv_heads).float()
        group = self.heads // self.kv_heads
        key, value = (rows.repeat_interleave(group, dim=1) for rows in (key, value))
        kept.append((key, value))
        # All tokens before are read as the model's; each guess then reads those that led to it.
        scores = query @ kept[0][0].transpose(-1, -2)
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
        own = [(query * keys).sum(-1, keepdim=True) for keys, _ in kept[1:]]
        weights = (torch.cat([scores, *own], dim=-1) * self.size**-0.5).softmax(-1)
        attended = weights[..., :count] @ kept[0][1]
        for place, (_, values) in enumerate(kept[1:]):
            attended = attended + weights[..., count + place, None] * values
        hidden = features + self.output(attended.transpose(1, 2).reshape(batch, count, -1))
        normed = self.norm_block(hidden)
        hidden = hidden + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return self.guess(self.norm_last(hidden)), hidden


def losses(head: Head, model, tokens: torch.Tensor, taps: torch.Tensor, last: torch.Tensor, known: torch.Tensor):
    """Of each guess in a row: by how much it is off what the model says, and how often both have the same favourite."""
    embedding = model.model.embed_tokens.weight
    features, kept, found = head.fc(taps.float())[:, : -GUESSES - 1], [], []
    count = features.shape[1]
    for number in range(GUESSES):
        # The head reads the token after the features, and guesses what the model says behind that.
        read = embedding[tokens[:, number + 1 : number + 1 + count]]
        logits, features = head.step(read, features, kept)
        with torch.no_grad():
            said = last[:, number + 1 : number + 1 + count].float() @ model.lm_head.weight.T
            favourite = said.argmax(-1)
            wanted = said[..., known].softmax(-1)
        off = -(wanted * logits.float().log_softmax(-1)).sum(-1).mean()
        same = (known[logits.argmax(-1)] == favourite).float().mean()
        found.append((off, same))
    return found


def write(path: str, head: Head, model, tokenizer, known: torch.Tensor, layers: list[int]) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, "eagle3")
    writer.add_block_count(1)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(head.heads)
    writer.add_head_count_kv(head.kv_heads)
    writer.add_rope_dimension_count(head.size)
    writer.add_rope_freq_base(head.theta)
    writer.add_layer_norm_rms_eps(head.epsilon)
    writer.add_vocab_size(config.vocab_size)
    writer.add_array("eagle3.target_layers", layers)
    writer.add_uint32("eagle3.target_hidden_size", config.hidden_size)
    writer.add_bool("eagle3.norm_before_residual", False)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([tokenizer.convert_ids_to_tokens(token) or f"[{token}]" for token in range(config.vocab_size)])

    def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
        rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
        return rows.swapaxes(1, 2).reshape(weight.shape)

    matrices = {
        "fc": head.fc.weight, "output": head.guess.weight, "blk.0.attn_q": permuted(head.query.weight, head.heads),
        "blk.0.attn_k": permuted(head.key.weight, head.kv_heads), "blk.0.attn_v": head.value.weight,
        "blk.0.attn_output": head.output.weight, "blk.0.ffn_gate": head.gate.weight, "blk.0.ffn_up": head.up.weight,
        "blk.0.ffn_down": head.down.weight,
    }
    vectors = {
        "blk.0.attn_norm": head.norm_embedding, "blk.0.attn_norm_2": head.norm_features, "blk.0.ffn_norm": head.norm_block,
        "output_norm": head.norm_last,
    }
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, weight in matrices.items():
        writer.add_tensor(f"{name}.weight", gguf.quantize(weight.detach().numpy(), kind), raw_dtype=kind)
    for name, norm in vectors.items():
        writer.add_tensor(f"{name}.weight", norm.weight.detach().numpy())
    writer.add_tensor("d2t", known.numpy().astype(np.int64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    folder, _, name = args.model.rpartition("/")
    model = AutoModelForCausalLM.from_pretrained(folder or ".", gguf_file=name, dtype=torch.float32).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(folder or ".", gguf_file=name)
    count = model.config.num_hidden_layers
    layers = [2, count // 2, count - 3]
    texts = write_texts(model, tokenizer, args.tokens)
    taps, last = read(model, texts, layers)
    often = torch.bincount(texts.flatten(), minlength=model.config.vocab_size).argsort(descending=True, stable=True)
    known = often[: args.vocabulary].sort().values
    head = Head(model, known, len(layers))
    held = max(2, len(texts) // 50)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    begun = time.monotonic()
    for step in range(args.steps):
        share = step / args.steps
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 20) * max(0.02, 0.5 * (1 + np.cos(np.pi * share)))
        rows = torch.randint(held, len(texts), (BATCH,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = losses(head, model, texts[rows], taps[rows], last[rows], known)
        total = sum(off * 0.8**number for number, (off, _) in enumerate(found))
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 0:
            print(f"step {step}, {time.monotonic() - begun:.0f} s: same favourite", " ".join(f"{float(same):.3f}" for _, same in found), flush=True)
    with torch.no_grad():
        found = losses(head, model, texts[:held], taps[:held], last[:held], known)
    print("of texts held back: same favourite", " ".join(f"{float(same):.3f}" for _, same in found))
    write(args.head, head.eval(), model, tokenizer, known, layers)


if __name__ == "__main__":
    main()
