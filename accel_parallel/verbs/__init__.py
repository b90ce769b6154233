"""The words of verbs whose work a child process does: the command line and that process read them alike."""

import argparse
from collections.abc import Callable


def parser(module: str, add_arguments: Callable[[argparse.ArgumentParser], None]) -> argparse.ArgumentParser:
    """That of the process, `python -m accel_parallel.train.<module>`."""
    result = argparse.ArgumentParser(prog=f"python -m accel_parallel.train.{module}")
    add_arguments(result)
    return result
