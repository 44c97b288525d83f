"""Do two models fit, what memory will they take, and what exactness does this machine give: the answers as data."""

from foredraft.tools.inspection.inspect import exactness_of, inspect_models
from foredraft.tools.inspection.report import Costs, HeadReport, Inspection, MemoryReport, ModelReport, VocabularyReport

__all__ = [
    "Costs",
    "HeadReport",
    "Inspection",
    "MemoryReport",
    "ModelReport",
    "VocabularyReport",
    "exactness_of",
    "inspect_models",
]
