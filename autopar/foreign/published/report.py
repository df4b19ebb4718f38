"""Predictions and scores as tables and as JSON. Bytes become GiB and fractions become percent only
here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import isfinite, nan
from typing import Any

from autopar_cost_models.constants import GIB
from autopar_cost_models.memory_error import FIT_CHANCE, SPREAD

from autopar.errors import AutoparError, shown
from autopar.foreign.published.chances import Reliability
from autopar.foreign.published.command import Predictions
from autopar.foreign.published.defaults import DEFAULTS
from autopar.foreign.published.machines import device_of, network_of
from autopar.foreign.published.run import Run
from autopar.foreign.published.score import (
    LARGE_GROUP,
    SELECTIONS,
    MemoryScore,
    RankScore,
    Scored,
    Scores,
    grouped,
    mean,
    score,
    select,
)
from autopar.foreign.published.score import Group as LayoutGroup
from autopar.text.replies import Field, Reply, field_table, records
from autopar.text.tables import Table

SURE = 0.9
"""Chance to fit below which a prediction is marked as near the limit of memory."""
GOOD_ORDER, GOOD_REGRET = 0.85, 0.03
"""Spearman's correlation and regret that a large group should reach: the report counts the groups."""
REPORT_WIDTH = 150
"""Width of the tables in columns if stdout is not a terminal."""


def report_reply(predictions: Predictions, by: str | None = None) -> Reply:
    """Predicted runs, runs that were not predicted, and scores.

    `by`, a key of `GROUPINGS`, adds scores of each group. The JSON has, with null for what cannot be
    computed:

    - `rows`: one object per predicted run, with `id`, `predicted_step_time_s`,
      `predicted_peak_memory_bytes`, `breakdown` (seconds), the measurements, the errors, whether it
      counts in the scores (`scored`), and the fields that were `defaulted`.
    - `out_of_memory`: the same for layouts that are known to have failed.
    - `not_predicted`: `id`, `reason`, and whether the row was `complete`.
    - `assumed`: `what`, `rule` and `reason` of each thing that rows do not say, and its `runs`. Each
      row has the same as texts.
    - `scores`: of `all` scored runs, of `selections` by name, and of `groups` if `by` is set.
    """
    scored, failed, assumed = predictions.scored, predictions.out_of_memory, _assumed(predictions)
    everything = score(scored, failed)
    selections = {name: score(select(scored, name), select(failed, name)) for name in SELECTIONS}
    grouping = grouped(scored, by) if by is not None else {}
    groups = {name: score(of) for name, of in grouping.items()}
    sets = {"all": everything}
    sets |= {name: of for name, of in selections.items() if select(scored, name)}
    runs = field_table(_RUN, [*predictions.results, *failed], "Runs")
    runs.caption = (
        "! hardly fits the GPU; ~ may not fit: near the limit runs took several times as long\n"
    )
    parts: list[str | Table] = [runs]
    if assumed:
        parts.append(field_table(_ASSUMED, assumed, "Assumed where rows do not say it"))
    if problems := predictions.problems:
        complete = sum(problem.complete for problem in problems)
        title = f"Not predicted: {len(problems)}, of which {complete} complete"
        reasons = [(problem.id, problem.reason) for problem in problems]
        parts.append(Table(("row", "reason"), reasons, title=title))
    parts.append(_scores("Step time", "runs", _TIME, sets))
    parts += [_scores(f"Step time by {by}", str(by), _TIME, groups)] if by is not None else []
    worst = [(name, _signed(error)) for name, error in everything.time.worst]
    parts.append(Table(("run", "error"), worst, (1,), title="Worst step times"))
    parts += [_ranking(everything), _scores("Memory", "runs", _MEMORY, sets)]
    parts += [_scores(f"Memory by {by}", str(by), _MEMORY, groups)] if by is not None else []
    parts += _chances(everything.memory) if everything.memory.out_of_memory else []
    parts += _verdicts(everything)
    if ignored := sorted({option for of in predictions.results for option in of.run.ignored}):
        parts.append(
            f"Options that are not known, and make their runs incomplete: {', '.join(ignored)}"
        )
    only = len(predictions.results) - len(scored)
    parts.append(f"{len(scored)} complete runs are scored, {only} incomplete ones only predicted.")
    scores: dict[str, Any] = {"all": asdict(everything)}
    scores["selections"] = {name: asdict(of) for name, of in selections.items()}
    if by is not None:
        scores["groups"] = {name: asdict(of) for name, of in groups.items()}
    data = {
        "files": list(predictions.paths),
        "rows": records(_RUN, predictions.results),
        "out_of_memory": records(_RUN, failed),
        "not_predicted": [asdict(problem) for problem in problems],
        "assumed": records(_ASSUMED, assumed),
        "scores": scores,
    }
    return Reply(parts, data)


def _measured_words(result: Scored) -> str:
    measured = result.run.measured
    return "out of memory" if measured.out_of_memory else _seconds(measured.step_time_s)


def _memory_words(result: Scored) -> str:
    """The predicted memory, with a mark of a layout that is rejected, or that may not fit its GPU."""
    mark = " !" if result.rejected else " ~" if (result.fit_chance or 1.0) < SURE else ""
    return _gib(result.prediction.peak_memory_bytes) + mark


def _held_words(result: Scored) -> str:
    measured = result.run.measured
    return _gib(measured.memory_bytes) + " (analytic)" * (measured.memory_scope == "analytic")


def _assumed(predictions: Predictions) -> list[tuple[Assumed, int]]:
    return assumed_counts(
        result.run for result in (*predictions.results, *predictions.out_of_memory)
    )


def run_layout_words(run: Run) -> str:
    """A layout in short form, such as `tp8 pp6 dp8 mb4 zero1 recompute full bf16`. Degrees of 1 are
    omitted.
    """
    by = run.layout
    sizes = {name: getattr(by, name) for name in ("tp", "pp", "vpp", "dp", "cp", "ep")}
    words = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    words.append(f"mb{by.micro_batch}")
    sharding = (
        run.software.sharding if run.software.sharding in ("fsdp", "hsdp") else f"zero{by.zero}"
    )
    words += [sharding] if by.zero else []
    words += ["sp"] if by.sequence_parallel else []
    words += [f"recompute {by.recompute}"] if by.recompute != "none" else []
    return " ".join([*words, run.precision.matmul])


def _scores(title: str, what: str, fields: Sequence[Field], sets: dict[str, Scores]) -> Table:
    """A row for each named set of runs, of which `what` says how it is named."""
    return field_table((Field("", lambda row: row[0], what), *fields), sets.items(), title)


def _share(count: int, of: int) -> str:
    return f"{count} ({finite_percent(count / of)})" if of else "-"


def _ranking(scores: Scores) -> Table:
    rank = scores.rank
    rows: list[tuple[str, ...]] = [
        (group.name, str(len(group.ids)), *_rank_words(group)) for group in rank.groups
    ]
    rows.append(("mean (pairs: all)", "", *_rank_words(rank)))
    if rank.large:
        rows.append(
            (f"of {len(rank.large)} groups of {LARGE_GROUP} runs and more:", "", "", "", "")
        )
        orders = [group.spearman for group in rank.large]
        regrets = [group.regret for group in rank.large]
        right = sum(group.pairs_right for group in rank.large)
        pairs = f"{right} of {sum(group.pairs for group in rank.large)}"
        means = (_number(mean(orders)), finite_percent(mean(regrets)), pairs)
        rows.append(("  mean (pairs: all)", "", *means))
        rows.append(("  the worst", "", _number(min(orders)), finite_percent(max(regrets)), ""))
        good = [
            sum(order >= GOOD_ORDER for order in orders),
            sum(r <= GOOD_REGRET for r in regrets),
        ]
        title = f"  groups of at least {GOOD_ORDER}; of at most {GOOD_REGRET:.0%}"
        rows.append((title, "", *map(str, good), ""))
    columns = (
        "layouts of one model on one cluster",
        "runs",
        "Spearman",
        "regret of the top",
        "pairs over 10 % apart in order",
    )
    return Table(columns, rows, (1, 2, 3, 4), title="Ranking")


def _rank_words(of: LayoutGroup | RankScore) -> tuple[str, str, str]:
    return _number(of.spearman), finite_percent(of.regret), f"{of.pairs_right} of {of.pairs}"


def _chances(memory: MemoryScore) -> list[Table]:
    """The reliability table of the chances in use, and of those with each fitted spread."""
    found = [_reliability(f"Chances to fit, spread {SPREAD}", memory.reliability)]
    for fit in memory.spreads:
        title = f"Chances to fit, spread {fit.spread:.3f} fitted on {fit.count} runs ({fit.name})"
        table = _reliability(title, fit.reliability)
        table.caption = f"area under the ROC curve: {finite_percent(fit.separation)}\n"
        found.append(table)
    return found


def _reliability(title: str, rows: Iterable[Reliability]) -> Table:
    texts = [
        (
            f"{finite_percent(r.low)} to {finite_percent(r.high)}",
            str(r.count),
            finite_percent(r.chance),
            finite_percent(r.ran),
        )
        for r in rows
    ]
    columns = ("chance to fit", "layouts", "mean chance", "ran")
    return Table(columns, texts, (1, 2, 3), title=title)


def _verdicts(scores: Scores) -> list[str]:
    memory, lines = scores.memory, []
    lines.append(
        f"The memory model rejects {len(memory.rejected)} of {memory.judged} layouts that ran"
        + (
            f" ({memory.rejected_unprinted} with a recomputation that is not printed)"
            if memory.rejected_unprinted
            else ""
        )
        + (f": {', '.join(memory.rejected)}" if memory.rejected else ".")
    )
    if memory.judged:
        lines.append(_sure_words(memory))
    if memory.outcomes is not None:
        fit = memory.outcomes
        lines.append(
            f"Which of {fit.count} layouts ran gives memory a spread of {fit.spread:.2f}; {finite_percent(fit.crashed)} fail at any size."
        )
    if memory.out_of_memory:
        lines.append(
            f"It accepts {len(memory.accepted)} of {memory.out_of_memory} layouts that ran out of memory"
            + (f": {', '.join(memory.accepted)}" if memory.accepted else ".")
        )
        lines.append(
            "The chance to fit is higher for a layout that ran than for one that failed in "
            f"{finite_percent(memory.separation)} of all pairs (area under the ROC curve)."
        )
    return lines


def _sure_words(memory: MemoryScore) -> str:
    """How many of the layouts with `FIT_CHANCE` ran, and how many that ran have a lower chance."""
    share = memory.sure_ran / memory.sure if memory.sure else nan
    printed = memory.judged - memory.unprinted
    known = len(memory.unsure) - memory.unsure_unprinted
    return (
        f"Of {memory.sure} layouts with a chance to fit of at least {finite_percent(FIT_CHANCE)}, {finite_percent(share)} ran. "
        f"{finite_percent(len(memory.unsure) / memory.judged)} of the {memory.judged} layouts that ran have a lower chance, and "
        f"{finite_percent(known / printed if printed else nan)} of the {printed} whose recomputation is printed."
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value / GIB:.1f}"


def finite_percent(share: float) -> str:
    """A share as `12.3 %`; `-` unless it is finite."""
    return f"{100 * share:.1f} %" if isfinite(share) else "-"


def _signed(share: float | None) -> str:
    return f"{100 * share:+.1f} %" if share is not None and isfinite(share) else "-"


def _number(value: float) -> str:
    return f"{value:.2f}" if isfinite(value) else "-"


_RULES = {default.field: default for default in DEFAULTS}


@dataclass(frozen=True, slots=True)
class Assumed:
    """Something that is inferred for a run: `what` it is, its value or rule in words, and why."""

    what: str
    rule: str
    reason: str

    def __str__(self) -> str:
        return f"{self.what}: {self.rule} ({self.reason})"


def assumed_of(run: Run) -> tuple[Assumed, ...]:
    """What is assumed for a run: its device and network first, then its blank fields."""
    found = [*_of_machine(run)]
    for name in run.defaulted:
        default = _RULES[name]
        found.append(Assumed(name, default.rule, default.reason))
    return tuple(found)


def _of_machine(run: Run) -> Iterable[Assumed]:
    machine = run.machine
    try:
        device = device_of(machine.gpu)
    except AutoparError:  # which says so in the place of a prediction
        return
    if device != machine.gpu.strip().lower():
        yield Assumed("device", device, f"gpu is {shown(machine.gpu)}")
    if machine.gpus <= machine.nvlink_domain:
        return
    _, node = network_of(device, machine.nvlink_domain, machine.nic_Bps, machine.system)
    rate = f"at {machine.nic_Bps * 8 / 1e9:g} Gbit/s a GPU"
    if machine.system and node == machine.system:
        yield Assumed("network", f"that of {node}, {rate}", "the row names the system")
    elif machine.system:
        why = f"{machine.system}, which the row names, has other nodes"
        yield Assumed("network", f"kind and efficiency of {node or device}, {rate}", why)
    elif node:
        why = "no system is named: that of the device's usual node"
        yield Assumed("network", f"kind and efficiency of {node}, {rate}", why)
    else:
        why = f"no system is named, and the catalogue has no node with {device}"
        yield Assumed("network", f"kind and efficiency of Ethernet, {rate}", why)


def assumed_counts(runs: Iterable[Run]) -> list[tuple[Assumed, int]]:
    """(what is assumed, for how many of the runs), the most frequent first."""
    return Counter(assumed for run in runs for assumed in assumed_of(run)).most_common()


_RUN = (
    Field("id", lambda r: r.run.id),
    Field("", lambda r: r.run.id + " (incomplete)" * (not r.run.complete), "run"),
    Field("", lambda r: run_layout_words(r.run), "layout"),
    Field("predicted_step_time_s", lambda r: r.prediction.step_time_s, "step s", _seconds),
    Field("predicted_peak_memory_bytes", lambda r: r.prediction.peak_memory_bytes),
    Field("breakdown", lambda r: dict(r.prediction.breakdown)),
    Field("measured_step_time_s", lambda r: r.run.measured.step_time_s),
    Field("", _measured_words, "measured", str),
    Field("measured_memory_bytes", lambda r: r.run.measured.memory_bytes),
    Field("memory_scope", lambda r: r.run.measured.memory_scope),
    Field("step_time_error", lambda r: r.time_error, "error", _signed),
    Field("", _memory_words, "memory GiB", str),
    Field("", _held_words, "measured", str),
    Field("memory_error", lambda r: r.memory_error, "error", _signed),
    Field("fits", lambda r: r.fits),
    Field("fit_chance", lambda r: r.fit_chance),
    Field("rejected", lambda r: r.rejected),
    Field("near_limit", lambda r: (r.fit_chance or 1.0) < SURE),
    Field("scored", lambda r: r.run.complete),
    Field("defaulted", lambda r: list(r.run.defaulted)),
    Field("assumed", lambda r: list(map(str, assumed_of(r.run)))),
    Field("ignored_options", lambda r: list(r.run.ignored)),
)
"""The facts of a predicted run."""
_ASSUMED = (
    Field("what", lambda pair: pair[0].what, "what"),
    Field("rule", lambda pair: pair[0].rule, "assumed"),
    Field("reason", lambda pair: pair[0].reason, "because"),
    Field("runs", lambda pair: pair[1], "runs", str),
)
"""The facts of something that is assumed, and for how many runs."""


def _of(part: str, head: str, get: Callable[[Any], Any], words: Callable[[Any], str]) -> Field:
    """A column of the scores of named sets of runs, of their `time` or `memory`."""
    return Field("", lambda row: get(getattr(row[1], part)), head, words)


_TIME = (
    _of("time", "runs", lambda t: t.count, str),
    _of("time", "MAPE", lambda t: t.mape, finite_percent),
    _of("time", "median", lambda t: t.median, finite_percent),
    _of("time", "bias", lambda t: t.bias, _signed),
    _of("time", "within 10 %", lambda t: t.within_10, finite_percent),
)
"""The scores of step times."""
_MEMORY = (
    _of("memory", "measured", lambda m: m.count, str),
    _of("memory", "MAPE", lambda m: m.mape, finite_percent),
    _of("memory", "median", lambda m: m.median, finite_percent),
    _of("memory", "bias", lambda m: m.bias, _signed),
    _of("memory", "over 10 % low", lambda m: len(m.under), str),
    _of("memory", "over 15 % low", lambda m: _share(len(m.far_under), m.count), str),
    _of("memory", "ran, but rejected", lambda m: f"{len(m.rejected)} of {m.judged}", str),
    _of("memory", "failed, but accepted", lambda m: f"{len(m.accepted)} of {m.out_of_memory}", str),
)
"""The scores of memory."""
