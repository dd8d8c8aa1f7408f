"""What an engine promises besides being near its graph: the same bits again, and outputs of a certain form."""
