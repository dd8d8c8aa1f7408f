"""Load as users make it: arrivals planned before, an open loop that sends them, and what became of the requests."""
