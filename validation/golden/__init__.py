"""Golden sets: inputs and expected outputs, frozen by digest."""
