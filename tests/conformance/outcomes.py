"""What became of one graph with one backend."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["passed", "built", "refused", "wrong", "broke", "crashed", "hung"]
# What a backend may do: answer rightly, build what cannot run here, or say no in time.
GOOD: tuple[Kind, ...] = ("passed", "built", "refused")


@dataclass(frozen=True)
class Outcome:
    """kind: 'passed' (ran, right at every size), 'built' (it cannot run here), 'refused' (with a reason before any
    answer), 'wrong' (an answer that is not right), 'broke' (an error that is no reason), 'crashed' (took its process
    down), 'hung'.  engine: digest.  by: who refused it: 'source' (as unreadable), 'plan', 'build', 'open' or 'run'.
    """

    name: str
    kind: Kind
    reason: str = ""
    by: str = ""
    engine: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether a backend may do so."""
        return self.kind in GOOD and (self.kind != "refused" or bool(self.reason.strip()))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
