"""What became of each run: written while it runs, readable from elsewhere and afterwards (`enginesmith status`)."""
