#!/usr/bin/env python3
"""Make the reference fixtures: tiny random models and their outputs.

Every expected value comes from an implementation that is not ours: logits and greedy
tokens from Hugging Face transformers on PyTorch, token ids from `tokenizers` and
`sentencepiece`, rendered chats from Jinja2, replies taken apart by `openai-harmony`, dequantized blocks from `gguf`, quantized ones
from it and llama.cpp, quantized folders by what reads them. Heads that guess tokens are transformers' layers with what is around them written out.

    python make.py [--out FOLDER] [models types tokenizers templates replies families heads encoders forms quantized vision]

Same versions (requirements.txt), same bytes. README.md describes the files.
"""

import argparse
import pathlib

PARTS = ("models", "types", "tokenizers", "templates", "replies", "families", "heads", "encoders", "forms", "quantized", "vision")


def main() -> None:
    here = pathlib.Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"any of {', '.join(PARTS)}")
    parser.add_argument("--out", type=pathlib.Path, default=here, help="default: this folder")
    arguments = parser.parse_args()
    for part in arguments.parts:
        if part not in PARTS:
            parser.error(f"unknown part {part!r}")
        module = __import__(f"making.{part}", fromlist=["make"])
        print(f"making {part}")
        module.make(arguments.out)


if __name__ == "__main__":
    main()
