"""Proof that a model computes on ranks what it computes in one process, or what went wrong."""

from flexcp.verification.entry import CHECKS, verify
from flexcp.verification.verdict import Check, Verdict, VerificationError

__all__ = ["CHECKS", "Check", "Verdict", "VerificationError", "verify"]
