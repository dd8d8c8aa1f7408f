"""Compile caches that are proven again on this machine, and those that are refused there."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import enginery
from builders.execution.local import LocalExecutor
from enginery.compile_caches.archive import SUFFIX, pack
from enginery.compile_caches.recipe import BACKEND
from enginery.core.errors import InputError, UnknownNameError
from enginery.core.hardware.cpu_kinds import CPU
from enginery.core.names import parse_reference
from enginery.core.requirements import Runtime
from enginery.registry.evidence.attestations import attestations
from enginery.registry.manifest import EngineEntry, Manifest
from enginery.registry.store.base import open_store
from enginery.registry.versions.lookup import load
from enginery.registry.versions.views import show_version
from enginery.user_code.compiling import CompileModel
from pipeline.compile.caches.maker import describe_maker
from pipeline.compile.run_context import RunContext
from pipeline.operations.revalidate_caches import revalidate_caches
from pipeline.sources.compiled_session import CompiledSession
from pipeline.spec.compile_cache import CompileCache
from pipeline.spec.model import load_spec
from tests.pipeline.compile.caches.test_build import MAY_FAIL
from tests.pipeline.compile.caches.test_make_cache import NET, SPEC
from tests.pipeline.projects import Project


def publish_cache(folder: Path) -> tuple[RunContext, Manifest]:
    """A version with a compile cache, however much quicker a start out of it is."""
    (folder / "net.py").write_text(NET.format(factor=2))
    text = SPEC.format(source="{torch: 'net.py:build'}").replace("compile_cache: {}", "")
    (folder / "net.yaml").write_text(f"{text}\nbackends: {{onnxruntime: {{}}}}\nvalidation: {{latency: 'off'}}\n")
    enginery.build(folder / "net.yaml", registry=folder / "registry")
    store, spec = open_store(folder / "registry"), load_spec(folder / "net.yaml")
    manifest = load(store, "net", "1")
    options = CompileCache().options(spec.tensors())
    cold, made = folder / "inductor", folder / f"torch{SUFFIX}"
    cold.mkdir()
    outputs = manifest.engines[0].outputs
    with CompiledSession(CompileModel(folder, "net.py", "build", options, folder=cold), outputs) as session:
        for rows in (8, 1, 4):
            session.run({"x": np.ones((rows, 8), np.float32)})
    pack(cold, replace(session.recipe, probes=session.answers[-1].probes), made)
    maker = describe_maker(CPU)
    entry = EngineEntry(
        "cpu", "fp32", BACKEND, "proven", "", digest=store.put_file(made), size_bytes=made.stat().st_size,
        suffix=SUFFIX, toolchain=maker.toolchain, outputs=outputs, requires=maker.requires,
    )  # fmt: skip
    executor = LocalExecutor()
    spec_now = {**manifest.spec, "compile_cache": {}}
    return RunContext(store, executor, executor), replace(manifest, spec=spec_now, caches=(entry,))


@pytest.mark.slow
def test_a_cache_is_started_again_or_refused_by_what_differs(tmp_path: Path) -> None:
    context, manifest = publish_cache(tmp_path)
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
