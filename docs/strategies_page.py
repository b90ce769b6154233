"""Renders `docs/strategies.md` from `docs/strategies.json` (written by measure.py) and the hardware tables."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from textwrap import dedent, fill
from typing import Any

from accel_parallel.hardware import ACCELERATORS, LINKS
from accel_parallel.shapes import ModelShape
from accel_parallel.spec import read_spec
from accel_parallel.strategies import CATALOGUE

MEASURED: dict[str, Any] = json.loads((Path(__file__).parent / "strategies.json").read_text(encoding="utf-8"))
ROWS: dict[str, Any] = {s.name: MEASURED["strategies"][s.name] for s in CATALOGUE if s.name in MEASURED["strategies"]}
P = 4 * MEASURED["model"]["parameters"]

PRESETS = ("124m", "1b", "llama3_8b")
TOKENS, MFU = 8_192, 0.40
GPU, NVLINK, PCIE = ACCELERATORS["h200"], LINKS["nvlink4"], LINKS["pcie5_x16"]
INFINIBAND, ETHERNET = LINKS["infiniband_ndr"], LINKS["ethernet_100g"]
GPUS_PER_MACHINE = 8
# Bytes a parameter: gathered in bfloat16, reduced in float32; at rest in float32 with gradient and two AdamW moments.
GATHERED, REDUCED, AT_REST = 2, 4, 16


def strategies() -> str:
    text = "\n".join(dedent(part()) for part in (_head, _memory, _collectives, _links, _machines, _choice))
    return "\n\n".join(map(_filled, text.strip().split("\n\n"))) + "\n"


def sent(strategy: str, shape: ModelShape, gpus: int) -> float:
    """Bytes each of `gpus` GPUs sends in one step around a ring, where the blocks are units.

    (N-1)/N of a tensor to gather or scatter it, twice that to all-reduce it; sources: `train/probe.py`, `ring_bytes`.
    """
    whole, blocks = shape.total_parameters, shape.num_layers * shape.block_parameters
    moved = {
        "ddp": 2 * REDUCED * whole,
        "fsdp_shard_grad_op": GATHERED * whole + REDUCED * whole,
        "fsdp": GATHERED * (whole + blocks) + REDUCED * whole,
    }
    return moved[strategy] * (gpus - 1) / gpus


def crossing(strategy: str, shape: ModelShape, machines: int) -> float:
    """Bytes that leave each machine in one step: of rings through all GPUs, or of the hybrid's gradients alone."""
    if strategy == "fsdp_hybrid_shard":
        return 2 * REDUCED * shape.total_parameters * (machines - 1) / machines
    return sent(strategy, shape, machines * GPUS_PER_MACHINE)


def _head() -> str:
    versions, model = MEASURED["versions"], MEASURED["model"]
    missing = [strategy.name for strategy in CATALOGUE if strategy.name not in ROWS]
    return f"""\
        # What each strategy costs

        Generated. `just measure-strategies` measures again (minutes, no GPU needed), `just docs` then writes this page.

        Measured: one step in real CPU processes, float32, `{model["preset"]}`: {model["parameters"]:,} parameters,
        P = {_mib(P)} MiB; {model["sequences_per_process"]} x {model["seq_len"]} tokens in each process;
        torch {versions["torch"]}, accelerate {versions["accelerate"]}.
        MiB is 2**20 bytes, GB 1e9.{f" Not measured: {', '.join(missing)}." if missing else ""}
        """


def _memory() -> str:
    table = (
        [f"`{name}`", row["processes"], *(f"{_mib(number)} ({_p(number)})" for number in row["memory"].values())]
        for name, row in ROWS.items()
    )
    head = ("strategy", "processes", "parameters", "gradients", "AdamW state", "between steps", "peak in a step")
    single = ROWS["single"]["memory"]
    return f"""\
        ## Memory of one process, measured

        MiB (multiple of P).

        {_table(head, table)}

        - Gradients: after the optimizer step. Between steps: after they are cleared, which DDP's buckets and the
          gradients of version 1 outlive; those of version 2 do not.
        - `single` peaks {_p(single["peak"] - single["between_steps"])} P above its rest: activations, gradients,
          temporaries.
        - `ddp` peaks {_more("ddp", "single")} above `single`: its buckets are there when the step begins.
        - `fsdp_shard_grad_op` peaks {_more("fsdp_shard_grad_op", "fsdp")} above `fsdp`: every block stays whole
          from forward to backward pass.
        - Offloading moves all that is at rest to host memory. On CPUs that is the same memory, and version 1 does not
          offload there: these rows show what would move.
        """


def _collectives() -> str:
    def phase(row: Any, name: str) -> str:
        items = [item for item in row["traffic"] if item["phase"] == name]
        return "<br>".join(f"{item['count']} {item['kind']}, {_size(item['tensor_bytes'])}" for item in items) or "-"

    table = (
        [f"`{name}`", *(phase(row, part) for part in ("forward", "backward", "clip")), _mib(_sent(row))]
        for name, row in ROWS.items()
        if row["traffic"]
    )
    return f"""\
        ## Collectives of one step, measured

        Count, and size of the whole tensors with padding. Sent: by each process, if all go around a ring: (N-1)/N of
        the size to gather or scatter, 2(N-1)/N to all-reduce. Hybrids are 2 x 2.

        {_table(("strategy", "forward", "backward", "clipping", "sent, MiB"), table, left=4)}

        - SHARD_GRAD_OP does gather parameters, {_gathered("fsdp_shard_grad_op")} P a step; FULL_SHARD gathers
          {_gathered("fsdp")} P: the blocks twice, the root (embedding, head) once.
        - In float32 SHARD_GRAD_OP sends {_mib(_sent(ROWS["fsdp_shard_grad_op"]))} MiB and DDP
          {_mib(_sent(ROWS["ddp"]))}: an all-reduce is a reduce-scatter and an all-gather.
        - A hybrid gathers and scatters inside a replica, then all-reduces the shards between replicas.
        - Version 2 has one more unit, the final norm: hidden_dim numbers.
        """


def _links() -> str:
    table = []
    for preset in PRESETS:
        shape = _shape(preset)
        compute = TOKENS * shape.flops_per_token() / (GPU.peak_bf16_tflops * 1e12 * MFU)
        for gpus in (2, 8):
            for name in ("ddp", "fsdp_shard_grad_op", "fsdp"):
                number = sent(name, shape, gpus)
                rest = AT_REST * shape.total_parameters / (1 if name == "ddp" else gpus)
                times = [_ms(number / (link.gb_s_per_direction * 1e9)) for link in (NVLINK, PCIE)]
                row = [_gib(rest / 2**20), f"{number / 1e9:.2f}", *times, _ms(compute)]
                table.append([preset, f"`{name}`", str(gpus), *row])
    head = ("preset", "strategy", "GPUs", "at rest, GiB", "sent, GB", f"{NVLINK.name}, ms", f"{PCIE.name}, ms")
    return f"""\
        ## {NVLINK.name} against {PCIE.name}, by arithmetic

        Not measured. N x {GPU.name}; {NVLINK.gb_s_per_direction:g} and {PCIE.gb_s_per_direction:g} GB/s per direction,
        raw, so real times are longer. Parameters are gathered in bfloat16, gradients reduced in float32. With p
        parameters, b of them in blocks, each GPU sends (N-1)/N of these bytes:

            ddp                 2 x 4p          gradients all-reduced
            fsdp_shard_grad_op  2p + 4p         gathered once, gradients scattered
            fsdp                2p + 2b + 4p    blocks gathered twice

        At rest: {AT_REST}p bytes, /N if sharded (float32 parameters, gradients, two moments), of
        {_gib(GPU.memory_mib)} GiB. Compute: {TOKENS:,} tokens a GPU and step x FLOPs a token
        (6N + 12 x layers x hidden x tokens in a sequence, as `shapes.py` says) /
        ({GPU.peak_bf16_tflops:g} TFLOP/s x {MFU:.0%} MFU).

        {_table((*head, "compute, ms"), table, left=2)}

        - Communication hides only behind longer compute. Compute grows with tokens a step, communication does not.
        - With bfloat16 gathers FULL_SHARD sends no more than DDP, and SHARD_GRAD_OP a quarter less.
        """


def _machines() -> str:
    shape, table = _shape("llama3_8b"), []
    for machines in (2, 4, 16):
        for name in ("fsdp", "fsdp_hybrid_shard"):
            number = crossing(name, shape, machines)
            shards = GPUS_PER_MACHINE * (machines if name == "fsdp" else 1)
            rates = (GPUS_PER_MACHINE * INFINIBAND.gb_s_per_direction, ETHERNET.gb_s_per_direction)
            row = [_gib(AT_REST * shape.total_parameters / shards / 2**20), f"{number / 1e9:.1f}"]
            table.append([f"`{name}`", str(machines), *row, *(_ms(number / (rate * 1e9)) for rate in rates)])
    head = ("strategy", "machines", "at rest, GiB", "leaves a machine, GB")
    return f"""\
        ## Between machines, by arithmetic

        llama3_8b, {GPUS_PER_MACHINE} GPUs a machine, a port for each GPU or one for all. Rings through all N GPUs carry
        (N-1)/N of the bytes above out of each machine; a hybrid of M machines only its gradients, 2(M-1)/M x 4p.

        {_table((*head, f"{GPUS_PER_MACHINE} x {INFINIBAND.name}, ms", f"1 x {ETHERNET.name}, ms"), table)}
        """


def _choice() -> str:
    llama = _shape("llama3_8b")
    rest = _gib(AT_REST * llama.total_parameters / 2**20)
    few, many = ([f"{crossing(name, llama, m) / 1e9:.0f}" for name in ("fsdp_hybrid_shard", "fsdp")] for m in (2, 16))
    return f"""\
        ## Which to choose

        1. {AT_REST} bytes a parameter at rest, {GATHERED} of bfloat16 copies, and the activations fit on a GPU: `ddp`.
           All that it sends can hide behind the backward pass. llama3_8b is too large: {rest} of
           {_gib(GPU.memory_mib)} GiB.
        2. Only {AT_REST}/N + {GATHERED} bytes a parameter fit: `fsdp_shard_grad_op`. It sends the least of all.
        3. Not even those: `fsdp`. It holds one or two gathered blocks at a time instead of all.
        4. Communication longer than compute (PCIe, few tokens): more tokens a step. With `grad_accum_steps` DDP still
           reduces once a step; sharded strategies gather in every micro-batch, and reduce in it unless
           `fsdp.sync_each_batch` is false.
        5. Slow links between machines, and {AT_REST}/{GPUS_PER_MACHINE} bytes a parameter fit: `fsdp_hybrid_shard`.
           With 2 machines {few[0]} GB leave each instead of {few[1]}, with 16 it is {many[0]} instead of {many[1]};
           what remains is that no gather waits for the slow link.
        6. Nothing else fits: `fsdp_cpu_offload`. Parameters and gradients cross the host link, AdamW runs on the CPU.
        7. Version 1 (`fsdp1_*`) only where something needs it: same collectives, same peak, gradients held between
           steps. torch has deprecated NO_SHARD: use `ddp`.
        """


def _filled(block: str) -> str:
    """Prose and lists in lines of 120, which the numbers in them would make uneven; all else as it is."""
    if block.startswith(("|", "#", "    ")):
        return block
    items = re.split(r"\n(?=- |\d\. )", block)
    hang = " " * items[-1].index(" ") + " " if len(items) > 1 else ""
    return "\n".join(fill(" ".join(item.split()), 120, subsequent_indent=hang) for item in items)


def _shape(preset: str) -> ModelShape:
    return read_spec(None, [f"model.preset={preset}"]).resolve({}, preset).model.shape


def _table(head: tuple[str, ...], rows: Iterable[Iterable[str]], *, left: int = 1) -> str:
    """Columns after the first `left` are numbers. Lines are indented as the text around them."""
    lines = [head, ["---"] * left + ["---:"] * (len(head) - left), *rows]
    return f"\n{' ' * 8}".join(f"| {' | '.join(cells)} |" for cells in lines)


def _sent(row: Any) -> int:
    return sum(item["sent_bytes"] for item in row["traffic"])


def _gathered(name: str) -> str:
    return _p(sum(item["tensor_bytes"] for item in ROWS[name]["traffic"] if item["kind"] == "all_gather"))


def _more(this: str, other: str) -> str:
    number = ROWS[this]["memory"]["peak"] - ROWS[other]["memory"]["peak"]
    return f"{_mib(number)} MiB ({_p(number)} P)"


def _gib(mib: float) -> str:
    return f"{mib / 1024:.1f}"


def _mib(number: float) -> str:
    return f"{number / 2**20:.1f}"


def _p(number: float) -> str:
    return f"{number / P:.2f}"


def _size(number: int) -> str:
    return f"{number} B" if number < 1_024 else f"{_mib(number)} MiB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"
