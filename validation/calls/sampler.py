"""Whether the sampler of an engine draws what the reference draws from the logits that the engine itself gives."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.reports.proof import Check
from enginesmith.core.sampling import SEEN, SEEN_NEXT, SamplingSettings
from enginesmith.core.types import Sampling, Session, Tensors
from enginesmith.sampling import first_inputs, sample, settings_inputs
from validation.golden.golden_set import GoldenSet

# Of golden cases; each is called with every setting.
MOST_CASES = 16
# High temperatures, so that what top_k and top_p leave out would be drawn without them; and a penalty with which the
# share of every token that was read is another, where the likeliest one alone seldom is.
SETTINGS = (
    SamplingSettings(),
    SamplingSettings(repetition_penalty=1.3),
    SamplingSettings(1.0),
    SamplingSettings(2.0, repetition_penalty=3.0),
    SamplingSettings(4.0, top_k=5),
    SamplingSettings(4.0, top_p=0.7),
    SamplingSettings(2.0, 20, 0.9, 0.8),
)
# A token is right that this much more or less of `uniform`, `top_p` or a score would give: float32's sums of up to some
# thousand shares, each rounded to 6e-8, differ by less.
SLACK = 1e-5


def sampler_checks(session: Session, sampling: Sampling, golden: GoldenSet, seed: int) -> list[Check]:
    """One check: the share of right tokens, over golden cases and settings, with drawn masks and tokens read before.

    session: with the inputs and outputs of the sampler. A state that does not hold the tokens that were read is wrong
    too.
    """
    rng, right = np.random.default_rng(seed), list[bool]()
    cases = [case for kind in ("golden", "edge") for case in islice(golden.of_kind(kind), MOST_CASES)]
    for case, settings in ((case, settings) for case in cases for settings in SETTINGS):
        right += _call(session, sampling, case.inputs, settings, rng)
    value = float(np.mean(right)) if right else 0.0
    note = f"{right.count(False)} of {len(right)} tokens are not what the reference draws of the engine's own logits"
    return [Check("engine", "sampler", sampling.token, "all", value, 1.0, value == 1.0, "" if value == 1.0 else note)]


def _call(
    session: Session, sampling: Sampling, inputs: Tensors, settings: SamplingSettings, rng: np.random.Generator
) -> Iterator[bool]:
    """For each row, whether its token is right."""
    ids = inputs[sampling.ids]
    rows = len(ids)
    given = first_inputs(sampling, rows) | settings_inputs([settings] * rows)
    given["uniform"] = rng.random(rows, dtype=np.float32)
    given["allowed"] = rng.random(given["allowed"].shape) < rng.choice([0.1, 0.9])
    given["allowed"][:, rng.integers(sampling.vocabulary)] = True
    given[SEEN] = (rng.random(given[SEEN].shape) < rng.choice([0.2, 0.6])).astype(np.float32)
    answer = session.run({**inputs, **given})
    logits = answer[sampling.logits] if answer[sampling.logits].ndim == 2 else answer[sampling.logits][:, -1]
    seen = given[SEEN] > 0
    np.put_along_axis(seen, ids.reshape(rows, -1), True, 1)
    for row, token in enumerate(answer[sampling.token]):
        drawn = logits[row], settings, float(given["uniform"][row]), seen[row], given["allowed"][row]
        held = np.array_equal(answer[SEEN_NEXT][row] > 0, seen[row])
        yield held and is_right(int(token), *drawn, sampling.candidates)


def is_right(
    token: int,
    logits: Array,
    settings: SamplingSettings,
    uniform: float,
    seen: Array,
    allowed: Array,
    candidates: int,
) -> bool:
    """Whether rounding alone can tell a token from that of the reference (`SLACK`). Arguments as of `sample`."""
    for more in (0.0, -SLACK, SLACK):
        for wider in (0.0, -SLACK, SLACK) if settings.top_p < 1 else (0.0,):
            how = replace(settings, top_p=settings.top_p + wider)
            found = sample(logits, how, uniform + more, seen, allowed, candidates)
            if found == token:
                return True
    scores = logits.astype(np.float64)
    close = abs(scores[token] - scores[found]) <= SLACK * max(1.0, abs(scores[found]))
    return bool(token >= 0 and found >= 0 and allowed[token] and close)
