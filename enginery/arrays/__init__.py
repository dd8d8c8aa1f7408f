"""Arrays in .npz files, and checks that arrays fit what a model declares. Needs numpy."""
