"""`enginesmith registry metrics`: a file for node-exporter."""

from pathlib import Path

from tests.pipeline.projects import Project


def test_the_same_is_written_for_node_exporter(built: Project, tmp_path: Path) -> None:
    assert built.run("registry", "metrics", "--textfile", tmp_path / "enginesmith.prom").code == 0
    assert "enginesmith_registry_up 1.0" in (tmp_path / "enginesmith.prom").read_text()
