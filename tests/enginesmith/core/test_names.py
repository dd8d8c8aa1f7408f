import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginesmith.core.errors import InputError, UnknownNameError
from enginesmith.core.names import (
    STABLE,
    Reference,
    channel_of,
    check_model,
    inside,
    is_graph_name,
    is_name,
    is_path,
    parse_channel,
    parse_reference,
    version_order,
)
from enginesmith.registry.store.layout import channel_key, check_key, manifest_key, record_key

NAMES = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,62}", fullmatch=True).filter(
    lambda name: ".." not in name and not name.endswith(".")
)


@pytest.mark.parametrize("name", ["digits", "1", "a.b-c_d", "x" * 63])
def test_good_names_are_accepted(name: str) -> None:
    assert check_model(name) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a..b", "a.", "/a", "a/b", "a\\b", "-a", ".a", "A", "aB", "\uff41", "ß", "a b", "a\n", "\0",
             "x" * 64],
)  # fmt: skip
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(UnknownNameError, match="model name"):
        check_model(name)


@given(
    st.text(max_size=80)
    | st.lists(st.sampled_from(["a", "..", "/", ".", "\0", "\n", "A", "\\", "@", ":"])).map("".join)
)
def test_no_text_becomes_a_path_that_climbs_or_hides(text: str) -> None:
    if not is_name(text):
        with pytest.raises(UnknownNameError):
            manifest_key("digits", text)
        return
    assert text == text.lower() and text.isascii() and text.isprintable()
    for key in (manifest_key(text, text), channel_key(text, text)):
        assert check_key(key) == key and not key.startswith("/")
        assert all(part not in ("", ".", "..") for part in key.split("/"))


@given(NAMES, NAMES)
def test_references_read_back(model: str, other: str) -> None:
    for reference in (Reference(model), Reference(model, version=other), Reference(model, channel=other)):
        assert parse_reference(str(reference)) == reference


@pytest.mark.parametrize("text", ["", "@1", "a@", "a:", ":stable", "a@1:stable", "a:stable@1", "a@@1", "a b", "../a@1"])
def test_bad_references_are_refused(text: str) -> None:
    with pytest.raises(UnknownNameError):
        parse_reference(text)


def test_versions_sort_in_natural_order() -> None:
    assert sorted(["10", "9", "1.10", "1.9", "1.0-rc", "1.0"], key=version_order) == [
        "1.0", "1.0-rc", "1.9", "1.10", "9", "10",
    ]  # fmt: skip
    assert sorted(["rc", "1"], key=version_order) == ["1", "rc"], "any two can be ordered"


@pytest.mark.parametrize(("kind", "key"), [("Export", "0" * 64), ("../x", "0" * 64), ("export", "x"), ("", "0" * 64)])
def test_a_record_needs_a_kind_and_a_digest(kind: str, key: str) -> None:
    with pytest.raises(InputError):
        record_key(kind, key)


def test_a_channel_is_named_with_its_model() -> None:
    assert parse_channel("digits:canary") == ("digits", "canary")
    assert parse_channel("digits", STABLE) == ("digits", "stable")
    assert channel_of("digits", "digits:canary") == channel_of("digits", "canary") == "canary"
    for text, default in (("digits", None), ("digits@1", STABLE)):
        with pytest.raises(UnknownNameError, match="names no channel; give digits:CHANNEL"):
            parse_channel(text, default)
    with pytest.raises(UnknownNameError, match="another model; give digits:canary"):
        channel_of("digits", "fraud:canary")


@pytest.mark.parametrize(
    "text", ["", ".", "./", "..", "a/..", "../a", "a/../b", "/a", "a\\b", "a\x00b", "a\nb", "\x1b[2J"]
)
def test_a_path_out_of_the_folder_is_refused(text: str) -> None:
    assert not is_path(text)
    with pytest.raises(ValueError, match="must be a relative path"):
        inside(text)


@pytest.mark.parametrize(("text", "path"), [("a.py", "a.py"), ("./a//b.py", "a/b.py"), ("..a/b c", "..a/b c")])
def test_a_path_has_one_spelling(text: str, path: str) -> None:
    assert inside(text) == path and is_path(path)
    assert is_path(text) == (text == path)


@pytest.mark.parametrize("text", ["a", "0-a_b", "x" * 32])
def test_graph_names_are_checked(text: str) -> None:
    assert is_graph_name(text) and is_name(text)


@pytest.mark.parametrize("text", ["", ".", "a.b", "a/b", "A", "-a", "x" * 33, "a\n"])
def test_invalid_graph_names_are_refused(text: str) -> None:
    assert not is_graph_name(text)
