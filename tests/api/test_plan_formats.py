"""Plan files that earlier versions wrote: each is read, or refused with the version of its format.

`plans/formatN.json` is a plan of a small gpt for 8 H100 as autopar wrote it when that format was last in use (1, 2, 3) or new (4), one
field a line.  A field that is added to `Plan` needs a default, or a new format and a file here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import autopar
from autopar.cli.plan_commands import cli
from autopar.errors import AutoparError
from autopar.ir.plan import FORMAT_VERSION, Plan

STORED = Path(__file__).parent / "plans"
REFUSED = [1, 2, 3]
READ = [4]


def test_each_format_has_a_stored_file():
    assert sorted(REFUSED + READ) == list(range(1, FORMAT_VERSION + 1))
    assert {path.stem for path in STORED.iterdir()} == {f"format{n}" for n in REFUSED + READ}


@pytest.mark.parametrize("version", REFUSED)
def test_plans_of_formats_that_are_no_longer_read_are_refused_with_their_version(version):
    path = STORED / f"format{version}.json"
    with pytest.raises(AutoparError) as refusal:
        Plan.load(path)
    message = (
        f"{path} has plan format {version}; this autopar reads format {FORMAT_VERSION}: plan again"
    )
    assert str(refusal.value) == message
    result = CliRunner().invoke(cli, ["diff", str(path), str(path)])
    assert result.exit_code == 2, result.output
    assert message in result.output


@pytest.mark.parametrize("version", READ)
def test_first_plans_of_a_format_are_read_and_shown_as_stale(version):
    plan = Plan.load(STORED / f"format{version}.json")
    assert (plan.mesh.dp, plan.mesh.tp, plan.global_batch, plan.zero) == (2, 4, 8, 1)
    assert (plan.shard, plan.offload, plan.devices) == (0, "none", ())  # fields that came later
    assert "predicted by cost model 4" in autopar.explain(plan)
    assert Plan.from_json(plan.to_json()) == plan
