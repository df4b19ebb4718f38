"""The benchmark of questions: what it asks, and how it prints an answer."""

from __future__ import annotations

import pytest

from autopar.models import parse_model
from benchmarks.search.expert_questions import QUESTIONS, Answer, answer, cluster_of


def test_questions_have_sources_and_clusters_of_many_sizes():
    assert len(QUESTIONS) >= 21 and len({q.name for q in QUESTIONS}) == len(QUESTIONS)
    assert all(q.source for q in QUESTIONS)
    sizes = [cluster_of(q.cluster).num_devices for q in QUESTIONS]
    assert min(sizes) == 2 and max(sizes) == 2048
    assert min(q.seq for q in QUESTIONS) < 2048 and max(q.seq for q in QUESTIONS) == 131072
    assert all(q.global_batch >= 8 for q in QUESTIONS)
    assert all(parse_model(q.model).name for q in QUESTIONS)


def test_a_question_without_a_plan_has_a_reason():
    q = QUESTIONS[0]
    found = Answer(q, cluster_of(q.cluster), None, "No plan fits: why\nIt fits", 0.0, 0.0)
    assert list(found.lines())[-1].endswith("No plan fits: why") and not list(found.broken())


@pytest.mark.slow
def test_a_small_question_is_answered_within_its_headroom():
    (q,) = (q for q in QUESTIONS if q.name == "olmo-1b on 4 A100")
    found = answer(q, 60.0)
    assert found.plan is not None and not list(found.broken())
    words = "\n".join(found.lines())
    assert "simplicity" in words and "FSDP" in words and "DDP" in words
