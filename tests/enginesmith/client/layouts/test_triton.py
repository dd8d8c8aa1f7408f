import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import enginesmith
from enginesmith.client.client import Client
from enginesmith.client.layouts.base import AllGenerations, Plain, hold
from enginesmith.client.layouts.triton import Triton, triton_version
from enginesmith.client.layouts.triton_config import DynamicBatching
from enginesmith.client.resolve import Policy
from enginesmith.core.errors import InputError, IntegrityError, UnavailableError, UnknownNameError
from enginesmith.core.types import ShapeProfile, TensorSpec
from enginesmith.registry.manifest import EngineEntry
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions import channels
from enginesmith.registry.versions.publish import publish
from pipeline.drafts.onnx_model import look_at_triton
from tests.enginesmith.client.layouts.engines import GOLDEN, cpu_engine, plan, publish_with_golden, stripped
from tests.enginesmith.client.layouts.model_config import read_config
from tests.enginesmith.registries import approval, draft, engine, flip, names_in, publish_engines


def place(store: Store, dest: Path, reference: str = "digits", layout: Triton = Triton(), **how):  # noqa: B008
    how = {"target": "cpu", **how}
    policy = how.pop("policy", Policy())
    return Client(store.uri, policy=policy).place(reference, dest, layout, **how)


def config(dest: Path) -> dict:
    return read_config(dest / "digits" / "config.pbtxt")


def test_a_version_of_a_batch_becomes_a_repository(store: Store, dest: Path, tmp_path: Path) -> None:
    publish_with_golden(store, [cpu_engine(store, 5)], tmp_path, "a")
    placement = place(store, dest)
    assert (placement.folder, placement.previous, placement.swapped) == (dest / "digits" / "1", "", True)
    assert names_in(dest / "digits") == ["1", "config.pbtxt", "warmup"]
    assert config(dest) == {
        "name": "digits",
        "backend": "onnxruntime",
        "platform": "onnxruntime_onnx",
        "max_batch_size": 32,
        "input": [{"name": "image", "data_type": "TYPE_FP32", "dims": ["1", "8", "8"]}],
        "output": [{"name": "logits", "data_type": "TYPE_FP32", "dims": ["10"]}],
        "instance_group": [{"kind": "KIND_CPU", "count": 1}],
        "version_policy": {"specific": {"versions": ["1"]}},
        "default_model_filename": "model.onnx",
        "parameters": {"enginesmith_version": {"string_value": "1"}},
        "model_warmup": [
            {
                "name": f"golden inputs, batch {size}",
                "batch_size": size,
                "inputs": {"image": {"data_type": "TYPE_FP32", "dims": ["1", "8", "8"], "input_data_file": "1/input0"}},
            }
            for size in (1, 8)
        ],
    }
    warm_array = np.fromfile(dest / "digits" / "warmup" / "1" / "input0", np.float32)
    assert np.array_equal(warm_array.reshape(1, 8, 8), GOLDEN[0])
    run = enginesmith.open_onnx(placement.folder / "model.json")
    assert run({"image": GOLDEN})["logits"][0, 0] == GOLDEN[0].sum() + 5


def test_init_reads_the_written_configuration_and_the_served_version(store: Store, dest: Path) -> None:
    publish_engines(store, [cpu_engine(store, 1)], "a")
    publish_engines(store, [cpu_engine(store, 2)], "b")
    for reference in ("digits@2", "digits@1"):
        place(store, dest, reference)
    triton = look_at_triton(dest / "digits" / "config.pbtxt", dest)
    assert (triton.name, triton.source) == ("digits", {"onnx": "digits/1/model.onnx"})
    assert triton.dims["batch"].max == 32


@pytest.mark.parametrize(
    ("shape", "profiles", "most", "dims"),
    [
        (("batch", 1, 8, 8), [((1, 1, 8, 8), (4, 1, 8, 8)), ((5, 1, 8, 8), (8, 1, 8, 8))], 8, [1, 8, 8]),
        (("batch", 1, 8, 8), [((1, 1, 8, 8), (4, 1, 8, 8)), ((6, 1, 8, 8), (8, 1, 8, 8))], 0, [-1, 1, 8, 8]),
        (("batch", 1, 8, 8), [((2, 1, 8, 8), (8, 1, 8, 8))], 0, [-1, 1, 8, 8]),
        (("batch", 1, 8, 8), [((1, 1, 8, 8), (1, 1, 8, 8))], 0, [1, 1, 8, 8]),
        (("tokens", 1, 8, 8), [((1, 1, 8, 8), (8, 1, 8, 8))], 0, [-1, 1, 8, 8]),
        (("batch", "length"), [((1, 4), (8, 64))], 8, [-1]),
        (("batch", "batch"), [((1, 1), (8, 8))], 0, [-1, -1]),
        ((4, "past + length"), [((4, 4), (4, 64))], 0, [4, -1]),
        (("batch",), [((1,), (8,))], 8, [1]),
    ],
)
def test_the_batch_axis_is_separate_only_if_any_batch_fits(store, dest, shape, profiles, most, dims) -> None:
    entry = cpu_engine(store, 1)
    sizes = tuple(ShapeProfile((("image", low, high, high),)) for low, high in profiles)
    entry = replace(entry, inputs=(TensorSpec("image", "float32", shape),), profiles=sizes)
    lead = shape[0] if isinstance(shape[0], str) else 4
    publish_engines(store, [replace(entry, outputs=(TensorSpec("logits", "float32", (lead, 10)),))])
    place(store, dest)
    result = config(dest)
    assert result.get("max_batch_size", 0) == most and result["input"][0]["dims"] == [str(dim) for dim in dims]
    assert ("reshape" in result["input"][0]) == (shape == ("batch",))


def test_requests_are_joined_only_if_requested_and_possible(store: Store, dest: Path) -> None:
    publish_engines(store, [cpu_engine(store, 1)])
    place(store, dest)
    assert "dynamic_batching" not in config(dest)
    place(store, dest, layout=Triton(DynamicBatching(max_batch_size=16, max_queue_delay_s=0.005)))
    assert config(dest)["dynamic_batching"] == {"max_queue_delay_microseconds": "5000"}
    assert config(dest)["max_batch_size"] == 16
    fixed_entry = replace(cpu_engine(store, 2), outputs=(TensorSpec("logits", "float32", (10,)),))
    publish_engines(store, [fixed_entry], "b")
    with pytest.raises(InputError, match="requests cannot be joined"):
        place(store, dest, layout=Triton(DynamicBatching()))
    for wrong_fields in ({"max_batch_size": 0}, {"max_queue_delay_s": float("nan")}, {"max_queue_delay_s": 3600.5}):
        with pytest.raises(InputError):
            DynamicBatching(**wrong_fields)


def test_a_batch_beyond_the_engines_is_refused_and_no_folder_is_made(store: Store, dest: Path) -> None:
    publish_engines(store, [cpu_engine(store, 1)])
    with pytest.raises(InputError, match="max_batch_size 33 is beyond its largest batch, 32; ask for 32 or less"):
        place(store, dest, layout=Triton(DynamicBatching(max_batch_size=33)))
    assert not dest.exists()


def publish_hints(store: Store, entries: list[EngineEntry], **hints: object) -> None:
    """A version whose spec has a section `triton`."""
    drafted_manifest = draft(store, "hints")
    sources = {**drafted_manifest.sources, "labels logits": store.put_bytes(b"zero\none\n")}
    publish(
        store,
        replace(drafted_manifest, sources=sources, spec={**drafted_manifest.spec, "triton": hints}),
        [(entry, approval(entry)) for entry in entries],
        (),
        channel="candidate",
    )


def test_instances_preferred_sizes_and_labels_equal_the_specs(store: Store, dest: Path) -> None:
    hints = {"instances": 2, "preferred_batch_sizes": [4, 8], "max_queue_delay_us": 100}
    publish_hints(store, [cpu_engine(store, 1)], **hints, labels={"logits": "names.txt"})
    place(store, dest)
    result = config(dest)
    assert result["dynamic_batching"] == {"preferred_batch_size": [4, 8], "max_queue_delay_microseconds": "100"}
    assert result["instance_group"] == [{"kind": "KIND_CPU", "count": 2}]
    assert result["output"][0]["label_filename"] == "1/labels0.txt"
    assert (dest / "digits" / "1" / "labels0.txt").read_text() == "zero\none\n"
    # Smaller batches than asked for leave no preferred size that Triton would refuse.
    place(store, dest, layout=Triton(DynamicBatching(max_batch_size=4)))
    assert config(dest)["dynamic_batching"] == {"preferred_batch_size": [4], "max_queue_delay_microseconds": "100"}
    second_model = look_at_triton(dest / "digits" / "config.pbtxt", dest)
    assert second_model.version == "1" and second_model.serve == "triton"
    assert second_model.triton == {
        "instances": 2,
        "preferred_batch_sizes": [4],
        "max_queue_delay_us": 100,
        "labels": {"logits": "digits/1/labels0.txt"},
    }


def test_plans_with_several_profiles_prefer_the_tuned_batches(store: Store, dest: Path) -> None:
    publish_engines(store, [plan(store, "l4", profiles=2)])
    place(store, dest, target="l4", layout=Triton(DynamicBatching()))
    assert config(dest)["dynamic_batching"]["preferred_batch_size"] == [8, 16]


def test_a_version_without_engines_for_triton_is_reported_before_a_folder_is_made(store: Store, dest: Path) -> None:
    other_engines = [engine(store, "sm_75", "fp16"), cpu_engine(store, 1)]
    publish_engines(store, [engine(store, "l4", "int8"), engine(store, "l4", "fp16"), *other_engines])
    with pytest.raises(UnknownNameError) as error:
        place(store, dest, target="l4")
    first_line, *rest = str(error.value).splitlines()
    assert first_line.startswith(
        "digits@1 has no engine for sm_89 (l4): l4 fp16 tensorrt-rtx: Triton does not load tensorrt-rtx engines"
    )
    assert "build again with `serve: triton` in its spec" in first_line and "targets" not in first_line
    assert len(rest) == 1 and rest[0].endswith("; it has engines for sm_75, cpu")
    assert not dest.exists()


def test_plans_of_several_generations_are_chosen_by_compute_capability(store: Store, dest: Path) -> None:
    entries = [plan(store, "sm_80", profiles=2), plan(store, "l4", profiles=2), cpu_engine(store, 1)]
    publish_engines(store, entries)
    placement = place(store, dest, target=AllGenerations.ALL)
    result = config(dest)
    assert result["cc_model_filenames"] == {"8.0": "sm_80-fp16.plan", "8.9": "sm_89-fp16.plan"}
    assert (result["backend"], result["platform"]) == ("tensorrt", "tensorrt_plan")
    assert result["instance_group"] == [{"kind": "KIND_GPU", "count": 1, "profile": ["0", "1"]}]
    assert [item.path.read_bytes() for item in placement.pulled] == [b"sm_80 fp16", b"l4 fp16"]
    assert json.loads((placement.folder / "sm_89-fp16.json").read_bytes())["file"] == "sm_89-fp16.plan"
    one_place = place(store, dest / "one", target="l4")
    assert config(dest / "one")["default_model_filename"] == "model.plan" == one_place.pulled[0].path.name


def test_engines_that_need_two_configurations_are_refused(store: Store, dest: Path) -> None:
    publish_engines(store, [plan(store, "sm_80"), plan(store, "sm_89", profiles=2), plan(store, "l4")])
    with pytest.raises(InputError, match="has other inputs, sizes or profiles"):
        place(store, dest, target=["sm_80", "sm_89"])
    with pytest.raises(InputError, match="not distinguish sm_80 fp16 tensorrt, sm_80 fp16 tensorrt"):
        place(store, dest, target=["sm_80", "sm_80"])
    with pytest.raises(InputError, match="engine of one target"):
        Client(store.uri).place("digits", dest, Plain(), target=["sm_80", "sm_89"])


def test_engines_that_triton_cannot_serve_are_skipped_with_the_reason(store: Store, dest: Path) -> None:
    rtx = engine(store, "l4", "int8")
    publish_engines(store, [rtx, stripped(plan(store, "l4", "fp8")), plan(store, "l4")])
    placement = place(store, dest, target="l4")
    assert placement.pulled[0].engine.precision == "fp16"
    reasons = dict(placement.pulled[0].resolution.rejected)
    assert "Triton does not load tensorrt-rtx engines" in reasons["l4 int8 tensorrt-rtx"]
    assert "has no weights" in reasons["l4 fp8 tensorrt"]
    odd_entry = replace(cpu_engine(store, 1), outputs=(TensorSpec("logits", "complex64", ("batch", 10)),))
    publish_engines(store, [odd_entry, rtx], "b")
    with pytest.raises(UnknownNameError, match="'logits' is complex64, a type that Triton does not support"):
        place(store, dest)


def test_the_version_exists_before_the_configuration_names_it(store: Store, dest: Path, monkeypatch) -> None:
    publish_engines(store, [cpu_engine(store, 1)], "a")
    publish_engines(store, [cpu_engine(store, 2)], "b")
    place(store, dest, "digits@1")
    seen_items: list[tuple[str, list[str]]] = []
    renames = {name: getattr(Path, name) for name in ("rename", "replace")}
    for name in renames:

        def watched(self: Path, target, name=name):
            result = renames[name](self, target)
            config = (dest / "digits" / "config.pbtxt").read_text().partition("versions: [")[2][0]
            seen_items.append((config, [item for item in names_in(dest / "digits") if item in "12"]))
            return result

        monkeypatch.setattr(Path, name, watched)
    place(store, dest, "digits@2")
    assert all(served_name in other_name for served_name, other_name in seen_items), seen_items
    assert seen_items[0] == ("1", ["1"]) and ("1", ["1", "2"]) in seen_items


def test_a_followed_channel_deletes_old_versions(store: Store, dest: Path, tmp_path: Path) -> None:
    called_versions: list[tuple[str, str]] = []

    def look(keep: int = 1):
        return Client(store.uri).watch(
            "digits:candidate", dest, target="cpu", layout=Triton(), once=True, keep=keep, say=lambda _: None,
            hook=lambda facts: called_versions.append((facts["version"], facts["previous"])) and None,
        )  # fmt: skip

    for number in range(4):
        publish_with_golden(store, [cpu_engine(store, number)], tmp_path, number)
        swap = look()
    assert names_in(dest / "digits") == ["3", "4", "config.pbtxt", "warmup"]
    assert names_in(dest / "digits" / "warmup") == ["3", "4"]
    assert called_versions == [("1", ""), ("2", "1"), ("3", "2"), ("4", "3")]
    assert swap.current == dest / "digits" and swap.engine.read_bytes() and not look().swapped
    channels.rollback(store, "digits", "candidate")
    back = look()
    assert (back.version, back.previous, back.origin) == ("3", "4", "there") and len(called_versions) == 5
    (dest / "digits" / "7").mkdir()
    publish_with_golden(store, [cpu_engine(store, 9)], tmp_path, 9)
    look()
    assert (dest / "digits" / "7").is_dir(), "a folder of somebody else"


def test_another_engine_of_the_served_version_replaces_it(store: Store, dest: Path) -> None:
    publish_engines(store, [cpu_engine(store, 1), replace(cpu_engine(store, 2), precision="int8")], "a")
    first_place = place(store, dest, policy=Policy("fp32"))
    second_place = place(store, dest, policy=Policy("fp32"))
    assert not second_place.swapped and second_place.identity == first_place.identity and second_place.pulled[0].cached
    other_place = place(store, dest, policy=Policy("int8"))
    assert other_place.swapped and other_place.identity != first_place.identity and other_place.previous == ""
    assert json.loads((other_place.folder / "model.json").read_bytes())["precision"] == "int8"
    assert names_in(dest / "digits") == ["1", "config.pbtxt"]


def test_a_damaged_engine_is_repaired_and_a_lost_one_skipped(store: Store, dest: Path) -> None:
    good_entry, best_entry = replace(cpu_engine(store, 1), precision="int8"), cpu_engine(store, 2)
    publish_engines(store, [good_entry, best_entry], "a")
    first_place = place(store, dest)
    first_place.pulled[0].path.chmod(0o644)
    first_place.pulled[0].path.write_bytes(b"damaged")
    assert place(store, dest).pulled[0].origin == "registry"
    flip(store, str(best_entry.digest))
    first_place.pulled[0].path.write_bytes(b"damaged")
    result = place(store, dest)
    assert result.pulled[0].engine.precision == "int8" and not result.whole
    assert any("LOST" in text for text in result.pulled[0].warnings)


@pytest.mark.parametrize("when", ["download", "golden", "configuration"])
def test_a_failed_first_pull_leaves_no_model_folder(store, dest, tmp_path, monkeypatch, when):
    entry = cpu_engine(store, 5)
    publish_with_golden(store, [entry], tmp_path, "a")
    if when == "download":
        flip(store, str(entry.digest))
    else:
        broken_text = "triton_config.read_warmup" if when == "golden" else "start_atomic_write"
        monkeypatch.setattr(f"enginesmith.client.layouts.triton.{broken_text}", interrupted)
    with pytest.raises((IntegrityError, KeyboardInterrupt)):
        place(store, dest)
    assert [path.name for path in dest.iterdir() if path.is_dir()] == [], "Triton takes every folder for a model"
    monkeypatch.undo()
    if when != "download":
        assert place(store, dest).swapped


def test_a_failed_first_pull_deletes_no_other_files(store: Store, dest: Path) -> None:
    entry = cpu_engine(store, 1)
    publish_engines(store, [entry])
    flip(store, str(entry.digest))
    (dest / "digits" / "1").mkdir(parents=True)
    (dest / "digits" / "1" / "model.onnx").write_bytes(b"theirs")
    with pytest.raises(IntegrityError):
        place(store, dest)
    assert names_in(dest / "digits" / "1") == ["model.onnx"] and names_in(dest / "digits") == ["1"]


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_configurations_of_others_and_two_writers_are_refused(store: Store, dest: Path) -> None:
    publish_engines(store, [cpu_engine(store, 1)])
    (dest / "digits").mkdir(parents=True)
    (dest / "digits" / "config.pbtxt").write_text('name: "digits"\n')
    with pytest.raises(InputError, match="was not written by enginesmith"):
        place(store, dest)
    (dest / "digits" / "config.pbtxt").unlink()
    with hold(Triton().at(dest, "digits")), pytest.raises(UnavailableError, match="another process"):
        place(store, dest)


@given(st.text("0123456789.-abc", min_size=1, max_size=30))
def test_every_version_has_a_number_that_triton_reads(version: str) -> None:
    number = triton_version(version)
    assert 1 <= number < 1 << 63
    assert (number < 10**18) == (version.isdecimal() and version[0] != "0" and len(version) <= 18)
    assert number >= 10**18 or str(number) == version


def test_version_numbers_stay() -> None:
    assert triton_version("3") == 3
    assert triton_version("1.2.0-rc1") == triton_version("1.2.0-rc1") != triton_version("1.2.0-rc2")
    assert triton_version("1.2.0-rc1") == 2878615583658854698
