"""`enginesmith backends compare`: every backend that can, side by side on one target, and which to take."""
