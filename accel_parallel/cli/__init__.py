"""The `accel-parallel` command: parses, calls one module per verb, prints. Data on stdout, everything else on stderr."""

from accel_parallel.cli.app import main

__all__ = ["main"]
