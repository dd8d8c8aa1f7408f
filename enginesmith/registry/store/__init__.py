"""Storage of a registry's bytes: the protocol, folders, buckets, downloads and the cache."""
