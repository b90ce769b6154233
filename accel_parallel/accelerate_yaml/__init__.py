"""The one place where a strategy becomes an Accelerate YAML file: `render` its keys, `dumps` its text."""

from accel_parallel.accelerate_yaml.render import BLOCK_CLASS, Config, render
from accel_parallel.accelerate_yaml.text import GENERATED, dumps, loads, reasons, render_file

__all__ = ["BLOCK_CLASS", "GENERATED", "Config", "dumps", "loads", "reasons", "render", "render_file"]
