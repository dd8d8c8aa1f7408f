"""Sampling over the sessions of a backend: an engine draws what the reference draws of its own logits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx

from builders.as_built import build_engine
from builders.backends import discovery
from builders.backends.compatibility import open_sampler
from enginesmith.core.errors import ModelError
from enginesmith.core.hardware.targets import parse_targets
from enginesmith.core.sampling import as_built
from enginesmith.core.types import ShapeProfile
from tests.conformance.trial import backend_of, fresh
from tests.decoding import REQUEST, SAMPLING, VOCABULARY, WIDTH, make_decoder
from validation.calls.sampler import sampler_checks
from validation.golden.golden_set import Case, GoldenSet

# Some compilers have no empty tensors, which is of the cache and not of the sampler.
PROFILE = ShapeProfile((("ids", (1, 1), (2, 1), (3, 4)), ("past", (1, 1, WIDTH), (2, 6, WIDTH), (3, 14, WIDTH))))


def behave(backend: str, target: str, workdir: Path) -> list[str]:
    """What is wrong with the tokens of a small decoder; nothing where its engine cannot run here."""
    tool, (hardware,) = backend_of(backend), parse_targets(target)
    options, toolchain = discovery.options_of(tool), discovery.toolchain_of(tool, hardware)
    given = {"target": hardware, "backend": backend, "options": options, "toolchain": toolchain}
    request = replace(REQUEST, profiles=(PROFILE,), **given)
    if reason := tool.refuses(as_built(request)):
        return [f"refused: {reason}"]
    onnx.save(make_decoder(), workdir / "model.onnx")
    try:
        engine = build_engine(tool, request, workdir / "model.onnx", fresh(workdir / "engine"))
    except ModelError as error:  # an operator that the tool does not know
        return [f"refused: {error}"]
    if tool.runs(hardware):
        return []
    with open_sampler(engine) as session:
        checks = sampler_checks(session, SAMPLING, _golden(), 0)
    return [check.note for check in checks if not check.passed]


def _golden() -> GoldenSet:
    """Calls of one to three rows, of one and of several places, behind caches of several lengths."""
    rng, cases = np.random.default_rng(0), list[Case]()
    for at, (rows, places, length) in enumerate([(2, 1, 6), (1, 1, 1), (3, 4, 14), (2, 3, 2), (3, 1, 9)]):
        past = rng.normal(size=(rows, length, WIDTH)).astype(np.float32)
        cases.append(Case(str(at), "golden", {"ids": rng.integers(VOCABULARY, size=(rows, places)), "past": past}, {}))
    return GoldenSet(cases)
