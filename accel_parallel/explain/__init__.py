"""What an accelerate file makes of a model, told without starting processes."""

from accel_parallel.explain.plan import Plan, other_version, plan
from accel_parallel.explain.steps import Step, block_steps, size_steps

__all__ = ["Plan", "Step", "block_steps", "other_version", "plan", "size_steps"]
