"""The table of constants is whole, short enough, and each constant says where it comes from."""

from __future__ import annotations

import json
import re
from dataclasses import fields

from autopar_cost_models import FITTED
from click.testing import CliRunner

from autopar.cli.plan_commands import cli
from autopar.foreign.published.constants import CONSTANTS, MEASURED, MOST_CONSTANTS


def test_every_fitted_constant_is_listed_once():
    names = [constant.name for constant in CONSTANTS]
    assert len(set(names)) == len(names) <= MOST_CONSTANTS
    assert {field.name for field in fields(FITTED)} < set(names)
    for constant in (*CONSTANTS, *MEASURED):
        assert re.match("(fit|derived|assumed|measured): .{10,}", constant.origin), constant


def test_the_command_prints_them_without_a_file():
    text = CliRunner().invoke(cli, ["predict", "--constants"]).output
    assert (
        f"Constants: {len(CONSTANTS)} of at most {MOST_CONSTANTS}" in text
        and "hopper_efficiency" in text
    )
    data = json.loads(CliRunner().invoke(cli, ["predict", "--constants", "--json"]).output)
    assert [row["name"] for row in data["constants"]] == [x.name for x in CONSTANTS]
    both = CliRunner().invoke(cli, ["predict", "--constants", "--ablate"])
    assert both.exit_code == 2 and "two reports" in both.output
    assert CliRunner().invoke(cli, ["predict"]).exit_code == 2
