"""Pipelines for tests: combinations that torch runs, stage times that models have, and action lists that torch makes."""

from __future__ import annotations

from functools import lru_cache

import autopar_cost_models as cm
from hypothesis import strategies as st

from autopar.runtime.pipeline.schedule_actions import schedule_actions

actions_of = lru_cache(maxsize=None)(schedule_actions)


def chunk_counts(schedule: str) -> tuple[int, ...]:
    return {"interleaved_1f1b": (2, 4), "zero_bubble": (1, 2, 4)}.get(schedule, (1,))


def runs(schedule: str, ranks: int, chunks: int, micro_batches: int) -> bool:
    try:
        cm.check_schedule(schedule, ranks, chunks, micro_batches)
    except ValueError:
        return False
    return True


def layers(
    counts: list[float], ratio: float = 2.0, share: float = 0.5, torch_first: bool = False
) -> list[cm.StageTimes]:
    """Stages of `counts` layers: forward 1 s a layer, backward `ratio` s, of which `share` for weights; torch's first stage has no rest."""
    times = [cm.StageTimes(n, ratio * n, ratio * n * share) for n in counts]
    if torch_first:
        times[0] = cm.StageTimes(times[0].forward_s, times[0].backward_s, times[0].backward_s)
    return times


@st.composite
def pipelines(
    draw,
    schedules=tuple(cm.SCHEDULES),
    ranks=(1, 2, 4, 8, 16),
    most_layers=3,
    most_hop=0.5,
    micro_batches=40,
):
    """(schedule, stages, ranks, micro-batches, hop_s, overlap): 1 to 3 layers a stage, an embedding first, a vocabulary and loss last."""
    schedule, p = draw(st.sampled_from(schedules)), draw(st.sampled_from(ranks))
    v = draw(st.sampled_from(chunk_counts(schedule)))
    m = draw(st.sampled_from([m for m in range(1, micro_batches + 1) if runs(schedule, p, v, m)]))
    most = draw(st.integers(1, most_layers))
    counts = [
        float(n) for n in draw(st.lists(st.integers(1, most), min_size=p * v, max_size=p * v))
    ]
    counts[0] += draw(st.floats(0, 2))
    counts[-1] += draw(st.floats(0, 4))
    stages = layers(counts, draw(st.floats(1.5, 3)), draw(st.floats(0.3, 0.5)), draw(st.booleans()))
    hop_s = draw(st.one_of(st.just(0.0), st.floats(0, most_hop))) * sum(counts) / len(counts)
    return schedule, stages, p, m, hop_s, draw(st.booleans())


def both(
    schedule, stages, ranks, micro_batches, hop_s=0.0, overlap=True
) -> tuple[cm.PipelineTime, cm.Simulation]:
    """The closed form and the simulation of torch's own lists."""
    actions = actions_of(schedule, ranks, len(stages) // ranks, micro_batches)
    closed = cm.pipeline_time(schedule, stages, ranks, micro_batches, hop_s, overlap)
    return closed, cm.simulate_pipeline(actions, stages, hop_s, overlap)
