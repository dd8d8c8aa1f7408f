"""The compilers: finding them by entry point, what they have in common, and a folder for each."""
