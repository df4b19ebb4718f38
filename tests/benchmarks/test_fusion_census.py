"""The census of fused ops: what it counts of heads, and how it tells programs that train otherwise."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import trace
from autopar.errors import AutoparError
from autopar.trace.fusion import fused as fusing
from autopar.verify.verify import FactorySpec
from benchmarks.exactness.fused_training import (
    Errors,
    MeshRun,
    Trained,
    run_apart,
    setup_of,
    trained_under,
)
from benchmarks.exactness.fusion_census import Row, counted, training


class Headed(nn.Module):
    def __init__(self, biased: bool) -> None:
        super().__init__()
        self.into, self.head = nn.Linear(6, 6), nn.Linear(6, 11, bias=biased)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.into(x)).view(-1, 11).float(), labels.view(-1))


@pytest.mark.parametrize("biased", [False, True])
def test_heads_are_counted(biased):
    inputs = {"x": torch.randn(2, 5, 6), "labels": torch.randint(0, 11, (2, 5))}
    row = counted("headed", trace(Headed(biased), inputs))
    assert row.found["head"] == row.found["cross_entropy"] == row.fused["cross_entropy"] == 1
    assert row.fused["head"] == (not biased)
    assert [miss.partition(": ")[2] for miss in row.misses["head"]] == (
        ["its head adds a bias"] if biased else []
    )


def normed() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Headed(False)
    model.into = nn.Sequential(nn.Linear(6, 6), nn.RMSNorm(6))
    return model, {"x": torch.randn(4, 5, 6), "labels": torch.randint(0, 11, (4, 5))}


RIGHT, WRONG = Errors(1e-16, 1e-14, "a"), Errors(1e-3, 2e-3, "b")


def _run(whole: Errors, unfused: Errors) -> MeshRun:
    return MeshRun(
        {"off": Trained(0, RIGHT), "all": Trained(3, whole, unfused)}, {}, 1.0, {"all": 5e-4}
    )


def test_the_report_tells_right_wrong_refused_and_failed_apart():
    runs = {
        "right": _run(RIGHT, RIGHT),
        "wrong": _run(WRONG, WRONG),
        "refused": MeshRun(untrained={"off": "AutoparError: not causal"}),
        "failed": MeshRun({"off": Trained(0, RIGHT)}, {"all": "AutoparError: no rule"}),
    }
    rows = [Row(name, ops=4, runs={"cp=2": run}, commit="abc") for name, run in runs.items()]
    again = [Row.of(json.loads(json.dumps(asdict(row)))) for row in rows]
    assert again == rows
    lines = training(again)
    assert "cp=2: 4 architectures, of which the mesh is refused for 1; 1 programs failed" in lines
    assert any(
        line.startswith("cp=2 fuse=all: trained in fp64 1 of 2 as one device") for line in lines
    )
    assert "refused cp=2 refused: AutoparError: not causal" in lines
    assert "failed cp=2 fuse=all failed: AutoparError: no rule" in lines
    assert [line for line in lines if line.startswith("trained otherwise")] == [
        f"trained otherwise cp=2 fuse=all wrong, against {other}: 1.0e-03, 2.0e-03 in b"
        "; one step of it against one device: 5.0e-04"
        for other in ("one device", "the unfused program")
    ]
    assert "fewer fused ops in fp64 than in bf16: right 3/4, wrong 3/4" in lines


def test_one_failure_hides_no_other():
    def run(broken, modes):
        for mode in modes:
            if mode in broken:
                raise AutoparError(f"no {mode}")
        return dict.fromkeys(modes, Trained(0, RIGHT))

    modes = ["off", "all", "head"]
    assert list(run_apart(partial(run, ""), modes).trained) == modes
    found = run_apart(partial(run, ("all",)), modes)
    assert list(found.trained) == ["off", "head"]
    assert found.untrained == {"all": "AutoparError: no all"}
    assert run_apart(partial(run, ("off",)), modes).untrained == {"off": "AutoparError: no off"}


@pytest.mark.slow
def test_a_wrong_rewriting_is_found_under_a_mesh(monkeypatch):
    """The wrong pass gives every norm another epsilon."""
    rewritten = fusing.rewritten

    def mistaken(graph, matches):
        changed = [
            replace(match, attributes=match.attributes | {"eps": 0.1})
            if "eps" in match.attributes
            else match
            for match in matches
        ]
        new, names = rewritten(graph, changed)
        return new, {match: names[other] for match, other in zip(matches, changed, strict=True)}

    monkeypatch.setattr(fusing, "rewritten", mistaken)
    found = trained_under(setup_of(FactorySpec.of(normed)), "dp=2")
    assert not found.untrained
    assert found.trained["off"].whole.small
    for mode in ("all", "head"):
        program = found.trained[mode]
        assert program.ops == 2 and program.unfused is not None
        assert not program.whole.small and not program.unfused.small
        assert found.one_step[mode] > 1e-9
