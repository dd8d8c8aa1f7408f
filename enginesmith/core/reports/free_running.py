"""How far a model with state is from its reference along sequences, as values. No numpy."""

import math
from dataclasses import dataclass
from statistics import median_low

# The case of streams that run side by side: the steps of the other sequences again.
SIDE_BY_SIDE = "sequences side by side"


@dataclass(frozen=True)
class SequenceDrift:
    """One sequence, run by both sides with their own states. sqnr_db: over all its steps.

    first: the first step (from 0) in which a decision differs: the likeliest element along the last axis, or an
    integer; None where none does.
    """

    case: str
    steps: int
    sqnr_db: float
    first: int | None


@dataclass(frozen=True)
class FreeRunning:
    """The drift of one output at one stage (`joint`) along sequences. decides: whether it has decisions at all.

    starts: the first step of each part of the sequences.  free_db, single_db: SQNR of the steps in each part, with
    their own states, and with those that the reference left (NaN where that was not measured).
    """

    joint: str
    output: str
    decides: bool
    sequences: tuple[SequenceDrift, ...]
    starts: tuple[int, ...]
    free_db: tuple[float, ...]
    single_db: tuple[float, ...]

    @property
    def worst(self) -> SequenceDrift:
        """The sequence with the lowest SQNR; NaN is the lowest."""
        return min(self.sequences, key=lambda item: -math.inf if math.isnan(item.sqnr_db) else item.sqnr_db)

    @property
    def earliest(self) -> SequenceDrift | None:
        """The sequence whose decisions differ at the earliest step; None where none does."""
        found = [item for item in self.sequences if item.first is not None]
        return min(found, key=lambda item: item.first or 0, default=None)

    @property
    def decisions(self) -> str:
        """Where decisions first differ, over all sequences, in words; '' of an output without decisions."""
        alone = [item for item in self.sequences if item.case != SIDE_BY_SIDE]
        if not self.decides:
            return ""
        if (earliest := self.earliest) is None:
            return "no decision differs"
        firsts = [item.first for item in alone if item.first is not None]
        middle = f", in the median at step {median_low(firsts)}" if firsts else ""
        return (
            f"decisions differ first at step {earliest.first} ({earliest.case}){middle}; "
            f"{len(alone) - len(firsts)} of {len(alone)} sequences without a difference"
        )

    @property
    def course(self) -> str:
        """Whether drift grows, in words: in the first and the last part, free running and of single steps."""
        first, last = (f"{self.free_db[at]:.0f} dB (single steps {self.single_db[at]:.0f})" for at in (0, -1))
        return f"from {first} at the beginning to {last} at the end"

    @property
    def text(self) -> str:
        """'worst sequence 2, 48.1 dB; from 52 dB (single steps 52) ...; decisions differ first at step 12 ...'."""
        worst = f"worst {self.worst.case}, {self.worst.sqnr_db:.1f} dB"
        return "; ".join(filter(None, [worst, self.course, self.decisions]))
