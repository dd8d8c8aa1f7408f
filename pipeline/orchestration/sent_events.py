"""What a Prefect server was told, remembered by the registry: so that whoever asks does not tell it again.

Without Prefect: a run with nothing to do looks here before it loads that.
"""

from enginery.core.digest import digest_of
from enginery.registry.records import recall, remember
from enginery.registry.store.base import Store

_RECORD = "told"


def was_sent(store: Store, event: str, about: str) -> bool:
    """Whether `remember_told` was called for this event about this digest."""
    return recall(store, _RECORD, _key(event, about)) is not None


def remember_sent(store: Store, event: str, about: str, told: str) -> None:
    """Remember that an event about a digest was told. told: the event's id, as the server knows it."""
    remember(store, _RECORD, _key(event, about), {"id": told})


def _key(event: str, about: str) -> str:
    return digest_of({"event": event, "about": about})
