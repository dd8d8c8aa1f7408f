"""Where Q/DQ pairs go."""
