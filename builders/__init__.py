"""How one engine gets built, wherever that happens: on this host, or on a Ray worker with the right GPU."""
