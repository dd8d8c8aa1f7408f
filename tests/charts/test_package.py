import hashlib
import http.server
import os
import shutil
import subprocess
from pathlib import Path

import helm_python as helm
import pytest

from charts import package
from tests.enginesmith.object_stores.servers import serving

SIGNER = "Release <release@example.com>"


class Registry(http.server.BaseHTTPRequestHandler):
    """As much of an OCI registry as one push and one pull of a chart use: objects by digest and tag."""

    objects: dict[str, bytes] = {}  # noqa: RUF012

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        if self.command == "PUT":
            self.objects |= {digest: body, name: body}
        elif self.command in ("GET", "HEAD") and (stored_object := self.objects.get(name)):
            body, digest = stored_object, f"sha256:{hashlib.sha256(stored_object).hexdigest()}"
        self.send_response({"PUT": 201, "POST": 202}.get(self.command, 200 if body else 404))
        for header in (("Content-Length", str(len(body))), ("Docker-Content-Digest", digest), ("Location", "/upload")):
            self.send_header(*header)
        self.send_header("Content-Type", "application/vnd.oci.image.manifest.v1+json")
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    do_HEAD = do_POST = do_PUT = do_GET


def gpg(folder: Path, *arguments: str) -> bytes:
    environment = {**os.environ, "GNUPGHOME": str(folder)}
    return subprocess.run(arguments, env=environment, check=True, capture_output=True).stdout


@pytest.mark.skipif(shutil.which("gpg") is None, reason="needs gpg")
def test_only_the_signed_chart_passes_push_pull_and_verification(tmp_path: Path) -> None:
    secret, public_path, home = tmp_path / "secret.gpg", tmp_path / "public.gpg", tmp_path / "home"
    home.mkdir(mode=0o700)
    no_passphrase = ("--batch", "--pinentry-mode", "loopback", "--passphrase", "")
    gpg(home, "gpg", *no_passphrase, "--quick-generate-key", SIGNER, "rsa2048", "sign")
    secret.write_bytes(gpg(home, "gpg", *no_passphrase, "--export-secret-keys"))
    public_path.write_bytes(gpg(home, "gpg", "--export"))
    gpg(home, "gpgconf", "--kill", "gpg-agent")
    archive, provenance = package.package(tmp_path / "new", SIGNER, secret)
    assert helm.verify(archive, public_path)["signed_by"] == [SIGNER]
    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Registry)) as url:
        place = url.replace("http://", "oci://").rstrip("/") + "/charts"
        helm.push(archive, place, plain_http=True)
        helm.pull(f"{place}/enginesmith", version="0.1.0", destination=str(tmp_path), plain_http=True)
    pulled_folder = tmp_path / archive.name
    assert provenance.read_bytes() in Registry.objects.values()
    assert helm.verify(pulled_folder, public_path, provenance_file=provenance)["file_name"] == archive.name
    pulled_folder.write_bytes(pulled_folder.read_bytes() + b"0")
    with pytest.raises(helm.HelmError):
        helm.verify(pulled_folder, public_path, provenance_file=provenance)
    with pytest.raises(ValueError, match=r"key 'nobody' of .*secret.gpg does not sign: private key not found"):
        package.package(tmp_path / "unsigned", "nobody", secret)
    assert list((tmp_path / "unsigned").iterdir()) == []


def test_an_outdated_chart_is_not_packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charts.regenerate.inputs", lambda: iter([(tmp_path / "gpus.yaml", "new")]))
    with pytest.raises(ValueError, match=r"gpus.yaml: out of date; run `make chart`"):
        package.package(tmp_path / "new")
    assert not (tmp_path / "new").exists()
