"""What was checked of an engine, and the verdict: the report that publishing asks for."""
