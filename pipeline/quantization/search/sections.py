"""Divides a model into sections, so that a group's error is measured a few groups later, not at the model's end.

A waist is a tensor through which all effects of the groups before it pass, such as the residual stream between two
layers. The effect of the rest of the model on errors at a waist is measured once, for all groups before it. So the cost
of judging all groups grows with their number; with tails to the model's end, it would grow with the square of that
number. Models without waists, such as a U-Net between its skips, are one section.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnx import ModelProto

from pipeline.quantization.settings.groups import SmoothingGroup, find_waists
from pipeline.quantization.settings.runs import downstream

# The least number of groups in a section. A group is judged at the end of the section after its own.
HORIZON = 12


@dataclass(frozen=True)
class Section:
    """Groups between two waists. end: the tensor that ends the section; None for the model's outputs."""

    groups: tuple[SmoothingGroup, ...]
    end: str | None


def divide_sections(
    model: ModelProto, groups: Sequence[SmoothingGroup], types: Mapping[str, int], least_count: int = HORIZON
) -> list[Section]:
    """A prepared model's sections in order; all but the last have `least_count` groups or more. types: of tensors."""
    node_indices = {node.name: index for index, node in enumerate(model.graph.node)}
    # A group with several readers ends at the last one.
    sorted_groups = sorted(groups, key=lambda group: max(node_indices[node] for node in group.nodes))
    sections, section_groups = list[Section](), list[SmoothingGroup]()
    changed_names = downstream(model, {node for group in groups for node in group.nodes})
    for index, tensor in find_waists(model, changed_names, types):
        while sorted_groups and max(node_indices[node] for node in sorted_groups[0].nodes) <= index:
            section_groups.append(sorted_groups.pop(0))
        if len(section_groups) >= least_count and sorted_groups:
            sections.append(Section(tuple(section_groups), tensor))
            section_groups = []
    return [*sections, Section((*section_groups, *sorted_groups), None)]
