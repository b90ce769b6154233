# List the recipes.
[private]
default:
    @just --list --unsorted

# Train on one process, one device.
[group('train')]
single *args:
    accel-parallel launch single {{args}}

# Train with DistributedDataParallel: a replica in each process.
[group('train')]
ddp *args:
    accel-parallel launch ddp {{args}}

# Train sharded, as the fsdp section says.
[group('train')]
fsdp *args:
    accel-parallel launch fsdp {{args}}

# FSDP, SHARD_GRAD_OP: parameters stay gathered from forward to backward pass.
[group('train')]
fsdp_shard_grad_op *args:
    accel-parallel launch fsdp_shard_grad_op {{args}}

# FSDP, HYBRID_SHARD: replicas of a sharded model; 4 processes at least.
[group('train')]
fsdp_hybrid_shard *args:
    accel-parallel launch fsdp_hybrid_shard {{args}}

# FSDP, shards and optimizer state rest in host memory.
[group('train')]
fsdp_cpu_offload *args:
    accel-parallel launch fsdp_cpu_offload {{args}}

# FSDP version 1, FULL_SHARD, units by fsdp.min_num_params.
[group('version 1')]
fsdp1_full_shard *args:
    accel-parallel launch fsdp1_full_shard {{args}}

# FSDP version 1, SHARD_GRAD_OP.
[group('version 1')]
fsdp1_shard_grad_op *args:
    accel-parallel launch fsdp1_shard_grad_op {{args}}

# FSDP version 1, NO_SHARD: replicas, as under DDP.
[group('version 1')]
fsdp1_no_shard *args:
    accel-parallel launch fsdp1_no_shard {{args}}

# FSDP version 1, HYBRID_SHARD: two machines at least (see two-machines).
[group('version 1')]
fsdp1_hybrid_shard *args:
    accel-parallel launch fsdp1_hybrid_shard {{args}}

# FSDP version 1, shards and optimizer state rest in host memory.
[group('version 1')]
fsdp1_cpu_offload *args:
    accel-parallel launch fsdp1_cpu_offload {{args}}

# DDP started by torchrun.
[group('other launchers')]
torchrun-ddp *args:
    #!/usr/bin/env bash
    set -euo pipefail
    eval "$(accel-parallel launch ddp --print-env)"
    torchrun --standalone --nproc_per_node "$ACCEL_PARALLEL_NUM_PROCESSES" -m accel_parallel.train {{args}}

# FSDP started by torchrun.
[group('other launchers')]
torchrun-fsdp *args:
    #!/usr/bin/env bash
    set -euo pipefail
    eval "$(accel-parallel launch fsdp --print-env)"
    torchrun --standalone --nproc_per_node "$ACCEL_PARALLEL_NUM_PROCESSES" -m accel_parallel.train {{args}}

# A strategy on two "machines" that are both this host.
[group('other launchers')]
two-machines strategy *args:
    #!/usr/bin/env bash
    set -euo pipefail
    port=$(python3 -c "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])")
    run=runs/{{strategy}}-two-machines
    options=(--set distributed.num_machines=2 --set distributed.main_process_ip=127.0.0.1
             --set distributed.main_process_port="$port" --run "$run")
    [ {{strategy}} = fsdp1_hybrid_shard ] || options+=(--num-processes 1)
    accel-parallel launch {{strategy}} "${options[@]}" --machine-rank 1 {{args}} >/dev/null 2>&1 &
    accel-parallel launch {{strategy}} "${options[@]}" --machine-rank 0 {{args}}
    wait

# Read, tokenise and cache the text without training.
[group('train')]
prepare *args:
    accel-parallel prepare {{args}}

# Write accelerate_configs/*.yaml from accelerate_configs/parallelism.yaml.
[group('configs')]
configs *args:
    accel-parallel config {{args}}

# Formatting, lint, types, and whether the generated files are up to date.
[group('develop')]
check:
    ruff format --check .
    ruff check .
    mypy
    accel-parallel config --check
    python docs/generate.py --check

# Run the tests, without the long ones.
[group('develop')]
test *args:
    pytest -m "not slow and not long" {{args}}

# Run all tests, as CI does.
[group('develop')]
test-all *args:
    pytest -m "not long" {{args}}

# Run the tests that take minutes each.
[group('develop')]
test-long *args:
    pytest -m long {{args}}

# Kill training at random moments, inside saves too, and start it again: `--kills 100 --seed 0`; takes minutes.
[group('develop')]
torture *args:
    python -m tests.torture {{args}}

# Measure what each strategy costs, for docs/strategies.md; takes minutes.
[group('develop')]
measure-strategies:
    python docs/measure.py

# Measure what saving costs, for docs/checkpoints.md; takes minutes.
[group('develop')]
measure-checkpoints:
    python docs/measure_checkpoints.py

# Coverage of the light tower by its quick tests; fails under 95 %.
[group('develop')]
coverage:
    coverage erase
    coverage run -m pytest -q tests/test_accelerate_yaml.py tests/test_checkpoints.py tests/test_cli.py \
        tests/test_config.py tests/test_ended.py tests/test_environment.py tests/test_explain.py tests/test_generations.py \
        tests/test_hardware.py tests/test_light.py tests/test_runs.py tests/test_shapes.py tests/test_spec.py \
        tests/test_rehearse.py tests/test_rehearse_script.py tests/test_strategies.py tests/test_target.py -k "not test_no_key_is_dead and not test_any_valid"
    coverage run -m pytest -q tests/test_export.py -k "config or sizes or folder_that_fits or folders or differs or represent"
    coverage combine -q
    coverage report --fail-under 95

# Write the pages of docs/ that come from the code.
[group('develop')]
docs *args:
    python docs/generate.py {{args}}

# Format the code and fix what can be fixed.
[group('develop')]
fix:
    ruff check --fix .
    ruff format .
