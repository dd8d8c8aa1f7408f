"""The steps of a run, each one file: a frozen request, its key, what a worker runs, and the frozen result.

A step is a plain function of the driver: tests call it, the in-process runner calls it, a Prefect task wraps it. Its
request runs in a process of its own, on this host or on a Ray worker. Request and result are JSON; blobs are fetched
from the artifact store by digest, verified, and stored there. A request's `run` must not name the driver's functions:
the code that a request can reach by name is part of its step's key (`closure`).
"""
