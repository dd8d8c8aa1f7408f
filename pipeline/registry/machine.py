"""What `--target auto` means here: this machine's GPU where there is one, else its CPU."""

from builders.cuda import Gpu, gpus
from builders.errors import UnknownNameError
from builders.targets import CPU, generation_of, parse_targets
from builders.types import Target

AUTO = "auto"


def target_named(name: str) -> Target:
    """The one target that a name stands for; `auto` is this machine's. Raises UnknownNameError for none or several."""
    if name == AUTO:
        return local_target()
    found = parse_targets(name)
    if len(found) > 1:
        raise UnknownNameError(f"target {name!r} is several: {', '.join(t.name for t in found)}; name one")
    return found[0]


def local_target() -> Target:
    """This machine's target. Raises UnknownNameError when it has GPUs of several generations: a person must choose."""
    found = {_target(gpu) for gpu in gpus()}
    if len({target.sm for target in found}) > 1:
        names = ", ".join(sorted(target.sm for target in found))
        raise UnknownNameError(f"this machine has GPUs of several generations: {names}; name one with --target")
    return min(found, key=lambda target: target.name) if found else CPU


def _target(gpu: Gpu) -> Target:
    """A GPU as a target; its product is known when its name is one that node labels use (spaces become '-')."""
    generation = generation_of(gpu.compute_capability)
    label = gpu.name.strip().replace(" ", "-")
    for product, labels in generation.products.items() if generation else ():
        if label in labels:
            return Target(product, gpu.compute_capability, product)
    return Target("sm_{}{}".format(*gpu.compute_capability), gpu.compute_capability)
