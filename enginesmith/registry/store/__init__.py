"""Where a registry keeps its bytes: the protocol, folders, buckets, downloads and the cache."""
