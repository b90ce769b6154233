"""Any accelerate YAML file, ours or not, as far as a launch has to understand it."""

import re
from dataclasses import dataclass
from pathlib import Path

from accel_parallel.accelerate_yaml.render import Config
from accel_parallel.accelerate_yaml.text import loads
from accel_parallel.errors import LaunchError
from accel_parallel.suggest import did_you_mean

# accelerate.utils.DistributedType (1.15) that `accelerate launch` takes from a file.
_TYPES = ("NO", "MULTI_GPU", "FSDP", "MULTI_CPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU",
          "MULTI_HPU", "MULTI_NEURON", "DEEPSPEED", "XLA", "MEGATRON_LM")  # fmt: skip
_MAX_BYTES = 1_000_000
_LAST_PORT = 65_535


@dataclass(frozen=True, slots=True)
class AccelerateFile:
    """The file as it is, and what of it decides how processes are started."""

    path: Path
    text: str
    config: Config
    kind: str

    @property
    def num_machines(self) -> int:
        return self._count("num_machines") or 1

    @property
    def num_processes(self) -> int | None:
        """Over all machines, as Accelerate counts them; None if the file leaves it to the command line."""
        return 1 if self.kind == "NO" else self._count("num_processes")

    @property
    def ignored(self) -> str | None:
        """One line about a number of processes that Accelerate does not start."""
        asked = self._count("num_processes") or 1
        if self.kind == "NO" and asked > 1:
            return f"{self.path}: distributed_type 'NO' runs one process, num_processes {asked} is ignored"
        return None

    @property
    def main_process_port(self) -> int | None:
        """None if Accelerate is to choose one, which the file says with 0."""
        port = self._count("main_process_port") if self.config.get("main_process_port") else None
        if port is not None and port > _LAST_PORT:
            raise LaunchError(f"{self.path}: main_process_port is {port}, and the last port is {_LAST_PORT}")
        return port

    @property
    def main_process_ip(self) -> str | None:
        address = self.config.get("main_process_ip")
        if address is not None and not re.fullmatch(r"\S+", str(address)):
            raise LaunchError(f"{self.path}: main_process_ip is {address!r}, and should be an address")
        return None if address is None else str(address)

    def _count(self, key: str) -> int | None:
        value = self.config.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not re.fullmatch(r"0*[1-9][0-9]{0,9}", str(value), re.ASCII):
            raise LaunchError(f"{self.path}: {key} is {value!r}, and should be a whole number of at least 1")
        return int(value)


def read_file(path: Path) -> AccelerateFile:
    """The file at `path`.

    Raises LaunchError if it cannot be read, is not a mapping, or names no way to distribute that Accelerate knows.
    """
    try:
        if path.exists() and not path.is_file():
            what = "a folder" if path.is_dir() else "not a file"
            raise LaunchError(f"{path} is {what}", hint="name a strategy, or an accelerate YAML file")
        if path.stat().st_size > _MAX_BYTES:
            raise LaunchError(f"{path} has more than {_MAX_BYTES:,} bytes: not an accelerate file")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise LaunchError(f"{path} is not UTF-8 text") from None
    try:
        config = loads(text)
    except LaunchError as error:
        raise LaunchError(f"{path} {error.message}") from None
    environment = config.get("compute_environment", "LOCAL_MACHINE")
    if environment != "LOCAL_MACHINE":
        raise LaunchError(f"{path}: compute_environment is {environment!r}; only LOCAL_MACHINE is launched here")
    if config.get("distributed_type") is None:
        if isinstance(config.get("distributed"), dict) or isinstance(config.get("training"), dict):
            hint = f"launch a strategy with --spec {path}, or a file that `accel-parallel config` writes from it"
            raise LaunchError(f"{path} is a specification, not an accelerate file", hint=hint)
        hint = "`accelerate config` and `accel-parallel config` write such files"
        raise LaunchError(f"{path} has no distributed_type: not an accelerate file", hint=hint)
    # Unquoted, NO is the boolean false in YAML 1.1.
    kind = "NO" if config["distributed_type"] is False else str(config["distributed_type"])
    if kind not in _TYPES:
        hint = {"DDP": "; DDP is MULTI_GPU", "TPU": "; TPU is XLA"}.get(kind, did_you_mean(kind, _TYPES))
        raise LaunchError(f"{path}: distributed_type is {kind!r}, which Accelerate does not know{hint}")
    return AccelerateFile(path, text, config, kind)


def names_a_file(target: str) -> bool:
    """Whether what was typed where a strategy may stand is a file."""
    return "/" in target or Path(target).suffix in (".yaml", ".yml", ".json") or Path(target).exists()
