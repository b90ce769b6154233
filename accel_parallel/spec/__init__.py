"""The typed, frozen specification of a run: one tree, one source of every default."""

from accel_parallel.spec.dump import dump_spec
from accel_parallel.spec.fields import Destination
from accel_parallel.spec.load import find_spec, load_spec, override_spec, parse_set
from accel_parallel.spec.presets import PRESETS
from accel_parallel.spec.run import RunSpec, destinations, lr_at
from accel_parallel.spec.sections import Data, Model, Training

__all__ = [
    "PRESETS",
    "Data",
    "Destination",
    "Model",
    "RunSpec",
    "Training",
    "destinations",
    "dump_spec",
    "find_spec",
    "load_spec",
    "lr_at",
    "override_spec",
    "parse_set",
]
