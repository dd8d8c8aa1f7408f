"""What the verdicts of canaries do to a channel, without a person: promote, roll back, or leave it where it is."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from enginery.core.errors import ConflictError, InputError, UnknownNameError
from enginery.core.names import check_channel, check_model
from enginery.core.origin.user import user
from enginery.registry.evidence.canaries import CanaryVerdict, canaries, covers
from enginery.registry.manifest import Manifest
from enginery.registry.store.base import Store
from enginery.registry.trust import require
from enginery.registry.versions import channels, lookup
from enginery.registry.versions.channels import Channel
from pipeline.canary.promotion import canary_passes
from pipeline.canary.targets import MISSING, attach, target_verdicts, targets_that_count
from pipeline.canary.verdicts import roll_back
from validation.canary.report import MOST_BYTES, read_report

Say = Callable[[str], None]


def settle(store: Store, model: str, channel: str, report: str, say: Say) -> str:
    """Do what a canary's verdict asks for, with those of the other targets that count. What was done, in a line.

    A FAIL takes its candidate back where it is served already. A PASS promotes it once every target that counts has
    one (`targets.targets_that_count`), and none has a FAIL. report: digest of the canary's report.
    Raises IntegrityError for a report that is lost or damaged, InputError for one about another model, UntrustedError
    where the trust policy asks for more.
    """
    found = read_report(store.read_blob(report)[: MOST_BYTES + 1])
    if (about := found.candidate.model) != model:
        raise InputError(f"canary report {report} is about {about}, not about {model}; no channel was moved")
    ran_on = attach(store, found, report).target
    serving = channels.read(store, check_model(model), check_channel(channel))
    if serving is None:
        return f"{model}:{channel} serves nothing; there is nothing to move"
    candidate = lookup.load(store, model, str(found.candidate.version))
    if found.verdict == "FAIL" and serving.manifest == candidate.digest:
        counting = targets_that_count(store, serving)
        if any(covers(ran_on, target) for target in counting):
            return _roll_back(store, report, channel)
        return f"FAIL on {ran_on}, which does not count for {model}:{channel} ({', '.join(counting)} do); not moved"
    return _advance(store, candidate, serving, say)


def settle_newest(store: Store, model: str, channel: str, say: Say) -> str:
    """Without an event: roll back what the channel serves where it has a FAIL (`_find_fail`); else promote the newest
    version of the model as `settle` does: what was not to be promoted when its verdict came may be now.

    Raises UnknownNameError for no such model, UntrustedError as `settle`.
    """
    serving = channels.read(store, check_model(model), check_channel(channel))
    found = lookup.versions(store, model)
    if not found:
        raise UnknownNameError(f"no model {model!r} in {store.uri}; `enginery list` shows what there is")
    if serving is None:
        return f"{model}:{channel} serves nothing; there is nothing to move"
    failed = _find_fail(store, serving)
    told = _roll_back(store, failed.report, channel) if failed else ""
    if failed and channels.read(store, model, channel) != serving:
        return told
    advanced = _advance(store, lookup.load(store, model, found[-1]), serving, say)
    return f"{told}; {advanced}" if told else advanced


def _find_fail(store: Store, serving: Channel) -> CanaryVerdict | None:
    """The newest FAIL of what a channel serves whose event was lost: on a target that counts, against a version that
    the channel served before it. Whoever promoted could see one from before the promotion: it takes nothing back."""
    if serving.previous() is None:
        return None
    *before, promoted = serving.active_promotions()
    found = canaries(store, lookup.load(store, serving.model, serving.version))
    counting = targets_that_count(store, serving) if found else ()
    failed = [
        item
        for item in found
        if item.verdict == "FAIL"
        and item.created_at >= promoted.at
        and item.baseline in {move.manifest for move in before}
        and any(covers(item.target, target) for target in counting)
    ]
    return max(failed, key=lambda item: item.created_at, default=None)


def _roll_back(store: Store, report: str, channel: str) -> str:
    """What `roll_back` says, for the digest of a report's blob."""
    failed = read_report(store.read_blob(report)[: MOST_BYTES + 1])
    return roll_back(store, failed, channel, user())


def _advance(store: Store, candidate: Manifest, serving: Channel, say: Say) -> str:
    """Promote the candidate if every target that counts has a PASS against what is served."""
    where, version = f"{serving.model}:{serving.name}", candidate.version
    if serving.manifest == candidate.digest:
        return f"{where} serves {version} already"
    if any(move.manifest == candidate.digest for move in serving.history):
        return f"{where} was not moved: it served {version} before, and was moved on; a person promotes it again"
    found = target_verdicts(store, candidate, serving)
    lacking = [item for item in found if item.verdict != "PASS"]
    if lacking or not found:
        worst = min((item.verdict for item in lacking), key=("FAIL", "INSUFFICIENT", MISSING).index, default=MISSING)
        passed = [f"{item.target} PASS" for item in found if item.verdict == "PASS"]
        told = "; ".join([*map(str, lacking), *passed]) or f"{serving.version} serves no engine that could be compared"
        return f"{worst}: {where} was not moved to {version}: {told}"
    return _promote(store, candidate, serving, [str(item.report) for item in found], say)


def _promote(store: Store, candidate: Manifest, serving: Channel, reports: list[str], say: Say) -> str:
    model, version, channel = candidate.model, candidate.version, serving.name
    try:
        vouched = require(store, candidate)
        with tempfile.TemporaryDirectory(prefix="enginery-canary-") as folder:
            paths = [Path(folder) / f"{digest}.json" for digest in dict.fromkeys(reports)]
            for path in paths:
                path.write_bytes(store.read_blob(path.stem))
            why, passes = canary_passes(store, candidate, channel, paths, say)
        proven_only = serving.proven_only
        channels.promote(
            store, candidate, channel, by=user(), why=why, proven_only=proven_only, canaries=passes,
            counts=vouched.counts,
        )  # fmt: skip
    except (InputError, ConflictError) as error:
        return f"PASS, and {model}:{channel} was not moved: {error}"
    # Whoever attached a FAIL since then found the candidate not served yet, and left the channel alone.
    for item in target_verdicts(store, candidate, serving):
        if item.verdict == "FAIL" and item.report:
            return _roll_back(store, item.report, channel)
    return f"promoted: {model}:{channel} -> {version}"
