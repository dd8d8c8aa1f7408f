"""Who wrote a document, from which process, and when."""
