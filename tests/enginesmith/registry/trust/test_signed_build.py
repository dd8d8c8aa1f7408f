from pathlib import Path

from enginesmith.registry.store.base import open_store
from tests.enginesmith.registry.trust.keys import written
from tests.pipeline.projects import Project


def test_a_channel_that_requires_a_signature_moves_after_the_build_signed(project: Project, tmp_path: Path) -> None:
    secret, public_model = written(tmp_path, "release")
    project.change_spec(targets=["cpu"], precisions=["fp32"], calibration=None)
    open_store(project.registry, create=True)
    assert project.run("registry", "policy", "set", "tiny:candidate", "--signed-by", public_model).code == 0
    assert "needs a signature" in project.build().json["channel_refusal"]
    signed_build = project.build("--sign-key", secret)
    assert signed_build.code == 0 and signed_build.json["channel_refusal"] is None
    [move] = project.run("registry", "history", "tiny:candidate", "--json").json
    assert (move["version"], move["why"]) == ("1", "built and signed")
    project.run("registry", "policy", "set", "tiny:candidate", "--signed-by", public_model, "--proven", "l4")
    assert "needs a proven engine for l4" in project.build("--sign-key", secret).json["channel_refusal"]
