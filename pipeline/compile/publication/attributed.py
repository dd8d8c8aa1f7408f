"""What follows a publication: which node drifted in the units that failed, beside the version and on its page.

A version is published before that is looked for, which takes minutes: what is proven does not wait for what failed.
"""

from collections.abc import Sequence
from dataclasses import replace

from enginesmith.registry.versions.lookup import load
from enginesmith.registry.versions.publish import published_without
from pipeline.compile.publication.draft import VersionDraft
from pipeline.compile.publication.pages import DrawPage, Measured, add_attributions, failed_page
from pipeline.compile.run_context import RunContext
from pipeline.outcome import Outcome
from pipeline.values import Attributed
from validation.attribution.result import NamedAttribution, attach_attribution, read_attribution


def publish_attributions(
    outcome: Outcome, draft: VersionDraft, attributed: Sequence[Attributed], draw: DrawPage, context: RunContext
) -> Outcome:
    """The outcome with the attributions of each unit, which are then beside the version and on its page; where nothing
    was published, on the page of the run.

    attributed: what was found, or why nothing was.  draw: as of `publish_version`.
    """
    store = context.store
    found = tuple(
        NamedAttribution(**vars(read_attribution(store, item.digest)), name=item.name, units=item.units)
        for item in attributed
        if item.digest
    )
    if outcome.version is None:
        failed_page(replace(draft.manifest, engines=draft.others), Measured.of(draft.judged), store, draw, found)
    else:
        manifest = load(store, outcome.model, outcome.version)
        with published_without(manifest, "which node drifted in what failed"):
            for item in found:
                attach_attribution(store, manifest, item)
            add_attributions(manifest, store, draw)
    engines = [
        replace(engine, attributed=tuple(item for item in attributed if engine.unit in item.units))
        for engine in outcome.engines
    ]
    return replace(outcome, engines=tuple(engines))
