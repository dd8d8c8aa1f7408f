import pytest

from enginesmith.core.errors import InputError, UnknownNameError
from enginesmith.core.hardware.machine import CPU
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions.channels import promote
from pipeline.regressions.findings import find_served, machine_of
from tests.enginesmith.registries import engine, publish_engines

HERE = machine_of(CPU)


def test_a_version_without_an_engine_for_this_machine_names_the_remedy(store: Store) -> None:
    publish_engines(store, [engine(store, "sm_89", "fp16", "unproven")], "a", channel=None)
    with pytest.raises(UnknownNameError, match=r"no engine for(.|\n)*--against none"):
        find_served(store, "digits", None, HERE)
    assert find_served(store, "digits", "none", HERE) is None
    with pytest.raises(InputError, match="the spec is of model 'digits'"):
        find_served(store, "digits", "other:stable", HERE)


def test_the_default_is_what_stable_serves(store: Store) -> None:
    for content in ("a", "b"):
        publish_engines(store, [engine(store, data=content.encode())], content, channel="candidate")
    actual = find_served(store, "digits", None, HERE)
    assert actual and (actual.manifest.reference, actual.channel) == ("digits@2", "candidate")
    first_version = find_served(store, "digits", "digits@1", HERE)
    assert first_version and first_version.channel is None
    promote(store, first_version.manifest, "stable", by="a test", why="")
    actual = find_served(store, "digits", None, HERE)
    assert actual and (actual.manifest.reference, actual.channel) == ("digits@1", "stable")
    assert list(actual.here) == [actual.pulled.unit] == ["cpu fp32 onnxruntime"]
