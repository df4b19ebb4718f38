"""Explanations of plans for users: the choices, the reasons, and the cost of alternatives."""

from autopar.explaining.plan_report import explain, plan_data, plan_table

__all__ = ["explain", "plan_data", "plan_table"]
