"""How fast an engine is here, how sure that is, and what it spends its time on."""
