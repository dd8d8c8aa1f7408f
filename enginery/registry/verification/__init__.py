"""Reading everything again: what is missing, corrupt or pointing nowhere."""
