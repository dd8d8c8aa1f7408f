"""Recording requests and answers of a server, for a canary. Needs numpy."""
