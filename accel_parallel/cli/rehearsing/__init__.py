"""`accel-parallel rehearse`: run a file on CPU processes, really sharded, and compare it with what it asks for."""

from accel_parallel.cli.rehearsing.request import Request
from accel_parallel.cli.rehearsing.verb import rehearse

__all__ = ["Request", "rehearse"]
