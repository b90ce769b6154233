"""The `accel-parallel` command: one module per verb. Data on stdout, everything else on stderr."""

from accel_parallel.cli.start import main

__all__ = ["main"]
