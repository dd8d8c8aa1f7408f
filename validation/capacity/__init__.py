"""Capacity: the request rate of one machine within a latency limit, its cost, and the cheapest fleet for a rate."""
