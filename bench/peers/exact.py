"""Writes what a GGUF file's weights say after some prompts when nothing is rounded on the way: they
are decoded to 32-bit floats and run by Hugging Face transformers on PyTorch. Beside every token: by
how much it beat the second, in logarithms of probability. Where two engines part at a gap smaller
than what they round by, this says whose token the weights favour.

    pip install torch transformers gguf accelerate
    python bench/peers/exact.py m.gguf
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "Water boils at a temperature of",
    "def fibonacci(n):\n",
    "The three most important inventions of the nineteenth century were",
]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--generate", type=int, default=64, help="tokens after each prompt")
    parser.add_argument("--prompt", action="append", help="instead of those that agreement.py has")
    return parser.parse_args()


def main():
    args = arguments()
    place = {"pretrained_model_name_or_path": str(args.model.parent), "gguf_file": args.model.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).eval()
    for prompt in args.prompt or PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        if tokenizer.bos_token_id is not None and ids[0, 0] != tokenizer.bos_token_id:
            ids = torch.cat([torch.tensor([[tokenizer.bos_token_id]]), ids], 1)
        print(repr(prompt))
        cache = None
        for index in range(args.generate):
            with torch.no_grad():
                out = model(ids, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            (first, second), tokens = torch.log_softmax(out.logits[0, -1], -1).topk(2)
            text, other = (tokenizer.decode(token) for token in tokens)
            print(f"  {index:3} {text!r:20} by {first - second:.3f} over {other!r}")
            ids = tokens[:1][None]
            if tokens[0] == tokenizer.eos_token_id:
                break


if __name__ == "__main__":
    main()
