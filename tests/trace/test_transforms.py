"""Function transforms and gradients in forward train as in eager PyTorch."""

from __future__ import annotations

import copy
import functools

import pytest
from support.effort import slow_but
from support.exactness import moved, run_steps, sgd, train_in_place, update_error
from support.transform_programs import EXACT, ROWS, WHOLE, batches, build

import autopar

PINS = {
    "dp=2": {"dp": 2, "tp": 1, "pp": 1, "zero": 0, "micro_batch": ROWS // 2},
    "zero 3": {"dp": 2, "tp": 1, "pp": 1, "zero": 3, "micro_batch": ROWS // 4},
    "tp=2": {"dp": 1, "tp": 2, "pp": 1, "micro_batch": ROWS // 2},
    "pp=2": {"dp": 1, "tp": 1, "pp": 2, "micro_batch": ROWS // 2},
}


def error(name: str, pin: dict, cluster: str) -> float:
    """The largest error of three steps over the tolerance."""
    data = batches()
    expected = train_in_place(
        build(name), copy.deepcopy(data), call=lambda net, batch: net(**batch)
    )
    assert moved(expected) > 1e-3
    engine = autopar.parallelize(
        build(name), cluster, data[0], optimizer=sgd, pin=pin, precision="fp64", global_batch=ROWS
    )
    return update_error(expected, run_steps(engine, data)[1])


def error_on_rank(rank: int, name: str, pin: dict) -> float:
    return error(name, pin, "cpu:2")


QUICK = ("gradient penalty", "tied weights", "Python state")
MESHED = ("ensemble", "functional_call", "grad and value of rows", "hessian of rows", "jvp", "forces of an energy", "gradient penalty",
          "gradients that are not trained", "vmap over experts")  # fmt: skip


@pytest.mark.parametrize("name", slow_but(QUICK, EXACT))
def test_training_is_exact(name):
    rows = ROWS if name in WHOLE else ROWS // 2
    assert error(name, {"micro_batch": rows}, "cpu:1") <= 1


@pytest.mark.slow
@pytest.mark.parametrize("pin", PINS)
@pytest.mark.parametrize("name", MESHED)
def test_two_ranks(pool2, name, pin):
    run = functools.partial(error_on_rank, name=name, pin=PINS[pin])
    assert max(pool2.run(run)) <= 1
