"""A model as far as wrapping looks at it: its modules, their classes, and the shapes of their own parameters."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from accel_parallel.shapes import ModelShape

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Module:
    """A module and its own parameters, without those of its children.

    A parameter that several modules share has one name, that of the first; a module that is at two places stands at
    the first.
    """

    name: str
    class_name: str
    own: Mapping[str, Shape] = field(default_factory=dict)
    children: tuple["Module", ...] = ()
    bases: tuple[str, ...] = ()
    """Names of the classes that its class inherits from."""
    has_forward: bool = True

    def walk(self) -> Iterator["Module"]:
        """This module and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def is_a(self, *classes: str) -> bool:
        """Whether it is an instance of one of them, by name."""
        return not {self.class_name, *self.bases}.isdisjoint(classes)

    @property
    def is_container(self) -> bool:
        return self.is_a("ModuleList", "ModuleDict")

    @cached_property
    def parameters(self) -> Mapping[str, Shape]:
        """Of it and of all below it; one that two of them share stands once."""
        found = dict(self.own)
        for child in self.children:
            found |= child.parameters
        return found

    @cached_property
    def size(self) -> int:
        """How many numbers its parameters are."""
        return sum(map(prod, self.parameters.values()))


@dataclass(frozen=True)
class Model:
    """A tree of modules, and the names of those that Accelerate makes units of by itself in version 2."""

    root: Module
    input_embedding: str | None = None
    output_embedding: str | None = None
    final_norm: str | None = None
    no_split: tuple[str, ...] = ()
    """Classes that are wrapped where none is named: `_no_split_modules` of Hugging Face's models."""
    fails_version2: str | None = None
    """Why Accelerate's version 2 cannot find those modules."""

    @cached_property
    def modules(self) -> Mapping[str, Module]:
        """By name, parents first; the root's name is empty."""
        return {module.name: module for module in self.root.walk()}

    @property
    def tied(self) -> bool:
        """Whether both embeddings are one weight."""
        ends = (self.input_embedding, self.output_embedding)
        first, last = ({} if name is None else self.modules[name].own for name in ends)
        return not set(first).isdisjoint(last)


def model_of(tree: Mapping[str, Any]) -> Model:
    """The model that `accel_parallel.train.model_tree` described."""
    keys = ("input_embedding", "output_embedding", "final_norm", "fails_version2")
    return Model(_module_of(tree["root"]), no_split=tuple(tree["no_split"]), **{key: tree[key] for key in keys})


def transformer_lm(shape: ModelShape) -> Model:
    """`TransformerLM`. A tied head holds the embedding's parameter, under the embedding's name."""
    shapes = shape.parameter_shapes()
    embedding = {"token_emb.weight": shapes["token_emb.weight"]}
    blocks = tuple(_block(f"blocks.{number}", shapes) for number in range(shape.num_layers))
    root = Module(
        "",
        "TransformerLM",
        children=(
            Module("token_emb", "Embedding", embedding),
            Module("blocks", "Sequential", children=blocks),
            Module("norm", "RMSNorm", {"norm.weight": shapes["norm.weight"]}),
            Module("head", "LMHead", embedding if shape.tie_embeddings else {"head.weight": shapes["head.weight"]}),
        ),
    )
    return Model(root, final_norm="norm")


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


def _module_of(node: Mapping[str, Any]) -> Module:
    return Module(
        node["name"],
        node["class"],
        {name: tuple(shape) for name, shape in node["own"].items()},
        tuple(map(_module_of, node["children"])),
        tuple(node["bases"]),
        node["has_forward"],
    )
