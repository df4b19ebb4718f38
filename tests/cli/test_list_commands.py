"""`autopar models`, `devices`, `clusters` and `cluster`."""

from __future__ import annotations

import json

import autopar_cost_models as cm
import pytest
from click.testing import CliRunner
from support.narrow import fits_a_terminal

from autopar.cli.plan_commands import cli
from autopar.ir.cluster import ClusterSpec
from autopar.models.published import published_models


def run(*args: str, code: int = 0) -> str:
    with fits_a_terminal():
        result = CliRunner().invoke(cli, list(args))
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize(
    ("command", "known"),
    [("models", published_models()), ("devices", cm.DEVICES), ("clusters", cm.NODES)],
)
def test_everything_is_listed_with_its_source(command, known):
    table, data = run(command), json.loads(run(command, "--json"))
    assert [entry["name"] for entry in data] == list(known)
    assert all(name in table for name in known)
    assert command == "clusters" or all(entry["source"] for entry in data)


def test_words_choose_names():
    data = json.loads(run("models", "QWEN3", "moe", "--json"))
    assert data == []
    names = [entry["name"] for entry in json.loads(run("models", "qwen3-", "b", "--json"))]
    assert "qwen3-8b" in names and not [name for name in names if "qwen3-" not in name]


def test_a_cluster_is_printed_as_a_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(run("cluster", "dgx-h100:4"))
    assert ClusterSpec.from_yaml(path) == ClusterSpec.parse("dgx-h100:4")
    assert "did you mean" in run("cluster", "dgx-h10:4", code=2)
