"""The names that stand for targets: a kind of CPU, a GPU generation or product, a compute capability, all of them."""

import re
from collections.abc import Sequence
from functools import lru_cache

from enginesmith.core.errors import UnknownNameError
from enginesmith.core.hardware.cpu_kinds import CPU, KINDS, kind_named
from enginesmith.core.hardware.gpu_generations import GENERATIONS, OLDER_FAMILIES, OTHER_PRODUCTS, generation_of
from enginesmith.core.text import suggest
from enginesmith.core.types import Target

_FAMILY_ALIASES = {"ada-lovelace": "ada", "lovelace": "ada"}


def names() -> list[str]:
    """Every name that a spec may use for a target or a group of targets."""
    out = ["cpu", "gpu", "all", *(kind.name for kind in KINDS)]
    for generation in GENERATIONS:
        out += [generation.sm, *generation.products]
    return out + sorted({g.family for g in GENERATIONS})


@lru_cache(maxsize=256)
def parse_targets(name: str) -> tuple[Target, ...]:
    """The targets that a name stands for, in order of capability.

    `sm_89` (or `sm89`, `8.9`), a product (`l4`), a family (`ampere`: each of its capabilities), `cpu` (this machine's
    kind of CPU), a kind of CPU (`x86-64-v3`, `avx512-vnni`, `arm64-dotprod`: KINDS), `gpu` (every
    generation) or `all` (those and `cpu`). Raises UnknownNameError with the nearest known name.
    """
    key = name.strip().lower().replace(" ", "")
    key = _FAMILY_ALIASES.get(key, key)
    if key == "cpu":
        return (CPU,)
    if kind := kind_named(key):
        return (Target(kind.name),)
    if key in ("gpu", "all"):
        gpus = tuple(Target(g.sm, g.compute_capability) for g in GENERATIONS)
        return gpus if key == "gpu" else (*gpus, CPU)
    sm = "sm_" + key.removeprefix("sm").lstrip("_").replace(".", "")
    product = key.replace("-", "").replace("_", "")
    found = (
        [Target(g.sm, g.compute_capability) for g in GENERATIONS if g.sm == sm]
        or [Target(product, g.compute_capability, product) for g in GENERATIONS if product in g.products]
        or [Target(g.sm, g.compute_capability) for g in GENERATIONS if g.family == key]
    )
    if not found:
        raise UnknownNameError(f"target {name!r} {_explain_unknown(key, product)}")
    return tuple(found)


def match_targets(name: str, known: Sequence[Target]) -> list[Target]:
    """Which of the known targets a name stands for; where none is the same, those of its generation that are, or that
    hold, all of it: `t4` is served by `sm_75`. Raises as `parse_targets`."""
    wanted = parse_targets(name)
    return [target for target in known if target in wanted] or [
        target
        for target in known
        for each in wanted
        if target.compute_capability == each.compute_capability is not None and None in (target.product, each.product)
    ]


def _explain_unknown(key: str, product: str) -> str:
    """Why a name is no target: a GPU that is not supported, one that is named by its generation, or no GPU at all."""
    others = {name: capability for capability, names in OTHER_PRODUCTS.items() for name in names}
    digits = re.fullmatch(r"(?:sm_?)?([1-9][0-9]?)\.?([0-9])a?", key)
    capability = (int(digits[1]), int(digits[2])) if digits else others.get(product) or OLDER_FAMILIES.get(key)
    if capability is None:
        return f"is not known; {suggest(key, names())}"
    sm = "sm_{}{}".format(*capability)
    if generation_of(capability):
        return f"is not known by that name; it is {sm}: name that"
    what = "is not supported" if key == sm else f"is a GPU of {sm}: {sm} is not supported"
    return f"{what}; known: {', '.join(item.sm for item in GENERATIONS)}"
