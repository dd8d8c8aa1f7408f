"""Compile caches that are proven again on this machine, and those that are refused there."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from builders.execution.local import LocalExecutor
from enginesmith.compile_caches.archive import SUFFIX, pack
from enginesmith.compile_caches.recipe import BACKEND
from enginesmith.core.errors import InputError, UnknownNameError
from enginesmith.core.hardware.cpu_kinds import CPU
from enginesmith.core.names import parse_reference
from enginesmith.core.requirements import Runtime
from enginesmith.core.text import now
from enginesmith.core.types import TensorSpec
from enginesmith.registry.evidence.attestations import attestations
from enginesmith.registry.manifest import EngineEntry, Manifest
from enginesmith.registry.store.base import open_store
from enginesmith.registry.versions.index import show_version
from enginesmith.user_code.compiling import CompileModel
from pipeline.compile.caches.maker import describe_maker
from pipeline.compile.run_context import RunContext
from pipeline.operations.revalidate_caches import revalidate_caches
from pipeline.sources.user_process import CompiledSession
from pipeline.spec.compile_cache import CompileCache
from pipeline.spec.model import load_spec
from tests.pipeline.compile.caches.test_build import MAY_FAIL
from tests.pipeline.compile.caches.test_make_cache import NET, SPEC
from tests.pipeline.projects import Project
from validation.golden.golden_set import Case, GoldenSet


def make_version(folder: Path) -> tuple[RunContext, Manifest]:
    """A version that has a compile cache and nothing else, however much quicker a start out of it is."""
    (folder / "net.py").write_text(NET.format(factor=2))
    (folder / "net.yaml").write_text(SPEC.format(source="{torch: 'net.py:build'}"))
    store, spec, executor = (
        open_store(folder / "registry", create=True),
        load_spec(folder / "net.yaml"),
        LocalExecutor(),
    )
    outputs, inputs = (
        (TensorSpec("output", "float32", ("batch", 4)),),
        [np.ones((rows, 8), np.float32) for rows in (4, 1)],
    )
    cold, made, golden = folder / "inductor", folder / f"torch{SUFFIX}", folder / "golden.safetensors"
    cold.mkdir()
    model = CompileModel(folder, "net.py", "build", CompileCache().options(spec.tensors()), folder=cold)
    with CompiledSession(model, outputs) as session:
        found = [session.run({"x": x}) for x in inputs]
    pack(cold, replace(session.recipe, probes=session.answers[-1].probes), made)
    pairs = enumerate(zip(inputs, found, strict=True))
    GoldenSet([Case(f"golden {index}", "golden", {"x": x}, y) for index, (x, y) in pairs]).save(golden)
    maker = describe_maker(CPU)
    entry = EngineEntry(
        "cpu", "fp32", BACKEND, "proven", "", digest=store.put_file(made), size_bytes=made.stat().st_size,
        suffix=SUFFIX, toolchain=maker.toolchain, outputs=outputs, requires=maker.requires,
    )  # fmt: skip
    manifest = Manifest(
        model="net", version="1", created_at=now(), content="", spec=spec.model_dump(mode="json"),
        sources={"golden": store.put_file(golden)}, toolchain={}, host={}, caches=(entry,),
    )  # fmt: skip
    return RunContext(store, executor, executor), manifest


@pytest.mark.slow
def test_a_cache_is_started_again_or_refused_by_what_differs(tmp_path: Path) -> None:
    context, manifest = make_version(tmp_path)
    (found,) = revalidate_caches(manifest, context, tmp_path)
    assert found.verdict == "proven" or MAY_FAIL in found.reason, found.reason
    assert "first answer of a process: cold " in found.reason
    (attached,) = attestations(context.store, manifest)
    assert (attached.engine, attached.report) == (manifest.caches[0].digest, found.report)
    report = json.loads(next((tmp_path / "registry").rglob(f"{found.report}.json")).read_bytes())
    assert {check["name"] for check in report["checks"]} >= {"warm start, CPU time", "compiled again", "recompilations"}
    assert all(check["passed"] for check in report["checks"] if check["name"] != "warm start, CPU time")

    (tmp_path / "net.py").write_text(NET.format(factor=3))
    (found,) = revalidate_caches(manifest, context, tmp_path)
    assert found.verdict == "refused" and "class Net has other source" in found.reason

    requires = tuple(
        replace(item, version="1.0") if isinstance(item, Runtime) else item for item in manifest.caches[0].requires
    )
    stale = replace(manifest, caches=(replace(manifest.caches[0], requires=requires),))
    (found,) = revalidate_caches(stale, context, tmp_path)
    assert found.verdict == "refused" and "torch" in found.reason and "1.0" in found.reason
    assert len(list(attestations(context.store, manifest))) == 1, "what is refused says nothing of a cache"

    with pytest.raises(InputError, match=r"has no net.py, which the cache's model is made of"):
        list(revalidate_caches(manifest, context, tmp_path / "registry"))
    with pytest.raises(UnknownNameError, match="no compile cache for that target"):
        list(revalidate_caches(manifest, context, tmp_path, {"sm_89"}))


def test_the_code_of_a_cache_needs_a_signature_or_a_word(built: Project, tmp_path: Path) -> None:
    done = built.run("validate", "tiny", "--cache", tmp_path)
    assert done.code == 1 and "are code (pickles and shared libraries)" in done.err and "--allow-unsigned" in done.err
    done = built.run("validate", "tiny", "--cache", tmp_path, "--allow-unsigned")
    assert done.code == 2 and "tiny@1 has no compile cache;" in done.err
    policy = tmp_path / "trust.yaml"
    policy.write_text("rules: [{model: other, keys: []}]\n")
    assert built.run("validate", "tiny", "--cache", tmp_path, "--trust", policy).code != 0
    assert built.run("validate", "tiny", "--allow-unsigned").code == 2
    assert built.run("validate", "tiny", "--cache", tmp_path, "--carry", tmp_path / "x").code == 2
    assert show_version(open_store(built.registry), parse_reference("tiny@1")).caches == ()
