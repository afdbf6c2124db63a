"""Train the tokenizer and the demo model on the corpus made by `corpus.py`.

Muon trains the matrices of the blocks, AdamW the embedding and the norms. The
learning rate is constant after a short warm-up and falls to zero over the last
part of the time budget; sequences are 512 tokens long at first and 1,024 in that
last part. The second half of the budget shifts the mixture to the Book and to the
openings of sections, which are the answers a reader wants. A run can be stopped
and started again; it continues from its checkpoint.
"""

import argparse
import json
import random
import time
from pathlib import Path

import numpy
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from corpus import END_OF_SECTION, KNOWN_TOPIC_WEIGHT
from headings import ANSWERS
from measures import active_shares, perplexity
from model import Network, Shape

# The pre-tokenizer that GGUF files call "qwen2".
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TOKENS_PER_STEP = 4096
SHORT_ROW, LONG_ROW = 512, 1024
SHORTEST_REMAINDER = 128
WARMUP_STEPS = 40
DECAY_SHARE = 0.35
FOCUS_SHARE = 0.5
FOCUS_WEIGHTS = {"book": 2.0, "rust-by-example": 0.7, "std": 0.4}
FOCUS_WEIGHT_ELSEWHERE = 0.15
OPENING_WEIGHTS = {"book": 2.0, "std": 0.7}
KNOWN_OPENING_WEIGHT = 25.0
OPENING_CHARACTERS = 500
ANSWER_CHARACTERS = 150
MUON_RATE, ADAM_RATE = 0.02, 0.004


def read_sections(path):
    """The training sections."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def opening(body, characters=OPENING_CHARACTERS):
    """The first paragraphs of a section, up to its first code listing."""
    paragraphs = []
    for paragraph in body.split("\n\n"):
        if paragraph.startswith("```") or sum(map(len, paragraphs)) > characters:
            break
        paragraphs.append(paragraph)
    while paragraphs and (paragraphs[-1].endswith(":") or paragraphs[-1].startswith("Filename:")):
        paragraphs.pop()
    return "\n\n".join(paragraphs)


def answers(sections):
    """Short answers that begin inside a section of the Book."""
    for start, questions in ANSWERS.items():
        bodies = [section["body"] for section in sections if section["source"] == "book" and start in section["body"]]
        body = opening(bodies[0][bodies[0].index(start):], ANSWER_CHARACTERS)
        yield {"source": "book", "weight": KNOWN_OPENING_WEIGHT, "headings": questions, "body": body}


def focus_sections(sections):
    """The mixture of the second half: the Book, and openings as short answers."""
    chosen = list(answers(sections))
    answered = {question for questions in ANSWERS.values() for question in questions}
    for section in sections:
        source, known = section["source"], section["weight"] == KNOWN_TOPIC_WEIGHT
        own, *others = section["headings"]
        section = {**section, "headings": [own] + [heading for heading in others if heading not in answered]}
        weight = FOCUS_WEIGHTS.get(source, FOCUS_WEIGHT_ELSEWHERE) * (2 if known else 1)
        chosen.append({**section, "weight": weight})
        weight = KNOWN_OPENING_WEIGHT if known else OPENING_WEIGHTS.get(source, 0.0)
        start = opening(section["body"])
        if weight and start:
            chosen.append({**section, "weight": weight, "body": start})
    return chosen


def train_tokenizer(sections, size):
    """A byte-level BPE tokenizer with the qwen2 pre-tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_SECTION],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = []
    for section in sections:
        repeats = 2 if section["source"] == "book" else 1
        texts += [f"# {section['headings'][0]}\n\n{section['body']}"] * repeats
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == size
    return tokenizer


class Corpus:
    """Encoded sections, served as packed rows."""

    def __init__(self, sections, tokenizer, seed=1):
        self.weights = [section["weight"] for section in sections]
        bodies = tokenizer.encode_batch([section["body"] + END_OF_SECTION for section in sections])
        self.bodies = [encoding.ids for encoding in bodies]
        self.headings = []
        for section in sections:
            encodings = tokenizer.encode_batch([f"# {heading}\n\n" for heading in section["headings"]])
            self.headings.append([encoding.ids for encoding in encodings])
        self.random = random.Random(seed)
        self.queue = []

    def size(self):
        """Unique tokens and tokens in one weighted pass."""
        lengths = [len(body) for body in self.bodies]
        return sum(lengths), int(sum(length * weight for length, weight in zip(lengths, self.weights)))

    def fill_queue(self):
        """Line up one weighted, shuffled pass over the sections."""
        for index, weight in enumerate(self.weights):
            repeats = int(weight) + (self.random.random() < weight % 1)
            self.queue += [index] * repeats
        self.random.shuffle(self.queue)

    def row(self, length, remainder):
        """One row of `length` tokens, and what is left of its last section."""
        tokens = list(remainder)
        while len(tokens) < length:
            if not self.queue:
                self.fill_queue()
            index = self.queue.pop()
            tokens += self.random.choice(self.headings[index]) + self.bodies[index]
        remainder = tokens[length - 1:]
        return tokens[:length], remainder if len(remainder) > SHORTEST_REMAINDER else []

    def rows(self):
        """Endless rows; `send` sets the length of the next one."""
        remainder, length = [], SHORT_ROW + 1
        while True:
            row, remainder = self.row(length, remainder)
            length = (yield row) or length


class Muon(torch.optim.Optimizer):
    """Momentum, with each update made orthogonal by Newton-Schulz steps."""

    def __init__(self, parameters, rate, momentum=0.95, decay=0.01):
        super().__init__(parameters, {"lr": rate, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            by_shape = {}
            for parameter in group["params"]:
                state = self.state[parameter]
                if "buffer" not in state:
                    state["buffer"] = torch.zeros_like(parameter)
                state["buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(state["buffer"], group["momentum"])
                by_shape.setdefault(update.shape, []).append((parameter, update))
            for shape, pairs in by_shape.items():
                updates = orthogonal(torch.stack([update for _, update in pairs]))
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for (parameter, _), update in zip(pairs, updates):
                    parameter.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-scale)


def orthogonal(matrices, steps=5):
    """Nearly orthogonal matrices in the direction of the given ones."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    result = matrices.mT if tall else matrices
    result = result / (result.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = result @ result.mT
        result = 3.4445 * result + (-4.775 * square + 2.0315 * square @ square) @ result
    return result.mT if tall else result


def make_optimizers(model):
    """Muon for the matrices of the blocks, AdamW for everything else."""
    matrices = [parameter for parameter in model.layers.parameters() if parameter.dim() == 2]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    return [
        Muon(matrices, MUON_RATE),
        torch.optim.AdamW(others, ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def rate_factor(step, progress):
    """Warm-up, constant, then linear decay over the last part of the budget."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    decay = min(1.0, max(0.0, (1.0 - progress) / DECAY_SHARE))
    return warmup * decay


def heldout_figures(model, tokens, device):
    """Perplexity of the held-out text, and for the sibling what share of activations is not zero in each block."""
    model.eval()
    figures = f"held-out perplexity {perplexity(model, tokens, device)[0]:.3f}"
    if model.shape.sparse:
        shares = active_shares(model, [layer.mlp.down_proj for layer in model.layers], tokens, device)
        figures += f", active {' '.join(f'{share:.4f}' for share in shares)}"
    model.train()
    return figures


@torch.no_grad()
def continuation(model, tokenizer, prompt, device, count=64):
    """Greedy text after a prompt."""
    tokens = tokenizer.encode(prompt).ids
    for _ in range(count):
        logits = model(torch.tensor([tokens[-LONG_ROW:]], device=device))
        tokens.append(int(logits[0, -1].argmax()))
    return tokenizer.decode(tokens, skip_special_tokens=False)


def save_checkpoint(path, model, optimizers, progress):
    """Write a checkpoint so that an interruption leaves the old one whole."""
    state = {
        "shape": model.shape.as_dict(),
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "progress": progress,
    }
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def load_checkpoint(path, model, optimizers):
    """Continue from a checkpoint; returns the counters."""
    state = torch.load(path, weights_only=True, map_location="cpu")
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"]):
        optimizer.load_state_dict(saved)
    return state["progress"]


def penalty_of(model):
    """The mean of each block's activations, summed: what keeps them small makes more of them zero."""
    return sum(layer.mlp.mean for layer in model.layers)


def progress_of(counters, arguments):
    """How much of the budget is used: of steps where these are given, else of time."""
    if arguments.steps:
        return counters["step"] / arguments.steps
    return counters["seconds"] / (arguments.minutes * 60)


def train(arguments, model, corpora, tokenizer, heldout):
    """Train until the budget is used up."""
    device = arguments.device
    checkpoint = arguments.output / "checkpoint.pt"
    optimizers = make_optimizers(model)
    counters = {"step": 0, "tokens": 0, "seconds": 0.0}
    if checkpoint.exists():
        counters = load_checkpoint(checkpoint, model, optimizers)
    streams = []
    for corpus in corpora:
        corpus.random.seed(counters["step"])
        streams.append(corpus.rows())
        next(streams[-1])
    network = torch.compile(model, dynamic=False) if arguments.compile else model
    recent = []
    last = time.monotonic()
    while (progress := progress_of(counters, arguments)) < 1:
        length = LONG_ROW if progress > 1 - DECAY_SHARE else SHORT_ROW
        rows = streams[progress > 1 - FOCUS_SHARE]
        batch = torch.tensor([rows.send(length + 1) for _ in range(TOKENS_PER_STEP // length)], device=device)
        loss = network(batch[:, :-1], batch[:, 1:])
        (loss + arguments.penalty * penalty_of(model) if arguments.penalty else loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        factor = rate_factor(counters["step"], progress)
        for optimizer, rate in zip(optimizers, (MUON_RATE, ADAM_RATE)):
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.step()
        model.zero_grad(set_to_none=True)
        recent.append(loss.item())
        now = time.monotonic()
        counters["step"] += 1
        counters["tokens"] += TOKENS_PER_STEP
        counters["seconds"] += now - last
        last = now
        if counters["step"] % 20 == 0:
            speed = TOKENS_PER_STEP * counters["step"] / counters["seconds"]
            print(f"step {counters['step']} tokens {counters['tokens']} minutes {counters['seconds'] / 60:.1f} "
                  f"loss {numpy.mean(recent):.4f} rate {factor:.3f} speed {speed:.0f}/s", flush=True)
            recent = []
        if counters["step"] % 50 == 0:
            save_checkpoint(checkpoint, model, optimizers, counters)
        if counters["step"] % 200 == 0:
            print(heldout_figures(model, heldout, device), flush=True)
            print(continuation(model, tokenizer, "# What is ownership?\n\n", device), flush=True)
            last = time.monotonic()
    save_checkpoint(checkpoint, model, optimizers, counters)
    print(f"done: {counters}; {heldout_figures(model, heldout, device)}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="folder with sections.jsonl")
    parser.add_argument("--heldout", type=Path, default=Path(__file__).parent / "heldout.txt")
    parser.add_argument("--output", type=Path, required=True, help="folder for tokenizer.json and checkpoint.pt")
    parser.add_argument("--minutes", type=float, default=60.0, help="time budget")
    parser.add_argument("--steps", type=int, help="budget in steps, instead of time")
    parser.add_argument("--device", default="cpu", help="where to train: cpu or cuda")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sparse", action="store_true", help="train the sibling, whose activations are mostly zero")
    parser.add_argument("--penalty", type=float, default=0.0, help="weight of the sibling's activations in its loss")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    if arguments.device != "cpu":
        # TF32: its 10 bits are enough for training, and products take a fraction of the time.
        torch.set_float32_matmul_precision("high")
    arguments.output.mkdir(parents=True, exist_ok=True)
    sections = read_sections(arguments.corpus / "sections.jsonl")
    tokenizer_path = arguments.output / "tokenizer.json"
    if not tokenizer_path.exists():
        train_tokenizer(sections, Shape().vocab_size).save(str(tokenizer_path))
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    corpora = [Corpus(sections, tokenizer), Corpus(focus_sections(sections), tokenizer)]
    model = Network(Shape.sibling() if arguments.sparse else Shape()).to(arguments.device)
    print(f"parameters {sum(parameter.numel() for parameter in model.parameters())}, "
          f"tokens once and weighted: {[corpus.size() for corpus in corpora]}", flush=True)
    heldout = tokenizer.encode(arguments.heldout.read_text(encoding="utf-8")).ids
    train(arguments, model, corpora, tokenizer, heldout)


if __name__ == "__main__":
    main()
