"""A Hugging Face Llama from a configuration, its embedding tied to its head."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler


def main() -> None:
    accelerator = Accelerator()
    set_seed(4)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=20)
    loader = DataLoader(torch.randint(config.vocab_size, (40, 16)), batch_size=4)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for step, tokens in enumerate(loader):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        accelerator.log({"train_loss": loss.item()}, step=step)


if __name__ == "__main__":
    main()
