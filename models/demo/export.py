"""Write the trained model as a Q8_0 GGUF file and check that file.

The check reads the written file back, loads its dequantized weights into the
network of transformers, compares that with the compact model used for training,
and measures the held-out perplexity (`measures.py`). The results go to
`reference.json`, against which another implementation can be tested. A checkpoint
of the sibling has a file and a reference of its own.
"""

import argparse
import json
import math
from pathlib import Path

import gguf
import numpy
import torch
from tokenizers import Tokenizer

from corpus import END_OF_SECTION
from families import family_of
from measures import WINDOW, active_shares, perplexity
from model import Network, Shape

GREEDY_TOKENS = 48
# Of the held-out text, for the shares of activations that are not zero: few, so that a test has time for a pass each.
ACTIVE_TOKENS = 192
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{ '# ' + message['content'] + '\\n\\n' }}"
    "{%- elif message['role'] == 'assistant' -%}{{ message['content'] + '" + END_OF_SECTION + "' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
)
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


def add_metadata(writer, shape, tokenizer):
    """Everything but the tensors."""
    family = family_of(shape)
    writer.add_name(family.name)
    writer.add_description(family.description)
    writer.add_license("MIT OR Apache-2.0")
    writer.add_source_url("https://doc.rust-lang.org/")
    writer.add_languages(["en"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_vocab_size(shape.vocab_size)
    family.add_sizes(writer, shape)
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
    family = family_of(shape)
    writer = gguf.GGUFWriter(path, family.architecture)
    add_metadata(writer, shape, tokenizer)
    for name, weight in weights.items():
        values = weight.float().numpy()
        kind = gguf.GGMLQuantizationType.Q8_0 if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(values, kind)
        writer.add_tensor(family.tensor_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_gguf(path, family, names):
    """The dequantized weights of a model file, under the names used for training."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    weights = {}
    for name in names:
        tensor = tensors.pop(family.tensor_name(name))
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        weights[name] = torch.from_numpy(numpy.array(values, dtype=numpy.float32))
    assert not tensors, f"unknown tensors {list(tensors)}"
    return weights


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
    for name in ("shape", "perplexity", "active_shares"):
        if name in reference:
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
    state = torch.load(arguments.run / "checkpoint.pt", weights_only=True, map_location="cpu")
    tokenizer = Tokenizer.from_file(str(arguments.run / "tokenizer.json"))
    shape = Shape(**state["shape"])
    path = arguments.output / family_of(shape).file
    write_gguf(path, shape, state["model"], tokenizer)
    report(path, shape, state, tokenizer, arguments)


def report(path, shape, state, tokenizer, arguments):
    """Check the written file, print the figures and write `reference.json`."""
    heldout = tokenizer.encode(arguments.heldout.read_text(encoding="utf-8")).ids
    family = family_of(shape)
    weights = read_gguf(path, family, state["model"].keys())
    compact, original = Network(shape).eval(), Network(shape).eval()
    compact.load_state_dict(weights)
    original.load_state_dict(state["model"])
    model = family.reference_model(shape, weights)
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
    if shape.sparse:
        # The feed-forward blocks are every second layer there.
        products = [layer.mixer.down_proj for layer in model.model.layers[1::2]]
        text = heldout[:ACTIVE_TOKENS]
        shares = active_shares(logits_of, products, text)
        reference["active_shares"] = {"tokens": text, "blocks": [round(share, 4) for share in shares]}
    write_reference(arguments.output / family.reference, reference)
    print(f"{path.name}: {path.stat().st_size} bytes, {sum(value.numel() for value in weights.values())} parameters")
    print(f"training: {state['progress']}")
    print(f"difference from transformers {difference:.2e}; held out: {reference['perplexity']}")
    if shape.sparse:
        print(f"not zero: {reference['active_shares']['blocks']}, of the whole text {active_shares(logits_of, products, heldout)}")
    for record in reference["greedy"]:
        print("---\n" + record["prompt"] + record["text"])


if __name__ == "__main__":
    main()
