"""A Trainer of transformers, which makes Accelerate's state a second time and its Accelerator itself."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


def main() -> None:
    set_seed(5)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    texts = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(config.vocab_size, (40, 16))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=5, per_device_train_batch_size=2, report_to=[], logging_steps=1, save_strategy="no"
        )
        Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=texts).train()


if __name__ == "__main__":
    main()
