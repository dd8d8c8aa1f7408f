"""`python -m enginesmith.user_code DESCRIPTOR` answers a job's questions about a user's code over socket DESCRIPTOR."""

import os
import sys

from enginesmith.user_code.channel import MessageChannel
from enginesmith.user_code.task import Task


def main(descriptor: int) -> None:
    """Serve the first task; then end at once, even if threads of the user's code still run."""
    with MessageChannel(descriptor) as channel:
        task, _ = channel.receive(Task)
        task.serve(channel)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
