"""Builds and opens one engine, on this host or on a Ray worker with the right GPU.

onnxruntime's wheels for Linux send telemetry since 1.29: each process that imports it writes an identifier and a
database into the home directory and sends events (microsoft/onnxruntime, pull request 27379). Nobody who pulls an
engine has asked for that. It is off unless ORT_DISABLE_TELEMETRY has another value. onnxruntime reads the variable
once, when it is imported.
"""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
