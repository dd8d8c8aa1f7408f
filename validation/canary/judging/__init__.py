"""The canary's verdict: criteria, sequential tests, pairs of answers."""
