"""What a version costs to serve: prices, the machines that its engines were timed on, and the fleet for a rate."""
