"""Reports, as data, whether two models fit together, how much memory they will take, and how exact this machine is."""

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
