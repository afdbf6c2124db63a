"""What is measured of a network: its perplexity, and how many activations of its feed-forward blocks are not zero.

Perplexity protocol: the whole text is tokenized once, without special tokens, and
cut into consecutive windows of 1,024 tokens (the last one may be shorter). Every
window starts with an empty context; its first token is not scored. The result is
exp(total negative log-likelihood / number of scored tokens).
"""

import math

import torch

WINDOW = 1024


def windows(tokens, device):
    """The windows of a text, each as a batch of one row."""
    for start in range(0, len(tokens), WINDOW):
        yield torch.tensor([tokens[start:start + WINDOW]], device=device)


@torch.no_grad()
def perplexity(logits_of, tokens, device="cpu"):
    """Perplexity and number of scored tokens, by the protocol above."""
    total, count = 0.0, 0
    for window in windows(tokens, device):
        if window.shape[1] < 2:
            continue
        losses = torch.log_softmax(logits_of(window)[0, :-1].double(), dim=-1)
        total -= losses.gather(1, window[0, 1:, None]).sum().item()
        count += window.shape[1] - 1
    return math.exp(total / count), count


@torch.no_grad()
def active_shares(logits_of, products, tokens, device="cpu"):
    """By product, the share of what it is given that is not zero, over the same windows."""
    active, seen = [0] * len(products), [0] * len(products)

    def count(index):
        def hook(_, inputs):
            active[index] += inputs[0].count_nonzero().item()
            seen[index] += inputs[0].numel()
        return hook

    hooks = [product.register_forward_pre_hook(count(index)) for index, product in enumerate(products)]
    for window in windows(tokens, device):
        logits_of(window)
    for hook in hooks:
        hook.remove()
    return [some / every for some, every in zip(active, seen)]
