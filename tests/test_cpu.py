"""The CPU runtime by itself: any `Accelerator` that a script makes, and the table of substitutions."""

from typing import Any

import pytest

from accel_parallel.asked import Asked
from accel_parallel.substitutions import TABLE, Substitution, substitutions
from tests.workers import launcher_environment, run_processes

FILE = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {{fsdp_version: {version}, {wrap}, {more}}}\n"
BY_SIZE = "fsdp_auto_wrap_policy: SIZE_BASED_WRAP, fsdp_min_num_params: 100"


def _script(own_plugin: bool) -> dict[str, Any]:
    """What an ordinary script does, and what it got."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch import nn
    from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    from accel_parallel.train.script import enter_launch

    torch.set_num_threads(1)
    enter_launch(force_cpu=False, keep_precision=False)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=False) if own_plugin else None
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    for step in range(3):
        batch = torch.full((4, 8), step + accelerator.process_index / 2)
        accelerator.backward(model(batch).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    sharded = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
    state = accelerator.get_state_dict(model)
    used = getattr(accelerator.state, "fsdp_plugin", None)
    offload = getattr(used, "cpu_offload", None)
    return {
        "type": accelerator.distributed_type.value,
        "units": sum(isinstance(module, FullyShardedDataParallel) for module in model.modules()),
        "held": sharded,
        "offloads": bool(getattr(offload, "offload_params", isinstance(offload, CPUOffloadPolicy))),
        "pins": getattr(offload, "pin_memory", False),
        "reshards": getattr(used, "reshard_after_forward", None),
        "state": {name: tensor.double().sum().item() for name, tensor in state.items()} if state else {},
    }


def run(config: str, own_plugin: bool = False) -> list[dict[str, Any]]:
    results = run_processes(_script, launcher_environment(config), 2, own_plugin)
    assert [kind for kind, _ in results] == ["ok", "ok"], results
    return [result for _, result in results]


@pytest.fixture(scope="module")
def replicated() -> dict[str, float]:
    """What plain DDP of Accelerate learns."""
    first, second = run("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    assert first["type"] == "MULTI_CPU"
    assert first["state"] == second["state"]
    return first["state"]


@pytest.mark.parametrize(
    ("version", "more", "offloads"),
    [
        (2, "fsdp_offload_params: false", False),
        (2, "fsdp_offload_params: true", True),
        (1, "fsdp_state_dict_type: FULL_STATE_DICT", False),
        (1, "fsdp_sharding_strategy: SHARD_GRAD_OP", False),
        (1, "fsdp_offload_params: true", False),
    ],
)
def test_a_script_s_own_accelerator_is_really_sharded(
    version: int, more: str, offloads: bool, replicated: dict[str, float]
) -> None:
    """And its whole state can be collected, which version 1 left alone ends with a segmentation fault."""
    ranks = run(FILE.format(version=version, wrap=BY_SIZE, more=more))
    total = 8 * 16 + 16 + 16 * 2 + 2
    assert sum(rank["held"] for rank in ranks) < 1.2 * total
    for rank in ranks:
        assert rank["type"] == "FSDP"
        assert rank["offloads"] is offloads
        assert rank["pins"] is False
        assert version == 2 or rank["units"] >= 2
    assert ranks[0]["state"] == pytest.approx(replicated, rel=1e-5)


def test_a_script_s_own_plugin_is_honoured(replicated: dict[str, float]) -> None:
    ranks = run(FILE.format(version=2, wrap=BY_SIZE, more="fsdp_reshard_after_forward: true"), own_plugin=True)
    assert [rank["reshards"] for rank in ranks] == [False, False]
    assert [rank["offloads"] for rank in ranks] == [False, False], "a policy that does not offload is an object too"
    assert ranks[0]["state"] == pytest.approx(replicated, rel=1e-5)


BASE = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "bf16"}
VERSION_1 = {
    **BASE, "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1", "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_OFFLOAD_PARAMS": "true", "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD",
}  # fmt: skip
VERSION_2 = {**BASE, "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"}


def said(environment: dict[str, str], backend: str = "auto", keep_precision: bool = False) -> list[Substitution]:
    return substitutions(Asked.from_environment(environment), backend, keep_precision, environment)


@pytest.mark.parametrize(
    ("environment", "keys"),
    [
        ({"WORLD_SIZE": "1"}, ["device"]),
        ({**BASE, "ACCELERATE_MIXED_PRECISION": "no"}, ["device", "distributed.backend"]),
        (BASE, ["device", "distributed.backend", "mixed_precision"]),
        (VERSION_2, ["device", "distributed.backend", "mixed_precision", "fsdp_offload_params"]),
        (
            VERSION_1,
            [
                "device", "distributed.backend", "mixed_precision", "fsdp_sync_module_states",
                "fsdp_cpu_ram_efficient_loading", "fsdp_offload_params", "fsdp_sharding_strategy",
            ],
        ),
    ],
)  # fmt: skip
def test_what_is_substituted(environment: dict[str, str], keys: list[str]) -> None:
    assert [item.key for item in said(environment)] == keys


def test_every_row_of_the_table_applies_to_some_launch() -> None:
    seen = {str(item) for environment in (VERSION_1, VERSION_2) for item in said(environment)}
    assert seen == {str(row.substitution()) for row in TABLE}


def test_what_was_asked_is_not_substituted() -> None:
    keys = [item.key for item in said({**VERSION_1, "FSDP_SYNC_MODULE_STATES": "false"}, "gloo", keep_precision=True)]
    assert keys == ["device", "fsdp_cpu_ram_efficient_loading", "fsdp_offload_params", "fsdp_sharding_strategy"]
    fp16 = said({**BASE, "ACCELERATE_MIXED_PRECISION": "fp16"})[-1]
    assert (fp16.asked, fp16.got) == ("fp16", "no")
