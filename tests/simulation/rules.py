"""The rules that a registry keeps at every moment, checked at each change of the store and at the end of a run."""

from dataclasses import dataclass, field

from enginery.core.digest import digests_in
from enginery.registry.manifest import parse
from enginery.registry.store.layout import MODELS, blob_key, manifest_key
from enginery.registry.versions.lookup import parse_channel_document
from enginery.registry.versions.pointers import parse_pointer
from tests.simulation.store import Content
from tests.simulation.world import Violation, World


@dataclass
class Rules:
    """Watches one store. published: every manifest that was ever there, by key.  moves: of each channel the manifests
    that it served, and from which step on."""

    world: World
    content: Content
    published: dict[str, bytes] = field(default_factory=dict)
    moves: dict[str, list[tuple[int, str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, data in self.content.objects.items():
            self.take(key, data)

    def take(self, key: str, data: bytes) -> None:
        """Note what was there before the run began."""
        match key.removeprefix(MODELS).split("/"):
            case [_, "versions", _, "manifest.json"]:
                self.published[key] = data
            case [model, "channels", name]:
                channel = parse_channel_document(None, data, model, name.removesuffix(".json"))  # type: ignore[arg-type]
                assert channel is not None
                self.moves.setdefault(f"{model}:{channel.name}", []).append((0, channel.manifest))

    def changed(self, key: str, before: bytes | None, after: bytes | None) -> None:
        """Check one change of the store. Raises Violation."""
        if key.startswith("blobs/"):
            if after is None:
                self._blob_removed(key)
            return
        match key.removeprefix(MODELS).split("/"):
            case [_, "versions", _, "manifest.json"]:
                self._manifest_changed(key, before, after)
            case [model, "channels", name]:
                self._channel_changed(model, name.removesuffix(".json"), before, after)
            case [model, "pointers", name] if after is not None:
                self._pointer_changed(model, name.removesuffix(".json"), after)
            case [model, "pins", name] if after is not None and before is None:
                self._there(model, name.removesuffix(".json"), None, f"pin of {name}")

    def _blob_removed(self, key: str) -> None:
        digest = key.rpartition("/")[2].encode()
        for other, data in self.content.objects.items():
            if other.startswith(MODELS) and digest in data and self._is_live(other):
                raise Violation(f"blob {digest[:12].decode()} was deleted, and {other} names it")

    def _is_live(self, key: str) -> bool:
        """Whether a document counts: one beside a manifest that is gone does not."""
        parts = key.removeprefix(MODELS).split("/")
        return parts[1] != "versions" or manifest_key(parts[0], parts[2]) in self.content.objects

    def _manifest_changed(self, key: str, before: bytes | None, after: bytes | None) -> None:
        if after is None:
            self._version_removed(key)
            return
        if before is not None:
            raise Violation(f"{key} was overwritten")
        if key in self.published:
            raise Violation(f"{key} was used before, by {'the same' if self.published[key] == after else 'another'} version")
        self.published[key] = after
        self._whole(key, after)

    def _whole(self, key: str, data: bytes) -> None:
        missing = [digest for digest in parse(data).blobs() if blob_key(digest) not in self.content.objects]
        if missing:
            raise Violation(f"{key} names blob {missing[0][:12]}, which is not there")

    def _version_removed(self, key: str) -> None:
        model, _, version, _ = key.removeprefix(MODELS).split("/")
        for other, data in self.content.objects.items():
            match other.removeprefix(MODELS).split("/"):
                case [its, "channels", name] if its == model:
                    channel = parse_channel_document(None, data, model, name.removesuffix(".json"))  # type: ignore[arg-type]
                    if channel and channel.version == version:
                        raise Violation(f"{model}@{version} was deleted, and {other} serves it")
                case [its, "pointers", name] if its == model:
                    pointer = parse_pointer(data, model, name.removesuffix(".json"))
                    if pointer and any(item.version == version for item in pointer.versions):
                        raise Violation(f"{model}@{version} was deleted, and {other} leads to it")
                case [its, "pins", name] if its == model and name == f"{version}.json":
                    raise Violation(f"{model}@{version} was deleted, and it is pinned")

    def _channel_changed(self, model: str, name: str, before: bytes | None, after: bytes | None) -> None:
        if after is None:
            raise Violation(f"channel {model}:{name} was deleted")
        old, new = (parse_channel_document(None, data, model, name) for data in (before, after))  # type: ignore[arg-type]
        assert new is not None
        if old and new.history[: len(old.history)] != old.history:
            raise Violation(f"channel {model}:{name} lost moves")
        whys = [move.why for move in new.history if move.why]
        if len(whys) != len(set(whys)):
            raise Violation(f"channel {model}:{name} was moved twice by one call")
        self._there(model, new.version, new.manifest, f"channel {name}")
        self.moves.setdefault(f"{model}:{name}", []).append((self.world.steps, new.manifest))

    def _pointer_changed(self, model: str, name: str, data: bytes) -> None:
        pointer = parse_pointer(data, model, name)
        for item in pointer.versions if pointer else ():
            self._there(model, item.version, item.manifest, f"pointer {name}")
            if item.snapshot and blob_key(item.snapshot) not in self.content.objects:
                raise Violation(f"pointer {name} names snapshot {item.snapshot[:12]}, which is not there")

    def _there(self, model: str, version: str, digest: str | None, who: str) -> None:
        key = manifest_key(model, version)
        data = self.content.objects.get(key)
        if data is None:
            raise Violation(f"{who} leads to {model}@{version}, which is not there")
        if digest is not None and parse(data).digest != digest:
            raise Violation(f"{who} leads to another {model}@{version}")
        self._whole(key, data)

    def served_between(self, where: str, began: int, ended: int) -> set[str]:
        """Digests of the manifests that a channel served at some step from `began` to `ended`."""
        moves = self.moves.get(where, [])
        found = {digest for step, digest in moves if began <= step <= ended}
        before = [digest for step, digest in moves if step <= began]
        return found | set(before[-1:])

    def named(self, key: str) -> set[str]:
        """The digests in a document."""
        return set(digests_in(self.content.objects.get(key, b"")))
