"""The mixed-precision search: moves outliers, rounds weights, measures sensitivity, keeps the most compute in int8."""
