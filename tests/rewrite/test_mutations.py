"""The exactness check has teeth: damage what a program communicates, one thing at a time, and training must differ from one device.

`benchmarks/exactness/mutations.py` says what is damaged and what counts as caught; `mutation_matrix.py` beside it does it to the model
matrix, of which a thinned part runs here and, with --runslow, every cell that covers a special lowering.  Random plans use primitives
that no solver would choose.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from support.exactness import case, gathering_again, random_plan, reference, setting, solved_plan

from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.runtime.ranks.launch import WorkerPool
from autopar.verify.verify import Case
from benchmarks.exactness import mutation_matrix, mutations
from benchmarks.exactness.mutation_cell import MutationCell, judged, run_mutations
from benchmarks.exactness.mutations import DIFFERS, EXACT, REJECTED, Mutation
from benchmarks.exactness.same_gradients import SAME

MESH = MeshShape(dp=2, tp=2)
REDUNDANT = {"delete prologue/all_reduce_positions (all_reduce/identity P->R on tp)"}
"""Collectives that a random plan has and no solver would pay for: the sum of a value that one rank alone holds, which is masked again
before anything but sums has seen it.  Without it the other ranks hold garbage that nobody reads."""


@cache
def trained_case(name: str) -> Case:
    """A case of `exactness.py`, in the words of `autopar verify`."""
    found, expected = case(name), reference(name)
    return Case(
        model=found.model,
        batches=found.batches,
        traced=found.traced,
        learning_rate=0.5,
        before=expected.before,
        after=expected.after,
        losses=tuple(expected.losses),
    )


def check(name: str, plan: Plan, every: int = 1) -> list[Mutation]:
    trained_case(name)  # before the workers are forked, which then need not make it again
    with WorkerPool(plan.mesh.num_devices) as pool:
        found = run_mutations(pool, (trained_case, name), plan, every)
    cell = judged(name, str(plan.mesh), found, time.perf_counter())
    check_cell(
        replace(cell, escaped=tuple(text for text in cell.escaped if text not in REDUNDANT)), found
    )
    return [mutation for mutation, _ in found]


def check_cell(cell: MutationCell, found: list[tuple[Mutation, str]] = ()) -> None:
    print(
        f"\n{cell.model} {cell.mesh}: {cell.mutations} mutations, {dict(Counter(verdict for _, verdict in found)) or cell}"
    )
    assert not cell.message, cell.message
    assert not cell.escaped, (
        f"{len(cell.escaped)} of {cell.mutations} mutations escaped: "
        + "; ".join(cell.escaped[:20])
    )
    assert not cell.wrong, "predicted to change nothing: " + "; ".join(cell.wrong[:20])
    assert cell.mutations > 4


def plans(name: str) -> dict[str, Plan]:
    found = case(name)
    where = setting(MESH)
    return {
        "solved": solved_plan(found.traced, found.annotator, where),
        "random": random_plan(found.traced, found.annotator, where, seed=5, random_fixed=False),
        "gathered again": gathering_again(solved_plan(found.traced, found.annotator, where)),
    }


@pytest.mark.slow
def test_every_mutation_of_the_solved_program_is_caught():
    check("llama-tiny", plans("llama-tiny")["solved"])


@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.slow)])
def test_mutations_of_what_is_gathered_again_are_caught(every):
    found = check("llama-tiny", plans("llama-tiny")["gathered again"], every)
    assert sum(mutation.what == "gather again" for mutation in found) >= (3 if every == 1 else 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-tiny", "hf-llama"])
def test_mutations_of_other_solved_programs_are_caught(name):
    """Every 10th here, all of them in the test below."""
    check(name, plans(name)["solved"], every=10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-tiny", "hf-llama", "hf-gpt2", "moe-tiny"])
def test_every_mutation_of_other_solved_programs_is_caught(name):
    check(name, plans(name)["solved"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-tiny", "gpt-tiny"])
def test_mutations_of_a_random_program_are_caught(name):
    """Every primitive, sequence sharding included; every 25th mutation here, all of them with --runslow."""
    check(name, plans(name)["random"], every=25)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["llama-tiny", "gpt-tiny", "moe-tiny", "hf-llama", "hf-gpt2"])
def test_every_mutation_of_random_programs_is_caught(name, seed):
    found = case(name)
    check(name, random_plan(found.traced, found.annotator, setting(MESH), seed))


# ------------------------------------------------------------------------------------------------------------- the model matrix


@pytest.mark.parametrize(("name", "mesh", "every"), [
    pytest.param("autopar-llama", "cp=2,tp=2,context_method=ring", 10, marks=pytest.mark.slow, id="ring"),
    pytest.param("autopar-moe", "ep=2,dp=2", 18, marks=pytest.mark.slow, id="experts"),
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
        ("autopar-llama", "dp=2,tp=2,fuse=all"),
        ("autopar-llama", "dp=2,tp=2,fuse=head"),
    ]),
])  # fmt: skip
def test_mutations_of_the_matrix_are_caught(name, mesh, every):
    """Inside a ring, an exchange of tokens and the fused loss over a sharded vocabulary among them."""
    if not name.startswith("autopar-"):
        pytest.importorskip("transformers")
    (cell,) = mutation_matrix.run_models([name], [mesh], every, verbose=False)
    check_cell(cell)


# ------------------------------------------------------------------------------------------------------------ the judge's honesty


def test_what_nothing_notices_is_reported():
    node, other = (
        Mutation(("layers_0", "gather"), "delete"),
        Mutation(("layers_0", "mask"), "double", no_op=True),
    )
    cell = judged(
        "m", "tp=4", [(node, EXACT), (other, EXACT), (other, REJECTED), (node, REJECTED)], 0.0
    )
    assert (cell.mutations, cell.no_ops, cell.rejected, cell.ok) == (4, 2, 1, False)
    assert cell.escaped == ("delete layers_0/gather ()",) and cell.wrong == (
        "double layers_0/mask (): rejected by the verifier",
    )
    assert judged("m", "tp=4", [(node, REJECTED), (other, EXACT)], 0.0).ok


def test_backwards_that_return_the_right_gradients_are_named_and_must_train_exactly():
    same = Mutation(("layers_0", "gather"), "slice", same=SAME)
    cell = judged("m", "tp=4", [(same, EXACT)], 0.0)
    assert cell.same == ("same gradients: slice layers_0/gather ()",)
    assert (cell.mutations, cell.no_ops, cell.escaped, cell.ok) == (1, 0, (), True)
    cell = judged("m", "tp=4", [(same, DIFFERS)], 0.0)
    assert cell.wrong == ("slice layers_0/gather (): differs",) and not cell.ok and not cell.differ


def part_ways(rank: int, plan: str, mutation: Mutation | None) -> str:
    """A mutant after which one rank waits for a message that nobody sends."""
    if mutation is not None and rank == 0:
        torch.distributed.recv(torch.zeros(1), src=1)
    return EXACT


def test_a_mutant_that_gets_stuck_is_caught_and_the_pool_starts_anew(pool4, monkeypatch):
    from benchmarks.exactness import mutation_cell

    monkeypatch.setattr(mutation_cell, "_prepare", prepare_two)
    monkeypatch.setattr(mutation_cell, "_mutant", part_ways)
    monkeypatch.setattr(mutation_cell, "TIMEOUT_S", 1.0)
    found = run_mutations(pool4, (trained_case, "llama-tiny"), plans("llama-tiny")["solved"])
    assert [verdict for _, verdict in found] == [mutations.STUCK] * 2


def prepare_two(rank: int, source: tuple, plan: str) -> tuple[list[Mutation], float]:
    return [Mutation(("", "a"), "delete"), Mutation(("", "b"), "delete")], 0.0


def test_the_command(monkeypatch, tmp_path, capsys):
    cells = [
        MutationCell(
            "llama", "tp=4", 3, rejected=2, same=("same gradients: slice layers_0/gather ()",)
        ),
        MutationCell("gpt2", "tp=4", 3, escaped=("delete layers_0/gather ()",)),
    ]
    monkeypatch.setattr(
        mutation_matrix,
        "run_models",
        lambda names, meshes, every, verbose: [c for c in cells if c.model in names],
    )
    file = tmp_path / "cells.json"
    assert (
        mutation_matrix.main(["--models", "llama,gpt2", "--meshes", "tp=4", "--json", str(file)])
        == 1
    )
    shown = capsys.readouterr().out
    assert (
        "gpt2 tp=4: NOT CAUGHT: delete layers_0/gather ()" in shown
        and "llama tp=4: same gradients: slice layers_0/gather ()" in shown
    )
    assert "layers_0/gather" in file.read_text()
    assert mutation_matrix.main(["--models", "llama", "--meshes", "tp=4"]) == 0
    with pytest.raises(SystemExit):
        mutation_matrix.main(["--models", "lama"])
