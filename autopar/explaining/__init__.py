"""Explanations for people: what was chosen, why, and what the alternatives would cost."""

from autopar.explaining.plan_report import plan_data, plan_table, plan_text

__all__ = ["plan_data", "plan_table", "plan_text"]
