"""Small registries with everything that a site shows, and the site that is written over them."""

from dataclasses import replace
from pathlib import Path

from enginesmith.core.errors import canonical_json
from enginesmith.registry.builds.runs import RunItem, RunState, new_id
from enginesmith.registry.manifest import EngineEntry, Manifest
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import run_key
from enginesmith.registry.versions import channels, lookup, publish
from pipeline.site.folder import SiteFolder, Written
from pipeline.site.generate import write_site
from tests.enginesmith.registries import approval, draft, engine, publish_engines, refusal, report

# What no page may take for markup, an address, a script or a style.
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "' onmouseover='alert(3)",
    "javascript:alert(4)",
    "</title></style><svg onload=alert(5)>",
    "{{ 7 * 191 }}{% raw %}",
    "\x1b[2Jcleared\u202egnp.exe",
)
HOSTILE_TEXT = " ".join(HOSTILE)


def write(store: Store, folder: Path, trust: Path | None = None) -> Written:
    return write_site(store, SiteFolder(folder), trust)


def publish_small(store: Store, model: str = "digits", content: object = "a", text: str = "fine") -> Manifest:
    """A version with a proven CPU engine, an unproven and a refused GPU engine."""
    entries = [engine(store, data=f"{model} {content}".encode()), engine(store, "sm_89", "fp16", "unproven")]
    other_refusals = [replace(refusal(), reason=text)]
    return publish_engines(store, entries, content, model=model, others=other_refusals).manifest


def publish_hostile(store: Store, model: str = "hostile") -> Manifest:
    """A version in which every text that somebody can write is hostile."""
    entries = [_hostile_engine(store, "cpu"), _hostile_engine(store, "sm_89", "unproven")]
    manifest = draft(store, HOSTILE_TEXT, model)
    manifest = replace(
        manifest,
        spec={HOSTILE[0]: {HOSTILE[1]: HOSTILE_TEXT}},
        host={"name": HOSTILE_TEXT, HOSTILE[2]: HOSTILE[1]},
        toolchain={HOSTILE[0]: HOSTILE_TEXT},
        provenance={HOSTILE[1]: "0" * 64},
        metrics={HOSTILE_TEXT: {HOSTILE[0]: 0.5}},
    )
    pairs = [(entry, approval(entry)) for entry in entries]
    other_refusals = [replace(refusal(), reason=HOSTILE_TEXT)]
    result = publish.publish(store, manifest, pairs, other_refusals, channel=None).manifest
    channels.promote(store, result, "stable", by=HOSTILE_TEXT, why=HOSTILE_TEXT, proven_only=True)
    _add_run(store, model)
    return result


def _hostile_engine(store: Store, target: str, status: str = "proven") -> EngineEntry:
    entry = engine(store, target, status=status)
    output = replace(entry.outputs[0], name=HOSTILE_TEXT)
    entry = replace(entry, reason=HOSTILE_TEXT, notes=HOSTILE, outputs=(output,), toolchain={HOSTILE[0]: HOSTILE_TEXT})
    result = report(entry)
    checks = tuple(replace(check, output=HOSTILE_TEXT, case=HOSTILE[1], note=HOSTILE_TEXT) for check in result.checks)
    return replace(entry, report=store.put_bytes(canonical_json(replace(result, checks=checks).to_json())))


def _add_run(store: Store, model: str) -> None:
    """A run that goes on, with hostile texts of its nodes and compilers."""
    item = RunItem("cpu fp32 x", "running", "cpu", "fp32", "x", phase=HOSTILE[0], where=HOSTILE[1], why=HOSTILE_TEXT)
    at = "2026-01-01T00:00:00.000+00:00"
    run = RunState(new_id(model), model, HOSTILE[0], "running", at, at, 1e9, HOSTILE[1], 1, HOSTILE[2], items=(item,))
    store.create(run_key(run.id), run.to_bytes())


def move(store: Store, model: str, version: str, channel: str = "stable") -> None:
    channels.promote(store, lookup.load(store, model, version), channel, by="ada", why="rule 7", proven_only=True)
