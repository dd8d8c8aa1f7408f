"""Statistics of measurements: bounds on shares, intervals of quantiles, comparison of two sides of requests."""
