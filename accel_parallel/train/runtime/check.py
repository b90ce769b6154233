"""The comparison of what was asked with what is there. Pure, and able to fail."""

import torch

from accel_parallel.asked import Asked, Parallelism
from accel_parallel.errors import MismatchError
from accel_parallel.train.runtime.observe import Observed, Original

_LOADING = "fsdp.cpu_ram_efficient_loading to false"
_DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check(asked: Asked, observed: Observed, original: Original, mixed_precision: str) -> None:
    """Raise MismatchError, naming everything asked, got and what to do, unless all of it holds.

    `mixed_precision` is the precision after substitutions.
    """
    problems = mismatches(asked, observed, original, mixed_precision)
    if problems:
        raise MismatchError("what runs is not what was asked for: " + "; ".join(problems))


def mismatches(asked: Asked, observed: Observed, original: Original, mixed_precision: str) -> list[str]:
    """One line for each difference."""
    found = []
    if asked.contradiction:
        found.append(asked.contradiction)
    if asked.world_size != observed.world_size:
        found.append(world_mismatch(asked.world_size, observed.world_size))
    if asked.parallelism is not observed.parallelism:
        found.append(
            f"asked for {asked.parallelism}, got {observed.parallelism}: "
            "check distributed_type and fsdp_version in the YAML, and that nothing set ACCELERATE_USE_FSDP later"
        )
    elif asked.fsdp:
        found += _sharding(asked, observed, original)
    dtype = _DTYPES.get(mixed_precision)
    if dtype is not None and observed.compute_dtypes and observed.compute_dtypes != {dtype}:
        got = ", ".join(sorted(str(d).removeprefix("torch.") for d in observed.compute_dtypes))
        found.append(f"asked for mixed_precision {mixed_precision}, matrix products run in {got}")
    if observed.tied != original.tied:
        names = ", ".join(" = ".join(group) for group in original.tied if group not in observed.tied)
        found.append(
            f"tied weights came apart ({names}): set "
            + ("fsdp_use_orig_params to true" if observed.parallelism is Parallelism.FSDP1 else _LOADING)
            + ", or model.tie_embeddings to false"
        )
    return found


def world_mismatch(asked: int, got: int) -> str:
    return (
        f"asked for {asked} processes, got {got} in this process group: every process would train its own copy; "
        "launch with `accel-parallel launch` or `accelerate launch`"
    )


def _sharding(asked: Asked, observed: Observed, original: Original) -> list[str]:
    found = []
    if asked.shard_size > 1 and observed.local_elements > observed.largest_promised_shard:
        found.append(
            f"asked for {asked.sharding_strategy} over {asked.shard_size} processes, at most "
            f"{observed.largest_promised_shard:,} of {original.num_parameters:,} parameters each; this process holds "
            f"{observed.local_elements:,}: check fsdp_sharding_strategy or parallelism_config"
        )
    # Accelerate makes units of version 2's final norm and of both embeddings whatever the policy.
    always = original.embeddings if observed.parallelism is Parallelism.FSDP2 else ()
    inner = {name: cls for name, cls in observed.units.items() if name not in ("", *always) and "Norm" not in cls}
    if asked.wrap_policy == "TRANSFORMER_BASED_WRAP":
        for name in asked.wrap_classes:
            there, wrapped = original.class_counts.get(name, 0), list(inner.values()).count(name)
            if there != wrapped or not there:
                found.append(
                    f"asked to wrap every {name}: the model has {there}, {wrapped} are units of their own; "
                    "check fsdp_transformer_layer_cls_to_wrap"
                )
    elif asked.wrap_policy == "SIZE_BASED_WRAP" and not inner:
        found.append(
            "asked for SIZE_BASED_WRAP, but no module reaches the threshold and only the whole model is one unit; "
            "lower fsdp.min_num_params, or set fsdp.wrap to none"
        )
    if observed.resharded_after_forward is not None and asked.sharding_strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        wanted = asked.sharding_strategy == "FULL_SHARD"
        if observed.resharded_after_forward != wanted and asked.shard_size > 1:
            got = "gave back" if observed.resharded_after_forward else "kept"
            found.append(
                f"asked for {asked.sharding_strategy}, but units {got} their full parameters after the forward pass; "
                "check fsdp_reshard_after_forward (version 2) or fsdp_sharding_strategy (version 1)"
            )
    if asked.wrap_policy == "NO_WRAP" and inner:
        found.append(f"asked for no wrapping, but {', '.join(inner)} are units of their own")
    return found
