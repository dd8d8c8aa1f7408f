from importlib import metadata

import pytest

from builders.backends import installed_versions


def test_a_version_is_read_once_until_an_installation(tmp_path, monkeypatch):
    reads = []
    real_version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: reads.append(name) or real_version(name))
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(3):
        with pytest.raises(installed_versions.PackageNotFoundError):
            installed_versions.version("a-thing-of-ours")
    assert reads == ["a-thing-of-ours"]
    (tmp_path / "a_thing_of_ours-1.5.dist-info").mkdir()
    (tmp_path / "a_thing_of_ours-1.5.dist-info" / "METADATA").write_text("Name: a-thing-of-ours\nVersion: 1.5\n")
    assert installed_versions.version("a-thing-of-ours") == installed_versions.version("a-thing-of-ours") == "1.5"
    assert len(reads) == 2
