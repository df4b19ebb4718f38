"""The benchmark of questions: what it asks, how it reads questions, and how it prints an answer."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace

import pytest

from autopar.errors import AutoparError
from autopar.models import parse_model
from benchmarks.search.expert_questions import (
    KINDS,
    QUESTIONS,
    Answer,
    Question,
    answer,
    cluster_of,
    main,
    read_questions,
)

ENTRY = """
- name: gpt2 on 2 nodes
  kind: Ethernet
  model: gpt2-small
  cluster: {device: a100-40g, nodes: 2, devices_per_node: 4, inter_bandwidth_Bps: 10Gb/s}
  global_batch: 64
  source: example/repository#1
"""


def test_questions_have_sources_and_clusters_of_many_sizes():
    assert len(QUESTIONS) == 60 and len({q.name for q in QUESTIONS}) == len(QUESTIONS)
    sizes = [cluster_of(q).num_devices for q in QUESTIONS]
    assert min(sizes) == 2 and max(sizes) == 2048
    lengths = [q.seq for q in QUESTIONS if q.seq]
    assert min(lengths) == 128 and max(lengths) == 131072


def test_every_kind_has_three_questions():
    counts = Counter(q.kind for q in QUESTIONS)
    assert set(counts) == set(KINDS) and min(counts.values()) >= 3


def test_a_name_says_the_size_of_its_cluster():
    for q in QUESTIONS:
        count = re.search(r" on ([\d,]+(?: x \d+)?) [A-Z]", q.name)
        assert count is not None, q.name
        factors = count[1].replace(",", "").split(" x ")
        assert cluster_of(q).num_devices == math.prod(map(int, factors)), q.name


def test_models_are_known_or_the_question_says_what_cannot_be_named():
    unknown = []
    for q in QUESTIONS:
        try:
            assert parse_model(q.model).name
        except AutoparError:
            unknown.append(q)
    assert [q.model for q in unknown] == ["sdxl"] and all(q.left_out for q in unknown)


def test_a_question_may_have_a_cluster_of_its_own(tmp_path):
    file = tmp_path / "questions.yaml"
    file.write_text(ENTRY)
    (q,) = read_questions(file)
    assert (q.seq, q.published, q.left_out, q.rows()) == (None, "", "", "64 rows")
    assert cluster_of(q).num_devices == 8
    assert cluster_of(q).topology.inter.bandwidth_Bps == 1.25e9


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("kind: Ethernet", "kind: Ethernets", "unknown kind 'Ethernets'; did you mean Ethernet?"),
        ("kind: Ethernet", "kind: 3", "kind is 3; it must be a text"),
        ("  source: example/repository#1\n", "", "question 1: missing source"),
        ("source: example/repository#1", "source: ''", "source is ''"),
        ("global_batch: 64", "global_batch: 6.4", "global_batch=6.4 must be a whole number >= 1"),
        ("global_batch: 64", "global_batch: 64\n  seq: 0", "seq=0 must be a whole number >= 1"),
        (
            "global_batch: 64",
            "global_batch: 64\n  sequence: 4",
            "question 1: unknown key 'sequence'",
        ),
        ("global_batch: 64", "global_batch: 64\n  published: 3", "published is 3"),
        ("global_batch: 64", "global_batch: [", "is not valid YAML"),
        ("- name", "name", "must be a list of questions"),
    ],
)
def test_a_wrong_field_is_an_error_that_names_the_question(tmp_path, old, new, words):
    file, text = tmp_path / "questions.yaml", ENTRY.replace(old, new)
    if new == "name":
        text = "\n".join(line.removeprefix("  ") for line in text.splitlines())
    file.write_text(text)
    with pytest.raises(AutoparError) as caught:
        read_questions(file)
    assert words in str(caught.value)


def test_a_name_twice_is_an_error(tmp_path):
    file = tmp_path / "questions.yaml"
    file.write_text(ENTRY + ENTRY)
    with pytest.raises(AutoparError, match="gpt2 on 2 nodes is asked twice"):
        read_questions(file)


def test_a_question_without_a_plan_has_a_reason():
    q = QUESTIONS[0]
    found = Answer(q, cluster_of(q), None, "No plan fits: why\nIt fits", 0.0, 0.0)
    lines = list(found.lines())
    assert f"[{q.kind}]" in lines[0] and q.source in lines[0]
    assert lines[-1].endswith("No plan fits: why") and not list(found.broken())


def test_a_model_that_is_refused_is_an_answer(capsys):
    assert main(["--only", "sdxl on 4 RTX 3090"]) == 0
    printed = capsys.readouterr().out
    assert "left out    no U-Net can be named" in printed
    assert "no plan     Unknown model 'sdxl'" in printed


def test_a_family_is_said_not_to_fit_only_if_that_is_proved():
    q = Question("tiny", "dense pre-training", "llama-tiny", "a100-40g:2", 8, "none", seq=16)
    found = answer(q, 10.0)
    assert found.plan is not None
    entries = (
        {"family": "first", "time_s": None, "bound_s": None},
        {"family": "second", "time_s": None, "bound_s": 1.0, "cut": True},
    )
    proof = replace(found.plan.certificate, runners_up=entries)
    words = "\n".join(replace(found, plan=replace(found.plan, certificate=proof)).lines())
    assert "first: none fits" in words and "second: not in time" in words


@pytest.mark.slow
def test_a_small_question_is_answered_within_its_headroom():
    (q,) = (q for q in QUESTIONS if q.name == "olmo-1b on 4 A100")
    found = answer(q, 60.0)
    assert found.plan is not None and not list(found.broken())
    words = "\n".join(found.lines())
    assert "simplicity" in words and "FSDP" in words and "DDP" in words and "not to fit" in words
