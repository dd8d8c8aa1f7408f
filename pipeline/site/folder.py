"""The folder of a site, and which models changed."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from enginesmith.core.errors import InputError, digest_of_bytes, is_digest
from enginesmith.core.names import is_name, is_path, version_order
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.files import reachable, start_atomic_write, sweep, sync_folder
from enginesmith.registry.store.layout import MANIFEST, MODELS, channel_key
from enginesmith.registry.versions.channel_writes import running_rollouts

# The folder that a site is written into: pages that changed, each as a whole, and what is known of those that lie
# there.
#
# Beside the pages lies `.enginesmith-site/`: for each model the digest of what its pages were drawn from. A page is
# drawn again when that digest changed, and written when its bytes did. Pages are deleted last, so that a run that is
# killed leaves links that lead somewhere; the next run goes on from what was noted.
#
# A page is renamed into its place and not synced, since it can be drawn again. `keep` syncs all of them together and
# then writes what is noted of them: after a loss of power nothing is noted of a page that the disk does not have.

STATE = ".enginesmith-site"
_OVERVIEW = "registry.json"
_HALF_WRITTEN = "new"
# Number of files above which the file system is synced once, instead of each file.
_MOST_SYNCED = 64
FORMAT = 1


@dataclass(frozen=True)
class Page:
    """A file of the site. path: relative to the site's folder.  key: digest of the data that it shows; if '', it is
    drawn each time.  draw: makes its bytes."""

    path: str
    key: str
    draw: Callable[[], bytes]


@dataclass
class Written:
    """What a run did. written: files whose bytes changed.  drawn: pages that were drawn.  deleted: files."""

    written: int = 0
    drawn: int = 0
    deleted: int = 0


class SiteFolder:
    """The folder of a site. Raises InputError for one that holds other things."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.done = Written()
        # Notes that are not on disk yet, by file name; None: to be deleted.
        self._notes: dict[str, Mapping[str, object] | None] = {}
        self._unsynced: list[Path] = []
        with reachable(f"reading {root}"):
            if root.exists() and not root.is_dir():
                raise InputError(f"{root} is not a folder; give one for the site")
            if root.is_dir() and any(root.iterdir()) and not (root / STATE).is_dir():
                raise InputError(f"{root} holds other files, not a site of Enginesmith; give an empty or a new folder")

    def read_overview(self) -> dict[str, dict[str, object]]:
        """The last run's note of each model; empty if none can be read."""
        state = self._read_state(_OVERVIEW)
        models = state.get("models") if state.get("format") == FORMAT else None
        note_items = models.items() if isinstance(models, dict) else ()
        return {name: note for name, note in note_items if isinstance(note, dict) and isinstance(note.get("key"), str)}

    def sweep(self) -> None:
        """Delete what killed runs left half written."""
        with reachable(f"reading {self.root}"):
            sweep(self.root / STATE / _HALF_WRITTEN)

    def keep(self, models: Mapping[str, Mapping[str, object]]) -> None:
        """Sync the pages that were written, then store their notes and the note of each model."""
        notes = {**self._notes, _OVERVIEW: {"format": FORMAT, "models": models}}
        note_files = {
            name: json.dumps(model_notes, separators=(",", ":")).encode()
            for name, model_notes in notes.items()
            if model_notes
        }
        changed_files = {name: data for name, data in note_files.items() if data != self._read_bytes(name)}
        if changed_files:
            _sync(self._unsynced)
        for name, data in changed_files.items():
            self._write(f"{STATE}/{name}", data)
        with reachable(f"deleting notes in {self.root / STATE}"):
            for name in notes.keys() - note_files.keys():
                (self.root / STATE / name).unlink(missing_ok=True)
        self._notes, self._unsynced = {}, []

    def update(self, group: str, pages: Iterable[Page]) -> list[str]:
        """Draw the pages of a group whose key changed, write those whose bytes changed, and return the paths of the
        group's pages that are no longer among them, for `delete`."""
        old_entries = self._keys(group)
        new_entries: dict[str, list[str]] = {}
        for page in pages:
            page_entry = old_entries.get(page.path)
            if page_entry and page.key and page_entry[0] == page.key and (self.root / page.path).is_file():
                new_entries[page.path] = page_entry
                continue
            data = page.draw()
            self.done.drawn += 1
            digest = digest_of_bytes(data)
            if not page_entry or page_entry[1] != digest or not (self.root / page.path).is_file():
                self._write(page.path, data)
                self.done.written += 1
                self._unsynced.append(self.root / page.path)
            new_entries[page.path] = [page.key, digest]
        dropped_paths = [path for path in old_entries if path not in new_entries]
        # Those that are to be deleted stay noted until they are.
        if new_entries != old_entries:
            self._notes[f"{group}.json"] = {"format": FORMAT, "pages": {**old_entries, **new_entries}}
        return dropped_paths

    def pages_of(self, group: str) -> list[str]:
        """The paths of a group's pages."""
        return list(self._keys(group))

    def delete(self, group: str, paths: Iterable[str]) -> None:
        """Delete pages of a group, and forget them; folders that become empty, too."""
        path_set = set(paths)
        with reachable(f"deleting pages of {self.root}"):
            for path in path_set:
                page_path = self.root / path
                page_path.unlink(missing_ok=True)
                self.done.deleted += 1
                for folder in page_path.parents:
                    if folder == self.root or any(folder.iterdir()):
                        break
                    folder.rmdir()
        remaining_pages = {path: page_entry for path, page_entry in self._keys(group).items() if path not in path_set}
        self._notes[f"{group}.json"] = {"format": FORMAT, "pages": remaining_pages} if remaining_pages else None

    def _keys(self, group: str) -> dict[str, list[str]]:
        state = self._read_state(f"{group}.json")
        pages = state.get("pages") if state.get("format") == FORMAT else None
        if not isinstance(pages, dict):
            return {}
        return {
            path: page_entry for path, page_entry in pages.items() if is_path(path) and isinstance(page_entry, list)
        }

    def _read_state(self, name: str) -> Mapping[str, object]:
        if name in self._notes:
            return self._notes[name] or {}
        try:
            state = json.loads(self._read_bytes(name) or b"")
        except (ValueError, RecursionError):
            return {}
        return state if isinstance(state, dict) else {}

    def _write(self, path: str, data: bytes) -> None:
        """Write a file that appears whole or not at all, without a sync. What a killed run leaves lies beside the
        notes, which copies of the site do not include."""
        temporary_folder, target_path = self.root / STATE / _HALF_WRITTEN, self.root / path
        with reachable(f"writing {target_path}"):
            if not temporary_folder.is_dir():
                temporary_folder.mkdir(parents=True)
            target_path.parent.mkdir(parents=True, exist_ok=True)
            with start_atomic_write(temporary_folder) as file:
                file.stream.write(data)
                file.stream.flush()
                file.path.replace(target_path)

    def _read_bytes(self, name: str) -> bytes | None:
        try:
            return (self.root / STATE / name).read_bytes()
        except OSError:
            return None


def _sync(paths: Sequence[Path]) -> None:
    """Sync files to the disk: a few one by one; many with `os.sync`, which also waits for other programs."""
    if len(paths) > _MOST_SYNCED:
        os.sync()
        return
    with reachable("syncing pages"):
        for path in paths:
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
        for folder in {path.parent for path in paths}:
            sync_folder(folder)


# What a registry's keys say of its models: which versions and channels there are, and whether anything changed.
#
# One listing of all keys with their sizes, and no document is read but policies and the channels whose rollout is not
# finished, which are few and are replaced. All other documents that a page shows are named by their digest, or only
# grow (the histories of channels), so that a change of any shows in the names or the sizes.


@dataclass(frozen=True)
class ModelKeys:
    """A model with its versions in the order of their names, each with the digest of the keys beneath it, its channels
    in the order of their names, the digests of its canaries' reports, and the digest of all its keys."""

    model: str
    versions: tuple[tuple[str, str], ...]
    channels: tuple[str, ...]
    canaries: tuple[str, ...]
    digest: str

    def with_lines(self, lines: Sequence[str]) -> "ModelKeys":
        """The same with digests that depend on these lines, too; itself for none."""
        if not lines:
            return self
        versions = tuple((version, digest_lines([digest, *lines])) for version, digest in self.versions)
        return replace(self, versions=versions, digest=digest_lines([self.digest, *lines]))


def read_models(store: Store, salt: str = "") -> list[ModelKeys]:
    """The models that have a version, sorted. salt: text that every digest depends on, too.

    Raises UnavailableError when the registry is out of reach.
    """
    keys_by_model: dict[str, list[tuple[str, int]]] = {}
    for key, size in store.sizes(MODELS):
        model, _, sub_key = key.removeprefix(MODELS).partition("/")
        if is_name(model) and sub_key:
            keys_by_model.setdefault(model, []).append((sub_key, size))
    other_keys: dict[str, list[str]] = {}
    for model, channel in running_rollouts(store):
        data = store.read(channel_key(model, channel)) or b""
        other_keys.setdefault(model, []).append(f"rollout {channel} {digest_of_bytes(data)}")
    shared_digests = [salt, *(digest_of_bytes(store.read(key) or b"") for key, _ in sorted(store.sizes("policies/")))]
    models = (
        _model(store, model, sorted(keys), shared_digests, other_keys.get(model, ()))
        for model, keys in sorted(keys_by_model.items())
    )
    return [model for model in models if model.versions]


def _model(
    store: Store, model: str, keys: list[tuple[str, int]], shared_digests: list[str], other_keys: Iterable[str]
) -> ModelKeys:
    versions: dict[str, list[str]] = {}
    channels, canaries, complete_versions, all_keys = [], set(), set(), [*shared_digests, *other_keys]
    for key, size in keys:
        all_keys.append(f"{key} {size}")
        match key.split("/"):
            case ["versions", version, *rest] if is_name(version):
                versions.setdefault(version, [*shared_digests]).append(all_keys[-1])
                if rest == [MANIFEST]:
                    complete_versions.add(version)
                elif rest[0] == "canaries" and is_digest(rest[-1].removesuffix(".json")):
                    canaries.add(rest[-1].removesuffix(".json"))
            case ["channels", name] if name.endswith(".json") and is_name(name.removesuffix(".json")):
                channels.append(name.removesuffix(".json"))
            case ["policies", _]:
                all_keys.append(digest_of_bytes(store.read(f"{MODELS}{model}/{key}") or b""))
    sorted_versions = sorted(complete_versions, key=version_order)
    digests = tuple((version, digest_lines(versions[version])) for version in sorted_versions)
    return ModelKeys(model, digests, tuple(channels), tuple(sorted(canaries)), digest_lines(all_keys))


def digest_lines(lines: Iterable[str]) -> str:
    """The digest of these lines in this order."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]
