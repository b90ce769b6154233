"""The wrap plan of a launch: which FSDP units an accelerate file makes of a model, and what they cost each process.

Worked out from the launcher's environment and the tree of the model's modules; starts nothing and needs no torch.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from accel_parallel.asked import Asked, Parallelism
from accel_parallel.errors import LaunchError, Problem
from accel_parallel.suggest import did_you_mean
from accel_parallel.units import (
    Model,
    Module,
    Sharding,
    Unit,
    Wrapping,
    padded_size,
    peaks,
    refused,
    shard_sizes,
    sharded_twice,
    split_parameters,
    traffic,
    units,
    wrapped,
)

_RESHARDS = ("FULL_SHARD", "HYBRID_SHARD")
_PRECISIONS = ("bf16", "fp16")


@dataclass(frozen=True)
class Plan:
    """What one version of FSDP makes of one model; without FSDP it has no units."""

    model: Model
    asked: Asked
    wrapping: Wrapping
    sharding: Sharding
    own_loop: bool

    @cached_property
    def units(self) -> list[Unit]:
        return units(self.model, self.wrapping) if self.asked.fsdp else []

    @cached_property
    def peaks(self) -> dict[str, int]:
        """Bytes by unit; see `accel_parallel.units.peaks`."""
        return peaks(self.model, self.units, self.sharding)

    @property
    def sharded(self) -> bool:
        return self.asked.fsdp and self.sharding.shard_size > 1

    @cached_property
    def traffic(self) -> dict[tuple[str, str], tuple[int, int]]:
        return traffic(self.units, self.sharding)

    @property
    def gathered_bytes(self) -> int:
        """Of whole tensors, in one forward and one backward pass."""
        return sum(size for (_, kind), (_, size) in self.traffic.items() if kind == "all_gather")

    @property
    def shards(self) -> list[int]:
        """Bytes of parameters at rest, by rank inside a replica."""
        each = [shard_sizes(unit, self.sharding) for unit in self.units]
        return [4 * sum(sizes) for sizes in zip(*each, strict=True)]

    def gathered(self, unit: Unit) -> int:
        """Bytes of the whole tensor, each time that it is gathered."""
        return padded_size(unit, self.sharding) * self.sharding.param_bytes

    def gathers(self, unit: Unit) -> int:
        """Times that it is gathered for one forward and one backward pass."""
        return 0 if not self.sharded or not unit.parameters else 1 + unit.reshards

    def problems(self) -> list[Problem]:
        """What does not do what the file seems to ask for, or fails in torch."""
        if not self.asked.fsdp:
            return []
        found = [*self._unknown_classes(), *self._impossible()]
        if not found and not wrapped(self.model, self.wrapping):
            found.append(self._nothing_wrapped())
        for name, where in split_parameters(self.model, self.units).items():
            text = f"{name} is shared by modules of {len(where)} units ({', '.join(map(_shown, where))}): torch fails"
            hint = "wrap them in one unit, or untie them"
            found.append(Problem(text, code="explain-tied", severity="warning", hint=hint))
        return found

    def _unknown_classes(self) -> list[Problem]:
        if self.wrapping.policy != "TRANSFORMER_BASED_WRAP":
            return []
        there = Counter(module.class_name for module in self.model.modules.values())
        said = "fsdp_transformer_layer_cls_to_wrap names" if self.wrapping.classes else "_no_split_modules names"
        return [
            Problem(
                f"{said} {name!r}, which the model does not have{did_you_mean(name, there)}",
                code="explain-class",
                hint=f"it has {_counts(there)}",
            )
            for name in self.wrapping.classes or self.model.no_split
            if name not in there
        ]

    def _impossible(self) -> list[Problem]:
        found = []
        if self.wrapping.version == 2 and self.model.fails_version2:
            found.append(Problem(self.model.fails_version2, code="explain-model"))
        for module in refused(self.model, self.wrapping)[:1]:
            text = f"{module.name} is a {module.class_name} of {module.size:,} parameters, which version 2 is to wrap "
            hint = "TRANSFORMER_BASED_WRAP with the class of a layer, or version 1"
            found.append(Problem(f"{text}and refuses: it has no forward pass", code="explain-container", hint=hint))
        for end, name in [] if found else sharded_twice(self.model, self.wrapping)[:1]:
            text = f"{end} is inside of {name}, a unit, and version 2 makes one of it afterwards: torch fails"
            hint = "wrap the class of a layer, or use version 1"
            found.append(Problem(text, code="explain-twice", hint=hint))
        return found

    def _nothing_wrapped(self) -> Problem:
        policy, threshold = self.wrapping.policy, self.wrapping.min_num_params
        largest = max(self._below(), key=lambda module: module.size)
        whole = "only the root unit: all parameters are gathered at once"
        if policy == "SIZE_BASED_WRAP" and threshold:
            reach = "more than" if self.wrapping.version == 2 else "at least"
            text = f"no module below the root has {reach} fsdp_min_num_params {threshold:,}: {whole}"
            hint = f"the largest is {largest.name}, a {largest.class_name} of {largest.size:,}"
            return Problem(text, code="explain-threshold", severity="warning", hint=hint)
        below = self._below()
        # Modules that hold others, such as layers; of a flat model all.
        above = [module for module in below if module.children] or below
        classes = Counter(module.class_name for module in above)
        hint = f"the model has {_counts(classes)}"
        text = f"fsdp_auto_wrap_policy {policy} wraps nothing: {whole}"
        if policy == "TRANSFORMER_BASED_WRAP":
            text = f"no class to wrap is named, and the model names none in _no_split_modules: {whole}"
        elif policy == "SIZE_BASED_WRAP":
            text = f"Accelerate takes fsdp_min_num_params 0 for no policy: {whole}"
        return Problem(text, code="explain-policy", severity="warning", hint=hint)

    def _below(self) -> list[Module]:
        return [module for name, module in self.model.modules.items() if name] or [self.model.root]

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints; bytes are of whole tensors, padding included, sizes are in parameters."""
        return {
            "parallelism": str(self.asked.parallelism),
            "sharding_strategy": self.asked.sharding_strategy if self.asked.fsdp else None,
            "world_size": self.asked.world_size,
            "shard_size": self.sharding.shard_size,
            "replicas": self.sharding.replicas,
            "mixed_precision": self.asked.mixed_precision,
            "model": self.model.root.class_name,
            "parameters": self.model.root.size,
            "wrapping": asdict(self.wrapping),
            "units": [self._unit(unit) for unit in self.units],
            "shard_bytes": self.shards,
            "unsharded_peak_bytes": max(self.peaks.values(), default=0) if self.sharded else None,
            "traffic": [
                {"phase": phase, "kind": kind, "count": count, "tensor_bytes": size}
                for (phase, kind), (count, size) in self.traffic.items()
            ],
        }

    def _unit(self, unit: Unit) -> dict[str, Any]:
        return {
            "name": unit.name,
            "class": unit.class_name,
            "modules": list(unit.modules),
            "size": unit.size,
            "reshards": unit.reshards,
            "shard_sizes": shard_sizes(unit, self.sharding),
            "gathers": self.gathers(unit),
            "gathered_bytes": self.gathered(unit) if self.sharded else 0,
            "unsharded_peak_bytes": self.peaks[unit.name] if self.sharded else None,
            "parameters": {name: list(shape) for name, shape in unit.parameters.items()},
        }


def plan(env: Mapping[str, str], model: Model, *, own_loop: bool) -> Plan:
    """The plan of a launch whose workers see `env`, world included.

    Under mixed precision this project's loop reduces gradients in float32, and Accelerate by itself in the type in
    which parameters are gathered (utils/dataclasses.py, `set_mixed_precision`, 1.15): `own_loop` says which.
    Raises LaunchError for what splits a model or a sequence otherwise.
    """
    asked = Asked.from_environment(env)
    if asked.other_dimensions:
        dimensions = ", ".join(asked.other_dimensions)
        raise LaunchError(f"parallelism_config {dimensions}: only the sharding of FSDP can be explained")
    version = 2 if asked.parallelism is Parallelism.FSDP2 else 1
    low = asked.mixed_precision in _PRECISIONS
    classes = asked.wrap_classes if asked.wrap_policy == "TRANSFORMER_BASED_WRAP" else ()
    reshards = asked.sharding_strategy in _RESHARDS
    if version == 2:
        # A mesh of replicas reshards as well as any other, or not.
        reshards = env.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() in ("1", "true", "yes", "on", "y", "t")
    wrapping = Wrapping(
        version=version,
        policy=asked.wrap_policy,
        classes=classes,
        min_num_params=int(env.get("FSDP_MIN_NUM_PARAMS", "0").replace("_", "")),
        reshards=reshards,
        low_precision=low,
    )
    sharding = Sharding(
        version=version,
        shard_size=asked.shard_size,
        replicas=asked.world_size // asked.shard_size,
        param_bytes=2 if low else 4,
        reduce_bytes=2 if low and not own_loop else 4,
        aligned=env.get("FSDP_USE_ORIG_PARAMS", "false").lower() == "true",
    )
    return Plan(model, asked, wrapping, sharding, own_loop)


def other_version(env: Mapping[str, str], model: Model, *, own_loop: bool) -> Plan:
    """What the same file would be with the other `fsdp_version`."""
    other = "1" if env.get("FSDP_VERSION", "1") == "2" else "2"
    return plan({**env, "FSDP_VERSION": other}, model, own_loop=own_loop)


def _counts(classes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} x{count}" if count > 1 else name for name, count in sorted(classes.items()))


def _shown(unit: str) -> str:
    return unit or "the root"
