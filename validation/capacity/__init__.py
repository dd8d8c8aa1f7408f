"""Capacity: the traffic that one machine carries within a latency limit, its cost, and the cheapest fleet for it."""
