"""What a step's worker calls and its key leaves out, because it decides nothing of what the step gives.

Progress, displays, pages and commands need not be named: no worker's function reaches them.
"""

# Room or module, and why; tests/pipeline/compile/closure/test_carriers.py holds each of them to that.
CARRIERS = {
    "enginery.registry": "carries bytes: a blob is read by the SHA-256 of its content, which the request names",
}


def is_carrier(module: str) -> bool:
    """Whether a module is left out of every key."""
    return any(module == carrier or module.startswith(f"{carrier}.") for carrier in CARRIERS)
