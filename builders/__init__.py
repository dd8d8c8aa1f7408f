"""How one engine is built and opened, on this host or on a Ray worker with the right GPU.

onnxruntime's wheels for Linux report what is run to their maker since 1.29: each process that imports it writes an
identifier and a database into the home directory and sends events (microsoft/onnxruntime, pull request 27379). Nobody
who pulls an engine has asked for that, so it is off unless ORT_DISABLE_TELEMETRY says otherwise. onnxruntime reads the
variable once, when it is imported.
"""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
