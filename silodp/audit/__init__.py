"""Does the code keep its promise? An audit runs it on canaries and compares what leaks with what the plan claims.

For every algorithm and trust model one small run of the real code (silodp.audit.canaries, silodp.audit.observe) is
attacked (silodp.audit.attack). A measured mu above the claim by more than three standard errors convicts the code; a
reading far below a claim that is attained would mean that the audit has become blind, and fails too.
"""

from silodp.audit.table import Row, audit, plain, render

__all__ = ["Row", "audit", "plain", "render"]
