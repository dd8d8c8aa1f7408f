"""Commands on recorded traffic."""
