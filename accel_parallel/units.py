"""The FSDP units of `TransformerLM` under an accelerate file, told from its shape: what is gathered together, and when.

Facts: torch 2.13 (`distributed/fsdp/wrap.py`, `_recursive_wrap`), accelerate 1.15 (`utils/fsdp_utils.py`,
`fsdp2_prepare_model`). Needs no torch; tests compare with what real processes wrap.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from accel_parallel.shapes import ModelShape

Shape = tuple[int, ...]
BYTES = 4
"""Of a parameter at rest: float32."""
ALIGNMENT = 4
"""Version 1 starts each original parameter at a multiple of 16 bytes in its unit's flat one: 4 float32."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What is sharded, gathered and freed as one; the root's name is empty. A parameter is in its innermost unit."""

    name: str
    class_name: str
    parameters: Mapping[str, Shape]
    reshards: bool
    """Whether gathered parameters are freed after the forward pass, and gathered once more for the backward pass."""

    @property
    def size(self) -> int:
        """Parameters in it, without padding."""
        return sum(map(math.prod, self.parameters.values()))


@dataclass(frozen=True, slots=True)
class Wrapping:
    """What of an accelerate file decides the units. `policy` as in `fsdp_auto_wrap_policy`."""

    version: int
    policy: str
    classes: tuple[str, ...] = ()
    min_num_params: int = 0
    reshards: bool = True


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the model: its own parameters, without those of its children."""

    name: str
    class_name: str
    own: Mapping[str, Shape] = field(default_factory=dict)
    children: tuple["Module", ...] = ()

    def walk(self) -> Iterator["Module"]:
        """This module and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def size(self) -> int:
        """Parameters of it and of all below it; one that two of them share counts once."""
        return sum({name: math.prod(shape) for module in self.walk() for name, shape in module.own.items()}.values())


def module_tree(shape: ModelShape) -> Module:
    """`TransformerLM` as a tree. A tied head holds the embedding's parameter, under the embedding's name."""
    shapes = shape.parameter_shapes()
    embedding = {"token_emb.weight": shapes["token_emb.weight"]}
    blocks = tuple(_block(f"blocks.{number}", shapes) for number in range(shape.num_layers))
    return Module(
        "",
        "TransformerLM",
        children=(
            Module("token_emb", "Embedding", embedding),
            Module("blocks", "Sequential", children=blocks),
            Module("norm", "RMSNorm", {"norm.weight": shapes["norm.weight"]}),
            Module("head", "LMHead", embedding if shape.tie_embeddings else {"head.weight": shapes["head.weight"]}),
        ),
    )


def units(shape: ModelShape, wrapping: Wrapping) -> list[Unit]:
    """The units in the order of the model's modules, the root first; without those that hold no parameter."""
    tree = module_tree(shape)
    found = {"": False}  # the root stays whole from forward to backward pass in both versions
    found |= dict.fromkeys(_wrapped(tree, wrapping), wrapping.reshards)
    if wrapping.version == 2:
        # Accelerate makes a unit of the last child whose class says Norm, which never gives its parameters back.
        found.setdefault("norm", False)
    owned = _owned(tree, found)
    return [
        Unit(module.name, module.class_name, owned[module.name], found[module.name])
        for module in tree.walk()
        if module.name in found and owned[module.name]
    ]


def shard_sizes(unit: Unit, version: int, shard_size: int) -> list[int]:
    """Parameters that each of `shard_size` processes holds of a unit, padding included.

    Version 2 cuts each parameter along its first dimension into as many pieces of equal height as `torch.chunk` makes,
    and version 1 the flat parameter of the unit, aligned and padded, into equal ones.
    """
    if version == 1:
        flat = sum(-(-math.prod(shape) // ALIGNMENT) * ALIGNMENT for shape in unit.parameters.values())
        return [-(-flat // shard_size)] * shard_size
    sizes = [0] * shard_size
    for shape in unit.parameters.values():
        rows, row = shape[0], math.prod(shape[1:])
        height = -(-rows // shard_size)
        for rank in range(shard_size):
            sizes[rank] += max(0, min(height, rows - rank * height)) * row
    return sizes


def _block(name: str, shapes: Mapping[str, Shape]) -> Module:
    def leaf(path: str, class_name: str) -> Module:
        full = f"{name}.{path}"
        return Module(full, class_name, {f"{full}.weight": shapes[f"{full}.weight"]})

    attention = tuple(leaf(f"attn.{part}_proj", "Linear") for part in "qkvo")
    feed_forward = tuple(leaf(f"ffn.{part}_proj", "Linear") for part in ("gate", "up", "down"))
    children = (
        leaf("attn_norm", "RMSNorm"),
        Module(f"{name}.attn", "Attention", children=attention),
        leaf("ffn_norm", "RMSNorm"),
        Module(f"{name}.ffn", "FeedForward", children=feed_forward),
    )
    return Module(name, "TransformerBlock", children=children)


def _wrapped(tree: Module, wrapping: Wrapping) -> set[str]:
    """Names of the modules below the root that become units by the policy."""
    if wrapping.policy == "TRANSFORMER_BASED_WRAP":
        return {module.name for module in tree.walk() if module.class_name in wrapping.classes}
    if wrapping.policy == "NO_WRAP":
        return set()
    below = [module for module in tree.walk() if module is not tree]
    if wrapping.version == 2:
        return {module.name for module in below if module.size > wrapping.min_num_params}
    return set(_wrapped_by_remainder(tree, lambda size: size >= wrapping.min_num_params, is_root=True)[0])


def _wrapped_by_remainder(
    module: Module, large: Callable[[int], bool], *, is_root: bool = False
) -> tuple[list[str], int]:
    """Version 1, children first: a unit is a module of which much is in no unit inside it. Names, and their sizes."""
    size = module.size
    if not large(size):
        return [], 0
    names, inside = [], 0
    for child in module.children:
        found, held = _wrapped_by_remainder(child, large)
        names += found
        inside += held
    if not is_root and large(size - inside):
        return [*names, module.name], size
    return names, inside


def _owned(tree: Module, found: Mapping[str, bool]) -> dict[str, dict[str, Shape]]:
    """The parameters of each unit: those of its module and of all below that are not in another; each once."""
    owned: dict[str, dict[str, Shape]] = {name: {} for name in found}
    taken: set[str] = set()

    def visit(module: Module, unit: str) -> None:
        inner = module.name if module.name in found else unit
        for child in module.children:
            visit(child, inner)
        for name, shape in module.own.items():
            if name not in taken:
                taken.add(name)
                owned[inner][name] = shape

    visit(tree, "")
    return owned
