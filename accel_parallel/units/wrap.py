"""Which modules become FSDP units, and which parameters each of them gathers.

Facts: torch 2.13 (distributed/fsdp/wrap.py, `_recursive_wrap` and `size_based_auto_wrap_policy`), accelerate 1.15
(utils/fsdp_utils.py, `fsdp2_prepare_model`). Needs no torch; tests compare with what real processes wrap.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from accel_parallel.units.tree import Model, Module, Shape

Large = Callable[[int], bool]
_WHOLE = ("MultiheadAttention",)


@dataclass(frozen=True, slots=True)
class Unit:
    """What is sharded, gathered and freed as one; the root's name is empty. A parameter is in its innermost unit.

    Without parameters, because all are in units inside of it, it is only a name: it moves and holds nothing.
    """

    name: str
    class_name: str
    parameters: Mapping[str, Shape]
    reshards: bool
    """Whether gathered parameters are freed after the forward pass, and gathered once more for the backward pass."""
    modules: tuple[str, ...] = ()
    """Modules that it is gathered for, by name: the one it is named after, or a model's last ones together."""

    @property
    def size(self) -> int:
        """Parameters in it, without padding."""
        return sum(map(prod, self.parameters.values()))


@dataclass(frozen=True, slots=True)
class Wrapping:
    """What of an accelerate file decides the units. `policy` as in `fsdp_auto_wrap_policy`."""

    version: int
    policy: str
    classes: tuple[str, ...] = ()
    """Empty: those that the model names itself."""
    min_num_params: int = 0
    reshards: bool = True
    low_precision: bool = False
    """Under mixed precision, version 1 makes every batch norm a unit, to keep it in float32."""


def units(model: Model, wrapping: Wrapping) -> list[Unit]:
    """The units in the order of the model's modules, the root first; those without parameters too."""
    # The root stays whole from forward to backward pass in both versions.
    groups: dict[str, tuple[str, bool]] = {"": ("", False)}
    groups |= {name: (name, wrapping.reshards) for name in wrapped(model, wrapping)}
    if wrapping.version == 2:
        _add_ends(groups, model, wrapping)
    owned = _owned(model.root, {module: unit for module, (unit, _) in groups.items()})
    named: dict[str, list[str]] = {}
    for module in model.modules:
        if module in groups:
            named.setdefault(groups[module][0], []).append(module)
    return [
        Unit(name, model.modules[name].class_name, owned[name], groups[name][1], tuple(modules))
        for name, modules in named.items()
    ]


def wrapped(model: Model, wrapping: Wrapping, large: Large | None = None) -> list[str]:
    """Names of the modules below the root that become units by the policy.

    `large` says of a size whether it reaches the threshold; left out, it is compared with `min_num_params`.
    """
    root, threshold, version1 = model.root, wrapping.min_num_params, wrapping.version == 1
    below = [module for module in model.modules.values() if module is not root]
    if wrapping.policy == "TRANSFORMER_BASED_WRAP":
        classes = wrapping.classes or model.no_split
        found = [module.name for module in below if module.is_a(*classes)]
    elif wrapping.policy == "SIZE_BASED_WRAP" and threshold > 0:  # Accelerate takes 0 for no policy
        large = large or (lambda size: size >= threshold if version1 else size > threshold)
        # Version 2 asks every module for all it holds, in units or not.
        if version1:
            found = _by_remainder(root, large, () if wrapping.low_precision else _WHOLE)[0]
        else:
            found = [each.name for each in below if large(each.size)]
    else:
        return []
    if version1 and wrapping.low_precision:
        found += [module.name for module in below if module.is_a("_BatchNorm")]
    return list(dict.fromkeys(name for name in found if name))


def refused(model: Model, wrapping: Wrapping) -> list[Module]:
    """Modules that version 2 is told to wrap and cannot: lists of modules have no forward pass to gather for."""
    if wrapping.version == 1:
        return []
    found = (model.modules[name] for name in wrapped(model, wrapping))
    return [module for module in found if module.is_container and not module.has_forward]


def sharded_twice(model: Model, wrapping: Wrapping) -> list[tuple[str, str]]:
    """Modules that version 2 makes units after a module around them became one, whose parameters they are already.

    Each with the name of that module. torch 2.13 fails on it.
    """
    if wrapping.version == 1:
        return []
    names = wrapped(model, wrapping)
    ends = (model.input_embedding, model.final_norm, model.output_embedding)
    around = [(end, name) for end in ends if end and end not in names for name in names if end.startswith(f"{name}.")]
    # Where several stand around it, the parameters are the innermost one's.
    return list(dict(sorted(around, key=lambda pair: len(pair[1]))).items())


def split_parameters(model: Model, found: list[Unit]) -> dict[str, list[str]]:
    """Shared parameters that modules of several units hold, with the names of those units. torch fails on them."""
    unit_of = {module: unit.name for unit in found for module in unit.modules}
    holders: dict[str, list[str]] = {}

    def visit(module: Module, unit: str) -> None:
        inner = unit_of.get(module.name, unit)
        for name in module.own:
            holders.setdefault(name, []).append(inner)
        for child in module.children:
            visit(child, inner)

    visit(model.root, "")
    return {name: list(dict.fromkeys(where)) for name, where in holders.items() if len(set(where)) > 1}


def _add_ends(groups: dict[str, tuple[str, bool]], model: Model, wrapping: Wrapping) -> None:
    """What Accelerate wraps in version 2 whatever the policy: a model's first and last modules.

    The last norm and the output matrix are one unit that stays gathered; a tied embedding belongs to it.
    """
    if not model.tied and model.input_embedding is not None:
        groups.setdefault(model.input_embedding, (model.input_embedding, wrapping.reshards))
    ends = (model.final_norm, model.input_embedding if model.tied else None, model.output_embedding)
    tail = [name for name in ends if name is not None and name not in groups]
    # Named after the one that the model has first.
    first = next((name for name in model.modules if name in tail), "")
    groups.update(dict.fromkeys(tail, (first, False)))


def _by_remainder(module: Module, large: Large, whole: tuple[str, ...]) -> tuple[list[str], int]:
    """Version 1, children first: a unit is a module of which much is in no unit inside it. Names, and their sizes.

    Lists of modules are none, nor what is of the classes `whole`, which are not looked into either.
    """
    size = module.size
    if not large(size) or module.is_a(*whole):
        return [], 0
    names: list[str] = []
    inside = 0
    for child in module.children:
        found, held = _by_remainder(child, large, whole)
        names += found
        inside += held
    if module.name and large(size - inside) and not module.is_container:
        return [*names, module.name], size
    return names, inside


def _owned(root: Module, unit_of: Mapping[str, str]) -> dict[str, dict[str, Shape]]:
    """The parameters of each unit: those of its modules and of all below that are not in another; each once."""
    owned: dict[str, dict[str, Shape]] = {name: {} for name in unit_of.values()}
    taken: set[str] = set()

    def visit(module: Module, unit: str) -> None:
        inner = unit_of.get(module.name, unit)
        for name, shape in module.own.items():
            if name not in taken:
                taken.add(name)
                owned[inner][name] = shape
        for child in module.children:
            visit(child, inner)

    visit(root, "")
    return owned
