"""The processes of one launch: joining them, preparing the model, and what they tell each other."""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from accelerate import Accelerator
from accelerate.tracking import filter_trackers
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, distributed, nn

from accel_parallel.asked import Asked, adapt_spec, overruled
from accel_parallel.errors import MismatchError
from accel_parallel.spec import RunSpec
from accel_parallel.substitutions import Substitution
from accel_parallel.train.runtime import arguments
from accel_parallel.train.runtime.check import check, world_mismatch
from accel_parallel.train.runtime.join import enter, join
from accel_parallel.train.runtime.observe import Observed, Original, observe, watch

T = TypeVar("T")

# Process groups and what refers to them are never freed, and the process ends with `os._exit`. Freeing a gloo group
# joins its thread while the interpreter's lock is held, and that thread needs the lock to drop the tensors of its
# latest collective: seen as a hang after all work was done (torch 2.13).
_NEVER_FREED: list["Runtime"] = []


@dataclass
class Runtime:
    """The processes of one launch. Every method marked collective must be called by all of them."""

    accelerator: Accelerator
    asked: Asked
    spec: RunSpec
    substitutions: list[Substitution]
    overruled: list[str]
    observed: Observed | None = field(default=None, init=False)
    held: list[int] = field(default_factory=list, init=False)
    """Parameters that each process keeps, in rank order."""
    side_group: distributed.ProcessGroup | None = field(default=None, init=False)
    save_group: distributed.ProcessGroup | None = field(default=None, init=False)
    """Of its own, so that a save in the background never waits for a collective of the training, or the reverse."""

    @classmethod
    def start(cls, spec: RunSpec, *, force_cpu: bool = False, keep_precision: bool = False) -> Self:
        """Collective. Join the process group that the launcher's environment describes.

        The returned `spec` carries the world and the precision of that environment: the YAML decides, not the file.
        Raises LaunchError with fewer accelerators than processes, SpecError if the batch does not divide.
        """
        asked = Asked.from_environment(os.environ)
        differs = overruled(spec, asked)
        spec = adapt_spec(spec, asked)
        changed = enter(asked, backend=spec.distributed.backend, force_cpu=force_cpu, keep_precision=keep_precision)
        if spec.training.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        on_cpu = changed is not None
        accelerator = None if on_cpu else torch.accelerator.current_accelerator()
        options = arguments.process_group_options(spec, asked, device_type=accelerator.type if accelerator else "cpu")
        join(asked, on_cpu, options)
        runtime = cls(Accelerator(**arguments.accelerator_arguments(spec, asked)), asked, spec, changed or [], differs)
        _NEVER_FREED.append(runtime)
        # Before anything is shared: processes that do not know each other would all be the main one.
        if runtime.world_size != asked.world_size:
            raise MismatchError(world_mismatch(asked.world_size, runtime.world_size))
        if asked.world_size > 1:
            runtime.open_side_groups()
        return runtime

    def open_side_groups(self) -> None:
        """Collective. Small things are agreed on beside the model's own collectives, and never wait for the device."""
        timeout = timedelta(minutes=self.spec.distributed.timeout_minutes)
        self.side_group = distributed.new_group(backend="gloo", timeout=timeout)
        self.save_group = distributed.new_group(backend="gloo", timeout=timeout)

    @property
    def rank(self) -> int:
        return self.accelerator.process_index

    @property
    def world_size(self) -> int:
        return self.accelerator.num_processes

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, labels: Tensor
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Collective. Prepare both, run one forward and backward pass that is thrown away, and check what runs.

        The discarded pass (`tokens`, `labels`: (B, T), this process's) meets out-of-memory errors before the first
        step, and lets DDP rebuild its buckets, which it does after its first backward pass: without it a resumed
        run would differ in the last bits from one that never stopped. Raises MismatchError.
        """
        original = Original.of(model)
        model, optimizer = self.spread(model, optimizer)
        with watch(model) as step:
            loss = model(*self.to_device(tokens, labels))
            self.accelerator.backward(loss)
        optimizer.zero_grad()
        self.observed = observe(model, original, step, self.world_size, self.asked.shard_size)
        self.held = self.gather_objects(self.observed.local_elements)
        check(self.asked, self.observed, original, self.accelerator.mixed_precision)
        return model, optimizer

    def spread(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Collective. Both as Accelerate spreads them over the processes."""
        with warnings.catch_warnings():
            # Asked for by name; what else there is says the documentation.
            warnings.filterwarnings("ignore", message="The `NO_SHARD` sharding strategy is deprecated")
            model, optimizer = self.accelerator.prepare(model, optimizer)
        return model, optimizer

    def clip(self, model: nn.Module) -> Tensor:
        """Collective. Clip the gradients in place; their global norm before that, a float32 scalar on the device."""
        limit = self.spec.training.max_grad_norm
        norm = self.accelerator.clip_grad_norm_(model.parameters(), float("inf") if limit is None else limit)
        # Version 2 returns a sharded scalar, of which each process holds only its part.
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        # Of offloaded gradients it is computed on the CPU.
        return norm.to(self.device)

    def to_device(self, *tensors: Tensor) -> list[Tensor]:
        """Tensors of host memory on this process's device, without waiting for it."""
        if self.device.type != "cuda":
            return [tensor.to(self.device) for tensor in tensors]
        return [tensor.pin_memory().to(self.device, non_blocking=True) for tensor in tensors]

    def fills_weights(self) -> bool:
        """Whether this process has to hold the initial weights, or receives them while the model is prepared."""
        received = self.asked.fsdp and os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false").lower() == "true"
        return self.is_main or not received

    def gather(self, values: Tensor) -> Tensor:
        """Collective. (K,) on each process -> (world_size, K) on every process."""
        return self.accelerator.gather(values).reshape(self.world_size, -1)

    def gather_objects(self, value: T) -> list[T]:
        """Collective. One small picklable object per process, in rank order, on every process."""
        return gather_object([value]) if self.world_size > 1 else [value]

    def tell_all(self, value: T) -> T:
        """Collective. The main process's object, on every process."""
        return broadcast_object_list([value])[0] if self.world_size > 1 else value

    def agree(self, *questions: Callable[[], bool]) -> Callable[[], list[bool]]:
        """Collective. Start to ask every process. Calling the result waits: for each, whether any of them said yes.

        What is computed in between hides the time that it takes.
        """
        if self.world_size == 1:
            return lambda: [ask() for ask in questions]
        said = torch.tensor([ask() for ask in questions], dtype=torch.int32)
        work = distributed.all_reduce(said, op=distributed.ReduceOp.MAX, group=self.side_group, async_op=True)

        def answer() -> list[bool]:
            work.wait()
            return [bool(yes) for yes in said]

        return answer

    def mfu(self, tokens_per_sec: float) -> float | None:
        """Model FLOPs utilisation, a fraction of the peak of `hardware.accelerator`; none on CPU."""
        if self.device.type == "cpu":
            return None
        return arguments.model_flops_utilisation(self.spec, tokens_per_sec, self.world_size)

    def start_trackers(self, folder: Path) -> None:
        """Collective. Start the trackers of the specification, writing below `folder`/trackers."""
        if not self.spec.logging.trackers:
            return
        # Not an argument of Accelerator, which wants the folder then: the run directory is agreed on by the processes.
        self.accelerator.project_configuration.set_directories(str(folder))
        self.accelerator.log_with = filter_trackers(list(self.spec.logging.trackers), str(folder))
        # TensorBoard's tracker takes numbers, booleans and strings only.
        values = self.spec.flat().items()
        config = {key: value if isinstance(value, int | float) else str(value) for key, value in values}
        self.accelerator.init_trackers("trackers", config=config)

    def end(self) -> None:
        """Close the trackers. The process group stays until the process ends."""
        for tracker in self.accelerator.trackers:
            tracker.finish()


def local_rank() -> int:
    """This process's number on its machine, before any process group exists."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def describe(run: Runtime) -> dict[str, Any]:
    """What was asked, substituted and observed, for `environment.json`."""
    observed = run.observed
    return {
        "asked": {name: getattr(run.asked, name) for name in Asked.__slots__},
        "overruled": run.overruled,
        "substitutions": [item.to_dict() for item in run.substitutions],
        "observed": None
        if observed is None
        else {
            "parallelism": observed.parallelism,
            "world_size": observed.world_size,
            "parameters_in_each_process": run.held,
            "units": observed.units,
            "resharded_after_forward": observed.resharded_after_forward,
            "compute_dtypes": sorted(str(dtype) for dtype in observed.compute_dtypes),
        },
        "device": str(run.device),
        "torch": {
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "threads": torch.get_num_threads(),
            "backend": torch.distributed.get_backend() if torch.distributed.is_initialized() else None,
        },
    }
