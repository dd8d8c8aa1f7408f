"""All planted faults, in the order of the table."""

from tests.faults import compilers, elsewhere, numbers, promises, roundings, variations
from tests.faults.table import Fault

FAULTS: tuple[Fault, ...] = (
    *numbers.FAULTS,
    *roundings.FAULTS,
    *variations.FAULTS,
    *compilers.FAULTS,
    *promises.FAULTS,
    *elsewhere.FAULTS,
)
