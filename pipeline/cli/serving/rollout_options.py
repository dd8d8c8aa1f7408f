"""Options that say how a version comes to a channel: waves, their time, gates, how fast they open."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import click

from enginesmith.cli.options import Duration, combine
from enginesmith.core.errors import InputError
from enginesmith.registry.rollouts.state import Gates, RolloutPlan
from enginesmith.registry.rollouts.waves import WHOLE, Slice, check_waves, parse_share, parse_wave

_GATES = "health=95% (nodes that are well), errors=1% (requests that failed), canary (a PASS), reports=20 (nodes)"


class Durations(click.ParamType[tuple[timedelta, ...]]):
    """'10m', '10m,1h': durations, as `Duration` reads them."""

    name = "durations"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[timedelta, ...]:
        """The durations. Raises click's usage error for another text."""
        if isinstance(value, tuple):
            return value
        return tuple(Duration().convert(text.strip(), param, ctx) for text in str(value).split(","))


def waves_options(waves: str) -> Callable[[Any], Any]:
    """The options of a plan, which `read_plan` reads. waves: the name of the option for waves."""
    return combine(
        click.option(
            waves,
            "waves",
            multiple=True,
            metavar="WAVE,...",
            help="5%, region=NAME, label=NAME or label=NAME:5%; repeat it, or separate with commas.",
        ),
        click.option(
            "--soak",
            type=Durations(),
            multiple=True,
            metavar="DURATION,...",
            show_default="10m",
            help="Least time of a wave; one for all waves, or one for each.",
        ),
        click.option(
            "--gate",
            "gates",
            multiple=True,
            metavar="GATE",
            help=f"What a wave needs: {_GATES}; repeat it.",
        ),
        click.option("--approve", is_flag=True, help="A person ends each wave, with `enginesmith rollout resume`."),
        click.option(
            "--max-unavailable",
            metavar="N|SHARE",
            show_default="all",
            help="Most nodes that may swap within one look: 1%, or a number with --nodes.",
        ),
        click.option(
            "--nodes",
            type=click.IntRange(1),
            show_default="what the last rollout's reports say",
            help="Least number of nodes: waves are limited to their shares of it; --max-unavailable may be a number.",
        ),
        click.option("--look", type=Duration(), default="2m", show_default=True, help="Time between a node's looks."),
    )


@dataclass(frozen=True)
class GivenPlan:
    """The values of `waves_options`."""

    waves: tuple[str, ...]
    soak: tuple[tuple[timedelta, ...], ...]
    gates: tuple[str, ...]
    approve: bool
    max_unavailable: str | None
    nodes: int | None
    look: timedelta

    def read(self) -> RolloutPlan | None:
        """The plan; None without waves. Raises InputError for what is none, and for options without waves."""
        if not self.waves:
            if self.soak or self.gates or self.approve or self.max_unavailable or self.nodes:
                raise InputError(
                    "--soak, --gate, --approve, --max-unavailable and --nodes go with waves; name them too"
                )
            return None
        waves = tuple(parse_wave(text) for group in self.waves for text in group.replace(",", " ").split())
        check_waves(waves)
        soaks = [int(soak.total_seconds()) for group in self.soak for soak in group] or [600]
        if len(soaks) not in (1, len(waves)):
            raise InputError(f"{len(soaks)} times of --soak for {len(waves)} waves: give one, or one for each")
        soaks_s = tuple(soaks if len(soaks) > 1 else soaks * len(waves))
        look_s = max(1, int(self.look.total_seconds()))
        self._check_limits(waves)
        return RolloutPlan(waves, soaks_s, read_gates(self.gates, self.approve), look_s, self._step(), self.nodes)

    def _check_limits(self, waves: tuple[Slice, ...]) -> None:
        """Raise InputError where --nodes are too few for these waves."""
        if self.nodes:
            from pipeline.rollout.limits import limit_waves

            limit_waves(waves, self.nodes)

    def _step(self) -> int | None:
        """Parts per million of the nodes that may be reached within one look; None: all."""
        text = self.max_unavailable
        if text is None:
            return None
        if text.endswith("%"):
            return parse_share(text, "--max-unavailable")
        if not text.isdecimal() or not int(text) or self.nodes is None:
            raise InputError(f"--max-unavailable {text}: give a share (1%), or a number of nodes with --nodes")
        return max(1, min(WHOLE, int(text) * WHOLE // self.nodes))


def read_gates(texts: tuple[str, ...], approve: bool) -> Gates:
    """The gates of 'health=95%', 'errors=1%', 'canary', 'reports=20'. Raises InputError."""
    found: dict[str, Any] = {"approve": approve}
    for text in texts:
        name, _, value = text.partition("=")
        match name:
            case "health" | "errors" if value:
                found[f"{name}_ppm"] = parse_share(value, f"gate {name}")
            case "canary" if not value:
                found["canary"] = True
            case "reports" if value.isdecimal() and 0 < int(value) < 10**6:
                found["least_reports"] = int(value)
            case _:
                raise InputError(f"gate {text!r} is none of {_GATES}")
    if "least_reports" in found and "health_ppm" not in found:
        raise InputError("gate reports=N says how many nodes health needs; give health=SHARE too")
    return Gates(**found)


def describe_plan(plan: RolloutPlan) -> str:
    """A plan in a line: '1%, 5%, 100% with 10m each; gates: health 95%'."""
    soaks = [format_duration(seconds) for seconds in plan.soaks_s]
    times = f"{soaks[0]} each" if len(set(soaks)) == 1 else ", ".join(soaks)
    gates = plan.gates
    least = f" of at least {gates.least_reports} nodes" if gates.least_reports > 1 else ""
    named = [f"health {gates.health_ppm / 10_000:g}%{least}"] if gates.health_ppm is not None else []
    named += [f"errors {gates.errors_ppm / 10_000:g}%"] if gates.errors_ppm is not None else []
    named += ["a canary's PASS"] * gates.canary + ["a person"] * gates.approve
    step = f"; at most {plan.step_ppm / 10_000:g}% of the nodes a look" if plan.step_ppm else ""
    nodes = f"; waves are limits of {plan.nodes} nodes" if plan.nodes else ""
    return f"{', '.join(map(str, plan.waves))} with {times}; gates: {', '.join(named) or 'none'}{step}{nodes}"


def format_duration(seconds: int) -> str:
    """'10m', '2h', '45s': seconds in the largest whole unit."""
    size, unit = next(
        ((size, unit) for size, unit in ((3600, "h"), (60, "m")) if seconds % size == 0 < seconds), (1, "s")
    )
    return f"{seconds // size}{unit}"
