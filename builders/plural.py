"""Counted nouns in what people read."""


def pluralize(count: int, noun: str, plural: str = "") -> str:
    """'1 model', '2 models': a count with its noun. plural: where it is not the noun and an s."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"
