"""Each family's equations once more, in float64 and from `model.gguf` alone.

transformers made the logits from `hf/`. A wrong permutation, a norm not shifted or a key left out on
the way to GGUF would show here.
"""

import json
import math
import pathlib

import gguf
import numpy as np

BOUND = 5e-6  # the frequencies of transformers' rotations are float32

CLAMP = 7.0  # of the gates of gpt-oss, which no GGUF key says

LATENT_EPS = 1e-6  # of the norms of latent rows, in transformers

NEIGHBOURS = (
    "bailingmoe", "deepseek2", "llama", "mistral3", "smollm3", "granite", "granitemoe", "cohere2", "glm4", "ernie4_5-moe", "llama4",
    "arcee", "chatglm", "cohere2moe", "command-r", "ernie4_5", "internlm2", "minicpm",
)  # pairs 2i, 2i + 1
GEMMAS = ("gemma", "gemma2", "gemma3", "gemma3n", "gemma4")
NEMOTRONS = ("nemotron_h", "nemotron_h_moe")  # their feed-forward blocks have no gates and their layers are one thing each
# Feed-forward blocks of these have no gates.
PLAIN = {name: lambda x: gelu(x) for name in ("phi2", "starcoder2")} | {name: lambda x: np.maximum(x, 0) ** 2 for name in (*NEMOTRONS, "arcee", "nemotron")}
CENTRED = ("cohere2", "command-r", "phi2", "nemotron", "stablelm", "starcoder2")  # norms take the mean off
HUNYUANS = ("hunyuan-dense", "hunyuan-moe")  # norm heads once they are turned


class File:
    """Metadata and tensors of a GGUF file, under their names."""

    def __init__(self, path: pathlib.Path):
        reader = gguf.GGUFReader(path)
        self.fields = {name: field.contents() for name, field in reader.fields.items()}
        self.architecture = self.fields["general.architecture"]
        self.tensors = {t.name: np.array(t.data, np.float64) for t in reader.tensors}
        self.used: set[str] = set()
        self.layers = self["block_count"]

    def __getitem__(self, key: str):
        return self.fields[f"{self.architecture}.{key}"]

    def get(self, key: str, default=None):
        return self.fields.get(f"{self.architecture}.{key}", default)

    def at(self, key: str, layer: int, default=None):
        """A key that may be one value or one per layer."""
        value = self.get(key, default)
        return value[layer] if isinstance(value, list) else value

    def tensor(self, name: str, layer: int | None = None):
        name = name if layer is None else f"blk.{layer}.{name}"
        self.used.add(name)
        return self.tensors.get(name)


# --- parts -----------------------------------------------------------------------------------


def rms(x, weight, eps):
    made = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return made if weight is None else made * weight


def layer_norm(x, weight, eps, bias=None):
    centred = x - x.mean(-1, keepdims=True)
    made = centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + eps) * weight
    return made if bias is None else made + bias


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def cap(x, bound):
    return x if bound is None else bound * np.tanh(x / bound)


def linear(file: File, layer: int, name: str, x):
    bias = file.tensor(f"{name}.bias", layer)
    made = x @ file.tensor(f"{name}.weight", layer).T
    return made if bias is None else made + bias


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def attend(q, k, v, scale, window, soft_cap, sinks):
    """Queries [T, Hq, d] over keys and values [T, Hkv, d], masked to the past and to the window."""
    count, heads, _ = q.shape
    k, v = (np.repeat(rows, heads // rows.shape[1], axis=1) for rows in (k, v))
    scores = cap(np.einsum("qhd,khd->hqk", q, k) * scale, soft_cap)
    at = np.arange(count)
    seen = at[None] <= at[:, None]
    if window:
        seen &= at[None] > at[:, None] - window
    scores = np.where(seen, scores, -np.inf)
    if sinks is not None:
        scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (heads, count, 1))], axis=-1)
    return np.einsum("hqk,khd->qhd", softmax(scores)[..., :count], v).reshape(count, -1)


def rotate(x, angles, scale, neighbours):
    """The first 2 * angles.shape[1] entries of each head, in pairs; the others pass."""
    half = angles.shape[1]
    cos, sin = (turn(angles)[:, None] * scale for turn in (np.cos, np.sin))
    made = x.copy()
    first = np.arange(half) * 2 if neighbours else np.arange(half)
    second = first + 1 if neighbours else first + half
    made[..., first] = x[..., first] * cos - x[..., second] * sin
    made[..., second] = x[..., second] * cos + x[..., first] * sin
    return made


# --- rotation --------------------------------------------------------------------------------


def yarn(file: File, width: int, base: float):
    """Frequencies, and the factor of cosine and sine."""
    factor, original = file["rope.scaling.factor"], file["rope.scaling.original_context_length"]

    def turns(count):
        return width * math.log(original / (count * 2 * math.pi)) / (2 * math.log(base))

    low, high = (turns(file.get(f"rope.scaling.yarn_beta_{end}", usual)) for end, usual in (("fast", 32.0), ("slow", 1.0)))
    if file.architecture != "gpt-oss":
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / max(high - low, 0.001), 0, 1)
    plain = base ** (-np.arange(0, width, 2) / width)

    def scale(all_dim):
        return 0.1 * all_dim * math.log(factor) + 1

    stretch = scale(1.0) / scale(file.get("rope.scaling.yarn_log_multiplier", 0.0))
    if file.architecture == "deepseek2":
        stretch = 1.0  # what the file leaves out cancels what it has, and scores take it up instead
    return plain / factor * ramp + plain * (1 - ramp), stretch


def frequencies(file: File, width: int, windowed: bool, context: int | None):
    kind, base = file.get("rope.scaling.type", "none"), file.get("rope.freq_base", 1e4)
    if windowed:
        base = file.get("rope.freq_base_swa", 1e4 if file.architecture.startswith("gemma") else base)
    plain = base ** (-np.arange(0, width, 2) / width)
    short, long = (file.tensor(f"rope_factors_{name}.weight") for name in ("short", "long"))
    if long is not None:
        longer = context > file["rope.scaling.original_context_length"]
        return plain / (long if longer else short), file["rope.scaling.attn_factor"]
    if file.architecture == "gpt-oss":
        windowed = False  # all its layers turn alike
    if windowed or kind == "none":
        factors = None if windowed else file.tensor("rope_freqs.weight")
        return plain if factors is None else plain / factors, 1.0
    if kind == "linear":
        return plain / file["rope.scaling.factor"], 1.0
    assert kind == "yarn", kind
    return yarn(file, width, base)


def windowed(file: File, layer: int) -> bool:
    if not file.get("attention.sliding_window"):
        return False
    if file.architecture == "phi3":
        return True
    pattern = file.get("attention.sliding_window_pattern", {"gemma2": 2, "gemma3": 6, "cohere2": 4, "gpt-oss": 2, "afmoe": 4, "mellum": 4}.get(file.architecture))
    if file.architecture == "laguna":
        return layer % 4 > 0
    return pattern[layer] if isinstance(pattern, list) else layer % pattern < pattern - 1


def rotates(file: File, layer: int, window: bool) -> bool:
    if file.get("rope.scaling.finetuned") is False:
        return False
    return {"smollm3": (layer + 1) % 4 != 0, "cohere2": window, "exaone4": window, "exaone-moe": window, "afmoe": window,
            "cohere2moe": window or layer < file.get("leading_dense_block_count", 0)}.get(file.architecture, True)


# --- layers ----------------------------------------------------------------------------------


class Pass:
    def __init__(self, file: File, count: int, context: int | None):
        self.file, self.count, self.context = file, count, context
        self.kv: dict[bool, tuple] = {}
        self.eps = file.get("attention.layer_norm_rms_epsilon") or file.get("attention.layer_norm_epsilon")

    def norm(self, x, name, layer=None):
        weight = self.file.tensor(f"{name}.weight", layer)
        if weight is None and self.file.architecture == "falcon-h1":
            weight = self.file.tensor(name, layer)
        if weight is None:
            return x
        centred = self.file.architecture == "cohere2moe" and self.file.get("attention.layer_norm_rms_epsilon") is None
        if centred or self.file.architecture in CENTRED:
            return layer_norm(x, weight, self.eps, self.file.tensor(f"{name}.bias", layer))
        return rms(x, weight, self.eps)

    def turned(self, x, name, layer, dim, window):
        """Rows of a projection by head, normed and turned, in whichever order."""
        made = self.turn(self.heads(x, name, layer, dim), layer, window)
        if self.file.architecture in HUNYUANS:
            made = rms(made, self.file.tensor(f"{name}_norm.weight", layer), self.eps)
        return made

    def turn(self, x, layer, window):
        file = self.file
        if not rotates(file, layer, window):
            return x
        ending = "_swa" if window and file.get("rope.dimension_count_swa") else ""
        width = file.get(f"rope.dimension_count{ending}", x.shape[-1])
        inverse, scale = frequencies(file, width, window, self.context)
        return rotate(x, np.arange(self.count)[:, None] * inverse, scale, file.architecture in NEIGHBOURS)

    def heads(self, x, name, layer, dim):
        """Rows of a projection by head, normed where the file has a norm for them."""
        weight = self.file.tensor(f"{name}_norm.weight", layer)
        if self.file.architecture in HUNYUANS:
            return x.reshape(self.count, -1, dim)
        if self.file.architecture == "llama4":
            return rms(x.reshape(self.count, -1, dim), None, self.eps)
        if weight is not None and weight.shape[0] == x.shape[-1] != dim:
            return rms(x, weight, self.eps).reshape(self.count, -1, dim)
        x = x.reshape(self.count, -1, dim)
        return x if weight is None else rms(x, weight, self.eps)

    def keys_and_values(self, h, layer, dim, window, fused):
        file = self.file
        k = linear(file, layer, "attn_k", h) if fused is None else fused[1]
        raw = k.reshape(self.count, -1, dim)
        if fused is not None:
            v = fused[2].reshape(self.count, -1, dim)
        elif file.tensor("attn_v.weight", layer) is None:
            v = raw
        else:
            v = linear(file, layer, "attn_v", h).reshape(self.count, -1, dim)
        if file.architecture in ("gemma3n", "gemma4"):
            v = rms(v, None, self.eps)
        return self.turned(k, "attn_k", layer, dim, window), v

    def latent_attention(self, h, layer):
        """Heads made of latent rows, one by one."""
        file, heads = self.file, self.file["attention.head_count"]
        rank, turned = file["attention.kv_lora_rank"], file["rope.dimension_count"]
        query = file.get("attention.key_length_mla", file["attention.key_length"])
        plain = query - turned
        if file.get("attention.q_lora_rank"):
            narrow = rms(linear(file, layer, "attn_q_a", h), file.tensor("attn_q_a_norm.weight", layer), LATENT_EPS)
            q = linear(file, layer, "attn_q_b", narrow)
        else:
            q = linear(file, layer, "attn_q", h)
        q = q.reshape(self.count, heads, query)
        rows = linear(file, layer, "attn_kv_a_mqa", h)
        c = rms(rows[:, :rank], file.tensor("attn_kv_a_norm.weight", layer), LATENT_EPS)
        if (both := file.tensor("attn_kv_b.weight", layer)) is not None:
            both = both.reshape(heads, -1, rank)
            keys, values = both[:, :plain], both[:, plain:]
        else:
            keys = file.tensor("attn_k_b.weight", layer).swapaxes(1, 2)
            values = file.tensor("attn_v_b.weight", layer)
        k = np.einsum("hdr,tr->thd", keys, c)
        v = np.einsum("hdr,tr->thd", values, c)
        shared = self.turn(rows[:, None, rank:], layer, False)
        k = np.concatenate([k, np.repeat(shared, heads, axis=1)], axis=-1)
        q = np.concatenate([q[..., :plain], self.turn(q[..., plain:], layer, False)], axis=-1)
        stretch = 10 * file.get("rope.scaling.yarn_log_multiplier", 0.0)
        magnitude = 0.1 * stretch * math.log(file.get("rope.scaling.factor", 1.0)) + 1
        return linear(file, layer, "attn_output", attend(q, k, v, magnitude**2 * query**-0.5, None, None, None))

    def convolve(self, x, weights, bias=None):
        """Each channel with what it was before."""
        taps = weights.shape[1]
        padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
        made = sum(padded[tap : tap + self.count] * weights[:, tap] for tap in range(taps))
        return made if bias is None else made + bias

    def short_convolution(self, h, layer):
        file = self.file
        before, after, x = np.split(linear(file, layer, "shortconv.in_proj", h), 3, axis=1)
        weights = file.tensor("shortconv.conv.weight", layer)
        return linear(file, layer, "shortconv.out_proj", after * self.convolve(before * x, weights))

    def delta_net(self, h, layer):
        """Token by token: a head's state forgets, is corrected and is read."""
        file = self.file
        keys, values, dim = file["ssm.group_count"], file["ssm.time_step_rank"], file["ssm.state_size"]
        width, each = file["ssm.inner_size"] // values, values // keys
        if file.tensor("ssm_in.weight", layer) is not None:
            parts = linear(file, layer, "ssm_in", h).reshape(self.count, keys, -1)
            q, k, v, z = np.split(parts, np.cumsum([dim, dim, each * width]), axis=2)
            mixed = np.concatenate([part.reshape(self.count, -1) for part in (q, k, v)], axis=1)
            z = z.reshape(self.count, values, width)
        else:
            mixed = linear(file, layer, "attn_qkv", h)
            z = linear(file, layer, "attn_gate", h).reshape(self.count, values, width)
        mixed = silu(self.convolve(mixed, file.tensor("ssm_conv1d.weight", layer)))
        q, k, v = np.split(mixed, [keys * dim, 2 * keys * dim], axis=1)
        of_head = np.arange(values) % keys if file.architecture.startswith("qwen35") else np.arange(values) // each
        q, k = ((x := part.reshape(self.count, keys, dim)) / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
        q, k, v = q[:, of_head] * dim**-0.5, k[:, of_head], v.reshape(self.count, values, width)
        if file.tensor("ssm_ba.weight", layer) is not None:
            b, a = np.split(linear(file, layer, "ssm_ba", h).reshape(self.count, keys, -1), 2, axis=2)
            b, a = b.reshape(self.count, values), a.reshape(self.count, values)
        else:
            b, a = (linear(file, layer, f"ssm_{name}", h) for name in ("beta", "alpha"))
        left = np.exp(file.tensor("ssm_a", layer) * np.log1p(np.exp(a + file.tensor("ssm_dt.bias", layer))))
        state, made = np.zeros((values, dim, width)), np.zeros_like(v)
        for token in range(self.count):
            state = left[token][:, None, None] * state
            wrong = v[token] - np.einsum("hdw,hd->hw", state, k[token])
            state = state + np.einsum("hd,hw->hdw", k[token], wrong / (1 + np.exp(-b[token]))[:, None])
            made[token] = np.einsum("hdw,hd->hw", state, q[token])
        made = rms(made, file.tensor("ssm_norm.weight", layer), self.eps) * silu(z)
        return linear(file, layer, "ssm_out", made.reshape(self.count, -1))

    def mamba(self, h, layer):
        """Token by token: a head's state forgets, takes up and is read."""
        file = self.file
        heads, groups, state_dim = file["ssm.time_step_rank"], file["ssm.group_count"], file["ssm.state_size"]
        width = file["ssm.inner_size"]
        z, mixed, steps = np.split(linear(file, layer, "ssm_in", h), [width, 2 * width + 2 * groups * state_dim], axis=1)
        weights, bias = file.tensor("ssm_conv1d.weight", layer), file.tensor("ssm_conv1d.bias", layer)
        x, b, c = np.split(silu(self.convolve(mixed, weights, bias)), [width, width + groups * state_dim], axis=1)
        x = x.reshape(self.count, heads, -1)
        b, c = (np.repeat(part.reshape(self.count, groups, -1), heads // groups, axis=1) for part in (b, c))
        steps = np.log1p(np.exp(steps + file.tensor("ssm_dt.bias", layer)))
        left = np.exp(steps * file.tensor("ssm_a", layer).ravel())
        state, made = np.zeros((heads, x.shape[2], state_dim)), np.zeros_like(x)
        for token in range(self.count):
            taken = np.einsum("hp,hn->hpn", steps[token][:, None] * x[token], b[token])
            state = left[token][:, None, None] * state + taken
            made[token] = np.einsum("hpn,hn->hp", state, c[token])
        made = (made + file.tensor("ssm_d", layer).ravel()[:, None] * x).reshape(self.count, -1) * silu(z)
        if (weight := file.tensor("ssm_norm.weight", layer)) is not None:
            made = rms(made.reshape(self.count, groups, -1), weight, self.eps)
        return linear(file, layer, "ssm_out", made.reshape(self.count, -1))

    def attention(self, h, layer):
        if self.file.architecture == "deepseek2":
            return self.latent_attention(h, layer)
        if self.file.architecture == "falcon-h1":
            return self.mamba(h, layer) + self.rows_attention(h, layer)
        if self.file.tensor("ssm_d", layer) is not None:
            return self.mamba(h, layer)
        if self.file.tensor("ssm_out.weight", layer) is not None:
            return self.delta_net(h, layer)
        if self.file.tensor("shortconv.conv.weight", layer) is not None:
            return self.short_convolution(h, layer)
        return self.rows_attention(h, layer)

    def rows_attention(self, h, layer):
        file, window = self.file, windowed(self.file, layer)
        ending = "_swa" if window and file.get("attention.key_length_swa") else ""
        heads = file.at("attention.head_count", layer)
        dim = file.get(f"attention.key_length{ending}", file["embedding_length"] // heads)
        fused = None
        if file.tensor("attn_qkv.weight", layer) is not None:
            rows = [heads * dim] + 2 * [file["attention.head_count_kv"] * dim]
            fused = np.split(linear(file, layer, "attn_qkv", h), np.cumsum(rows)[:2], axis=1)
        q = linear(file, layer, "attn_q", h) if fused is None else fused[0]
        gate = None
        if q.shape[1] == 2 * heads * dim:
            q, gate = (part.reshape(self.count, -1) for part in np.split(q.reshape(self.count, -1, 2 * dim), 2, axis=2))
        q = self.turned(q, "attn_q", layer, dim, window)
        if (growth := file.get("attention.temperature_scale")) is not None:
            turned = np.floor(np.arange(self.count) / file["rope.scaling.original_context_length"])
            q = q * (1 + growth * np.log(1 + turned))[:, None, None]
        if layer < file.layers - file.get("attention.shared_kv_layers", 0):
            self.kv[window] = self.keys_and_values(h, layer, dim, window, fused)
        scale = file.get("attention.scale", 1.0 if file.architecture in ("gemma3n", "gemma4") else dim**-0.5)
        limit = file["attention.sliding_window"] if window else None
        sinks = file.tensor("attn_sinks.weight", layer)
        made = attend(q, *self.kv[window], scale, limit, file.get("attn_logit_softcapping"), sinks)
        if file.tensor("attn_gate.weight", layer) is not None:
            gate = linear(file, layer, "attn_gate", h)
        if gate is not None:
            made = made.reshape(self.count, gate.shape[1], -1)
            made = made * (np.log1p(np.exp(gate)) if file.architecture == "laguna" else 1 / (1 + np.exp(-gate)))[:, :, None]
            made = made.reshape(self.count, -1)
        return linear(file, layer, "attn_output", made)

    def feed_forward(self, h, layer):
        file = self.file
        if file.tensor("ffn_gate_inp.weight", layer) is not None and file.architecture != "gemma4":
            return self.experts(h, layer)
        up = linear(file, layer, "ffn_up", h)
        if (function := PLAIN.get(file.architecture)) is not None:
            return linear(file, layer, "ffn_down", function(up))
        if file.tensor("ffn_gate.weight", layer) is None:
            gate, up = np.split(up, 2, axis=1)
        else:
            gate = linear(file, layer, "ffn_gate", h)
        sparse = file.get("activation_sparsity_scale")
        if sparse is not None and sparse[layer] > -math.inf:
            gate = np.maximum(gate - (gate.mean(-1, keepdims=True) + sparse[layer] * gate.std(-1, keepdims=True)), 0)
        activated = gelu(gate) if file.architecture in GEMMAS else silu(gate)
        return linear(file, layer, "ffn_down", activated * up)

    def routed(self, h, layer, read=None):
        """What the chosen experts make of rows, one row at a time; the router may read others."""
        file = self.file
        logits = linear(file, layer, "ffn_gate_inp", h if read is None else read)
        count, used = file["expert_count"], file["expert_used_count"]
        sigmoid = file.architecture in ("afmoe", *NEMOTRONS) or file.get("expert_gating_func") == 2
        if sigmoid:
            scores = 1 / (1 + np.exp(-logits))
        else:
            scores = logits if file.architecture in ("granitemoe", "granitehybrid", "gpt-oss") else softmax(logits)
        bias = file.tensor("exp_probs_b" if file.architecture == "hy_v3" else "exp_probs_b.bias", layer)
        keys = scores if bias is None else scores + bias
        if (groups := file.get("expert_group_count", 1)) > 1:
            split = np.sort(keys.reshape(-1, groups, count // groups), axis=-1)
            best = 2 if sigmoid else 1
            worst = np.argsort(split[..., -best:].sum(-1), axis=-1)[:, : groups - file["expert_group_used_count"]]
            keys = keys.reshape(split.shape).copy()
            np.put_along_axis(keys, worst[..., None], -np.inf, axis=1)
            keys = keys.reshape(-1, count)
        chosen = np.argsort(-keys, axis=-1)[:, :used]
        weights = np.take_along_axis(scores, chosen, axis=-1)
        if file.architecture in ("granitemoe", "granitehybrid", "gpt-oss"):
            weights = softmax(weights)
        elif file.architecture in ("qwen3moe", "qwen3next", "qwen35moe", "lfm2moe", "llama", "gemma4", "afmoe", "ernie4_5-moe", "hunyuan-moe", "mellum", "minimax-m2") or file.get("expert_weights_norm"):
            weights = weights / weights.sum(-1, keepdims=True)
        weights = weights * file.get("expert_weights_scale", 1.0)
        if (scales := file.tensor("ffn_down_exps.scale", layer)) is not None:
            weights = weights * scales[chosen]
        narrow = file.tensor("ffn_latent_down.weight", layer)
        h = h if narrow is None else h @ narrow.T
        made = np.zeros_like(h)
        for row in range(len(h)):
            for expert, weight in zip(chosen[row], weights[row]):
                made[row] += weight * self.expert(h[row], layer, expert)
        return made if narrow is None else linear(file, layer, "ffn_latent_up", made)

    def expert(self, x, layer, expert):
        def product(name, x):
            bias = self.file.tensor(f"ffn_{name}_exps.bias", layer)
            made = self.file.tensor(f"ffn_{name}_exps.weight", layer)[expert] @ x
            return made if bias is None else made + bias[expert]

        if self.file.architecture == "gemma4":
            gate, up = np.split(product("gate_up", x), 2)
            return product("down", gelu(gate) * up)
        if self.file.architecture in NEMOTRONS:
            return product("down", np.maximum(product("up", x), 0) ** 2)
        gate, up = product("gate", x), product("up", x)
        if self.file.architecture != "gpt-oss":
            return product("down", silu(gate) * up)
        gate, up = np.minimum(gate, CLAMP), np.clip(up, -CLAMP, CLAMP)
        return product("down", gate / (1 + np.exp(-1.702 * gate)) * (up + 1))

    def beside(self, x, dense, layer):
        """Gemma 4: what experts make of the stream is added to what the dense block made of it."""
        read = rms(x, None, self.eps) * self.file.tensor("ffn_gate_inp.scale", layer) * x.shape[1] ** -0.5
        chosen = self.routed(self.norm(x, "pre_ffw_norm_2", layer), layer, read)
        return self.norm(dense, "post_ffw_norm_1", layer) + self.norm(chosen, "post_ffw_norm_2", layer)

    def experts(self, h, layer):
        file = self.file
        made = self.routed(h, layer)
        if file.architecture in NEMOTRONS:
            return made + linear(file, layer, "ffn_down_shexp", np.maximum(linear(file, layer, "ffn_up_shexp", h), 0) ** 2)
        if file.tensor("ffn_gate_shexp.weight", layer) is None:
            return made
        gated = silu(linear(file, layer, "ffn_gate_shexp", h)) * linear(file, layer, "ffn_up_shexp", h)
        shared = linear(file, layer, "ffn_down_shexp", gated)
        if file.architecture == "cohere2moe":
            return (made + shared) / 2
        if file.tensor("ffn_gate_inp_shexp.weight", layer) is not None:
            shared = shared / (1 + np.exp(-linear(file, layer, "ffn_gate_inp_shexp", h)))
        return made + shared

    def layer(self, x, layer, per_layer):
        """A layer of every family but Gemma 3n; a norm that the file does not have changes nothing."""
        file, residual = self.file, self.file.get("residual_scale", 1.0)
        h = self.norm(x, "attn_norm", layer)
        if file.architecture in NEMOTRONS:
            mixes = file.at("attention.head_count_kv", layer) or file.tensor("ssm_d", layer) is not None
            return x + (self.attention(h, layer) if mixes else self.feed_forward(h, layer))
        attended = self.attention(h, layer)
        late = file.architecture in ("seed_oss", "gpt-oss", "glm4moe", "qwen3next", "qwen35", "qwen35moe")  # their norm before the feed-forward block is called so
        if not late:
            attended = self.norm(attended, "post_attention_norm", layer)
        if file.architecture in ("cohere2", "cohere2moe", "command-r", "phi2") or file.get("use_parallel_residual"):
            return x + attended + self.feed_forward(h, layer)
        x = x + residual * attended
        if file.architecture == "mamba2":
            return x
        h = self.norm(x, "post_attention_norm" if late else "ffn_norm", layer)
        made = self.feed_forward(h, layer)
        if file.architecture == "gemma4" and file.tensor("ffn_gate_inp.weight", layer) is not None:
            made = self.beside(x, made, layer)
        x = x + residual * self.norm(made, "post_ffw_norm", layer)
        if per_layer is not None:
            gated = gelu(linear(file, layer, "inp_gate", x)) * per_layer[:, layer]
            x = x + self.norm(linear(file, layer, "proj", gated), "post_norm", layer)
        scalar = file.tensor("layer_output_scale.weight", layer)
        return x if scalar is None else x * scalar

    def per_layer_inputs(self, tokens, x):
        file = self.file
        width = file.get("embedding_length_per_layer_input")
        if not width:
            return None
        shape = (self.count, file.layers, width)
        rows = file.tensor("per_layer_token_embd.weight")[tokens].reshape(shape) * math.sqrt(width)
        projected = (x @ file.tensor("per_layer_model_proj.weight").T * x.shape[1] ** -0.5).reshape(shape)
        return (rows + self.norm(projected, "per_layer_proj_norm")) * 2**-0.5

    def stretched(self, x, like):
        """`x` with the root mean square of `like`."""
        return x * np.sqrt((like**2).mean(-1, keepdims=True) / np.maximum((x**2).mean(-1, keepdims=True), 1e-5))

    def router(self, x, layer):
        h = self.norm(x, "altup_router_norm", layer) / x.shape[1]
        return np.tanh(linear(self.file, layer, "altup_router", h))

    def altup_layer(self, streams, layer, per_layer):
        """A layer of Gemma 3n: four streams, of which the first is computed and the others predicted."""
        file, count = self.file, len(streams)
        mix = linear(file, layer, "altup_predict_coef", self.router(streams[0], layer)).reshape(-1, count, count)
        predicted = [x + sum(mix[:, i, j, None] * streams[j] for j in range(count)) for i, x in enumerate(streams)]
        x = predicted[0]
        h = self.norm(x, "attn_norm", layer)
        laurel = h + self.norm(linear(file, layer, "laurel_r", linear(file, layer, "laurel_l", h)), "laurel_post_norm", layer)
        attended = self.norm(self.attention(h, layer), "post_attention_norm", layer)
        x = (x + attended + laurel) * 2**-0.5
        x = x + self.norm(self.feed_forward(self.norm(x, "ffn_norm", layer), layer), "post_ffw_norm", layer)
        weights = linear(file, layer, "altup_correct_coef", self.router(x, layer)) + 1
        corrected = [old + (x - predicted[0]) * weights[:, i, None] for i, old in enumerate(predicted)]
        first = corrected[0] * file.tensor("altup_correct_scale.weight", layer)
        gated = gelu(linear(file, layer, "inp_gate", first)) * per_layer[:, layer]
        added = self.norm(linear(file, layer, "proj", gated), "post_norm", layer)
        return [corrected[0], *(stream + added for stream in corrected[1:])]

    def hidden(self, tokens):
        file = self.file
        x = file.tensor("token_embd.weight")[tokens]
        x = x * (math.sqrt(x.shape[1]) if file.architecture in (*GEMMAS, "afmoe") else file.get("embedding_scale", 1.0))
        per_layer = self.per_layer_inputs(tokens, x)
        if file.architecture != "gemma3n":
            for layer in range(file.layers):
                x = self.layer(x, layer, per_layer)
            return x
        streams = [x, *(self.stretched(x @ one.T, x) for one in file.tensor("altup_proj.weight"))]
        for layer in range(file.layers):
            streams = self.altup_layer(streams, layer, per_layer)
        first, *others = streams
        back = [self.stretched(x @ one.T, first) for x, one in zip(others, file.tensor("altup_unembd_proj.weight"))]
        return (first + sum(back)) / len(streams)

    def logits(self, tokens):
        file = self.file
        output = file.tensor("output.weight")
        output = file.tensor("token_embd.weight") if output is None else output
        last = "token_embd_norm" if file.architecture in ("lfm2", "lfm2moe") else "output_norm"
        made = self.norm(self.hidden(tokens), last) @ output.T
        bias = file.tensor("output.bias")
        made = made if bias is None else made + bias
        scale = file.get("logit_scale", 1.0)
        made = made / scale if file.architecture in ("granite", "granitemoe", "granitehybrid", "minicpm") else made * scale
        return cap(made, file.get("final_logit_softcapping"))


def check(folder: pathlib.Path) -> None:
    for path in sorted(folder.glob("*.gguf")):
        check_file(folder, path)


def check_file(folder: pathlib.Path, path: pathlib.Path) -> None:
    about = json.loads((folder / "expected.json").read_text())
    file = File(path)
    tokens = np.array(about["tokens"])
    found = Pass(file, len(tokens), about.get("context")).logits(tokens)[about["rows"]]
    expected = np.fromfile(folder / "logits.f32", "<f4").reshape(found.shape)
    worst = np.abs(found - expected).max() / np.abs(expected).max()
    unused = file.tensors.keys() - file.used
    assert not unused, f"{folder.name}/{path.name}: tensors that the equations do not use: {sorted(unused)}"
    assert worst < BOUND, f"{folder.name}/{path.name}: GGUF differs from the reference by {worst:.1e}"
    print(f"  {folder.name}: {path.name} agrees to {worst:.1e}")
