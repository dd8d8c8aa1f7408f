"""What is done to published engines: prove, profile, compare, refit, rebuild, fuzz, attribute."""
