"""What recorded traffic says about a model's dims: histograms, and the buckets that cost least for it."""
