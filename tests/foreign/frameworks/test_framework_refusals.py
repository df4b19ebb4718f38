"""For each constraint of a framework: what breaks it is refused, with legal neighbours, by the framework too."""

from __future__ import annotations

import pytest

from tests.support.refusals import CASES, Case

NAMES = [f"{case.framework}: {case.constraint}" for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_what_breaks_a_constraint_is_refused(case: Case) -> None:
    found = [finding for finding in case.findings() if case.words in finding.what]
    assert found, [str(finding) for finding in case.findings()]
    assert found[0].theirs, "in the framework's words"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_framework_refuses_it_too(case: Case) -> None:
    refusal = case.refusal()
    if refusal is None:
        pytest.skip(f"{case.framework} has no parser here")
    assert bool(refusal) == case.looks, refusal
