"""Removes credentials from text that others will read: compilers' logs, reasons of failures.

It hides the values of this process's environment variables whose names suggest secrets, and the usual forms of
credentials from any source. A secret in another form that is not in the environment is not found.
Standard library only, so that a build worker can use it with its own environment.
"""

import os
import re
from collections.abc import Callable, Mapping

HIDDEN = "[hidden]"
# Shorter values ('1', 'yes', 'auto') are common words in logs, not secrets.
_SHORTEST = 6
_SECRET_NAME = re.compile(
    r"(?i)(secret|passw|passphrase|token(?!iz)|credential|api_?key|access_?key|private_?key|auth(?!or)|cookie)|_key$|_pwd$|_pass$"
)
# Variables with a path or URL, which may contain a password: only the user information of a URL is secret.
_PLACE_NAME = re.compile(r"(?i)(_file|_path|_dir|_sock|_url|_uri|_proxy|signing_key)$")
_NAMED = (
    r"(?:secret(?:[_-]?access)?[_-]?key|secret|passwo?r?d|passphrase|api[_-]?key|private[_-]?key|"
    r"(?:access|auth|session|security|id|refresh)[_-]?token|x-amz-(?:signature|credential|security-token))"
)
_TOKENS = (
    r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|"
    r"xox[abprs]-[\w-]{10,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
_NAMES = ("secret", "passw", "passphrase", "api", "private", "token", "x-amz-")
# (lower-case words, one of which is in each match; the pattern; its replacement). Searching for the words first takes
# a hundredth of the time. Only the last pattern spans lines: a log is scrubbed in pieces of whole lines.
_FORMS = (
    # user:password@ and token@ in a URL (RFC 3986, section 3.2.1)
    (("://",), re.compile(r"(?i)\b([a-z][a-z0-9+.-]{0,30}://)[^\s/?#@'\"]{1,1024}@"), rf"\1{HIDDEN}@"),
    # AWS access key ids: https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_identifiers.html
    (("akia", "asia"), re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), HIDDEN),
    # HTTP authorization (RFC 9110, section 11.6.2), and its tokens elsewhere (RFC 6750)
    (("authorization",), re.compile(r"(?i)\b(authorization['\"]?[ \t]*[:=][ \t]*['\"]?)[^\r\n'\"]+"), rf"\1{HIDDEN}"),
    (("bearer",), re.compile(r"(?i)\b(bearer[ \t]+)[\w.~+/=-]{8,}"), rf"\1{HIDDEN}"),
    # tokens of GitHub, GitLab, Hugging Face and Slack, and JSON web tokens (RFC 7519)
    (("_", "glpat-", "xox", "eyj"), re.compile(_TOKENS), HIDDEN),
    # name=value, name: value, "name": "value", and the query of signed URLs
    (
        _NAMES,
        re.compile(rf"(?i)({_NAMED}['\"]?[ \t]*[=:][ \t]*)(?:\"[^\"\r\n]+\"|'[^'\r\n]+'|[^\s&'\",;]+)"),
        rf"\1{HIDDEN}",
    ),
    (
        ("-----begin ",),
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"),
        HIDDEN,
    ),
)


def scrubber(environment: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """A function that hides credentials in a text. environment: None is this process's, read now."""
    # The whole value if the variable's name is secret; in a URL with user information, only the password.
    secrets = set()
    for name, value in (os.environ if environment is None else environment).items():
        if user_match := re.match(r"[A-Za-z][\w+.-]*://([^/?#\s]+)@", value):
            secrets |= {password for password in user_match[1].split(":", 1)[-1:] if len(password) >= _SHORTEST}
        elif _SECRET_NAME.search(name) and not _PLACE_NAME.search(name) and len(value.strip()) >= _SHORTEST:
            secrets |= {line.strip() for line in value.splitlines() if len(line.strip()) >= _SHORTEST}
    values = sorted(secrets, key=len, reverse=True)
    secret_pattern = re.compile("|".join(map(re.escape, values))) if values else None

    def scrub(text: str) -> str:
        if secret_pattern:
            text = secret_pattern.sub(HIDDEN, text)
        lower_text = text.lower()
        for markers, pattern, replacement in _FORMS:
            if any(marker in lower_text for marker in markers):
                text = pattern.sub(replacement, text)
        return text

    return scrub
