"""The trust policy of a client: a YAML file that says whose signatures a model needs before it is loaded.

::

    format: 1
    signers:
      release: {public_key: keys/release.pub}                     # relative to this file
      ci: {certificate_roots: [keys/ca.pem], identity: ci@example.org}
      cloud: {keyless_identity: robot@example.org, keyless_issuer: https://accounts.example.org}
    rules:                                                        # the first that matches the model's name counts
      - {models: "digits*", signers: [release, ci], needed: 2, min_version: "12"}
      - {models: "scratch-*", required: false}

A model that no rule matches is refused; a rule for `*` matches all. An unknown key is an error, since a policy with a
misspelt key would protect less than it seems to.
"""

import fnmatch
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.core import parsing
from enginesmith.core.errors import InputError
from enginesmith.core.parsing import Malformed, field
from enginesmith.registry.trust.signatures import CertificateSigner, KeylessSigner, KeySigner, Signer, key_id_of_pem

if TYPE_CHECKING:
    import yaml

VARIABLE = "ENGINESMITH_TRUST_POLICY"
FORMAT = 1
LARGEST_POLICY_BYTES = 256 << 10
LARGEST_KEY_BYTES = 64 << 10
MOST_SIGNERS = 100
MOST_RULES = 1000

_GLOB = re.compile(r"[a-z0-9._*?\[\]!-]{1,128}")
_RULE = {"models", "signers", "required", "needed", "min_version"}
_EVENTS = 100_000
_DEPTH = 16


@dataclass(frozen=True)
class Rule:
    """What the models that `models` (a glob) matches need. needed: how many of the signers must have signed.

    min_version: versions that sort before it are refused, however well signed.
    """

    models: str
    signers: tuple[Signer, ...] = ()
    required: bool = True
    needed: int = 1
    min_version: str | None = None


@dataclass(frozen=True)
class TrustPolicy:
    """The rules in their order, and the file they are from."""

    rules: tuple[Rule, ...]
    path: str = ""

    def rule(self, model: str) -> Rule | None:
        """The first rule that matches a model's name; None means that it is refused."""
        return next((rule for rule in self.rules if fnmatch.fnmatchcase(model, rule.models)), None)


def configured_policy() -> TrustPolicy | None:
    """The policy that ENGINESMITH_TRUST_POLICY names, or None where it is not set. Raises InputError."""
    path = os.environ.get(VARIABLE)
    return load_policy(path) if path else None


def load_policy(path: Path | str) -> TrustPolicy:
    """Read a policy and the keys it names. Raises InputError that names the file, the key and the remedy."""
    path = Path(path)
    try:
        document = _plain(_read_file(path, LARGEST_POLICY_BYTES))
        return _policy(document, path)
    except Malformed as error:
        raise InputError(f"trust policy {path}: {error}; see docs/concepts/security.md") from error


def policy_of_key(path: Path) -> TrustPolicy:
    """A policy that asks for the signature of one public key, for whatever model. Raises InputError."""
    return TrustPolicy((Rule("*", (public_key(path),)),), f"(--public-key {path})")


def public_key(path: Path) -> KeySigner:
    """The signer whose public key is in a file. Raises InputError."""
    pem = _read_file(path, LARGEST_KEY_BYTES)
    try:
        return KeySigner(path.name, pem, key_id_of_pem(pem))
    except Malformed as error:
        raise InputError(f"{path} {error}; `openssl ec -in KEY -pubout` writes one") from error


def _plain(data: bytes) -> object:
    """The document in YAML bytes. Raises Malformed for what JSON cannot say, duplicate keys and deep nesting."""
    import yaml

    try:
        text = data.decode()
        depth = 0
        for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or count > _EVENTS or depth > _DEPTH:
                raise Malformed("has aliases, deep nesting or too many values; see docs/concepts/security.md")
        _refuse_duplicates(yaml.compose(text, Loader=yaml.SafeLoader))
        document: object = yaml.safe_load(text)
        return document
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise Malformed(f"is not plain YAML ({(str(error).splitlines() or ['?'])[0][:200]})") from error


def _refuse_duplicates(root: "yaml.Node | None") -> None:
    import yaml

    pending = [root]
    while pending:
        node = pending.pop()
        if isinstance(node, yaml.SequenceNode):
            pending += node.value
        elif isinstance(node, yaml.MappingNode):
            names = [str(key.value) for key, _ in node.value]
            if len(set(names)) < len(names):
                raise Malformed(f"gives a key twice near line {node.start_mark.line + 1}; keep one")
            pending += [value for _, value in node.value]


def _policy(document: object, path: Path) -> TrustPolicy:
    data = _check_keys(document, "policy", {"format", "signers", "rules"})
    if (found := field(data, "format", parsing.count)) != FORMAT:
        raise Malformed(f"format is {found}; this enginesmith reads {FORMAT}")
    named = field(data, "signers", parsing.mapping)
    rules = field(data, "rules", parsing.many(lambda value, where: _check_keys(value, where, _RULE)))
    if len(named) > MOST_SIGNERS or not 1 <= len(rules) <= MOST_RULES:
        raise Malformed(f"has {len(named)} signers and {len(rules)} rules; {MOST_SIGNERS} and 1 to {MOST_RULES} may be")
    signers = {_text(name, "signers"): _signer(str(name), value, path.parent) for name, value in named.items()}
    seen: dict[object, str] = {}
    for name, signer in signers.items():  # a key under two names would count as two signers
        what = signer.key_id if isinstance(signer, KeySigner) else signer.identity
        if what in seen:
            raise Malformed(f"signers {seen[what]!r} and {name!r} are one; keep one name")
        seen[what] = name
    return TrustPolicy(tuple(_rule(rule, f"rules[{i}]", signers) for i, rule in enumerate(rules)), str(path))


def _rule(data: Mapping[str, object], where: str, signers: Mapping[str, Signer]) -> Rule:
    models = field(data, "models", _text, where)
    if not _GLOB.fullmatch(models):
        raise Malformed(f"{where}.models is {models[:80]!r}; it must be a glob over names, as in 'digits*'")
    names = field(data, "signers", parsing.many(_text), where) if "signers" in data else ()
    if unknown := [name for name in names if name not in signers]:
        raise Malformed(f"{where}.signers names {unknown[0][:80]!r}; known: {', '.join(sorted(signers)) or 'none'}")
    required = field(data, "required", parsing.truth, where) if "required" in data else True
    needed = field(data, "needed", parsing.count, where) if "needed" in data else 1
    if len(set(names)) < len(names) or (required and not 1 <= needed <= len(names)):
        raise Malformed(f"{where} needs {needed} of {len(names)} signers; name each once, and need 1 to all of them")
    version = field(data, "min_version", _version, where) if "min_version" in data else None
    return Rule(models, tuple(signers[name] for name in names), required, needed, version)


def _version(value: object, where: str) -> str:
    return str(value) if type(value) is int and value >= 0 else parsing.name(value, where)


def _signer(name: str, value: object, folder: Path) -> Signer:
    where = f"signers.{name[:80]}"
    data = parsing.mapping(value, where)
    if "public_key" in data:
        _check_keys(data, where, {"public_key"})
        pem = _key_file(data["public_key"], f"{where}.public_key", folder)
        try:
            return KeySigner(name, pem, key_id_of_pem(pem))
        except Malformed as error:
            raise Malformed(f"{where}.public_key {error}") from error
    if "certificate_roots" in data:
        _check_keys(data, where, {"certificate_roots", "identity"})
        read: Callable[[object, str], bytes] = lambda item, path: _key_file(item, path, folder)  # noqa: E731
        roots = field(data, "certificate_roots", parsing.many(read), where)
        if not 1 <= len(roots) <= MOST_SIGNERS:
            # Without one, model-signing would take every root that browsers trust.
            raise Malformed(f"{where}.certificate_roots has {len(roots)} files; name 1 to {MOST_SIGNERS}")
        return CertificateSigner(name, roots, field(data, "identity", _text, where))
    _check_keys(data, where, {"keyless_identity", "keyless_issuer"})
    return KeylessSigner(
        name, field(data, "keyless_identity", _text, where), field(data, "keyless_issuer", _text, where)
    )


def _key_file(value: object, where: str, folder: Path) -> bytes:
    return _read_file(folder / _text(value, where), LARGEST_KEY_BYTES)


def _read_file(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as stream:
            data = stream.read(limit + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"trust: {path}: {reason}; without it nothing is trusted, so nothing is loaded") from error
    if len(data) > limit:
        raise InputError(f"trust: {path} is over {limit} bytes; this is no policy and no key")
    return data


def _check_keys(value: object, where: str, known: set[str]) -> dict[str, object]:
    data = parsing.mapping(value, where)
    if unknown := sorted(str(name)[:80] for name in set(data) - known):
        raise Malformed(f"{where} has the unknown key {unknown[0]!r}; known: {', '.join(sorted(known))}")
    return data


def _text(value: object, where: str) -> str:
    found = parsing.text(value, where)
    if not 0 < len(found) <= 1000 or not found.isprintable():
        raise Malformed(f"{where} is {found[:80]!r}; it must be 1 to 1000 printable characters")
    return found
