"""Decides whether `builders`, `validation` and `pipeline` are Enginesmith's own in a process, or a team's packages.

A team's packages come first in its own processes: its server, its scripts, and the process of its entry points. The
command line and the processes of its jobs run no code of a team, so Enginesmith's own come first there, for any
PYTHONPATH. `python -m enginesmith.rooms MODULE ...` runs such a module of these packages.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

ROOMS = ("builders", "pipeline", "validation")
_HOME = Path(__file__).resolve().parents[1]


class FindIn:
    """Finds the packages of `ROOMS` in some folders only, also without an `__init__.py`.

    Python itself would prefer a package that has one, in any folder (PEP 420).
    """

    def __init__(self, folders: list[str]) -> None:
        self._folders = folders

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """The spec of a package of `ROOMS`; None for any other, and if the folders do not contain it."""
        return PathFinder.find_spec(name, self._folders) if name in ROOMS else None


def prefer_own() -> None:
    """Make this process import Enginesmith's own packages, for any `sys.path`."""
    sys.meta_path.insert(0, FindIn([str(_HOME)]))


def check_own() -> None:
    """Raise ImportError if one of ROOMS is another project's package in this process."""
    for name in ROOMS:
        module = sys.modules.get(name)
        spec = module.__spec__ if module else importlib.util.find_spec(name)
        locations = list(spec.submodule_search_locations or [spec.origin or ""]) if spec else []
        package_folder = Path(locations[0]).resolve() if locations else None
        if package_folder != _HOME / name:
            raise ImportError(
                f"this needs Enginesmith's own package {name!r}, but here {name!r} is "
                f"{package_folder or 'no package'}; run `enginesmith build` as a command, which finds its own, or call "
                "this from a process without the other package"
            )


if __name__ == "__main__":
    import runpy

    prefer_own()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
