"""Commands about traffic: buckets from it, what it costs to serve."""
