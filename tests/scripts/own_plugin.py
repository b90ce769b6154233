"""Asks for FSDP itself, whatever it is launched with; precision and accumulation too."""

import argparse

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--version", type=int, default=2)
    parser.add_argument("--strategy", default="FULL_SHARD")
    parser.add_argument("--offload", action="store_true")
    arguments = parser.parse_args()
    version1 = {"sync_module_states": True, "use_orig_params": True, "sharding_strategy": arguments.strategy}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=arguments.version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
        cpu_offload=arguments.offload,
        **(version1 if arguments.version == 1 else {}),
    )
    accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision="no", gradient_accumulation_steps=3)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in range(12):
        with accelerator.accumulate(model):
            batch = torch.full((2, 16), step + accelerator.process_index / 2)
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
