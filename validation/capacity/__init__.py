"""How much traffic one machine carries within a limit of latency, what that costs, and the cheapest fleet for it."""
