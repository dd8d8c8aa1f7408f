"""Shapes of engines that answer for those of their profiles and no others."""

from builders.tensors import check_inputs, fitting_profile
from builders.types import BuildRequest, Tensors

# A plan cuts a CPU engine's list of profiles off behind this many; who holds inputs to them needs them all.
MOST_PROFILES = 64


def refusal(request: BuildRequest, title: str) -> str | None:
    """Why an engine cannot be held to the shapes of this request; None when it can."""
    if len(request.profiles) > MOST_PROFILES:
        return f"the buckets combine to more than {MOST_PROFILES} profiles, which {title} holds inputs to; use fewer"
    for spec in (*request.inputs, *request.outputs):
        if 0 in spec.shape:
            return f"{spec.name!r} has shape {spec.shape} and so no elements, which {title} does not take; leave it out"
    return None


def check(request: BuildRequest, inputs: Tensors) -> None:
    """Raise DataError for names, dtypes and shapes that the request does not have. Without profiles any size will do."""
    check_inputs(request.inputs, inputs)
    if request.profiles:
        fitting_profile(request.profiles, inputs)
