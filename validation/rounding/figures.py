"""What `honest_rounding` finds."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from validation.drift import Drift


@dataclass(frozen=True)
class Honest:
    """By output and kind of case ('golden', 'edge'), the drift that honest rounding adds.

    reason: why it is not known; empty where it is.
    """

    drifts: Mapping[tuple[str, str], Drift] = field(default_factory=dict)
    reason: str = ""
