"""What the launch asked for, read from the environment that Accelerate's launcher or torchrun set.

Variable names: accelerate/utils/launch.py, `prepare_multi_gpu_env` (1.15), and torch's elastic launcher.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from accel_parallel.errors import Problem, SpecError
from accel_parallel.spec import RunSpec

PROMISED_PROCESSES = "ACCEL_PARALLEL_NUM_PROCESSES"
"""What a worker compares with the processes it finds: Accelerate can start fewer than a file asks for, silently."""

_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


class Parallelism(StrEnum):
    """What happens to the model in each process."""

    SINGLE = "single"
    DDP = "ddp"
    FSDP1 = "fsdp version 1"
    FSDP2 = "fsdp version 2"


@dataclass(frozen=True, slots=True)
class Asked:
    """The launcher's wishes. `shard_size` processes share one copy of the parameters."""

    parallelism: Parallelism
    world_size: int
    local_world_size: int
    mixed_precision: str
    sharding_strategy: str
    shard_size: int
    cpu_offload: bool
    wrap_policy: str
    wrap_classes: tuple[str, ...]
    activation_checkpointing: bool
    contradiction: str | None
    other_dimensions: tuple[str, ...] = ()
    """Dimensions of parallelism_config along which the model or the sequence is split, such as "tp_size 2"."""

    @property
    def fsdp(self) -> bool:
        return self.parallelism in (Parallelism.FSDP1, Parallelism.FSDP2)

    @property
    def num_machines(self) -> int:
        return max(1, self.world_size // self.local_world_size)

    @property
    def strategy_name(self) -> str:
        """The catalogue's name for this, used for the run directory when nobody named one."""
        if not self.fsdp:
            return self.parallelism.value
        base = "fsdp" if self.parallelism is Parallelism.FSDP2 else "fsdp1"
        kind = self.sharding_strategy.lower()
        if self.cpu_offload:
            return f"{base}_cpu_offload"
        return base if base == "fsdp" and kind == "full_shard" else f"{base}_{kind}"

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> Self:
        world_size = int(env.get("WORLD_SIZE", "1"))
        fsdp = _true(env.get("ACCELERATE_USE_FSDP"))
        version2 = env.get("FSDP_VERSION", "1") == "2"
        parallelism = (
            (Parallelism.FSDP2 if version2 else Parallelism.FSDP1)
            if fsdp
            else Parallelism.DDP if world_size > 1 or "LOCAL_RANK" in env else Parallelism.SINGLE
        )  # fmt: skip
        replicas = int(env.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1")) if version2 else 1
        strategy = _strategy(env, version2, replicas) if fsdp else "NO_SHARD"
        policy = env.get("FSDP_AUTO_WRAP_POLICY", "NO_WRAP").upper() if fsdp else "NO_WRAP"
        local_world_size = int(env.get("LOCAL_WORLD_SIZE", str(world_size)))
        return cls(
            parallelism=parallelism,
            world_size=world_size,
            local_world_size=local_world_size,
            mixed_precision=env.get("ACCELERATE_MIXED_PRECISION", "no").lower(),
            sharding_strategy=strategy,
            shard_size=_shard_size(strategy, world_size, local_world_size, replicas),
            cpu_offload=fsdp and _true(env.get("FSDP_OFFLOAD_PARAMS")),
            wrap_policy=policy,
            wrap_classes=tuple(filter(None, env.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "").split(","))) if fsdp else (),
            activation_checkpointing=fsdp and _true(env.get("FSDP_ACTIVATION_CHECKPOINTING")),
            contradiction=_contradiction(env, strategy) if fsdp else None,
            other_dimensions=tuple(
                f"{name.lower()}_size {size}"
                for name in ("TP", "CP", "SP")
                if (size := env.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1")) != "1"
            ),
        )


def adapt_spec(spec: RunSpec, asked: Asked) -> RunSpec:
    """The specification with what the launch really asked for: its world, precision and sharding. The YAML decides.

    Raises SpecError if the batch does not divide, or if the launch asks for what this loop does not do.
    """
    if asked.mixed_precision not in ("no", "bf16"):
        message = f"mixed_precision {asked.mixed_precision} in the accelerate YAML: this loop trains with no or bf16"
        raise SpecError([Problem(message, code="spec-precision")])
    if asked.other_dimensions:
        message = f"parallelism_config {', '.join(asked.other_dimensions)} in the accelerate YAML: this loop splits "
        raise SpecError([Problem(f"{message}neither a sequence nor a matrix", code="spec-parallelism")])
    if asked.activation_checkpointing and spec.model.activation_checkpointing != "none":
        message = (
            "activation checkpointing is asked for twice: model.activation_checkpointing "
            f"{spec.model.activation_checkpointing} and fsdp_activation_checkpointing in the YAML; keep one"
        )
        raise SpecError([Problem(message, code="spec-checkpointing")])
    changes: dict[str, Any] = {
        "distributed": spec.distributed.model_copy(
            update={
                "num_machines": asked.num_machines,
                "processes_per_machine": asked.local_world_size,
                "mixed_precision": asked.mixed_precision,
            }
        )
    }
    if asked.fsdp:
        changes["fsdp"] = spec.fsdp.model_copy(update=_sharding(asked))
    spec = spec.model_copy(update=changes)
    problem = spec.batch_problem()
    if problem:
        raise SpecError([Problem(problem, code="spec-batch")])
    return spec


def _sharding(asked: Asked) -> dict[str, Any]:
    """The keys of the specification's fsdp section that the launch's environment decides."""
    return {
        "version": 2 if asked.parallelism is Parallelism.FSDP2 else 1,
        "sharding_strategy": asked.sharding_strategy,
        "cpu_offload": asked.cpu_offload,
    }


def overruled(spec: RunSpec, asked: Asked) -> list[str]:
    """One line for each key of the specification that the accelerate YAML overrules: it was edited, or the YAML was."""
    if not asked.fsdp:
        return []
    return [
        f"fsdp.{key} is {getattr(spec.fsdp, key)} in the specification, {value} in the accelerate YAML, which decides; "
        "`accel-parallel config` brings it up to date"
        for key, value in _sharding(asked).items()
        if getattr(spec.fsdp, key) != value
    ]


def _true(value: str | None) -> bool:
    return (value or "").lower() in ("1", "true", "yes", "on", "y", "t")


def _strategy(env: Mapping[str, str], version2: bool, replicas: int) -> str:
    if version2:
        if replicas > 1:
            return "HYBRID_SHARD"
        return "FULL_SHARD" if _true(env.get("FSDP_RESHARD_AFTER_FORWARD", "true")) else "SHARD_GRAD_OP"
    name = env.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD").upper()
    return _STRATEGIES[int(name) - 1] if name.isdigit() and 1 <= int(name) <= len(_STRATEGIES) else name


def _shard_size(strategy: str, world_size: int, local_world_size: int, replicas: int) -> int:
    if strategy == "NO_SHARD":
        return 1
    if strategy.startswith("HYBRID_SHARD"):
        return world_size // replicas if replicas > 1 else local_world_size
    return world_size


def _contradiction(env: Mapping[str, str], strategy: str) -> str | None:
    """A wish that is in the environment and that Accelerate does not read.

    With version 1 the launcher always exports FSDP_SHARDING_STRATEGY, and the plugin reads
    FSDP_RESHARD_AFTER_FORWARD only without it (accelerate/utils/dataclasses.py, 1.15).
    With version 2 the plugin never reads FSDP_SHARDING_STRATEGY; FULL_SHARD there is the launcher's own default.
    """
    if env.get("FSDP_VERSION", "1") != "2":
        wish = env.get("FSDP_RESHARD_AFTER_FORWARD", "").upper()
        if wish in _STRATEGIES and wish != strategy:
            return f"fsdp_reshard_after_forward asks for {wish}, which version 1 ignores: {strategy} runs; " + (
                f"write fsdp_sharding_strategy: {wish}"
            )
        return None
    wish = env.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD").upper()
    wish = _STRATEGIES[int(wish) - 1] if wish.isdigit() and 1 <= int(wish) <= len(_STRATEGIES) else wish
    if wish not in ("FULL_SHARD", strategy):
        return f"fsdp_sharding_strategy asks for {wish}, which version 2 ignores: {strategy} runs; " + (
            "set fsdp_reshard_after_forward or parallelism_config"
        )
    return None
