"""The floors of the house: who may import whom, what stays free of torch, which words stand where."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "accel_parallel"

# The floor of each module or folder; a module imports only from floors strictly below its own.
FLOORS = {
    "errors": 0, "say": 0, "suggest": 0, "files": 0, "arguments": 0, "metrics": 0, "shapes": 0, "hardware": 0,
    "redact": 0,
    "spec": 1, "units": 1, "locks": 1, "summary": 1, "output": 1, "checkpoints": 1, "ended": 1,
    "continuing": 2, "strategies": 2, "asked": 2, "llama": 2,
    "explain": 3, "runs": 3, "init_from": 3, "verbs": 3,
    "accelerate_yaml": 3, "substitutions": 3, "rehearsal": 4,
    "launch": 4,
    "supervise": 5,
    "restarts": 6,
    "cli": 7, "__main__": 8,
    "train/state": 2, "train/model": 2, "train/data": 2, "train/optimize": 2, "train/generate": 2, "train/agent": 2,
    "train/control": 2, "train/failure": 2, "train/stations": 2,
    "train/status": 3, "train/prepare": 3, "train/pool": 3, "train/model_tree": 3,
    "train/runtime": 4,
    "train/checkpoint": 5, "train/meter": 5, "train/evaluate": 5, "train/probe": 5,
    "train/report": 6, "train/initialize": 6, "train/saved": 6, "train/units": 6, "train/training_step": 6,
    "train/watch_script": 6,
    "train/script": 5, "train/scale": 7, "train/loop": 7, "train/export": 7, "train/generate_text": 7,
    "train/session": 8,
    "train/__main__": 9, "train/preload": 9, "train/rehearse": 9,
}  # fmt: skip
STRATEGY_WORDS = re.compile(r"\b(fsdp|fsdp1|fsdp2|ddp|fullysharded\w*|distributeddataparallel)\b", re.IGNORECASE)
HEAVY = {"torch", "accelerate", "transformers", "datasets", "tokenizers", "numpy", "pyarrow", "tensorboard"}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part_of(module: str) -> str | None:
    """`accel_parallel.train.data.order` -> `train/data`; None for the package itself."""
    names = module.split(".")[1:]
    if not names:
        return None
    return "/".join(names[:2]) if names[0] == "train" and len(names) > 1 else names[0]


def imports(path: Path) -> set[str]:
    """Every module named in an import statement, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_only_from_floors_below(path: Path) -> None:
    own = part_of(name_of(path))
    if own == "train":
        assert not imports(path), "train/__init__.py imports nothing"
        return
    assert own is not None
    for module in imports(path):
        if not module.startswith("accel_parallel"):
            continue
        other = part_of(module)
        if other in (None, own):
            continue
        assert other in FLOORS, f"{module} has no floor"
        assert FLOORS[other] < FLOORS[own], f"{own} (floor {FLOORS[own]}) imports {other} (floor {FLOORS[other]})"


def test_every_module_has_a_floor_and_every_floor_a_module() -> None:
    assert {part_of(name_of(path)) for path in MODULES} - {"train"} == set(FLOORS)


@pytest.mark.parametrize("path", [p for p in MODULES if "train" not in p.relative_to(PACKAGE).parts], ids=name_of)
def test_light_tower_never_imports_the_heavy_one(path: Path) -> None:
    for module in imports(path):
        assert not module.startswith("accel_parallel.train"), module
        assert module.split(".")[0] not in HEAVY, module


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_module_is_longer_than_250_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 250


@pytest.mark.parametrize(
    "name", ["train/loop.py", "train/model.py", "train/data", "train/state.py", "train/meter.py", "train/evaluate.py",
             "train/optimize.py", "train/generate.py", "metrics.py"],
)  # fmt: skip
def test_no_strategy_words_where_the_strategy_must_not_matter(name: str) -> None:
    path = PACKAGE / name
    for file in path.rglob("*.py") if path.is_dir() else [path]:
        assert not STRATEGY_WORDS.search(file.read_text()), file


def test_the_loop_is_one_screen_and_asks_for_no_types() -> None:
    source = (PACKAGE / "train/loop.py").read_text()
    assert len(source.splitlines()) < 150
    tree = ast.parse(source)
    train = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "train")
    assert train.end_lineno is not None
    assert train.end_lineno - train.body[1].lineno < 60
    assert "isinstance" not in source
    assert "distributed_type" not in source
    assert "is_main" not in source


@pytest.mark.parametrize(
    "arguments", [["--help"], ["config", "--check"], ["launch", "fsdp", "--dry-run"], ["--version"]]
)
def test_light_verbs_never_import_torch(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from accel_parallel.cli import main\n"
        f"sys.argv = ['accel-parallel', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        f"print(sorted(set({sorted(HEAVY)!r}) & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[]"


def test_importing_the_package_does_nothing() -> None:
    code = "import sys, accel_parallel; print(len([m for m in sys.modules if m.startswith('accel_parallel')]))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "1"


def test_a_verb_does_not_load_what_only_plugins_of_pydantic_need() -> None:
    """importlib.metadata and the email package: 30 ms of every start."""
    code = (
        "import sys\n"
        "from accel_parallel.cli import main\n"
        "sys.argv = ['accel-parallel', 'config', '--check']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "print('email' in sys.modules)\n"
        "import importlib.metadata\n"
        "print(importlib.metadata.version('pydantic') == sys.modules['pydantic'].VERSION)\n"
        "print(len(importlib.metadata.entry_points(group='console_scripts')) > 0)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=True
    )
    assert result.stdout.splitlines()[-3:] == ["False", "True", "True"]
