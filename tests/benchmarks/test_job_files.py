"""The share of files that are read in full."""

from __future__ import annotations

from benchmarks.fidelity.job_files import main


def test_shares_of_a_folder(tmp_path, capsys) -> None:
    ds = '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}%s}'
    (tmp_path / "a.json").write_text(ds % "")
    (tmp_path / "b.json").write_text(ds % ', "odd": 1')
    (tmp_path / "c.json").write_text("{}")
    assert main([str(tmp_path), "--fields"]) == 0
    printed = capsys.readouterr()
    assert (
        "layout  global_batch=8 zero=2" in printed.out and "without a price: odd=1" in printed.out
    )
    assert printed.out.splitlines()[-1].split() == ["all", "2", "1", "50.0%", "2", "100.0%"]
    assert "c.json is no job" in printed.err
    assert main([str(tmp_path / "c.json")]) == 1
