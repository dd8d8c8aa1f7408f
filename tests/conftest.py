"""What holds for all tests."""

import signal

from hypothesis import HealthCheck, settings

# A shell that starts the tests in the background has them ignore Ctrl-C, and with them everything that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how busy the machine is.
settings.register_profile("enginery", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("enginery")
