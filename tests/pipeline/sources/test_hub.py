"""Sources on the Hugging Face Hub, which a small server on loopback stands for; huggingface_hub itself downloads."""

import hashlib
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from click.testing import CliRunner
from onnx import helper, numpy_helper
from safetensors.numpy import save

from enginesmith.cli import enginesmith
from enginesmith.core.errors import InputError, IntegrityError, ModelError, SpecError, UnavailableError
from pipeline.cli.models.init import draft_spec
from pipeline.compile.steps.exports import source_digests
from pipeline.intake.registration import bundle_of
from pipeline.sources.hub import HubFile, fetch, list_locations
from pipeline.spec.model import ModelSpec, load_spec
from tests.enginesmith.object_stores.servers import serving
from tests.pipeline.projects import SPEC, Project
from tests.pipeline.quantization.small_nets import build

REVISION = "0123456789abcdef0123456789abcdef01234567"
ONNX = HubFile("org/model", REVISION, "onnx/model.onnx")


def external(location: str = "model.onnx_data") -> tuple[bytes, bytes]:
    """A model of two weights, one of them of a graph inside a node, and the file with their data."""
    weights = {name: np.full((8,), value, np.float32) for name, value in (("w", 2.0), ("v", 3.0))}
    model = build("float[batch,8] x", "float[batch,8] logits", "y = Mul(x, w)", {"w": weights["w"]})
    result = helper.make_tensor_value_info("z", 1, ["batch", 8])
    third_tensor = numpy_helper.from_array(weights["v"], "v")
    graph = helper.make_graph([helper.make_node("Mul", ["y", "v"], ["z"])], "inner", [], [result], [third_tensor])
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    model.graph.node.append(helper.make_node("If", ["yes"], ["logits"], then_branch=graph, else_branch=graph))
    data = b""
    branches = [item.g.initializer[0] for item in model.graph.node[1].attribute]
    for tensor in (model.graph.initializer[0], *branches):
        onnx.external_data_helper.set_external_data(tensor, location, len(data), 32)
        data += tensor.raw_data
        tensor.ClearField("raw_data")
    return model.SerializeToString(), data


class Hub:
    """The files of one repository at one commit. seen: the requests. status: of all answers but 200 to 299."""

    def __init__(self, files: dict[str, bytes], large: tuple[str, ...] = ()) -> None:
        self.files, self.large, self.seen, self.refused = files, large, list[str](), ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.seen.append(f"{request.command} {request.path}")
        name = request.path.removeprefix(f"/org/model/resolve/{REVISION}/")
        data = b"" if self.refused else self.files.get(name)
        missing_text = self.refused or (
            "EntryNotFound" if request.path.startswith("/org/model/resolve/") else "RepoNotFound"
        )
        if data is None or self.refused:
            request.send_response(403 if missing_text == "GatedRepo" else 404)
            request.send_header("X-Error-Code", missing_text)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        request.send_response(200)
        request.send_header("ETag", f'"{hashlib.sha256(data).hexdigest() if name in self.large else blob}"')
        request.send_header("X-Repo-Commit", REVISION)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(data)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Hub, *args: Any) -> None:
        self.hub = hub
        super().__init__(*args)

    def do_GET(self) -> None:
        self.hub.answer(self)

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    constants = pytest.importorskip("huggingface_hub.constants")
    model, data = external()
    shown_hub = Hub({"onnx/model.onnx": model, "onnx/model.onnx_data": data}, large=("onnx/model.onnx_data",))
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, shown_hub))) as place:
        monkeypatch.setattr(constants, "ENDPOINT", place)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", place + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield shown_hub


def spec_in(folder: Path, source: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    keys = ("model", "inputs", "outputs", "dims", "validation")
    document = {key: SPEC[key] for key in keys} | {
        "targets": ["cpu"],
        "backends": {"onnxruntime": {}},
        "source": source,
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(document))
    return folder / "tiny.yaml"


HF = {"hf": "org/model", "revision": REVISION, "file": "onnx/model.onnx"}


@pytest.mark.slow
def test_a_hub_model_is_built(tmp_path: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    project = Project(tmp_path / "tiny", capsys)
    spec_in(project.folder, HF)
    build = project.build()
    assert build.code == 0, build.err
    assert any(REVISION in path.read_text() for path in project.registry.glob("models/**/*.json"))


def test_an_onnx_files_external_data_is_downloaded_and_in_the_keys(tmp_path: Path, hub: Hub) -> None:
    spec = load_spec(spec_in(tmp_path / "tiny", HF))
    folder = spec.folder / ".hub/org/model" / REVISION / "onnx"
    assert (folder / "model.onnx_data").read_bytes() == hub.files["onnx/model.onnx_data"]
    files = {path: digest for path, digest in bundle_of(spec).files.items() if path != "tiny.yaml"}
    assert {path.rpartition("/")[2] for path in files} == {"model.onnx", "model.onnx_data"}
    empty_stub = SimpleNamespace(recall=lambda *_: None, remember=lambda *_: None)
    reads = source_digests(spec, empty_stub)  # type: ignore[arg-type]
    assert reads["files"] == files and reads["spec"]["revision"] == REVISION


def test_without_the_hub_its_cache_suffices_and_a_lost_one_names_the_command(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_spec(spec_in(tmp_path / "one", HF))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    request_count = len(hub.seen)
    load_spec(spec_in(tmp_path / "two", HF))
    assert len(hub.seen) == request_count
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "other"))
    with pytest.raises(UnavailableError, match=f"hf download org/model onnx/model.onnx --revision {REVISION}"):
        load_spec(spec_in(tmp_path / "three", HF))


def test_init_of_a_cached_file_writes_its_hub_address_and_not_into_the_cache(tmp_path, hub, monkeypatch):
    fetch(ONNX, tmp_path / "one")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    folder = tmp_path / "cache/models--org--model/snapshots" / REVISION / "onnx"
    (folder / "config.pbtxt").touch()
    (tmp_path / "link").symlink_to(folder)
    paths_before, file = sorted(tmp_path.rglob("cache/**")), folder / "../onnx/model.onnx"
    monkeypatch.chdir(tmp_path)
    init = partial(CliRunner().invoke, enginesmith, catch_exceptions=False, standalone_mode=False)
    init(["init", str(file)])
    assert (spec := load_spec(Path("model.yaml"))).source.hub_file == ONNX and spec.model == "model"
    assert draft_spec(file, None) == (Path("model.yaml"), False)
    with pytest.raises(InputError, match="copy it out of the cache"):
        draft_spec(folder / "config.pbtxt", None)
    monkeypatch.chdir(tmp_path / "one")
    init(["init", f"a={file}", f"b={file}"])
    assert sorted(path.name for path in Path().glob("*.yaml")) == ["a.yaml", "b.yaml", "model.yaml"]
    monkeypatch.chdir(folder)
    for words in (["model.onnx"], ["a=model.onnx", "b=model.onnx"], [str(file), "--out", f"{tmp_path}/link/m.yaml"]):
        with pytest.raises(InputError, match="is in the cache of the Hugging Face Hub; run in another folder, or give"):
            init(["init", *words])
    assert sorted(tmp_path.rglob("cache/**")) == paths_before


@pytest.mark.parametrize("damaged", ["onnx/model.onnx", "onnx/model.onnx_data"])
def test_a_damaged_cache_is_not_used(tmp_path: Path, hub: Hub, damaged: str) -> None:
    fetch(ONNX, tmp_path / "one")
    cached = tmp_path / "cache/models--org--model/snapshots" / REVISION / damaged
    blob = cached.resolve()
    blob.unlink()  # the file in the folder is a second name of it
    blob.write_bytes(hub.files[damaged][:-1] + b"?")
    with pytest.raises(IntegrityError, match="is damaged; delete it and run again"):
        fetch(ONNX, tmp_path / "two")
    assert not list((tmp_path / "two").rglob("model.onnx")), "the ONNX file comes last"


@pytest.mark.parametrize(
    ("refused", "changed", "message"),
    [
        ("", {"file": "onnx/other.onnx"}, "no such file at this commit; correct source.file"),
        ("", {"repository": "org/other"}, "no such repository, or does not show it; correct source.hf"),
        ("RevisionNotFound", {}, "no such commit; correct source.revision"),
        ("GatedRepo", {}, "accept its terms on its page, and set HF_TOKEN"),
    ],
)
def test_a_refusal_of_the_hub_has_its_reason_and_remedy(
    tmp_path: Path, hub: Hub, refused: str, changed: dict[str, str], message: str
) -> None:
    hub.refused = refused
    with pytest.raises(InputError, match=message):
        fetch(
            HubFile(**{"repository": "org/model", "revision": REVISION, "file": "onnx/model.onnx", **changed}), tmp_path
        )


def test_external_data_elsewhere_is_refused_before_it_is_fetched(tmp_path: Path, hub: Hub) -> None:
    for location in ("../secret", "/etc/passwd"):
        hub.files["onnx/evil.onnx"], _ = external(location)
        evil_file = HubFile("org/model", REVISION, "onnx/evil.onnx")
        with pytest.raises(ModelError, match="must be a relative path"):
            fetch(evil_file, tmp_path)
        (tmp_path / "cache/models--org--model/snapshots" / REVISION / "onnx/evil.onnx").unlink()
    assert not any("secret" in request or "passwd" in request for request in hub.seen)


def test_hub_weights_load_into_the_users_module(tmp_path: Path, hub: Hub) -> None:
    hub.files["model.safetensors"] = save({"weight": np.eye(3, 8, dtype=np.float32), "bias": np.zeros(3, np.float32)})
    path = spec_in(tmp_path / "tiny", {**HF, "torch": "net.py:make", "file": "model.safetensors"})
    (path.parent / "net.py").write_text("import torch\n\n\ndef make():\n    return torch.nn.Linear(8, 3)\n")
    source = load_spec(path).source
    assert (source.kind, source.weights) == ("torch", f".hub/org/model/{REVISION}/model.safetensors")
    assert (path.parent / source.weights).read_bytes() == hub.files["model.safetensors"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"revision": "main"}, "'main' is not a commit of 40 hexadecimal digits; a branch or tag moves"),
        ({"revision": REVISION.upper()}, "not a commit of 40"),
        ({"revision": None}, "hf, revision and file belong together; add revision"),
        ({"file": "../../model.onnx"}, "file: .* must be a relative path"),
        ({"file": "/etc/model.onnx"}, "file: .* must be a relative path"),
        ({"hf": "../model"}, "hf"),
        ({"hf": "https://huggingface.co/org/model"}, "hf"),
        ({"file": "pytorch_model.bin"}, "not an ONNX file; name one, or beside weights the function"),
        ({"onnx": "own.onnx"}, "onnx is the file of hf; remove one of the two"),
        ({"pt2": "own.pt2"}, "exactly one of torch, pt2, onnx"),
    ],
)
def test_a_spec_with_another_address_is_refused_before_any_request(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        load_spec(spec_in(tmp_path, {**HF, **changed}))


def test_a_specs_dump_survives_json_and_others_have_no_new_keys(tmp_path: Path, hub: Hub) -> None:
    spec = load_spec(spec_in(tmp_path / "tiny", HF))
    dump = spec.model_dump(mode="json")
    assert ModelSpec.model_validate(dump).model_dump(mode="json") == dump and dump["source"]["revision"] == REVISION
    assert not {"hf", "revision", "file"} & set(ModelSpec.model_validate(SPEC).model_dump()["source"])


def test_locations_are_those_in_the_whole_model(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(external("a/b.data")[0])
    assert list_locations(path) == ["a/b.data"]
    for damaged_data in (b"", b"\xff" * 40, path.read_bytes()[:-3]):
        path.write_bytes(damaged_data)
        with pytest.raises(ModelError, match="truncated or not an ONNX file"):
            list_locations(path)
