"""What one training step of a prepared model costs a process: collectives, bytes at rest, peak of allocated bytes.

Knows neither how the model is spread over the processes nor how the step is made. Bytes are those of storages, padding
included; nothing is estimated. Seen on torch 2.13, gloo, CPU.
"""

from accel_parallel.train.probe.collectives import (
    Collectives,
    Traffic,
    UnitTraffic,
    bytes_of,
    ring_bytes,
    storage_bytes,
    storages_of,
    tensors_of,
)
from accel_parallel.train.probe.step import (
    Memory,
    Phase,
    StepCost,
    TrainingStep,
    ignore_phase,
    observe_collectives,
    observe_step,
    peak_allocated,
)

__all__ = [
    "Collectives",
    "Memory",
    "Phase",
    "StepCost",
    "Traffic",
    "TrainingStep",
    "UnitTraffic",
    "bytes_of",
    "ignore_phase",
    "observe_collectives",
    "observe_step",
    "peak_allocated",
    "ring_bytes",
    "storage_bytes",
    "storages_of",
    "tensors_of",
]
