"""The demo's training part, at a smaller size."""

from __future__ import annotations

from support.effort import tried

from autopar.cli.demo import demo_reply, text_batches, train_both
from autopar.cli.plan_commands import show

SMALL = "llama:layers=2,hidden=64,heads=4,kv_heads=2,vocab=256,ffn=176,seq=64"


def test_processes_agree_with_one_device(capsys):
    nproc = tried(2, 4)
    result = train_both(SMALL, nproc=nproc, steps=4, seq=32, rows=8)
    assert result.plan.mesh.num_devices == nproc and (nproc == 2 or result.plan.mesh.tp > 1)
    assert result.agrees and result.worst_error <= 1e-4
    assert result.losses[-1] < result.losses[0]
    show(demo_reply(result))
    printed = capsys.readouterr().out
    assert "Parameters and losses agree" in printed and f"{result.losses[0]:.6f}" in printed


def test_text_is_real_and_the_same_every_time():
    first, again = text_batches(2, 4, 32), text_batches(2, 4, 32)
    assert all((a["input_ids"] == b["input_ids"]).all() for a, b in zip(first, again, strict=True))
    assert (first[0]["input_ids"] != first[1]["input_ids"]).any()
    assert bytes(first[0]["input_ids"].flatten().tolist()).decode("latin-1").isascii()
    hidden = (first[0]["labels"] == -100).sum(1)
    assert hidden[:2].sum() != hidden[2:].sum()
