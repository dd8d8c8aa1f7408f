import json
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginesmith.client.resolve import Policy, rank_engines
from enginesmith.core.codec import decode, encode
from enginesmith.core.errors import IntegrityError, canonical_json, digest_of
from enginesmith.core.hardware.evaluation import evaluate
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.parsing import Malformed
from enginesmith.core.requirements import KINDS, Gpu, GpuMemory, Requirement, Runtime
from enginesmith.core.types import ShapeProfile, TensorSpec
from enginesmith.registry.manifest import EngineEntry, Manifest, parse
from enginesmith.registry.versions.lookup import engine_sizes

D = "d" * 64
ENTRY = EngineEntry(
    target="sm_89",
    precision="int8",
    backend="tensorrt-rtx",
    status="unproven",
    reason="no GPU here",
    compute_capability=(8, 9),
    build_key=D,
    digest=D,
    size_bytes=5,
    suffix=".engine",
    options={"optimization_level": 3, "fast": True, "name": "x", "scale": 0.5},
    toolchain={"tensorrt-rtx": "1.7.1"},
    inputs=(TensorSpec("image", "float32", ("batch", 1, 8, 8)),),
    outputs=(TensorSpec("logits", "float32", ("batch", 10)),),
    profiles=(ShapeProfile((("image", (1, 1, 8, 8), (8, 1, 8, 8), (32, 1, 8, 8)),)),),
    report=D,
    checks={"passed": 3, "failed": 0},
    requires=(
        Gpu("sm_89", (8, 9)),
        Runtime("tensorrt-rtx", "1.7.1", "TensorRT-RTX", loads=(("1", "2"),)),
        GpuMemory(5),
    ),
    notes=("two layers stay in fp32",),
)
MANIFEST = Manifest(
    model="digits",
    version="1",
    created_at="2026-01-01T00:00:00+00:00",
    content=D,
    spec={"dims": {"batch": {"min": 1}}},
    sources={"onnx": D},
    toolchain={"onnx": "1.23"},
    host={"cpu": "x", "count": 2},
    metrics={"fp32": {"accuracy": 0.97}},
    engines=(ENTRY,),
    report=D,
)


def resealed(**changes: Any) -> bytes:
    """The manifest's bytes with fields changed and a digest that fits: an edit by somebody who knows how."""
    document = {**json.loads(canonical_json(encode(MANIFEST))), **changes}
    return canonical_json({**document, "digest": digest_of(document)})


def test_a_manifest_survives_json_with_the_same_bytes() -> None:
    data = MANIFEST.to_bytes()
    assert parse(data) == MANIFEST and parse(data).to_bytes() == data
    assert json.loads(data)["digest"] == MANIFEST.digest
    profile = ShapeProfile(ENTRY.profiles[0].inputs, (("image", (1, 1, 4, 4)),))
    stepped_manifest = replace(MANIFEST, engines=(replace(ENTRY, profiles=(profile,)),))
    assert parse(stepped_manifest.to_bytes()) == stepped_manifest


def test_shards_are_blobs_and_count_where_sizes_are_reported() -> None:
    sharded_manifest = replace(MANIFEST, shards={D: {"e" * 64: 7, "f" * 64: 30}})
    assert parse(sharded_manifest.to_bytes()) == sharded_manifest != MANIFEST
    assert {digest: sharded_manifest.blobs()[digest] for digest in ("e" * 64, D)} == {
        "e" * 64: "shard of engine sm_89 int8 tensorrt-rtx",
        D: sharded_manifest.blobs()[D],
    }
    assert (MANIFEST.size_of(ENTRY), sharded_manifest.size_of(ENTRY)) == (5, 42)
    assert engine_sizes(sharded_manifest) == {D: 5, "e" * 64: 7, "f" * 64: 30}


@given(st.integers(0, 2000), st.integers(1, 255))
def test_any_edit_is_detected(position: int, change: int) -> None:
    data = bytearray(MANIFEST.to_bytes())
    data[position % len(data)] ^= change
    with pytest.raises(IntegrityError):
        parse(bytes(data))


def test_a_manual_edit_is_reported_as_such() -> None:
    with pytest.raises(IntegrityError, match="edited by hand"):
        parse(MANIFEST.to_bytes().replace(b'"unproven"', b'"proven"'))


def test_a_manifest_found_elsewhere_is_refused() -> None:
    assert parse(MANIFEST.to_bytes(), model="digits", version="1") == MANIFEST
    with pytest.raises(IntegrityError, match=r"digits@2: it belongs to digits@1"):
        parse(MANIFEST.to_bytes(), model="digits", version="2")


def entry_with(**changes: Any) -> list[Any]:
    return [{**json.loads(canonical_json(encode(MANIFEST)))["engines"][0], **changes}]


SM89 = {"kind": "gpu", "target": "sm_89", "capability": [8, 9], "match": "exact"}


def entry_without(name: str) -> list[Any]:
    (entry,) = entry_with()
    return [{key: value for key, value in entry.items() if key != name}]


NO_NAMES, NO_PATHS = (".", "./", "a/b", "..", "/a", "A", "a.b", ""), ("../a.py", "/a.py", "./a.py", "a//b.py")
TENSORS = {"x": {"dtype": "float32", "shape": ["rows"]}}
FUNCTION = {"function": "a.py:f", "inputs": TENSORS, "outputs": TENSORS}


def with_function(name: str, file: str = "a.py", named: str | None = None) -> dict[str, Any]:
    """An ensemble with a graph 'first' and a function. named: the file that is among its sources."""
    function = {**FUNCTION, "function": f"{file}:f"}
    graph = {"name": "first", "model": "digits", "version": "1", "manifest": D, "sources": {}}
    sources = {f"function {name} {file if named is None else named}": D}
    return {"spec": {"functions": {name: function}}, "sources": sources, "graphs": [graph]}


def test_a_function_is_read() -> None:
    assert parse(resealed(**with_function("second", "inner/a.py"))).sources == {"function second inner/a.py": D}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *((with_function(name), "spec.functions has the key .*must be the name of a graph") for name in NO_NAMES),
        *((with_function("f", name), "sources of spec.functions.f") for name in NO_PATHS),
        (with_function("f", "a.py", "b.py"), "no source is named function f a.py"),
        (with_function("first"), "two of its graphs and functions are called 'first'"),
        ({"graphs": with_function("f")["graphs"] * 2}, "two of its graphs and functions are called 'first'"),
        ({"graphs": [{**with_function("f")["graphs"][0], "name": "a.b"}]}, r"graphs\[0\].name"),
        ({"spec": {"functions": [1]}}, "spec.functions"),
        ({"shards": {D: {D: 1 << 41}}}, "a size of at most"),
        ({"engines": entry_with(size_bytes=1 << 41)}, "size_bytes is .*a size of at most"),
        ({"shards": {D: {"../e": 1}}}, "shards.*must be a SHA-256"),
        ({"shards": {"/etc": {D: 1}}}, "shards.*must be a SHA-256"),
        ({"shards": {D: {D: -1}}}, "shards"),
        ({"format": 2}, "upgrade enginesmith"),
        ({"format": "1"}, "format"),
        ({"model": "../x"}, "model is '../x'"),
        ({"version": "A"}, "version"),
        ({"content": "abc"}, "content"),
        ({"sources": {"onnx": "../../etc/passwd"}}, "sources.onnx"),
        ({"sources": []}, "sources"),
        ({"spec": None}, "spec"),
        ({"extra": 1}, "extra"),
        ({"engines": {}}, "engines"),
        ({"engines": [1]}, r"engines\[0\]"),
        ({"engines": entry_with(target="../x")}, r"engines\[0\].target"),
        ({"engines": entry_with(precision="fp7")}, "precision"),
        ({"engines": entry_with(status="fine")}, "status"),
        ({"engines": entry_with(digest="x")}, "digest"),
        ({"engines": entry_with(digest=None)}, "unproven and has no digest"),
        ({"engines": entry_with(report=None)}, "unproven and has no report"),
        ({"engines": entry_with(size_bytes=-1)}, "size_bytes"),
        ({"engines": entry_with(size_bytes=True)}, "size_bytes"),
        ({"engines": entry_with(suffix="/../x")}, "suffix"),
        ({"engines": entry_with(suffix="engine")}, "suffix"),
        ({"engines": entry_with(compute_capability=[8])}, "compute_capability"),
        ({"engines": entry_with(inputs=[{"name": "x", "dtype": "float32", "shape": [None]}])}, "shape"),
        ({"engines": entry_with(profiles=[{"inputs": [["x", [1]]]}])}, "profiles"),
        ({"engines": entry_with(profiles=[{"inputs": [], "multiples": [["x"]]}])}, "multiples"),
        (
            {"engines": entry_with(profiles=[{"inputs": [], "multiples": [["x", [0]]]}])},
            r"\[1\]\[0\] is 0; .* at least 1",
        ),
        *(
            ({"engines": entry_with(profiles=[profile])}, "has a profile with other axes of '.+' than its input")
            for profile in (
                {"inputs": [["other", [1, 1], [1, 1], [1, 1]]]},
                {"inputs": [["image", [1, 1, 8, 8], [1, 1, 8, 8], [1, 1, 8]]]},
                {"inputs": [], "multiples": [["image", [1]]]},
                {"inputs": [], "multiples": [["other", [1, 1, 8, 8]]]},
            )
        ),
        ({"engines": entry_with(options={"x": [1]})}, "options.x"),
        ({"engines": entry_without("requires")}, "does not say which processor"),
        ({"engines": entry_with(requires=[])}, "unproven and does not say which processor it requires"),
        ({"engines": entry_with(requires={})}, "requires"),
        ({"engines": entry_with(requires=[1])}, r"requires\[0\] is 1"),
        ({"engines": entry_with(requires=[{"target": "l4"}])}, r"requires\[0\].kind is missing"),
        ({"engines": entry_with(requires=[{"kind": 5}])}, r"requires\[0\].kind is 5"),
        ({"engines": entry_with(requires=[{**SM89, "capability": [8]}])}, r"requires\[0\].capability"),
        ({"engines": entry_with(requires=[{**SM89, "target": None}])}, r"requires\[0\].target is None"),
        ({"engines": entry_with(requires=[{"kind": "memory", "size_bytes": True}])}, "size_bytes is True"),
    ],
)
def test_every_field_is_checked_even_when_the_digest_fits(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(IntegrityError, match=words):
        parse(resealed(**changes))


@pytest.mark.parametrize(
    ("newer", "kind"),
    [
        ({"kind": "qubits", "count": 9, "of": [{"kind": "logical"}]}, "qubits"),
        ({**SM89, "clusters": 4}, "gpu"),
        ({**SM89, "match": "arch"}, "arch"),
        ({"kind": "x" * 9999}, "xxxx"),
    ],
)
def test_an_unknown_requirement_rejects_only_its_engine(newer: dict[str, Any], kind: str) -> None:
    whole_entry, other_entry = entry_with()[0], entry_with(target="l4", product="l4", requires=[newer])[0]
    data = resealed(engines=[whole_entry, other_entry])
    result = parse(data)
    assert result.to_bytes() == data and result.digest == json.loads(data)["digest"]
    machine = Machine((8, 9), "l4")
    answered_ranking = rank_engines(result.engines, machine, Policy())
    assert [item.entry.unit for item in answered_ranking.candidates] == ["sm_89 int8 tensorrt-rtx"]
    ((unit, reason),) = answered_ranking.rejected
    assert unit == "l4 int8 tensorrt-rtx" and f"{kind}" in reason and "which this enginesmith does not know" in reason


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 70) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.sampled_from([*sorted(KINDS), "qubits"]),
    st.dictionaries(st.text(max_size=6), json_values, max_size=3),
    st.data(),
)
def test_any_document_is_read_or_refused_with_the_field(kind: str, extra: dict[str, Any], data: Any) -> None:
    names = [field.name for field in fields(KINDS[kind])] if kind in KINDS else []
    document = {name: data.draw(json_values) for name in names} | extra | {"kind": kind}
    with suppress(Malformed):
        requirement = decode(json.loads(json.dumps(document)), Requirement, "engines[0].requires[0]")
        assert canonical_json(encode(requirement)) == canonical_json(document)
        for machine in (Machine(), Machine((8, 9), "l4", "580.1", "13.0", {"x": "1"}, 1 << 30)):
            evaluate((requirement,), machine)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"format": NaN}', b"{}"])
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        parse(data)


def test_deeply_nested_or_huge_documents_are_refused() -> None:
    for depth in (100, 700, 100_000):
        with pytest.raises(IntegrityError, match=r"nested|not JSON"):
            parse(b'{"host": ' + b'{"a": ' * depth + b"1" + b"}" * depth + b"}")
    with pytest.raises(IntegrityError, match="limit"):  # before it is parsed
        parse(b" " * ((16 << 20) + 1))


def test_documents_that_cannot_be_read_back_are_not_written() -> None:
    with pytest.raises(IntegrityError, match="version"):
        replace(MANIFEST, version="").to_bytes()
    with pytest.raises(IntegrityError, match=r"accuracy is .*must be a finite number"):
        replace(MANIFEST, metrics={"fp32": {"accuracy": float("nan")}}).to_bytes()


def test_a_manifest_names_every_needed_blob() -> None:
    other_entry = replace(ENTRY, digest="e" * 64, report="f" * 64)
    blobs = replace(MANIFEST, engines=(other_entry,), report="a" * 64, sources={"onnx": "b" * 64}).blobs()
    assert {digest[0]: blob for digest, blob in blobs.items()} == {
        "a": "report",
        "b": "source onnx",
        "e": "engine sm_89 int8 tensorrt-rtx",
        "f": "report of sm_89 int8 tensorrt-rtx",
    }
