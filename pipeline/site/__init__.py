"""The registry as a website: static files over any registry, and a server that shows them."""
