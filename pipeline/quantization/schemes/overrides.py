"""Precision by hand: the spec's `quantization.overrides`, resolved to one precision for each node that they name."""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from enginesmith.core.errors import InputError
from enginesmith.core.text import suggest

if TYPE_CHECKING:
    from onnx import ModelProto

ProductPrecision = Literal["fp32", "fp16", "fp8", "mxfp8", "int8"]
# own: the narrow precision that the graph is written in.
OverridePrecision = ProductPrecision | Literal["own"]


@dataclass(frozen=True)
class Override:
    """One rule. match: a node's name, an operator type, or a glob over names ('*/attn/*').

    precision: 'fp32' and 'fp16' leave the node in float ('fp32' also where the rest is cast to 16 bits);
    'int8' takes back an earlier rule: the node gets the graph's own narrow precision.
    """

    match: str
    precision: ProductPrecision


def resolve(model: "ModelProto", rules: Sequence[Override]) -> dict[str, OverridePrecision]:
    """Node name -> precision, for a tidy model; 'own' for a rule of 'int8'. The last rule that matches a node counts.

    Raises InputError, with the nearest name, for a rule that matches no node.
    """
    node_precisions: dict[str, OverridePrecision] = {}
    for rule in rules:
        nodes = [
            node.name
            for node in model.graph.node
            if rule.match in (node.name, node.op_type) or fnmatch.fnmatchcase(node.name, rule.match)
        ]
        if not nodes:
            node_words = sorted({word for node in model.graph.node for word in (node.name, node.op_type)})
            remedy = "`enginesmith debug sensitivity` and any ONNX viewer show the nodes' names"
            hint = suggest(rule.match.strip("*"), node_words, remedy)
            raise InputError(f"quantization.overrides: no node matches {rule.match!r}; {hint}")
        node_precisions |= dict.fromkeys(nodes, "own" if rule.precision == "int8" else rule.precision)
    return node_precisions


def find_override(node: str, overrides: Mapping[str, OverridePrecision]) -> str | None:
    """Why an override leaves a node in float; None if none does."""
    precision = overrides.get(node, "own")
    return None if precision in ("own", "int8", "mxfp8") else f"quantization.overrides says {precision}"


def in_fp32(node_precisions: Mapping[str, OverridePrecision]) -> dict[str, str]:
    """The nodes that stay in fp32 even where the rest is cast to 16 bits, with the reason."""
    return {name: "the spec keeps it in fp32" for name, precision in node_precisions.items() if precision == "fp32"}
