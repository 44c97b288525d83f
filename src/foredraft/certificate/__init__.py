"""`foredraft check`: a certificate that speculation is lossless, for one target, one drafter and one way of sampling."""

from foredraft.certificate.certify import BUDGET, MAX_TOKENS, NUM_TOKENS, check
from foredraft.certificate.report import Certificate, CheckResult, ControlResult

__all__ = ["BUDGET", "MAX_TOKENS", "NUM_TOKENS", "Certificate", "CheckResult", "ControlResult", "check"]
