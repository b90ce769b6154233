"""Observing a script that uses Accelerate, from outside and unmodified: what each process really did.

`watching` replaces methods of Accelerate's classes while the script runs, and leaves `rank-NN.json`. Nothing of this is
imported unless somebody asks for it. Seen on accelerate 1.15, torch 2.13.
"""

from accel_parallel.train.watch_script.watch import watching

__all__ = ["watching"]
