"""Which nodes of a Ray cluster suit a job, what Ray is asked for, and the message when none does."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from builders.execution.jobs import Needs
from builders.execution.ray.cluster import _NODE_ID, RayNode


def find_fitting(needs: Needs, nodes: Iterable[RayNode], avoid: str | None = None) -> list[RayNode]:
    """The nodes that the job could run on if nothing else did. Memory excludes none (see `ray_options`).

    avoid: the id of a node that will not do.
    """
    labels = needs.labels.items() if needs.required else set()
    return [
        node
        for node in nodes
        if node.id != avoid and node.cpus >= 1 and node.gpus >= needs.gpus and labels <= node.labels.items()
    ]


def ray_options(needs: Needs, nodes: Sequence[RayNode], avoid: str | None = None) -> dict[str, object]:
    """The options of a Ray task with these needs: one CPU, its GPUs and memory, and label selectors.

    What asks for more memory than any node that suits it has gets the whole of the largest. A preferred label is given
    up as soon as only other nodes have room. avoid: the id of a node that is left out as long as another one suits.
    """
    possible = find_fitting(needs, nodes, avoid)
    strict = dict(needs.labels) if needs.required else {}
    if possible and avoid is not None:
        strict[_NODE_ID] = f"!{avoid}"
    options: dict[str, object] = {"num_cpus": 1, "num_gpus": needs.gpus, "label_selector": strict}
    if needs.memory_mib:
        most = max((node.memory_mib for node in possible), default=needs.memory_mib)
        options["memory"] = min(needs.memory_mib, most) << 20
    if not needs.required and needs.labels and any(needs.labels.items() <= node.labels.items() for node in possible):
        options["label_selector"] = {**needs.labels, **strict}
        options["fallback_strategy"] = [{"label_selector": strict}]
    return options


def none_fits(needs: Needs, nodes: Iterable[RayNode], waited_s: float = 0.0) -> str:
    """The message that no node suits: what was asked for, what there is, and the remedy. waited_s: for one to come."""
    counted = Counter(_describe(node.labels, node.gpus) for node in nodes)
    there = ", ".join(f"{count} with {words}" for words, count in sorted(counted.items())) or "none"
    labels = "".join(f" --labels {name}={value}" for name, value in needs.labels.items() if needs.required)
    gpus = f" --num-gpus {needs.gpus}" if needs.gpus else ""
    came = f" came in {_minutes(waited_s)}" if waited_s else ""
    wait = "wait longer for it" if waited_s else "wait for it"
    return (
        f"no node with {_describe_needs(needs)}{came}; the cluster's nodes: {there}; start one with "
        f"`ray start --address HEAD{labels}{gpus}`, or {wait} with --wait-for-nodes 15m where nodes come by themselves "
        "(from the chart's `gpuGroups`: a group of that generation and product)"
    )


def countdown(needs: Needs, left_s: float) -> str:
    """The message while no node suits yet: what is asked for, and how long it is still waited for."""
    return f"a node with {_describe_needs(needs)}: none yet, {_minutes(left_s)} left"


def _describe_needs(needs: Needs) -> str:
    return _describe(needs.labels if needs.required else {}, needs.gpus)


def _minutes(seconds: float) -> str:
    return "{}:{:02d}".format(*divmod(max(0, round(seconds)), 60))


def _describe(labels: Mapping[str, str], gpus: float) -> str:
    named = [f"{name}={value}" for name, value in sorted(labels.items())]
    words = [*named, *([f"{gpus:g} GPU{'s' if gpus > 1 else ''}"] if gpus else [])]
    return " and ".join(words) if words else "a CPU"
