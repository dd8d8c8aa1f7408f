"""ONNX Runtime's errors as what, which node and remedy: without its status codes, source paths and C++ signatures."""

import re
from pathlib import Path

# ONNX Runtime's kernels begin there: https://onnxruntime.ai/docs/reference/compatibility.html
OLDEST_OPSET = 7
_UNKNOWN_OP = (
    re.compile(r"No Op registered for (?P<op>\w+)"),
    re.compile(r"(?<![\w.:])(?P<op>[\w.:]+)\(-?\d+\) is not a registered function"),
    re.compile(r"implementation for (?P<op>[\w.:]+)\(\d+\) node with name '(?P<node>[^']*)'"),
)
_LONGEST_REASON = 4000
_STATUS = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : (Load model from .+? failed:)?")
_NODE = re.compile(r"Non-zero status code returned while running (\w+) node\. Name:'([^']*)' Status Message: ")
# A place in its source, and what may stand before the parentheses of a function's signature.
_PLACE = re.compile(r"(?<!\S)\S+\.(?:cc|cpp|cu|cuh|h|hpp):\d+ ")
_FUNCTION = re.compile(r"[\w\s:<>~*&,.=\[\]]*::[\w\s:<>~*&,.=\[\]]*(?=\()")
_BEHIND = re.compile(r"\s*(?:const|noexcept)\b")
_CONDITION = re.compile(r"^[^\n]*? was false\.\s*")
_PAIRS = {"(": ")", "[": "]"}


def failures() -> tuple[type[Exception], ...]:
    """The classes of ONNX Runtime's errors, which share no base class of their own."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return tuple(
        cls
        for cls in (getattr(state, name) for name in dir(state))
        if isinstance(cls, type) and issubclass(cls, Exception)
    )


def words_of(error: Exception) -> str:
    """ONNX Runtime's message without what only its authors can read."""
    words = _STATUS.sub("", str(error)).partition("\nStacktrace:")[0].strip()
    words = words if len(words) <= _LONGEST_REASON else f"{words[:_LONGEST_REASON]} ..."  # a model's names can be long
    words = _NODE.sub(lambda found: f"{found[1]} node {found[2]!r}: " if found[2] else f"{found[1]} node: ", words)
    while found := _PLACE.search(words):
        said = _CONDITION.sub("", _without_signature(words[found.end() :]))
        words = words[: found.start()] + (said or "a check in it failed")
    return words


def why_unreadable(error: Exception, model: Path) -> str:
    """Why a file could not be opened, and the remedy; the operator's and the node's name where that is the reason."""
    words = words_of(error)
    opset = _opset(model)
    old = opset is not None and opset < OLDEST_OPSET
    newer = f"export the model again with opset {OLDEST_OPSET} or later, or convert it with onnx.version_converter"
    for pattern in _UNKNOWN_OP:
        if found := pattern.search(words):
            node = found.groupdict().get("node")
            where = f" (node {node!r})" if node else ""
            if old:
                return f"onnxruntime has no operator {found['op']}{where} of opset {opset}; {newer}"
            remedy = "leave the operator out, or use a dtype it has"
            return f"onnxruntime has no operator {found['op']}{where} for these types; {remedy}: {words}"
    return f"onnxruntime cannot read it: {words}; {newer if old else 'export the model again'}"


def _opset(model: Path) -> int | None:
    """The opset of ONNX's own operators in a file; None where that cannot be told."""
    try:
        import onnx
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    except ImportError:  # who runs engines need not have it
        return None
    try:
        found = onnx.load(model, load_external_data=False).opset_import
    except (DecodeError, OSError, ValueError):
        return None
    return max((entry.version for entry in found if entry.domain in ("", "ai.onnx")), default=None)


def _without_signature(text: str) -> str:
    """A message without the signature of the C++ function at its start, if there is one."""
    found = _FUNCTION.match(text)
    if found is None:
        return text
    rest = _behind_pair(text[found.end() :])
    while rest.startswith(("(", "::")):  # operator()(...), and lambdas in functions
        rest = _behind_pair(rest[rest.find("(") :]).removeprefix(">") if "(" in rest else ""
    rest = _BEHIND.sub("", rest).lstrip()
    return (_behind_pair(rest) if rest.startswith("[with ") else rest).lstrip()


def _behind_pair(text: str) -> str:
    """What follows the bracket that closes the one at the start."""
    opening, closing, depth = text[:1], _PAIRS.get(text[:1], ""), 0
    for place, char in enumerate(text):
        depth += (char == opening) - (char == closing)
        if not depth:
            return text[place + 1 :]
    return ""
