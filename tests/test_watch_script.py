"""Scripts as people write them, unmodified, under --observe: what is seen against what can be computed by hand."""

from pathlib import Path

from tests.workers import launcher_environment, run_processes

SCRIPTS = Path(__file__).parent / "scripts"
DDP = "distributed_type: MULTI_GPU\nnum_processes: 2\n"
FSDP = (
    "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {{fsdp_version: {version}, "
    "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_transformer_layer_cls_to_wrap: {cls}, {more}}}\n"
)


def _run(argv: list[str], log: str) -> int:
    import os
    import sys

    import torch

    from accel_parallel.train.runtime import cpu
    from accel_parallel.train.script import main

    cpu.use_all_cores = lambda *_: torch.set_num_threads(1)
    with Path(f"{log}-{os.environ['RANK']}.txt").open("w") as sys.stdout:
        sys.stderr = sys.stdout
        return main([*argv[:-1], *argv[-1].split()])


if __name__ == "__main__":
    import sys
    import tempfile

    cfg = {"ddp": DDP}.get(sys.argv[1]) or FSDP.format(
        version=sys.argv[1][-1],
        cls=sys.argv[3],
        more="fsdp_cpu_ram_efficient_loading: true" if len(sys.argv) < 7 else sys.argv[6],
    )
    d = tempfile.mkdtemp()
    extra = sys.argv[5].split() if len(sys.argv) > 5 else []
    print(
        run_processes(
            _run,
            launcher_environment(cfg),
            2,
            [*extra, "--observe", d, f"{SCRIPTS}/{sys.argv[2]}.py " + sys.argv[4].replace("TMP", d)],
            d + "/log",
        )
    )
    for f in sorted(Path(d).glob("log*")):
        print(f.read_text()[-3000:])
    print((Path(d) / "rank-00.json").read_text())
