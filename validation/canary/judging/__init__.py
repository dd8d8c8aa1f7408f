"""The canary's verdict: criteria, sequential tests, matching of answers."""
