"""`foredraft check`: a certificate that speculation is lossless, for one target, one drafter and one way of sampling.

It looks at texts and draws of the user's models, and states what it would have noticed. The rules of verification are tested
by enumeration besides: exact to 1e-12 as float64 code, to 3.4e-7 as compiled float32 (docs/internals/exactness.md).
"""

from foredraft.certificate.certify import BUDGET, MAX_TOKENS, NUM_TOKENS, check
from foredraft.certificate.report import Certificate, CheckResult, ControlResult

__all__ = ["BUDGET", "MAX_TOKENS", "NUM_TOKENS", "Certificate", "CheckResult", "ControlResult", "check"]
