"""Proof that a model computes on ranks what it computes in one process, or what went wrong."""

from flexcp.tools.verify.entry import CHECKS, verify
from flexcp.tools.verify.verdict import Check, Verdict, VerificationError

__all__ = ["CHECKS", "Check", "Verdict", "VerificationError", "verify"]
