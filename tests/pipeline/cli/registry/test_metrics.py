"""`enginery metrics`: a file for node-exporter."""

from pathlib import Path

from tests.pipeline.projects import Project


def test_the_same_is_written_for_node_exporter(built: Project, tmp_path: Path) -> None:
    assert built.run("metrics", "--textfile", tmp_path / "enginery.prom").code == 0
    assert "enginery_registry_up 1.0" in (tmp_path / "enginery.prom").read_text()
