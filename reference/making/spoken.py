"""Models that say one thing: two tiny ones whose greedy replies are known, for tests from request to reply.

A token's embedding names it, the output matrix says which token follows which, and nothing else counts, but for two
features: two heads each look for one token, and add a direction to the stream of all after it. What follows
a token may depend on them.
"""

import pathlib

import gguf
import numpy as np

from making import bpe, templates

WIDTH, HEAD = 64, 32
# The stream: one direction for each token with a place in a reply, and after them these.
ALWAYS, FIRST_SEEN, SECOND_SEEN = WIDTH - 3, WIDTH - 2, WIDTH - 1
# The last row of a head, which rotates too little to notice.
STILL = HEAD - 1

CONTROL = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>", "<|endoftext|>"]
# After "assistant", of which the prompt has the letters.
HARMONY = {
    "t": {"<|channel|>": 7},
    "assistant": {"<|channel|>": 7},
    # A thought first. With the second feature a call after it, otherwise an answer.
    "<|channel|>": {"analysis": 7, "final": 3.5, "commentary": 2.5},
    "<|message|>": {"Simple": 7, "It": 3.5, '{"city": ': 2.5},
    "analysis": {"<|message|>": 7},
    "final": {"<|message|>": 7},
    "Simple": {" sum.": 7},
    " sum.": {"<|end|>": 7},
    "<|end|>": {"<|start|>": 7},
    "<|start|>": {"assistant": 7},
    "It": {" is": 7},
    " is": {" 4.": 7},
    " 4.": {"<|return|>": 7},
    "commentary": {" to=functions.weather": 7},
    " to=functions.weather": {" ": 7},
    " ": {"<|constrain|>": 7},
    "<|constrain|>": {"json": 7},
    "json": {"<|message|>": 7},
    '{"city": ': {'"Rome"}': 7},
    '"Rome"}': {"<|call|>": 7},
}
# That the thought has been had, and that there are tools: only their types have an underscore.
HARMONY_FEATURES = {" sum.": {"final": 4, "It": 4, "commentary": 3, '{"city": ': 3}, "_": {"commentary": 3, '{"city": ': 3}}

THINKING_CONTROL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
THINKING_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% if begin_thought %}{{ '<think>' }}{% endif %}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>' }}{% endif %}{% endif %}"
)
THINKING = {
    "\n": {"<think>": 7},
    "<think>": {"\nSimple": 7},
    "\nSimple": {" sum.\n": 7},
    " sum.\n": {"</think>": 7},
    "</think>": {"\n\nIt": 7},
    "\n\nIt": {" is": 7},
    " is": {" 4.": 7},
    " 4.": {"<|im_end|>": 7},
    "<|im_end|>": {},
}


def vocabulary(follows: dict, control: list[str]) -> list[str]:
    """Every byte, the words of the reply, one merge that no text needs, and control tokens."""
    alphabet = bpe.byte_alphabet()
    words = [bpe.spell(word) for word in follows if word not in control]
    return list(dict.fromkeys(alphabet + [alphabet[0] * 2] + words)) + control


def tensors(follows: dict, features: dict, tokens: list[str], control: list[str]) -> dict[str, np.ndarray]:
    def token(text: str) -> int:
        return tokens.index(text if text in control else bpe.spell(text))

    places = {text: place for place, text in enumerate(dict.fromkeys([*follows, *features]))}
    assert len(places) <= ALWAYS
    embedding = np.zeros((len(tokens), WIDTH), np.float32)
    output = np.zeros((len(tokens), WIDTH), np.float32)
    for text, place in places.items():
        embedding[token(text), place] = 1
        embedding[token(text), ALWAYS] = 1
        for following, weight in follows.get(text, {}).items():
            output[token(following), place] = weight
    query, key, value = (np.zeros((WIDTH, WIDTH), np.float32) for _ in range(3))
    mixed = np.zeros((WIDTH, WIDTH), np.float32)
    # What a norm makes of the ones above.
    unit = np.sqrt(WIDTH / 2)
    for head, ((text, weights), seen) in enumerate(zip(features.items(), (FIRST_SEEN, SECOND_SEEN))):
        query[head * HEAD + STILL, ALWAYS] = 20 / unit
        key[head * HEAD + STILL, places[text]] = 20 / unit
        value[head * HEAD, places[text]] = 1 / unit
        mixed[seen, head * HEAD] = 1
        for following, weight in weights.items():
            output[token(following), seen] = weight
    nothing = np.zeros((32, WIDTH), np.float32)
    ones = np.ones(WIDTH, np.float32)
    return {
        "token_embd.weight": embedding,
        "output_norm.weight": ones,
        "output.weight": output,
        "blk.0.attn_norm.weight": ones,
        "blk.0.attn_q.weight": query,
        "blk.0.attn_k.weight": key,
        "blk.0.attn_v.weight": value,
        "blk.0.attn_output.weight": mixed,
        "blk.0.ffn_norm.weight": ones,
        "blk.0.ffn_gate.weight": nothing,
        "blk.0.ffn_up.weight": nothing,
        "blk.0.ffn_down.weight": nothing.T.copy(),
    }


def write(path: pathlib.Path, follows: dict, features: dict, control: list[str], end: str, pre: str, template: str) -> None:
    tokens = vocabulary(follows, control)
    zero = bpe.byte_alphabet()[0]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("model")
    writer.add_name(path.stem)
    writer.add_block_count(1)
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_dimension_count(HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    bpe.add_to_gguf(writer, pre, tokens, [(zero, zero)], control, ("<think>", "</think>"))
    writer.add_eos_token_id(tokens.index(end))
    writer.add_add_bos_token(False)
    writer.add_chat_template(template)
    for name, data in tensors(follows, features, tokens, control).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make(out: pathlib.Path) -> None:
    folder = out / "replies"
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "harmony.gguf", HARMONY, HARMONY_FEATURES, CONTROL, "<|return|>", "gpt-4o", templates.HARMONY)
    write(folder / "thinking.gguf", THINKING, {}, THINKING_CONTROL, "<|im_end|>", "qwen2", THINKING_TEMPLATE)
