"""The benchmark of public networks, on networks of its own: their packages are not installed here."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict

from torch import nn

from benchmarks.exactness import public_models
from benchmarks.exactness.public_inputs import Classifier, PublicModel, images, packed, padded
from benchmarks.exactness.public_models import (
    MODELS,
    PublicCell,
    read_log,
    run_apart,
    run_cell,
    table,
)


def test_there_are_networks_of_each_package_and_batches_of_each_kind():
    packages = {name.split()[0] for name in MODELS}
    assert len(MODELS) >= 75
    assert packages >= {"litgpt", "x-transformers", "transformers", "peft", "DPO", "timm", "torchvision", "diffusers"}  # fmt: skip


def test_batches():
    batch = padded(5)
    lengths = batch["attention_mask"].sum(1)
    assert len(set(lengths.tolist())) > 1
    assert bool(((batch["labels"] == -100) == (batch["attention_mask"] == 0)).all())
    positions = packed(5)["position_ids"]
    assert bool(((positions == 0).sum(1) == 2).all())


def test_verdicts(monkeypatch):
    def linear() -> nn.Module:
        return Classifier(nn.Sequential(nn.Flatten(), nn.Linear(27, 10)))

    def broken() -> nn.Module:
        raise ValueError("no such network")

    made = {"a linear": linear, "b broken": broken}
    models = {name: PublicModel(build, images(3)) for name, build in made.items()}
    monkeypatch.setattr(public_models, "MODELS", models)
    found = [run_cell(name, "dp=2") for name in models]
    assert [cell.verdict for cell in found] == ["exact", "crash"]
    assert "no such network" in found[1].words
    refused = run_cell("a linear", "tp=3")
    assert refused.verdict == "refused" and "tp=3" in refused.words
    text = table([*found, refused])
    assert "dp=2: 1 exact, 1 crash" in text and "a linear tp=3 refused: " in text


def test_a_cell_that_ends_or_hangs_is_a_crash(monkeypatch):
    models = {
        "a exits": PublicModel(lambda: os._exit(3), images(3)),
        "b hangs": PublicModel(lambda: time.sleep(60), images(3)),
    }
    monkeypatch.setattr(public_models, "MODELS", models)
    exits = run_apart("a exits", ("dp=2", "tp=2"))
    monkeypatch.setattr(public_models, "TIMEOUT_S", 2.0)
    hangs = run_apart("b hangs", ("dp=2", "tp=2"))
    assert [(cell.mesh, cell.verdict) for cell in exits] == [("dp=2", "crash"), ("tp=2", "crash")]
    assert "code 3" in exits[1].words and "longer than 2 s" in hangs[1].words


def test_the_last_cell_counts_and_the_table_says_which_commit_ran_it(monkeypatch):
    monkeypatch.setattr(public_models, "MODELS", dict.fromkeys(["a", "b"]))
    cells = [
        PublicCell("a", "dp=2", "WRONG", "off", commit="1111111"),
        PublicCell("a", "dp=2", "exact", error=1e-15, commit="2222222"),
    ]
    lines = table(cells).splitlines()
    assert lines[1].split() == ["a", "exact", "1e-15", "2222222"]
    assert "Not run: b" in lines and "WRONG" not in table(cells)


def test_a_log_is_read_as_it_was_written(tmp_path):
    cells = [PublicCell("a", "dp=2", "exact", "", 1e-15, 3, 0.5), PublicCell("a", "tp=2", "WRONG")]
    file = tmp_path / "cells.jsonl"
    file.write_text("".join(json.dumps(asdict(cell)) + "\n" for cell in cells))
    assert read_log(file) == cells and read_log(tmp_path / "none") == []
