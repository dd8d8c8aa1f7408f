"""The state of each run: written while it runs, readable elsewhere and afterwards (`enginesmith status`)."""
