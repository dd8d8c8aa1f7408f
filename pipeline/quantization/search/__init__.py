"""What to quantize and how: outliers moved, weights rounded, sensitivity measured, the most compute kept in int8."""
