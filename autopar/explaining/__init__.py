"""Explanations of plans for users: the choices, the reasons, and the cost of alternatives."""

from autopar.explaining.plan_report import plan_data, plan_reply, plan_text

__all__ = ["plan_data", "plan_reply", "plan_text"]
