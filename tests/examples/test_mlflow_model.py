import importlib.util
from pathlib import Path

import pytest

from enginesmith.registry.store.base import open_store
from tests.enginesmith.client.layouts.engines import GOLDEN, cpu_engine
from tests.enginesmith.registries import publish_engines


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_version_is_logged_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyfunc = pytest.importorskip("mlflow.pyfunc", reason="needs mlflow-skinny==3.17.2 and pandas")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)
    store = open_store(tmp_path / "registry", create=True)
    publish_engines(store, [cpu_engine(store, 5)])
    spec = importlib.util.spec_from_file_location("example", Path(__file__).parents[2] / "examples" / "mlflow_model.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model = pyfunc.load_model(example.log_version("digits:candidate", store.uri).model_uri)
    assert model.predict({"image": GOLDEN})["logits"][0, 0] == GOLDEN[0].sum() + 5
    assert model.metadata.metadata["enginesmith"]["version"] == "1"
    with pytest.raises(Exception, match="Model is missing inputs"):
        model.predict({"picture": GOLDEN})
