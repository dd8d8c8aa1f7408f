"""Promotion on the word of a canary."""

from collections.abc import Callable, Sequence
from pathlib import Path

from enginery.core.digest import digest_of_bytes
from enginery.core.errors import InputError
from enginery.core.text import join_first
from enginery.registry.manifest import Manifest
from enginery.registry.store.atomic_write import reachable
from enginery.registry.store.base import Store
from enginery.registry.versions import channels
from enginery.registry.versions.policies import CanaryPass
from pipeline.canary.verdicts import promotion_refusal, read_report_file
from validation.canary.report import read_report


def canary_passes(
    store: Store, manifest: Manifest, channel: str, reports: Sequence[Path], say: Callable[[str], None]
) -> tuple[str, list[CanaryPass]]:
    """What the channel's history says of these canaries, and the passes, their reports stored as blobs; engines that
    none of them ran are named by `say`.

    Raises InputError unless every report is a PASS of exactly this version against what the channel serves.
    """
    serving = channels.read(store, manifest.model, channel)
    words, passes, texts = [], [], []
    for path in reports:
        read_report_file(path)
        with reachable(f"reading {path}"):
            texts.append(path.read_bytes())
        report = read_report(texts[-1])
        if refusal := promotion_refusal(report, manifest, serving):
            raise InputError(f"{path}: {refusal}; {manifest.model}:{channel} was not moved")
        baseline = report.baseline.get("manifest", "")
        target = str(report.document.get("target") or "")
        passes.append(CanaryPass(digest_of_bytes(texts[-1]), report.candidate["engine"], baseline, target))
        words.append(report.digest[:12])
    covered = {item.engine for item in passes}
    if left := [entry.unit for entry in manifest.engines if entry.digest and entry.digest not in covered]:
        say(f"no canary ran {len(left)} of the engines: {join_first(left, 5)}")
    for text in texts:
        store.put_bytes(text)
    return f"canary PASS {', '.join(words)}", passes
