"""What a process of a user's code is started for."""

from dataclasses import dataclass

from enginery.user_code.channel import Channel
from enginery.user_code.samples import SampleGenerator
from enginery.user_code.torch_program import TorchProgram


@dataclass(frozen=True)
class Task:
    """The first message to such a process."""

    what: TorchProgram | SampleGenerator

    def serve(self, channel: Channel) -> None:
        """Answer until the other end is closed; an error before the first answer is the first answer."""
        try:
            self.what.serve(channel)
        except EOFError:
            return
        except Exception as error:
            channel.send_error(error)
