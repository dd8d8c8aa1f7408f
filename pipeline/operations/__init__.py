"""Operations on published engines: prove, profile, compare, refit, check_reproducible, fuzz, attribute."""
