"""The steps of a run, each one file: a frozen request, its key, what a worker runs, and the frozen result.

A step is a plain function of the driver: tests call it, the in-process runner calls it, a Prefect task wraps it. Its
request runs in a process of its own, on this host or on a Ray worker, and takes and gives JSON; blobs come from the
artifact store by digest, are verified on the way, and go back to it. Names of the driver's functions must not stand in
a request's `run`: what a request can reach by name is part of its step's key (`closure`).
"""
