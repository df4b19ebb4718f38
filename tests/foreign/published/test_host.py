"""The host: small micro-batches wait for it, large ones do not, and graphs and faster hosts shorten the wait."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.published_rows import GPT, LLAMA, MOE, write

from autopar.foreign.published.evaluate import PredictionInputs, case_of, price_run
from autopar.foreign.published.runs import read_runs

PIPELINE = GPT | {"recompute": "none"}


def case(tmp_path, row, **software) -> PredictionInputs:
    (run,), problems = read_runs(write(tmp_path, row))
    assert not problems
    found = case_of(run)
    return replace(found, software=replace(found.software, **software))


def host_s(found: PredictionInputs) -> float:
    return price_run(found).breakdown.get("host", 0.0)


@pytest.mark.parametrize("row", [LLAMA, PIPELINE], ids=["alone", "pipeline"])
def test_a_tiny_model_waits_for_the_host(tmp_path, row):
    """Its kernels take microseconds, and the host issues one in 24."""
    slow = case(tmp_path, row)
    waits_s = host_s(slow)
    assert waits_s > 0.5 * price_run(slow).step_time_s
    at_once = price_run(replace(slow, software=replace(slow.software, issue_s=0.0)))
    assert "host" not in at_once.breakdown
    assert price_run(slow).step_time_s == pytest.approx(at_once.step_time_s + waits_s)
    assert sum(price_run(slow).breakdown.values()) == pytest.approx(price_run(slow).step_time_s)


def test_the_wait_is_the_time_of_the_host_beyond_that_of_the_device(tmp_path):
    """Twice the time for each operation adds once the time that the host needs in all."""
    once, twice, thrice = (host_s(case(tmp_path, LLAMA, issue_s=n * 1e-4)) for n in (1, 2, 3))
    assert twice - once == pytest.approx(thrice - twice) and twice > 1.9 * once


@pytest.mark.parametrize(
    ("layout", "slower"),
    [
        ({"gpus": 2, "tp": 2, "gpus_per_node": 1}, 1.0),  # no pipeline
        ({"gpus": 4, "tp": 2, "pp": 2, "gpus_per_node": 4}, 1.0),  # within a node
        ({"gpus": 2, "pp": 2, "gpus_per_node": 1}, 1.5),
        ({"gpus": 4, "tp": 2, "pp": 2, "gpus_per_node": 2}, 2.0),
        ({"gpus": 8, "tp": 4, "pp": 2, "gpus_per_node": 4}, 3.0),
        ({"gpus": 12, "pp": 3, "dp": 4, "gpus_per_node": 4}, 1.5),
    ],
)
def test_a_pipeline_between_nodes_slows_the_hosts_of_tp(tmp_path, layout, slower):
    """By half for each rank of tp here. `issue_s` is long, so that the host decides."""
    row = PIPELINE | {"tp": 1, "pp": 1, "dp": 1} | layout
    quiet, busy = (
        case(tmp_path, row, issue_s=1e-2, network_slows_host=share) for share in (0.0, 0.5)
    )
    device_s = price_run(replace(quiet, software=replace(quiet.software, issue_s=0.0))).step_time_s
    assert host_s(busy) + device_s == pytest.approx(slower * (host_s(quiet) + device_s), rel=0.02)


def test_graphs_take_the_host_no_time(tmp_path):
    assert host_s(case(tmp_path, LLAMA, cuda_graphs="all")) == 0.0


def test_recomputation_takes_the_host_longer(tmp_path):
    again = host_s(case(tmp_path, LLAMA | {"recompute": "full"}, issue_s=1e-3))
    assert again > 1.2 * host_s(case(tmp_path, LLAMA, issue_s=1e-3))


def test_routing_takes_the_host_further_operations(tmp_path):
    """60 operations in each of the three layers with experts, for each micro-batch."""
    row = MOE | {"recompute": "none"}
    plain, routed = (case(tmp_path, row, routing_operations=n, issue_s=1e-3) for n in (0, 60))
    number = plain.run.num_microbatches
    assert host_s(routed) - host_s(plain) == pytest.approx(number * 3 * 60 * 1e-3)
    graphs = case(tmp_path, row, routing_operations=60, cuda_graphs="but experts", issue_s=1e-3)
    assert 0 < host_s(graphs) < host_s(routed)
