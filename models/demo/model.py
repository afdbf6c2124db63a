"""A compact Qwen3 in PyTorch, with the parameter names that transformers uses; and its sibling, a Nemotron-H without states.

The sibling's feed-forward blocks have no gates and square what is positive, so most of their activations are exactly zero;
its attention knows no positions but what is before what.
"""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as functional
from torch import nn


@dataclass
class Shape:
    """The sizes of the network."""

    vocab_size: int = 2560
    hidden_size: int = 192
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 512
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    sparse: bool = False

    @classmethod
    def sibling(cls):
        """That of the sibling, whose blocks have as many parameters with two matrices as others with three."""
        return cls(intermediate_size=768, sparse=True)

    def as_dict(self):
        """The sizes as a plain dictionary."""
        return asdict(self)


class Norm(nn.Module):
    """Root-mean-square normalisation."""

    def __init__(self, size, epsilon):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, hidden):
        return functional.rms_norm(hidden, self.weight.shape, self.weight, self.epsilon)


def rotate(states, cosine, sine):
    """Apply rotary positions; the two halves of a head form the pairs."""
    first, second = states.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class Attention(nn.Module):
    """Causal attention with grouped keys and per-head normalisation."""

    def __init__(self, shape):
        super().__init__()
        self.heads, self.groups, self.width = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, self.heads * self.width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, self.groups * self.width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, self.groups * self.width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.width, shape.hidden_size, bias=False)
        self.plain = shape.sparse
        if not self.plain:
            self.q_norm = Norm(self.width, shape.rms_norm_eps)
            self.k_norm = Norm(self.width, shape.rms_norm_eps)

    def forward(self, hidden, cosine, sine):
        batch, length, _ = hidden.shape
        queries = self.q_proj(hidden).view(batch, length, self.heads, self.width)
        keys = self.k_proj(hidden).view(batch, length, self.groups, self.width)
        values = self.v_proj(hidden).view(batch, length, self.groups, self.width).transpose(1, 2)
        if self.plain:
            queries, keys = queries.transpose(1, 2), keys.transpose(1, 2)
        else:
            queries, keys = self.q_norm(queries).transpose(1, 2), self.k_norm(keys).transpose(1, 2)
            queries, keys = rotate(queries, cosine, sine), rotate(keys, cosine, sine)
        repeats = self.heads // self.groups
        keys = keys.repeat_interleave(repeats, dim=1)
        values = values.repeat_interleave(repeats, dim=1)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """Gated feed-forward network."""

    def __init__(self, shape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden):
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class SparseFeedForward(nn.Module):
    """Feed-forward network of which only what is positive, squared, goes on."""

    def __init__(self, shape):
        super().__init__()
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden):
        active = functional.relu(self.up_proj(hidden))
        # For a penalty on it.
        self.mean = active.mean()
        return self.down_proj(active.square())


class Layer(nn.Module):
    """One transformer block."""

    def __init__(self, shape):
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = SparseFeedForward(shape) if shape.sparse else FeedForward(shape)

    def forward(self, hidden, cosine, sine):
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cosine, sine)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Network(nn.Module):
    """The whole network; the output matrix is the embedding."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        exponents = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        angles = torch.outer(torch.arange(shape.max_position_embeddings).float(), shape.rope_theta**-exponents)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)
        self.initialise()

    def initialise(self):
        """Small random matrices; the matrices that write to the residual start at zero."""
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02 if "embed" in name else self.shape.hidden_size**-0.5)

    def forward(self, tokens, targets=None):
        """Logits, or the mean loss where targets are given."""
        length = tokens.shape[1]
        cosine, sine = self.cosine[:length], self.sine[:length]
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden, cosine, sine)
        logits = functional.linear(self.norm(hidden), self.embed_tokens.weight)
        if targets is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
