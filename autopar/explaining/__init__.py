"""Explanations for people: what was chosen, why, and what the alternatives would cost."""

from autopar.explaining.plan_report import explain, plan_data, plan_table

__all__ = ["explain", "plan_data", "plan_table"]
