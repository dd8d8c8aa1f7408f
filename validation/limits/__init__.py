"""How much drift is allowed, and why: documented budgets, noise floors, measured rounding."""
