"""The thresholds of `fsdp_min_num_params` at which the units change."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from accel_parallel.units.tree import Model
from accel_parallel.units.wrap import Unit, Wrapping, units, wrapped


@dataclass(frozen=True, slots=True)
class Band:
    """Thresholds from `first` to `last`, which make the same units; the last band has no end."""

    first: int
    last: int | None
    units: list[Unit]


def bands(model: Model, wrapping: Wrapping) -> list[Band]:
    """Every threshold under SIZE_BASED_WRAP from 1 on, in bands that differ from their neighbours."""
    wrapping = replace(wrapping, policy="SIZE_BASED_WRAP")
    starts: list[tuple[int, list[str]]] = []
    for threshold, names in _plans(model, wrapping):
        if not starts or names != starts[-1][1]:
            starts.append((threshold, names))
    ends = [*(first - 1 for first, _ in starts[1:]), None]
    return [
        Band(first, last, units(model, replace(wrapping, min_num_params=first)))
        for (first, _), last in zip(starts, ends, strict=True)
    ]


def _plans(model: Model, wrapping: Wrapping) -> Iterator[tuple[int, list[str]]]:
    """From 1 on, each threshold at which a size that was large enough no longer is, and what is wrapped from there."""
    threshold = 1
    while True:
        passed: list[int] = []

        def large(size: int, least: int = threshold + (wrapping.version == 2), passed: list[int] = passed) -> bool:
            if size >= least:
                passed.append(size)
            return size >= least

        yield threshold, wrapped(model, replace(wrapping, min_num_params=threshold), large)
        if not passed:
            return
        threshold = min(passed) + (wrapping.version == 1)
