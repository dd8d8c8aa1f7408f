"""Engines under real traffic: requests routed to buckets and batched, fallbacks, and how often those are used.

`router.Router` sends each request to the cheapest bucket of an engine that holds it; `batcher.Batcher` joins requests
before a router or a session. Their public signatures are described at the head of those two files.
"""
