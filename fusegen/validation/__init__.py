"""validate(kernel): does it compute what its chain means? Inputs, tolerances and verdict, all from the graph."""

from fusegen.validation.bounds import Bounded, analyse
from fusegen.validation.checks import narrowed, validate
from fusegen.validation.lengths import at_lengths, interesting_lengths, validate_chain
from fusegen.validation.report import Case, Report, Worst

__all__ = [
    "Bounded",
    "Case",
    "Report",
    "Worst",
    "analyse",
    "at_lengths",
    "interesting_lengths",
    "narrowed",
    "validate",
    "validate_chain",
]
