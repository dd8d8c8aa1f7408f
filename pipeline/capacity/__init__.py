"""The cost to serve a version: prices, the machines that its engines were timed on, and the fleet for a rate."""
