"""Golden prompts, and how an engine answers them beside the exported model, as values. No numpy."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_low


@dataclass(frozen=True)
class PromptTerms:
    """Golden prompts of a spec. ids, logits: names.  prompts: tokens of each.  most: tokens of an answer.  rows: the
    fewest that the model takes.  limits: by check: the greatest mean `kl_nats`, the least of the others.

    grammar: (kind, text) of what answers must keep, as `enginesmith.grammars.read_grammar` takes it."""

    ids: str
    logits: str
    prompts: tuple[tuple[int, ...], ...]
    most: int
    rows: int
    limits: Mapping[str, float]
    grammar: tuple[str, str] | None = None


@dataclass(frozen=True)
class PromptDrift:
    """The answers to golden prompts, of which the exported model gave each token (teacher forced).

    kl_nats: at each position of the answers, the mean over prompts of the KL divergence of the engine's next token from
    the model's, in nats.  agreement: (k, mean share of the model's k likeliest tokens that are among the engine's).
    firsts: for each prompt the first position (from 0) where the engine's likeliest token is another one, None without:
    up to there its own greedy answer is the model's.
    """

    output: str
    kl_nats: tuple[float, ...]
    agreement: tuple[tuple[int, float], ...]
    firsts: tuple[int | None, ...]

    @property
    def first(self) -> str:
        """Where answers differ first, in words."""
        found = [first for first in self.firsts if first is not None]
        if not found:
            return f"all {len(self.firsts)} answers are the same, {len(self.kl_nats)} tokens each"
        return (
            f"answers differ first at token {min(found)}, in the median at {median_low(found)}; "
            f"{len(self.firsts) - len(found)} of {len(self.firsts)} are the same"
        )

    @property
    def text(self) -> str:
        """'KL 0.00021 nats (0.0001 at the first, 0.0003 at the last token); top 1 99.2 %, ...; answers differ ...'."""
        mean, ends = sum(self.kl_nats) / len(self.kl_nats), (self.kl_nats[0], self.kl_nats[-1])
        shares = ", ".join(f"top {k} {share:.1%}" for k, share in self.agreement)
        return (
            f"KL {mean:.2g} nats ({ends[0]:.2g} at the first token, {ends[1]:.2g} at the last); {shares}; {self.first}"
        )
