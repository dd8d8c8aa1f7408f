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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_types import Len, Predicate, doc

from enginesmith.core.codec import decode
from enginesmith.core.constraints import Count, Format, JsonObject
from enginesmith.core.errors import InputError
from enginesmith.core.names import Name
from enginesmith.core.parsing import Malformed
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
_EVENTS = 100_000
_DEPTH = 16


_Text = Annotated[str, Len(1, 1000), Predicate(str.isprintable), doc("1 to 1000 printable characters")]


@dataclass(frozen=True)
class _KeyText:
    public_key: _Text


@dataclass(frozen=True)
class _CertificateText:
    """certificate_roots: without one, model-signing would take every root that browsers trust."""

    certificate_roots: Annotated[
        tuple[_Text, ...], Len(1, MOST_SIGNERS), doc(f"a list; name 1 to {MOST_SIGNERS} files")
    ]
    identity: _Text


@dataclass(frozen=True)
class _KeylessText:
    keyless_identity: _Text
    keyless_issuer: _Text


@dataclass(frozen=True)
class _RuleText:
    """A rule as it is written. signers: names."""

    models: Annotated[str, Predicate(_GLOB.fullmatch), doc("a glob over names, as in 'digits*'")]
    signers: tuple[_Text, ...] = ()
    required: bool = True
    needed: Count = 1
    min_version: Name | Count | None = None


@dataclass(frozen=True)
class _PolicyText:
    """The file. signers: each one of three kinds."""

    signers: Annotated[Mapping[_Text, JsonObject], Len(0, MOST_SIGNERS)]
    rules: Annotated[tuple[_RuleText, ...], Len(1, MOST_RULES)]
    format: Annotated[int, Format(FORMAT)] = FORMAT


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
    text = decode(document, _PolicyText, "policy")
    signers = {name: _signer(name, value, path.parent) for name, value in text.signers.items()}
    seen: dict[object, str] = {}
    for name, signer in signers.items():  # a key under two names would count as two signers
        what = signer.key_id if isinstance(signer, KeySigner) else signer.identity
        if what in seen:
            raise Malformed(f"signers {seen[what]!r} and {name!r} are one; keep one name")
        seen[what] = name
    return TrustPolicy(tuple(_rule(rule, f"rules[{i}]", signers) for i, rule in enumerate(text.rules)), str(path))


def _rule(text: _RuleText, where: str, signers: Mapping[str, Signer]) -> Rule:
    names = text.signers
    if unknown := [name for name in names if name not in signers]:
        raise Malformed(f"{where}.signers names {unknown[0][:80]!r}; known: {', '.join(sorted(signers)) or 'none'}")
    if len(set(names)) < len(names) or (text.required and not 1 <= text.needed <= len(names)):
        raise Malformed(
            f"{where} needs {text.needed} of {len(names)} signers; name each once, and need 1 to all of them"
        )
    version = None if text.min_version is None else str(text.min_version)
    return Rule(text.models, tuple(signers[name] for name in names), text.required, text.needed, version)


def _signer(name: str, value: JsonObject, folder: Path) -> Signer:
    where = f"signers.{name[:80]}"
    if "public_key" in value:
        pem = _key_file(decode(value, _KeyText, where).public_key, folder)
        try:
            return KeySigner(name, pem, key_id_of_pem(pem))
        except Malformed as error:
            raise Malformed(f"{where}.public_key {error}") from error
    if "certificate_roots" in value:
        found = decode(value, _CertificateText, where)
        return CertificateSigner(
            name, tuple(_key_file(root, folder) for root in found.certificate_roots), found.identity
        )
    keyless = decode(value, _KeylessText, where)
    return KeylessSigner(name, keyless.keyless_identity, keyless.keyless_issuer)


def _key_file(name: str, folder: Path) -> bytes:
    return _read_file(folder / name, LARGEST_KEY_BYTES)


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
