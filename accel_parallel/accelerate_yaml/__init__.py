"""The one place where a strategy becomes an Accelerate YAML file: `render` its keys, `dumps` its text.

And what any such file means: `read_file`, and `environment`, what Accelerate's launcher exports for it.
"""

from accel_parallel.accelerate_yaml.environment import environment
from accel_parallel.accelerate_yaml.file import AccelerateFile, names_a_file, read_file
from accel_parallel.accelerate_yaml.render import BLOCK_CLASS, Config, render
from accel_parallel.accelerate_yaml.text import GENERATED, dumps, loads, reasons, render_file

__all__ = [
    "BLOCK_CLASS",
    "GENERATED",
    "AccelerateFile",
    "Config",
    "dumps",
    "environment",
    "loads",
    "names_a_file",
    "read_file",
    "reasons",
    "render",
    "render_file",
]
