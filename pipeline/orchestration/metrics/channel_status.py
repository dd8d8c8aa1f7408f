"""What the channels of a registry serve, in a ConfigMap: a status that `kubectl get` shows to everybody.

The exporter writes it at each poll. Nothing reads it back: the registry decides what nodes serve.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from enginesmith.core.errors import EnginesmithError, InputError, UnavailableError
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.parallel import side_by_side
from enginesmith.registry.versions.channel_state import Channel, read_channel
from enginesmith.registry.versions.index import ListedModel
from pipeline.fleet.inventory import Access, connection_to

# NAMESPACE/NAME of the ConfigMap; the chart sets it.
VARIABLE = "ENGINESMITH_CHANNELS_CONFIGMAP"
# A ConfigMap holds 1 MiB. No name of a model begins with an underscore.
MOST_MODELS, MOST_BYTES = 500, 900_000
LEFT_OUT, PROBLEM = "_left_out", "_problem"
# Channels whose documents are read again at each poll though their version is the same.
MOST_AGAIN = 20


@dataclass(frozen=True)
class _Look:
    version: str
    text: str
    rolls: bool


class ChannelStatus:
    """Describes the channels of each model. A poll reads the documents of channels that have another version or a
    running rollout, and of `MOST_AGAIN` other channels in turn."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._looks: dict[tuple[str, str], _Look] = {}  # the least recently read one first

    def texts(self, listing: Iterable[ListedModel]) -> dict[str, str]:
        """By model a line for each channel, of models that have one. Those beyond `MOST_MODELS` and `MOST_BYTES` are
        counted under `LEFT_OUT`. Raises UnavailableError."""
        entries = [entry for entry in listing if entry.channels]
        versions = {
            (entry.model, name): version
            for entry in entries[:MOST_MODELS]
            for name, version in sorted(entry.channels.items())
        }
        self._looks = {key: poll for key, poll in self._looks.items() if key in versions}
        repeats = set(islice(self._looks, MOST_AGAIN))
        due_keys = [
            key
            for key, version in versions.items()
            if key in repeats or (poll := self._looks.get(key)) is None or poll.rolls or poll.version != version
        ]
        for key, poll in side_by_side(lambda key: self._look(*key, versions[key]), due_keys):
            self._looks.pop(key, None)
            self._looks[key] = poll
        lines_by_model: dict[str, list[str]] = {}
        for key in versions:
            lines_by_model.setdefault(key[0], []).append(self._looks[key].text)
        return _limit({model: "\n".join(texts) + "\n" for model, texts in lines_by_model.items()}, len(entries))

    def _look(self, model: str, name: str, version: str) -> _Look:
        try:
            channel = read_channel(self._store, model, name)
        except UnavailableError:
            raise
        except EnginesmithError as error:
            return _Look(version, f"{name}: unreadable: {error}", False)
        if channel is None:
            return _Look(version, f"{name}: gone", False)
        return _Look(version, describe(channel), channel.active_rollout is not None)


def describe(channel: Channel) -> str:
    """A channel in a line: its version, since when and by whom, and the rollout that runs or was halted last."""
    text = f"{channel.name}: {channel.version} since {channel.move.at}"
    text += f" by {channel.move.by}" if channel.move.by else ""
    rollout = channel.rollout
    if rollout is None or (rollout.is_finished and rollout.state != "halted"):
        return text
    last_event = rollout.history[-1]
    return f"{text}; rollout of {rollout.version}: {rollout.state}, {last_event.what} ({last_event.at})"


def _limit(texts: dict[str, str], count: int) -> dict[str, str]:
    """The first texts that a ConfigMap holds. count: number of models that have channels."""
    subset, size = dict[str, str](), 0
    for model, text in texts.items():
        size += len(model.encode()) + len(text.encode()) + 16
        if size > MOST_BYTES:
            break
        subset[model] = text
    if left_out_count := count - len(subset):
        subset[LEFT_OUT] = f"{left_out_count} models, which a ConfigMap has no room for; `enginesmith list` has all\n"
    return subset


@dataclass(frozen=True)
class ConfigMap:
    """A ConfigMap that exists."""

    namespace: str
    name: str
    access: Access = field(default_factory=lambda: Access(timeout_s=10.0))

    @classmethod
    def parse(cls, text: str) -> "ConfigMap":
        """The ConfigMap that NAMESPACE/NAME names. Raises InputError for another text."""
        namespace, _, name = text.partition("/")
        if not namespace or not name or "/" in name:
            raise InputError(f"{VARIABLE}={text!r}: is not NAMESPACE/NAME of a ConfigMap")
        return cls(namespace, name)

    def write(self, texts: dict[str, str]) -> None:
        """Replace its data in one request. Raises UnavailableError with the reason."""
        connection = connection_to(self.access)
        import urllib3
        from kubernetes import client
        from kubernetes.client.exceptions import ApiException

        change = [{"op": "add", "path": "/data", "value": texts}]
        try:
            with connection:
                client.CoreV1Api(connection).patch_namespaced_config_map(
                    self.name, self.namespace, change, _request_timeout=self.access.timeout_s
                )
        except ApiException as error:
            raise UnavailableError(f"ConfigMap {self.namespace}/{self.name}: {error.status} {error.reason}") from error
        except urllib3.exceptions.HTTPError as error:
            raise UnavailableError(
                f"ConfigMap {self.namespace}/{self.name}: no answer ({type(error).__name__})"
            ) from error


class StatusWriter:
    """Keeps the ConfigMap equal to the registry. say: called when it cannot, once for each reason."""

    def __init__(self, store: Store, config_map: ConfigMap, say: Callable[[str], object]) -> None:
        self._status, self._config_map, self._say = ChannelStatus(store), config_map, say
        self._texts, self._complaint = dict[str, str](), ""

    def write(self, listing: Sequence[ListedModel] | None, problem: str = "") -> None:
        """Write what these models' channels serve. listing: None if the registry could not be read, for the reason
        `problem`; then the earlier texts stay, with this reason."""
        try:
            if listing is not None:
                self._texts = self._status.texts(listing)
            self._config_map.write({**self._texts, **({PROBLEM: f"{problem}\n"} if problem else {})})
            self._complaint = ""
        except EnginesmithError as error:
            if str(error) != self._complaint:
                self._say(f"the status of channels is not written: {error}")
            self._complaint = str(error)


def writer_of_environment(
    store: Store, say: Callable[[str], object]
) -> Callable[[Sequence[ListedModel] | None, str], object]:
    """What writes the ConfigMap that `VARIABLE` names; nothing where it is not set. Raises InputError."""
    text = os.environ.get(VARIABLE, "")
    return StatusWriter(store, ConfigMap.parse(text), say).write if text else lambda *_: None
