"""FSDP units told beforehand: what is gathered together and when, what each process holds, and what it moves."""

from accel_parallel.units.cost import Sharding, padded_size, peaks, shard_sizes, traffic
from accel_parallel.units.thresholds import Band, bands
from accel_parallel.units.tree import Model, Module, Shape, model_of, transformer_lm
from accel_parallel.units.wrap import Unit, Wrapping, refused, sharded_twice, split_parameters, units, wrapped

__all__ = [
    "Band",
    "Model",
    "Module",
    "Shape",
    "Sharding",
    "Unit",
    "Wrapping",
    "bands",
    "model_of",
    "padded_size",
    "peaks",
    "refused",
    "shard_sizes",
    "sharded_twice",
    "split_parameters",
    "traffic",
    "transformer_lm",
    "units",
    "wrapped",
]
