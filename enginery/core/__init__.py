"""What everything else is about: types, digests, errors, text, files that appear whole. Standard library and BLAKE3."""
