"""Who runs this, for the histories of channels and whatever else remembers who did it."""

import getpass
import os


def user() -> str:
    """The current user's name; 'uid 1000' in a container that has no name for the uid."""
    try:
        return os.environ.get("USER") or getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"
