"""Who is in a wave of a rollout: a pure function of a node, the rollout's id and the shares that are reached.

A node's place is a number in [0, 1): the first 64 bits of SHA-256 over the rollout's id and the node's name. A share
reaches the nodes whose place is below it. So shares are nested (1 % is a part of 5 %), the same nodes are not the first
of every rollout, and nobody keeps a list of nodes.
"""

import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from enginesmith.core.codec import OMIT_NONE
from enginesmith.core.constraints import Count
from enginesmith.core.errors import InputError

# Shares are whole parts per million, so that no two programs round them differently.
WHOLE = 1_000_000
MOST_LABELS = 32
# All of them are in the document that nodes read.
MOST_WAVES = 100
_TEXT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")
_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,4})?)%")


@dataclass(frozen=True)
class ServingNode:
    """A node that serves. name: unique in the fleet.  region: '' where it has none.  labels: any words.

    Raises InputError for a name, region or label that is none.
    """

    name: str
    region: str = ""
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for what, text in (("name", self.name), ("region", self.region or "-"), *(("label", x) for x in self.labels)):
            if text != "-" and not _TEXT.fullmatch(text):
                raise InputError(f"node {what} {text[:80]!r} must match {_TEXT.pattern}")
        if len(self.labels) > MOST_LABELS:
            raise InputError(f"node {self.name} has {len(self.labels)} labels; the most are {MOST_LABELS}")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "ServingNode":
        """The node of ENGINESMITH_NODE (else the host's name), ENGINESMITH_REGION and ENGINESMITH_LABELS
        ('canary,gpu')."""
        labels = environment.get("ENGINESMITH_LABELS", "").replace(",", " ").split()
        name = environment.get("ENGINESMITH_NODE") or re.sub(r"[^A-Za-z0-9._/:-]", "-", socket.gethostname())[:128]
        return cls(name, environment.get("ENGINESMITH_REGION", ""), tuple(sorted(set(labels))))


@dataclass(frozen=True)
class Slice:
    """Nodes by their place, and by region or label if one is given. share_ppm: parts per million of them."""

    share_ppm: Count
    region: str | None = field(default=None, metadata=OMIT_NONE)
    label: str | None = field(default=None, metadata=OMIT_NONE)

    def __post_init__(self) -> None:
        if not 0 <= self.share_ppm <= WHOLE:
            raise ValueError(f"share_ppm is {self.share_ppm}; it is 0 to {WHOLE}")
        if self.region is not None and self.label is not None:
            raise ValueError("region and label are given; a wave has one of them")

    def covers(self, other: "Slice") -> bool:
        """Whether every node of `other` is in this one."""
        same = (self.region, self.label) in ((other.region, other.label), (None, None))
        return same and self.share_ppm >= other.share_ppm

    def __str__(self) -> str:
        share = f"{self.share_ppm / 10_000:g}%"
        where = f"region={self.region}" if self.region else f"label={self.label}" if self.label else ""
        return share if not where else where if self.share_ppm == WHOLE else f"{where}:{share}"


def place_of_node(name: str, rollout: str) -> int:
    """A node's place in a rollout, as a whole number below 2^64."""
    return int.from_bytes(sha256(f"{rollout}\n{name}".encode()).digest()[:8], "big")


def is_below(place: int, share_ppm: int) -> bool:
    """Whether a place (below 2^64) is within a share."""
    return place * WHOLE < share_ppm << 64


def is_reached(node: ServingNode, rollout: str, reach: Iterable[Slice]) -> bool:
    """Whether a rollout has reached a node. reach: the slices that are open; one suffices."""
    place = place_of_node(node.name, rollout)
    return any(
        is_below(place, item.share_ppm)
        and item.region in (None, node.region)
        and (item.label is None or item.label in node.labels)
        for item in reach
    )


def reports(node: str, reporters_ppm: int) -> bool:
    """Whether a node is among those that report. node: SHA-256 of its name, which is independent of its places, so that
    every wave has some; in hexadecimal digits, as in the key of its report."""
    return is_below(int(node[:16], 16), reporters_ppm)


def add_slice(reach: Sequence[Slice], item: Slice) -> tuple[Slice, ...]:
    """The slices with one more; what that covers is left out, and it is itself where one covers it."""
    if any(known.covers(item) for known in reach):
        return tuple(reach)
    return (*(known for known in reach if not item.covers(known)), item)


def parse_share(text: str, what: str) -> int:
    """Parts per million of '5%', '0.5%'. what: for errors. Raises InputError."""
    found = _PERCENT.fullmatch(text.strip())
    share = round(float(found[1]) * 10_000) if found else 0
    if not 0 < share <= WHOLE:
        raise InputError(f"{what} {text!r}: give a share above 0% and up to 100%, such as 5%")
    return share


def parse_wave(text: str) -> Slice:
    """The slice of '5%', 'region=eu-west-1', 'label=canary', or 'region=eu-west-1:5%'. Raises InputError."""
    kind, equals, rest = text.partition("=")
    if not equals:
        return Slice(parse_share(text, "wave"))
    name, _, share = rest.partition(":") if rest.endswith("%") else (rest, "", "")
    if kind not in ("region", "label") or not _TEXT.fullmatch(name):
        raise InputError(
            f"wave {text!r}: give 5%, region=NAME, label=NAME, or one of these with a share, label=NAME:5%"
        )
    ppm = parse_share(share, f"wave {text!r}: share") if share else WHOLE
    return Slice(ppm, name, None) if kind == "region" else Slice(ppm, None, name)


def check_waves(waves: Sequence[Slice]) -> None:
    """Raise InputError unless each wave reaches more nodes than those before it, and the last one all, and
    there are not too many."""
    if not waves or waves[-1] != Slice(WHOLE):
        raise InputError("the last wave must be 100%, so that the rollout ends with every node")
    if len(waves) > MOST_WAVES:
        raise InputError(f"{len(waves)} waves; the most are {MOST_WAVES}")
    reach: tuple[Slice, ...] = ()
    for item in waves:
        grown = add_slice(reach, item)
        if grown == reach:
            raise InputError(f"wave {item} reaches nobody that the waves before it have not reached; leave it out")
        reach = grown
