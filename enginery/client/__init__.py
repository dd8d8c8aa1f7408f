"""The registry for those who serve: resolve, pull, watch."""
