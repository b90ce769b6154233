"""Ways to make a worker run something else than it was asked to, by name; applied in the workers of test_mismatch."""

import functools
import os
from typing import Any


def apply(name: str) -> None:
    from torch import distributed

    from accel_parallel.train.model import TransformerLM
    from accel_parallel.train.runtime import arguments, cpu, join, process

    original_plugin = arguments.fsdp_plugin

    def plugin(*args: Any, **kwargs: Any) -> Any:
        made = original_plugin(*args, **kwargs)
        if name == "no wrapping":
            made.auto_wrap_policy = None
        if name == "kept after forward":
            made.reshard_after_forward = False
        return made

    arguments.fsdp_plugin = plugin
    if name == "no promotion to FSDP":
        cpu.promote_to_fsdp = lambda: None
    if name == "no tie_weights":
        TransformerLM.tie_weights = functools.partialmethod(_tie_only_while_building)  # type: ignore[method-assign,assignment]
    if name == "precision lost":
        original_environment = cpu.prepare_environment

        def lose(asked: Any, keep_precision: bool) -> None:
            original_environment(asked, keep_precision=True)
            os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"

        cpu.prepare_environment = lose
        arguments.fsdp_plugin = lambda asked: _without_precision(plugin(asked))
    if name == "no process group":
        for key in ("RANK", "LOCAL_RANK"):
            os.environ.pop(key, None)
        original_join = process.join

        def alone(asked: Any, on_cpu: bool, options: Any) -> None:
            os.environ.pop("WORLD_SIZE", None)
            original_join(asked, on_cpu, options)
            assert not distributed.is_initialized()

        process.join = alone

    if name.startswith("not finite on rank"):
        rank, step = name.split()[4], int(name.split()[-1])
        original_forward = TransformerLM.forward
        # The discarded pass comes before the first step.
        calls = {"left": step + 1}

        def forward(model: Any, tokens: Any, labels: Any = None) -> Any:
            out = original_forward(model, tokens, labels)
            calls["left"] -= model.training
            return out * float("nan") if calls["left"] == 0 and os.environ["RANK"] == rank else out

        TransformerLM.forward = forward  # type: ignore[method-assign]
    if name.startswith("gradient not finite at step"):
        original_clip, clips = process.Runtime.clip, {"left": int(name.split()[-1])}

        def clip(self: Any, model: Any) -> Any:
            clips["left"] -= 1
            norm = original_clip(self, model)
            return norm * float("inf") if clips["left"] == 0 else norm

        process.Runtime.clip = clip  # type: ignore[method-assign]
    if name == "other tokens on rank 1":
        from accel_parallel.train.data import TokenData

        TokenData.fingerprint = property(lambda self: "other" if os.environ["RANK"] == "1" else "same")  # type: ignore[assignment]
    if name == "one accelerator":
        join.accelerators = lambda: 1


def _without_precision(plugin: Any) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    plugin.mixed_precision_policy = MixedPrecisionPolicy()
    return plugin


def _tie_only_while_building(model: Any) -> None:
    if not getattr(model, "_built", False):
        model.head.weight = model.token_emb.weight
        model._built = True
