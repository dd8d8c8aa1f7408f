"""The registries of the client's commands."""

from tests.enginesmith.cli.conftest import empty, mixed, three

__all__ = ["empty", "mixed", "three"]
