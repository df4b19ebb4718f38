"""`autopar init` writes a script and a cluster file that work; `explain` draws what it is asked to draw."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

from click.testing import CliRunner, Result
from support.trace_faults import trace_faults

from autopar.cli.plan_commands import cli
from autopar.ir.cluster import ClusterSpec
from autopar.report.trace_diff import read_trace

TASK = ["llama-tiny", "h100:4", "--global-batch", "8", "--seq", "16"]


def run(*args: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, list(args))
    assert result.exit_code == code, result.output
    return result


def test_files_are_written_once(tmp_path):
    written = run("init", "llama-tiny", "dgx-h100:2", "--seq", "32", "--dir", str(tmp_path / "run"))
    assert "train.py" in written.stdout and "cluster.yaml" in written.stdout
    script = (tmp_path / "run/train.py").read_text()
    ast.parse(script)
    assert 'default="llama-tiny"' in script and "default=128" in script and "default=32" in script
    assert ClusterSpec.parse(str(tmp_path / "run/cluster.yaml")) == ClusterSpec.parse("dgx-h100:2")
    assert (
        "are there already" in run("init", *TASK[:2], "--dir", str(tmp_path / "run"), code=2).output
    )
    run("init", *TASK, "--dir", str(tmp_path / "run"), "--force")
    assert "default=8" in (tmp_path / "run/train.py").read_text()
    assert "Unknown model" in run("init", "nothing", "h100:4", code=2).output


def test_the_script_plans(tmp_path):
    run("init", "llama-tiny", "cpu:2", "--global-batch", "4", "--seq", "16", "--dir", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "train.py", "--plan"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "predicted step time" in done.stdout


def test_explain_draws_a_page_figures_and_a_trace(tmp_path):
    asked = ["explain", *TASK, "--pin", "pp=2,tp=1", "--time-limit", "4", "--json"]
    files = [
        "--html",
        str(tmp_path / "r.html"),
        "--svg",
        str(tmp_path / "svg"),
        "--trace",
        str(tmp_path / "t.json.gz"),
    ]
    result = run(*asked, *files)
    data = json.loads(result.stdout)
    assert data["report"]["ranks"] and data["lints"] is not None
    page = (tmp_path / "r.html").read_text()
    assert "autopar explain llama-tiny h100:4 \\\n    --global-batch 8 --seq 16" in page
    assert (
        f'data-path="predicted.step_time_s" data-value="{data["predicted"]["step_time_s"]!r}"'
        in page
    )
    assert {path.suffix for path in (tmp_path / "svg").iterdir()} == {".svg"}
    assert trace_faults(read_trace(tmp_path / "t.json.gz")) == []
    (tmp_path / "plan.json").write_text(result.stdout)
    saved = run(
        "explain", "--plan", str(tmp_path / "plan.json"), "--html", str(tmp_path / "s.html")
    )
    assert (
        "Written" in saved.stderr
        and "timeline" not in (tmp_path / "s.html").read_text().split("<section")[1]
    )
    assert (
        "needs the model"
        in run(
            "explain", "--plan", str(tmp_path / "plan.json"), "--trace", str(tmp_path / "x"), code=2
        ).output
    )
    assert "--ranks all is for --trace" in run(*asked, "--ranks", "all", code=2).output
    other = run("trace-diff", str(tmp_path / "t.json.gz"), str(tmp_path / "t.json.gz"))
    assert "the same names in the same order" in " ".join(other.stdout.split())
