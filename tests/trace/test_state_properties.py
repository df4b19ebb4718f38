"""Generated modules with state: each trains as in eager PyTorch, or is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from support.effort import examples
from support.state_generator import Step, outcome, steps

NUMBERS = st.sampled_from([1, 2])
"""Numbers of micro-batches."""
UNUSED_BEFORE_NO_GRAD = (
    Step(target="center", write="unfrozen", value="mean of outputs", where="plainly"),
    Step(target="center", read="difference", where="without gradients"),
)
"""torch.export forgets a use of the outputs, whose mean nothing reads."""
PAST_ITS_GRADIENT = (
    Step(target="center", write="copied_to_data", value="mean of outputs"),
    Step(target="center", read="difference"),
)
"""What is written through `.data` gives the buffer no gradient."""
QUIET = dict(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@settings(max_examples=examples(3, 6), **QUIET)
@given(program=steps(), number=NUMBERS)
@example(program=UNUSED_BEFORE_NO_GRAD, number=1)
@example(program=PAST_ITS_GRADIENT, number=1)
def test_generated_modules_are_exact_or_refused_by_name(program, number):
    event(outcome(program, number))


@pytest.mark.slow
@settings(max_examples=300, **QUIET)
@given(program=steps(), number=NUMBERS)
def test_many_generated_modules_are_exact_or_refused_by_name(program, number):
    event(outcome(program, number))
