"""The partition of sizes into buckets that costs least: costs of buckets, the search, and a trace under a partition."""
