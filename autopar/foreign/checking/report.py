"""The answer to a job as rows, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from autopar.foreign.checking.check import Answer
from autopar.ir.layout import Layout
from autopar.request.options import TOLERANCE
from autopar.text.numbers import Numbers, Words
from autopar.text.plan_words import MEMORY_WORDS, TIME_WORDS, short_words
from autopar.text.replies import Reply
from autopar.text.tables import Table
from autopar.text.units import PROVED, gib, ms, percent

TITLES = {
    "refused": "Refused at start",
    "unknown": "Cannot be determined",
    "contradiction": "Contradictions",
    "note": "Notes",
}
CAUSES = "usual causes: a network slower than its rate, a data loader or checkpoints in the step, stragglers, few kernels that are fused"


def check_reply(answer: Answer) -> Reply:
    """The answer: a summary, ranks and parts, what is refused, and what would be better. JSON has times
    in seconds, memory in bytes.
    """
    data = check_data(answer)
    return Reply(list(_parts(answer, Numbers(data))), data)


def _parts(answer: Answer, n: Numbers) -> Iterator[Table]:
    by = job_layout_words(answer.job.layout, answer.cluster.num_devices)
    rows = [("job", answer.target.title), ("layout", by), ("cluster", str(answer.cluster))]
    yield Table(("", ""), [*rows, *_summary(answer)])
    if answer.withheld:
        reasons = [(reason,) for reason in answer.withheld]
        yield Table(("",), reasons, title="Why no verdict is given")
    if answer.plan is not None:
        yield rank_table(answer, n)
        yield _part_table(answer)
    for kind, title in TITLES.items():
        found = [(f.what, f.theirs, ", ".join(f.legal)) for f in answer.findings if f.kind == kind]
        if found:
            yield _findings(title, found, "legal" if kind == "refused" else "remedy")
    if answer.job.unpriced:
        unpriced = [("not priced", ", ".join(answer.job.unpriced))]
        yield Table(("", ""), unpriced, title="Options without a price")
    if not answer.withheld:
        yield from _advice(answer, n)


def _findings(title: str, rows: list[tuple[str, str, str]], last: str) -> Table:
    """A table of findings without columns that are empty."""
    names = ("what", "in its words", last)
    kept = [k for k in range(len(names)) if any(row[k] for row in rows)]
    return Table([names[k] for k in kept], [[row[k] for k in kept] for row in rows], title=title)


def job_layout_words(by: Layout, gpus: int) -> str:
    """A layout in one line: degrees above 1, batches, and what is on."""
    degrees = {"tp": by.tp, "pp": by.pp, "cp": by.cp, "dp": by.dp_on(gpus), "ep": by.ep}
    words = [f"{name}={size}" for name, size in degrees.items() if size > 1]
    words += [f"{by.vpp} stages a rank"] if by.vpp > 1 else []
    words += [f"micro-batch {by.micro_batch} of {by.batch_on(gpus)}", f"ZeRO-{by.zero}"]
    words += [f"{by.copies} copies"] if by.copies > 1 else []
    words += ["sequence parallel"] if by.sequence_parallel else []
    words += [f"recompute {by.recompute}"] if by.recompute != "none" else []
    return ", ".join([*words, *([f"{by.offload} offloaded"] if by.offload != "none" else [])])


def _summary(answer: Answer) -> Iterator[tuple[str, str]]:
    plan = answer.plan
    if plan is None:
        why = "see why no verdict is given" if answer.withheld else answer.why_not
        yield "prediction", f"none: {why}"
        return
    predicted = plan.predicted
    peak, memory = max(predicted.peak_memory_bytes), answer.cluster.device.memory_bytes
    if answer.withheld:
        size = f"{gib(peak)} of {gib(memory)} on the fullest device"
        yield "verdict", "none"
        yield alone_words(answer), f"{size}, {ms(predicted.step_time_s)} a step"
        if answer.measured_s is not None:
            yield "measured", f"{ms(answer.measured_s)}: not compared, since no verdict is given"
        return
    chance = f", chance {percent(answer.chance)}" if answer.chance is not None else ""
    yield (
        "memory",
        f"{fit_words(answer)}: {gib(peak)} of {gib(memory)} on the fullest device{chance}",
    )
    yield (
        "step",
        f"{ms(predicted.step_time_s)}, {predicted.tokens_per_s / answer.cluster.num_devices:,.0f} tokens/s a device",
    )
    yield "MFU", percent(predicted.mfu)
    if answer.measured_s is not None:
        yield (
            "measured",
            f"{ms(answer.measured_s)}: {answer.measured_s / predicted.step_time_s:.2f} times the prediction",
        )
        yield "of the gap", answer_gap_words(answer)


def fit_words(answer: Answer) -> str:
    """Whether the job fits. A job that is predicted to fit with a chance below `FIT_CHANCE` may fit."""
    if not answer.fits:
        return "does not fit"
    return "fits" if answer.is_sure else "may fit"


def alone_words(answer: Answer) -> str:
    """What the price of a job without a verdict is of."""
    beside = all(part.place == "beside" for part in answer.job.unmodelled)
    return "training alone" if beside else "without these parts"


def answer_gap_words(answer: Answer) -> str:
    """How much of the time above the best plan the layout explains, and what is left."""
    if answer.gap is None:
        return ""
    gap_s, layout_s = answer.gap
    if gap_s <= 0:
        return "none: the measured step is not slower than the best layout's prediction"
    return f"the layout explains {ms(layout_s)} of {ms(gap_s)} above the best plan; {ms(gap_s - layout_s)} are left ({CAUSES})"


def rank_table(answer: Answer, n: Numbers) -> Table:
    """Layers and memory of each pipeline rank; whether it fits, if a verdict is given."""
    assert answer.plan is not None
    memory, peaks = answer.cluster.device.memory_bytes, answer.plan.predicted.peak_memory_bytes
    rows: list[list[Words]] = []
    for rank, (layers, peak) in enumerate(zip(answer.layers, peaks, strict=True)):
        ends = " + embedding" * (rank == 0) + " + loss" * (rank == len(peaks) - 1)
        count = " + ".join(map(str, layers))
        fits = "yes" if peak <= memory else f"{gib(peak - memory)} too much"
        size = n.gib(f"predicted.peak_memory_bytes.{rank}")
        rows.append([str(rank), f"{count}{ends}", size, fits])
    told = 3 if answer.withheld else 4
    names = ("rank", "layers", "peak", "fits")[:told]
    return Table(names, [row[:told] for row in rows], (0, 2), title="Ranks of the pipeline")


def _part_table(answer: Answer) -> Table:
    assert answer.plan is not None
    predicted = answer.plan.predicted
    memory = [
        (MEMORY_WORDS.get(name, name), gib(of)) for name, of in predicted.memory.items() if of
    ]
    times = [(TIME_WORDS.get(name, name), ms(of)) for name, of in predicted.breakdown.items() if of]
    rows = [(*m, *t) for m, t in zip_longest(memory, times, fillvalue=("", ""))]
    return Table(("memory", "", "time", ""), rows, (1, 3), title="Fullest device, and a step")


def change_table(answer: Answer, n: Numbers) -> Table:
    """The single changes with which the job fits, or that none was found."""
    assert answer.plan is not None
    step_s, title = answer.plan.predicted.step_time_s, "Single changes that fit"
    rows = [
        (
            ", ".join(map(str, change.differences)),
            n.ms(f"changes.{k}.step_time_s"),
            f"{change.step_time_s / step_s - 1:+.1%}",
            n.gib(f"changes.{k}.peak_bytes"),
        )
        for k, change in enumerate(answer.changes)
    ]
    if not rows:
        return Table(("",), [("none of those tried",)], title=title)
    return Table(("change", "step", "slower", "peak"), rows, (1, 2, 3), title=title)


def _advice(answer: Answer, n: Numbers) -> Iterator[Table]:
    if answer.changes or (answer.plan is not None and not answer.is_sure):
        yield change_table(answer, n)
    best = [(line,) for line in _best_lines(answer)]
    yield Table(("",), best, title="Best plan within this framework")


def _best_lines(answer: Answer) -> Iterator[str]:
    """The best plan, what is proved about it, and the options in which it differs."""
    best, own = answer.best, answer.plan
    if best is None:
        yield f"none: {answer.why_no_best}"
        return
    step_s = best.predicted.step_time_s
    size = gib(max(best.predicted.peak_memory_bytes))
    if best is own:
        why = answer.why_no_best or "no faster one was found"
        yield f"the job's own layout, {ms(step_s)}: {why}"
    else:
        yield f"{short_words(best)}: {ms(step_s)}, {size}{own_words(answer)}"
    if answer.bound_s:
        yield answer_proof_words(answer)
    yield from (f"  {difference}" for difference in answer.differences)


def own_words(answer: Answer) -> str:
    """How the step of a job's own layout compares with that of the best plan; '' without a price."""
    own, best = answer.plan, answer.best
    if own is None or best is None:
        return ""
    more = own.predicted.step_time_s / best.predicted.step_time_s - 1
    if more >= 0:
        return f"; the job's layout takes {percent(more)} more"
    why = "is refused" if answer.refused else "does not fit"
    return f"; the job's layout, which {why}, takes {percent(-more)} less"


def answer_proof_words(answer: Answer) -> str:
    """What is proved about the best plan of an answer."""
    assert answer.best is not None
    faster = answer.best.predicted.step_time_s / answer.bound_s - 1
    if faster <= PROVED:
        return "proved: no plan that leaves memory free is faster"
    words = f"a plan that leaves memory free is at most {percent(faster)} faster"
    is_proved = faster <= 2 * TOLERANCE
    return f"proved: {words}" if is_proved else f"not proved in time: {words}; raise --time-limit"


_OF_RUNS = ("window", "window_every", "parallel_block", "expert_bias", "family", "activation")
"""Dimensions that no file of a job says."""


def check_data(answer: Answer) -> dict[str, Any]:
    """The answer as JSON data: times in seconds, memory in bytes."""
    plan, best = answer.plan, answer.best
    return {
        "framework": answer.job.framework,
        "layout": asdict(answer.job.layout),
        "model": {n: v for n, v in asdict(answer.job.shape).items() if n not in _OF_RUNS},
        "seq": answer.seq or None,
        "gpus": answer.cluster.num_devices,
        "findings": [asdict(finding) for finding in answer.findings],
        "unpriced": list(answer.job.unpriced),
        "withheld": list(answer.withheld),
        "unknown": list(answer.job.unknown),
        "unmodelled": [asdict(part) for part in answer.job.unmodelled],
        "predicted": asdict(plan.predicted) if plan else None,
        "not_predicted": answer.why_not,
        "layers": [list(stages) for stages in answer.layers],
        "memory_bytes": answer.cluster.device.memory_bytes,
        "fits": answer.fits,
        "chance": answer.chance,
        "best": asdict(best.predicted) | {"layout": short_words(best)} if best else None,
        "best_bound_s": answer.bound_s,
        "no_best": answer.why_no_best,
        "differences": [asdict(difference) for difference in answer.differences],
        "changes": [
            {
                "differences": [asdict(d) for d in c.differences],
                "step_time_s": c.step_time_s,
                "peak_bytes": c.peak_bytes,
            }
            for c in answer.changes
        ],
        "measured_s": answer.measured_s,
        "gap": dict(zip(("whole_s", "layout_s"), answer.gap, strict=True)) if answer.gap else None,
    }
