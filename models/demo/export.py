"""Write the trained model as a Q8_0 GGUF file and check that file.

The check reads the written file back, loads its dequantized weights into the
Qwen3 of transformers, compares that with the compact model used for training,
and measures the held-out perplexity. The results go to `reference.json`, against
which another implementation can be tested.

Perplexity protocol: the whole text is tokenized once, without special tokens, and
cut into consecutive windows of 1,024 tokens (the last one may be shorter). Every
window starts with an empty context; its first token is not scored. The result is
exp(total negative log-likelihood / number of scored tokens).
"""

import argparse
import json
import math
from pathlib import Path

import gguf
import numpy
import torch
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from corpus import END_OF_SECTION
from model import Qwen3, Shape

WINDOW = 1024
GREEDY_TOKENS = 48
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{ '# ' + message['content'] + '\\n\\n' }}"
    "{%- elif message['role'] == 'assistant' -%}{{ message['content'] + '" + END_OF_SECTION + "' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
)
DESCRIPTION = (
    "A very small Qwen3 language model that explains Rust, made to demonstrate and test Lacuna. "
    "Trained from random weights on the documentation that ships with the Rust toolchain, "
    "by The Rust Project Developers and contributors, used under MIT or Apache-2.0."
)
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TEXTS = [
    "",
    "Hello, world!",
    "What is ownership?",
    "# What is ownership?\n\n",
    "fn main() {\n    let mut numbers: Vec<u32> = vec![1, 20, 300];\n    numbers.push(4_000);\n}\n",
    "It's what we'll use; they've said I'd, DON'T and you're.",
    "one two  three   four    five\t\ttabs\n\n\nnew lines \r\n \r\n end  ",
    "3.14159 1234567890 0xFF 1_000 v1.95.0",
    "Grüße, ça va? Привет, мир! こんにちは世界 你好 مرحبا नमस्ते",
    "Crab 🦀, family 👨‍👩‍👧‍👦, flag 🇪🇺, thumbs 👍🏽.",
    "e\u0301 and é; ﬁ; \u00a0no-break\u00a0space\u3000wide; zero\u200bwidth",
    "```\nassert_eq!(a::<T>()?.b[..=3], &'static str);\n```",
    "https://www.rust-lang.org/?a=1&b=%20#top -- \"quoted\" 'single' (x) {y} [z] <w> ... !!! ???",
    " leading space",
    "\n",
]
PROMPTS = ["What is ownership?", "What is a trait?", "What is borrowing?", "How does error handling work?"]


def tensor_name(name):
    """The GGUF name of a parameter."""
    fixed = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
    if name in fixed:
        return fixed[name]
    _, layer, rest = name.split(".", 2)
    return f"blk.{layer}.{LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def add_metadata(writer, shape, tokenizer):
    """Everything but the tensors."""
    writer.add_name("Lacuna demo")
    writer.add_description(DESCRIPTION)
    writer.add_license("MIT OR Apache-2.0")
    writer.add_source_url("https://doc.rust-lang.org/")
    writer.add_languages(["en"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_vocab_size(shape.vocab_size)
    add_vocabulary(writer, json.loads(tokenizer.to_str()))


def add_vocabulary(writer, description):
    """The tokenizer, in the form that GGUF calls gpt2 with the qwen2 pre-tokenizer."""
    vocabulary = description["model"]["vocab"]
    special = {token["id"] for token in description["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.get)
    types = [gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL for index in range(len(tokens))]
    end = vocabulary[END_OF_SECTION]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in description["model"]["merges"]])
    writer.add_eos_token_id(end)
    writer.add_bos_token_id(end)
    writer.add_pad_token_id(end)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_gguf(path, shape, weights, tokenizer):
    """Write the model file: matrices as Q8_0, norms as F32."""
    writer = gguf.GGUFWriter(path, "qwen3")
    add_metadata(writer, shape, tokenizer)
    for name, weight in weights.items():
        values = weight.float().numpy()
        kind = gguf.GGMLQuantizationType.Q8_0 if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(values, kind)
        writer.add_tensor(tensor_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_gguf(path, names):
    """The dequantized weights of a model file, under the names used for training."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    weights = {}
    for name in names:
        tensor = tensors.pop(tensor_name(name))
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        weights[name] = torch.from_numpy(numpy.array(values, dtype=numpy.float32))
    assert not tensors, f"unknown tensors {list(tensors)}"
    return weights


def reference_model(shape, weights):
    """The Qwen3 of transformers with the given weights."""
    sizes = shape.as_dict()
    theta = sizes.pop("rope_theta")
    config = Qwen3Config(
        **sizes,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=True,
        attention_bias=False,
        use_cache=False,
    )
    model = Qwen3ForCausalLM(config)
    missing, unexpected = model.load_state_dict({"model." + name: value for name, value in weights.items()}, strict=False)
    assert missing in ([], ["lm_head.weight"]) and not unexpected
    model.tie_weights()
    return model.eval()


@torch.no_grad()
def perplexity(logits_of, tokens):
    """Perplexity and number of scored tokens, by the protocol above."""
    total, count = 0.0, 0
    for start in range(0, len(tokens), WINDOW):
        window = torch.tensor([tokens[start:start + WINDOW]])
        if window.shape[1] < 2:
            continue
        losses = torch.log_softmax(logits_of(window)[0, :-1].double(), dim=-1)
        total -= losses.gather(1, window[0, 1:, None]).sum().item()
        count += window.shape[1] - 1
    return math.exp(total / count), count


@torch.no_grad()
def greedy(logits_of, tokens, end, count=GREEDY_TOKENS):
    """Greedy continuation until `end`, and the smallest lead of a chosen token."""
    context = list(tokens)
    margin = math.inf
    for _ in range(count):
        best = logits_of(torch.tensor([context]))[0, -1].topk(2)
        margin = min(margin, (best.values[0] - best.values[1]).item())
        context.append(int(best.indices[0]))
        if context[-1] == end:
            break
    return context[len(tokens):], margin


@torch.no_grad()
def make_reference(logits_of, tokenizer, shape):
    """Token ids and greedy continuations for the fixed texts and prompts."""
    end = tokenizer.token_to_id(END_OF_SECTION)
    texts = [{"text": text, "tokens": tokenizer.encode(text).ids} for text in TEXTS]
    continuations = []
    for question in PROMPTS:
        prompt = f"# {question}\n\n"
        tokens = tokenizer.encode(prompt).ids
        generated, margin = greedy(logits_of, tokens, end)
        first = logits_of(torch.tensor([tokens]))[0, -1].topk(5)
        continuations.append({
            "prompt": prompt,
            "prompt_tokens": tokens,
            "first_logits": [[int(index), round(value.item(), 4)] for value, index in zip(*first)],
            "tokens": generated,
            "text": tokenizer.decode(generated, skip_special_tokens=False),
            "smallest_margin": round(margin, 4),
        })
    return {"shape": shape.as_dict(), "tokenization": texts, "greedy": continuations}


def write_reference(path, reference):
    """Write readable JSON with each list of numbers on one line."""
    lines = []
    for section in ("tokenization", "greedy"):
        records = ",\n".join("    " + json.dumps(record, ensure_ascii=True) for record in reference[section])
        lines.append(f'  "{section}": [\n{records}\n  ]')
    for name in ("shape", "perplexity"):
        lines.append(f'  "{name}": {json.dumps(reference[name])}')
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def largest_difference(compact, reference, tokens):
    """How far the logits of the two implementations are apart."""
    window = torch.tensor([tokens[:WINDOW]])
    with torch.no_grad():
        return (compact(window) - reference(window)).abs().max().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    here = Path(__file__).parent
    parser.add_argument("--run", type=Path, required=True, help="output folder of train.py")
    parser.add_argument("--heldout", type=Path, default=here / "heldout.txt")
    parser.add_argument("--output", type=Path, default=here)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    state = torch.load(arguments.run / "checkpoint.pt", weights_only=True)
    tokenizer = Tokenizer.from_file(str(arguments.run / "tokenizer.json"))
    shape = Shape(**state["shape"])
    path = arguments.output / "lacuna-demo-q8_0.gguf"
    write_gguf(path, shape, state["model"], tokenizer)
    report(path, shape, state, tokenizer, arguments)


def report(path, shape, state, tokenizer, arguments):
    """Check the written file, print the figures and write `reference.json`."""
    heldout = tokenizer.encode(arguments.heldout.read_text(encoding="utf-8")).ids
    weights = read_gguf(path, state["model"].keys())
    compact, original = Qwen3(shape).eval(), Qwen3(shape).eval()
    compact.load_state_dict(weights)
    original.load_state_dict(state["model"])
    model = reference_model(shape, weights)
    logits_of = lambda window: model(window).logits
    difference = largest_difference(compact, logits_of, heldout)
    assert difference < 1e-3, f"implementations differ by {difference}"
    quantized, count = perplexity(logits_of, heldout)
    full, _ = perplexity(original, heldout)
    reference = make_reference(logits_of, tokenizer, shape)
    reference["perplexity"] = {
        "file": "heldout.txt", "window": WINDOW, "tokens": len(heldout), "scored_tokens": count,
        "q8_0": round(quantized, 4), "f32": round(full, 4),
    }
    write_reference(arguments.output / "reference.json", reference)
    print(f"{path.name}: {path.stat().st_size} bytes, {sum(value.numel() for value in weights.values())} parameters")
    print(f"training: {state['progress']}")
    print(f"difference from transformers {difference:.2e}; held out: {reference['perplexity']}")
    for record in reference["greedy"]:
        print("---\n" + record["prompt"] + record["text"])


if __name__ == "__main__":
    main()
