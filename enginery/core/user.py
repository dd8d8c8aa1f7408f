"""Who runs this, for the histories of channels and whatever else remembers who did it."""

import getpass
import os


def user() -> str:
    """The name of the user; a container may have none for a bare uid."""
    try:
        return os.environ.get("USER") or getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"
