"""The steps on the worker's side: each function runs in a process of its own, on this host or on a Ray worker.

They take and return JSON. Bytes come from the artifact store by digest, are verified on the way, and go back to it.
"""
