"""Commands that work on published engines and canaries."""
