"""What holds for all tests."""

import signal

from hypothesis import HealthCheck, settings

# A shell that starts the tests in the background has them ignore Ctrl-C, and with them everything that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A real control plane; `make cluster-test` names the folder.
collect_ignore = ["cluster"]

# How long an example takes says how busy the machine is.
CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The default run tries the same examples every time, so that it fails for a change and not by chance; `make hunt` looks
# for new ones.
settings.register_profile("enginery", CALM, derandomize=True)
settings.register_profile("hunt", CALM, print_blob=True)
settings.load_profile("enginery")
