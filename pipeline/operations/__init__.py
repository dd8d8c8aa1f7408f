"""What is done to published engines: prove, profile, compare, refit, check_reproducible, fuzz, attribute."""
