# List the recipes.
[private]
default:
    @just --list --unsorted

# Train on one process, one device.
[group('train')]
single *args:
    accel-parallel launch single {{args}}

# Train with DistributedDataParallel: a replica of the model in each process.
[group('train')]
ddp *args:
    accel-parallel launch ddp {{args}}

# Train fully sharded: parameters, gradients and optimizer state split over the processes.
[group('train')]
fsdp *args:
    accel-parallel launch fsdp {{args}}

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

# Run the tests.
[group('develop')]
test *args:
    pytest {{args}}

# Write the pages of docs/ that come from the code.
[group('develop')]
docs *args:
    python docs/generate.py {{args}}

# Format the code and fix what can be fixed.
[group('develop')]
fix:
    ruff check --fix .
    ruff format .
