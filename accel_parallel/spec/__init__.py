"""The typed, frozen specification of a run: one tree, one source of every default."""

from accel_parallel.spec.dump import dump_spec
from accel_parallel.spec.fields import Destination
from accel_parallel.spec.load import Draft, find_spec, load_spec, parse_set, read_spec
from accel_parallel.spec.presets import PRESETS
from accel_parallel.spec.run import RunSpec, destinations, lr_at
from accel_parallel.spec.sections import Data, Model, Training

__all__ = [
    "PRESETS",
    "Data",
    "Destination",
    "Draft",
    "Model",
    "RunSpec",
    "Training",
    "destinations",
    "dump_spec",
    "find_spec",
    "load_spec",
    "lr_at",
    "parse_set",
    "read_spec",
]
