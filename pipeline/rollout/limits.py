"""Makes the share of a wave a limit: by how many nodes there are at least, the share of places that keeps within it.

Nodes fall into a wave by a hash (`rollouts.waves`), so that a share p of places reaches a binomial number of n nodes:
1 % of 10,000 are 100 on average, and 118 in one rollout of thirty. `limit_share` gives the greatest p with which more
than the wave's share are reached with probability `LEVEL` at most. P(Binomial(n, p) > k) <= level just where p is not
over the lower bound of Clopper & Pearson for k + 1 of n (Biometrika 26, 1934; `validation.statistics.rates`).

It holds for more nodes than n as well, known or not: the more there are, the nearer a wave is to p, which is below its
share. So the least number of nodes is enough, and the reports of the rollout before give one.
"""

from collections.abc import Sequence
from dataclasses import replace

from enginesmith.core.errors import InputError
from enginesmith.registry.rollouts.reports import NodeReport, read_reports
from enginesmith.registry.rollouts.state import Rollout, parse_time
from enginesmith.registry.rollouts.waves import WHOLE, Slice
from enginesmith.registry.store.base import Store
from validation.statistics.rates import lower

# Probability that a wave reaches more than its share.
LEVEL = 1e-6
# A wave with fewer nodes on average may well reach nobody, of whom no gate would hear: one in 150 with this.
LEAST_MEAN = 5.0


def limit_waves(waves: Sequence[Slice], nodes: int) -> tuple[int, ...]:
    """Of each wave the share of places, in parts per million, that reaches at most its share of `nodes` nodes or more.

    A wave of a region or label keeps its own, as how many nodes those have is not known. Raises InputError where a
    wave has too few nodes to be limited by a hash.
    """
    return tuple(_limit_wave(wave, nodes) for wave in waves)


def _limit_wave(wave: Slice, nodes: int) -> int:
    if wave.region or wave.label or wave.share_ppm == WHOLE:
        return wave.share_ppm
    share = limit_share(wave.share_ppm, nodes)
    if share * nodes < LEAST_MEAN * WHOLE:
        raise InputError(
            f"wave {wave} of {nodes} nodes: at most {wave.share_ppm * nodes // WHOLE} by a hash are "
            f"{share * nodes / WHOLE:.2g} on average, and often nobody; give a larger share, name the first nodes by a "
            "label (label=NAME), or leave --nodes out: the share is one on average then"
        )
    return share


def limit_share(share_ppm: int, nodes: int) -> int:
    """The greatest share of places, in parts per million, of which no more than `share_ppm` of `nodes` nodes or more
    are reached, but with probability `LEVEL`."""
    most = share_ppm * nodes // WHOLE
    largest = ((most + 1) * WHOLE - 1) // share_ppm  # number of nodes of which no more than `most` are the share
    return int(lower(most + 1, largest, LEVEL) * WHOLE)


def count_nodes(store: Store, before: Rollout | None) -> int:
    """How many nodes there are at least, by the reports of the rollout before; 0 where they do not say.

    Nodes that had gone silent by the last report are not counted. The others are a sample: of the places that were
    reached, and of the nodes that report. The count is a lower bound, wrong with probability `LEVEL`.
    """
    if before is None:
        return 0
    reach = max((item.share_ppm for item in before.reach if not (item.region or item.label)), default=0)
    if not reach:
        return 0
    alive = _count_alive(read_reports(store, before).reports)
    return _least_total(alive, reach / WHOLE * before.reporters_ppm / WHOLE)


def _count_alive(reports: Sequence[NodeReport]) -> int:
    last = max((parse_time(report.at) for report in reports), default=None)
    return sum(not report.is_silent(last) for report in reports) if last else 0


def _least_total(count: int, share: float) -> int:
    """The greatest total of which a sample of this share has `count` or more with probability `LEVEL` at most."""
    low, high = count, max(count, int(count / share))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if share <= lower(count, middle, LEVEL) else (low, middle - 1)
    return low if count else 0


def with_limits(rollout: Rollout, heard_of: int) -> Rollout:
    """A rollout whose waves are limits: of the nodes that its plan says, else of those that were heard of, if those are
    enough; else shares on average. Raises InputError for a plan whose waves cannot be limits."""
    given, waves = rollout.plan.nodes, rollout.plan.waves
    if given is None and not heard_of:
        return rollout
    try:
        shares = limit_waves(waves, given or heard_of)
    except InputError:
        if given:
            raise
        return rollout
    return replace(rollout, nodes=given or heard_of, shares_ppm=shares)
