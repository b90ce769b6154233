"""Sampling from a model that is being trained."""

import torch
from torch import Tensor, nn


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: list[int],
    *,
    max_new_tokens: int,
    seq_len: int,
    vocab_size: int,
    device: torch.device,
    temperature: float = 0.8,
    seed: int = 0,
) -> list[int]:
    """Collective: every rank samples the same tokens. The prompt's continuation, without the prompt.

    Each token costs a forward pass over at most `seq_len` tokens: a prepared model has no key-value cache.
    Tokens at or above `vocab_size` (padding of the embedding) are never drawn.
    """
    draw = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    model.eval()
    for _ in range(max_new_tokens):
        context = torch.tensor([tokens[-seq_len:]], device=device)  # (1, T)
        logits: Tensor = model(context)[0, -1, :vocab_size].float().cpu()  # (V,)
        tokens.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=draw)))
    model.train()
    return tokens[len(prompt) :]
