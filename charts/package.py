"""Packages the chart and signs it: `make chart-package KEY='Release <release@example.com>' KEYRING=secret.gpg`.

    python -m charts.package FOLDER [--key KEY --keyring FILE [--passphrase-file FILE]]

Writes FOLDER/enginesmith-VERSION.tgz, and with a key its provenance beside it (`.tgz.prov`), as `helm package --sign`
does. Exits 1 for a chart whose generated files are out of date, and for a key that cannot sign.
"""

import argparse
import sys
from pathlib import Path

import helm_python as helm

from charts import regenerate


def package(folder: Path, key: str = "", keyring: Path | None = None, passphrase: Path | None = None) -> list[Path]:
    """The chart's archive in `folder`, and its provenance if there is a key.

    key: identity of an OpenPGP key, or a unique part of it.  keyring: secret keys, as `gpg --export-secret-keys`
    writes them.  passphrase: a file whose first line unlocks the key.
    Raises ValueError for a key that cannot sign, and for generated files that are out of date.
    """
    stale = [path.name for path, text in regenerate.inputs() if not path.exists() or path.read_text() != text]
    if stale:
        raise ValueError(f"{', '.join(stale)}: out of date; run `make chart`")
    folder.mkdir(parents=True, exist_ok=True)
    archive = Path(helm.package(str(regenerate.CHART), destination=str(folder)))
    if not key:
        return [archive]
    try:
        return [archive, Path(helm.sign(archive, key=key, keyring=str(keyring), passphrase_file=passphrase))]
    except helm.HelmError as error:
        archive.unlink()  # so that it is not pushed in place of a signed one
        raise ValueError(f"key {key!r} of {keyring} does not sign: {error}") from error


def main() -> int:
    """Package the chart with the options of the command line, and print the written paths."""
    parser = argparse.ArgumentParser(prog="python -m charts.package", description="Package and sign the chart.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--key", default="")
    parser.add_argument("--keyring", type=Path)
    parser.add_argument("--passphrase-file", type=Path)
    options = parser.parse_args()
    if bool(options.key) != bool(options.keyring):
        parser.error("--key and --keyring go together")
    try:
        paths = package(options.folder, options.key, options.keyring, options.passphrase_file)
    except (ValueError, helm.HelmError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(map(str, paths)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
