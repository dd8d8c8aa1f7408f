"""Promotion on the word of a canary."""

from collections.abc import Callable, Sequence
from pathlib import Path

from builders.errors import InputError
from pipeline.canary.verdicts import promotion_refusal, read_report_file
from pipeline.registry import channels
from pipeline.registry.manifest import Manifest
from pipeline.registry.store import Store


def canary_words(
    store: Store, manifest: Manifest, channel: str, reports: Sequence[Path], say: Callable[[str], None]
) -> str:
    """What the channel's history says of these canaries; engines that none of them ran are named by `say`.

    Raises InputError unless every report is a PASS of exactly this version against what the channel serves.
    """
    serving = channels.read(store, manifest.model, channel)
    words, covered = [], set()
    for path in reports:
        report = read_report_file(path)
        if refusal := promotion_refusal(report, manifest, serving):
            raise InputError(f"{path}: {refusal}; {manifest.model}:{channel} was not moved")
        covered.add(report.candidate["engine"])
        words.append(report.digest[:12])
    if left := [entry.unit for entry in manifest.engines if entry.digest and entry.digest not in covered]:
        say(f"no canary ran {len(left)} of the engines: {', '.join(left[:5])}{' ...' if len(left) > 5 else ''}")
    return f"canary PASS {', '.join(words)}"
