"""The exactness check has teeth: damage what a program communicates, one thing at a time, and training must differ from one device.

`benchmarks/mutations.py` says what is damaged and what counts as caught; `benchmarks/mutation_matrix.py` does it to the model matrix, of
which a thinned part runs here and, with --runslow, every cell that covers a special lowering.  Random plans use primitives that no solver
would choose.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import mutation_matrix
import mutations
import pytest
import torch
from exactness import SEQ, case, random_plan, reference, setting, solved_plan
from mutation_cell import MutationCell, judged, run_mutations
from mutations import EXACT, REJECTED, Mutation

from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.verify import Case

MESH = MeshShape(dp=2, tp=2)
SHORT_GPT = f"gpt:vocab=127,hidden=48,layers=2,heads=4,seq={SEQ}"
"""gpt-tiny with as many positions as tokens: a random plan may shard that table, and rows that no token has hide wrong positions."""



@cache
def trained_case(name: str) -> Case:
    """A case of `exactness.py`, in the words of `autopar verify`."""
    found, expected = case(name), reference(name)
    return Case(found.model, found.batches, found.traced, 0.5, 0.0, expected.before, expected.after, tuple(expected.losses))


def check(pool, name: str, plan: Plan, every: int = 1, start: int = 0) -> None:
    found = run_mutations(pool, (trained_case, name), plan, every, start)
    check_cell(judged(name, str(plan.mesh), found, 0.0), found)


def check_cell(cell: MutationCell, found: list[tuple[Mutation, str]] = ()) -> None:
    print(f"\n{cell.model} {cell.mesh}: {cell.mutations} mutations, {dict(Counter(verdict for _, verdict in found)) or cell}")
    assert not cell.message, cell.message
    assert not cell.escaped, f"{len(cell.escaped)} of {cell.mutations} mutations escaped: " + "; ".join(cell.escaped[:20])
    assert not cell.wrong, "predicted to change nothing: " + "; ".join(cell.wrong[:20])
    assert cell.mutations > 5


def plans(name: str) -> dict[str, Plan]:
    found = case(name)
    where = setting(MESH)
    return {
        "solved": solved_plan(found.traced, found.annotator, where),
        "random": random_plan(found.traced, found.annotator, where, seed=5, random_fixed=False),
    }


def test_every_mutation_of_the_solved_program_is_caught(pool4):
    check(pool4, "llama-tiny", plans("llama-tiny")["solved"])


@pytest.mark.parametrize("name", ["gpt-tiny", "hf-llama"])
def test_mutations_of_other_solved_programs_are_caught(pool4, name):
    """Every 6th here, all of them with --runslow."""
    check(pool4, name, plans(name)["solved"], every=6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-tiny", "hf-llama", "hf-gpt2", "moe-tiny"])
def test_every_mutation_of_other_solved_programs_is_caught(pool4, name):
    check(pool4, name, plans(name)["solved"])


@pytest.mark.parametrize("name", ["llama-tiny", SHORT_GPT])
def test_mutations_of_a_random_program_are_caught(pool4, name):
    """Every primitive, sequence sharding included; every 20th mutation here, all of them with --runslow."""
    check(pool4, name, plans(name)["random"], every=20)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["llama-tiny", SHORT_GPT, "moe-tiny", "hf-llama", "hf-gpt2"])
def test_every_mutation_of_random_programs_is_caught(pool4, name, seed):
    found = case(name)
    check(pool4, name, random_plan(found.traced, found.annotator, setting(MESH), seed))


# ------------------------------------------------------------------------------------------------------------- the model matrix


@pytest.mark.parametrize(("name", "mesh", "every"), [
    pytest.param("autopar-llama", "cp=2,tp=2,context_method=ring", 9, id="ring"),
    pytest.param("autopar-moe", "ep=2,dp=2", 11, id="experts"),
    *(pytest.param(name, mesh, 1, marks=pytest.mark.slow, id=f"{name}-{mesh}") for name, mesh in [
        ("llama", "cp=2,tp=2"),
        ("mistral", "cp=2,tp=2,context_method=gather"),
        ("mistral", "cp=2,tp=2,context_method=ring"),
        ("mistral", "cp=2,tp=2,context_method=ulysses"),
        ("bert", "cp=2,tp=2"),
        ("t5", "cp=2,tp=2"),
        ("gpt2", "tp=4"),
        ("deepseek_v3", "tp=4"),
        ("mixtral", "ep=2,dp=2"),
        ("autopar-moe", "ep=2,dp=2"),
    ]),
])  # fmt: skip
def test_mutations_of_the_matrix_are_caught(pool4, name, mesh, every):
    """Inside a ring and inside an exchange of tokens among them."""
    if not name.startswith("autopar-"):
        pytest.importorskip("transformers")
    check_cell(mutation_matrix.run_cell(pool4, name, mesh, every))


# ------------------------------------------------------------------------------------------------------------ the judge's honesty


def test_what_nothing_notices_is_reported():
    node, other = Mutation(("layers_0", "gather"), "delete"), Mutation(("layers_0", "mask"), "double", no_op=True)
    cell = judged("m", "tp=4", [(node, EXACT), (other, EXACT), (other, REJECTED), (node, REJECTED)], 0.0)
    assert (cell.mutations, cell.no_ops, cell.rejected, cell.ok) == (4, 2, 1, False)
    assert cell.escaped == ("delete layers_0/gather ()",) and cell.wrong == ("double layers_0/mask (): rejected by the verifier",)
    assert judged("m", "tp=4", [(node, REJECTED), (other, EXACT)], 0.0).ok


def part_ways(rank: int, plan: str, mutation: Mutation | None) -> str:
    """A mutant after which one rank waits for a message that nobody sends."""
    if mutation is not None and rank == 0:
        torch.distributed.recv(torch.zeros(1), src=1)
    return EXACT


def test_a_mutant_that_gets_stuck_is_caught_and_the_pool_starts_anew(pool4, monkeypatch):
    import mutation_cell

    monkeypatch.setattr(mutation_cell, "_prepare", prepare_two)
    monkeypatch.setattr(mutation_cell, "_mutant", part_ways)
    monkeypatch.setattr(mutation_cell, "TIMEOUT_S", 1.0)
    found = run_mutations(pool4, (trained_case, "llama-tiny"), plans("llama-tiny")["solved"])
    assert [verdict for _, verdict in found] == [mutations.STUCK] * 2


def prepare_two(rank: int, source: tuple, plan: str) -> tuple[list[Mutation], float]:
    return [Mutation(("", "a"), "delete"), Mutation(("", "b"), "delete")], 0.0


def test_the_command(monkeypatch, tmp_path, capsys):
    cells = [MutationCell("llama", "tp=4", 3, rejected=3), MutationCell("gpt2", "tp=4", 3, escaped=("delete layers_0/gather ()",))]
    monkeypatch.setattr(mutation_matrix, "run_models", lambda names, meshes, every, verbose: [c for c in cells if c.model in names])
    file = tmp_path / "cells.json"
    assert mutation_matrix.main(["--models", "llama,gpt2", "--meshes", "tp=4", "--json", str(file)]) == 1
    assert "gpt2 tp=4: NOT CAUGHT: delete layers_0/gather ()" in capsys.readouterr().out and "layers_0/gather" in file.read_text()
    assert mutation_matrix.main(["--models", "llama", "--meshes", "tp=4"]) == 0
    with pytest.raises(SystemExit):
        mutation_matrix.main(["--models", "lama"])
