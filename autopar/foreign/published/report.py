"""Predictions and scores as tables and as JSON. Bytes become GiB and fractions become percent only
here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import isfinite, nan
from typing import TYPE_CHECKING, Any

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
from autopar.text.tables import Grid, grid

if TYPE_CHECKING:
    from rich.console import Group


SURE = 0.9
"""Chance to fit below which a prediction is marked as near the limit of memory."""
GOOD_ORDER, GOOD_REGRET = 0.85, 0.03
"""Spearman's correlation and regret that a large group should reach: the report counts the groups."""
REPORT_WIDTH = 150
"""Width of the tables in columns if stdout is not a terminal."""


# ------------------------------------------------------------------------------------------------------------------------- JSON


def report_json(predictions: Predictions, by: str | None = None) -> str:
    """The report as JSON text. Values that cannot be computed are null.

    - `rows`: one object per predicted run, with `id`, `predicted_step_time_s`,
      `predicted_peak_memory_bytes`, `breakdown` (seconds), the measurements, the errors, whether it
      counts in the scores (`scored`), and the fields that were `defaulted`.
    - `out_of_memory`: the same for layouts that are known to have failed.
    - `not_predicted`: `id`, `reason`, and whether the row was `complete`.
    - `assumed`: `what`, `rule` and `reason` of each thing that rows do not say, and its `runs`. Each
      row has the same as texts.
    - `scores`: of `all` scored runs, of `selections` by name, and of `groups` if `by` is set.
    """
    scored = predictions.scored
    scores: dict[str, Any] = {"all": asdict(score(scored, predictions.out_of_memory))}
    scores["selections"] = {
        name: asdict(score(select(scored, name), select(predictions.out_of_memory, name)))
        for name in SELECTIONS
    }
    if by is not None:
        scores["groups"] = {name: asdict(of) for name, of in _group_scores(scored, by).items()}
    data = {
        "files": list(predictions.paths),
        "rows": [_row(result) for result in predictions.results],
        "out_of_memory": [_row(result) for result in predictions.out_of_memory],
        "not_predicted": [asdict(problem) for problem in predictions.problems],
        "assumed": [asdict(of) | {"runs": runs} for of, runs in _assumed(predictions)],
        "scores": scores,
    }
    return json_text(data)


def json_text(data: Any) -> str:
    """JSON of plain data, with null where a number is not finite."""
    return json.dumps(_finite(data), indent=1, allow_nan=False)


def _group_scores(scored: Sequence[Scored], by: str | None) -> dict[str, Scores]:
    return {name: score(of) for name, of in grouped(scored, by).items()} if by is not None else {}


def _row(result: Scored) -> dict[str, Any]:
    run, predicted = result.run, result.prediction
    return {
        "id": run.id,
        "predicted_step_time_s": predicted.step_time_s,
        "predicted_peak_memory_bytes": predicted.peak_memory_bytes,
        "breakdown": dict(predicted.breakdown),
        "measured_step_time_s": run.measured.step_time_s,
        "measured_memory_bytes": run.measured.memory_bytes,
        "memory_scope": run.measured.memory_scope,
        "step_time_error": result.time_error,
        "memory_error": result.memory_error,
        "fits": result.fits,
        "fit_chance": result.fit_chance,
        "rejected": result.rejected,
        "near_limit": (result.fit_chance or 1.0) < SURE,
        "scored": run.complete,
        "defaulted": list(run.defaulted),
        "assumed": list(map(str, assumed_of(run))),
        "ignored_options": list(run.ignored),
    }


def _finite(data: Any) -> Any:
    """`data` with NaN and infinities, which JSON lacks, replaced by None."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not isfinite(data) else data


# ----------------------------------------------------------------------------------------------------------------------- tables


def report_table(predictions: Predictions, by: str | None = None) -> Group:
    """The report as a rich renderable: predicted runs, runs that were not predicted, scores. `by`,
    a key of `GROUPINGS`, adds scores of each group.
    """
    from rich.console import Group
    from rich.text import Text

    scored = predictions.scored
    parts: list[Any] = [_rows(predictions)]
    if assumed := _assumed(predictions):
        parts.append(_assumed_table(assumed))
    if predictions.problems:
        complete = sum(problem.complete for problem in predictions.problems)
        title = f"Not predicted: {len(predictions.problems)}, of which {complete} complete"
        reasons = [(problem.id, problem.reason) for problem in predictions.problems]
        parts.append(text_grid(title, ("row", "reason"), reasons))
    everything = score(scored, predictions.out_of_memory)
    sets = {"all": everything} | {
        name: score(select(scored, name), select(predictions.out_of_memory, name))
        for name in SELECTIONS
        if select(scored, name)
    }
    groups = _group_scores(scored, by)
    parts.append(_time_table("Step time", "runs", sets))
    if by is not None:
        parts.append(_time_table(f"Step time by {by}", by, groups))
    parts += [_worst(everything), _ranking(everything), _memory_table("Memory", "runs", sets)]
    if by is not None:
        parts.append(_memory_table(f"Memory by {by}", by, groups))
    if everything.memory.out_of_memory:
        parts += _chances(everything.memory)
    lines = _verdicts(everything)
    ignored = sorted({option for result in predictions.results for option in result.run.ignored})
    if ignored:
        lines.append(
            f"Options that are not known, and make their runs incomplete: {', '.join(ignored)}"
        )
    lines.append(
        f"{len(scored)} complete runs are scored, {len(predictions.results) - len(scored)} incomplete ones only predicted."
    )
    return Group(*parts, *map(Text, lines))


def _rows(predictions: Predictions) -> Grid:
    rows = []
    for result in (*predictions.results, *predictions.out_of_memory):
        run, predicted, measured = result.run, result.prediction, result.run.measured
        analytic = " (analytic)" if measured.memory_scope == "analytic" else ""
        rows.append(
            (
                run.id + ("" if run.complete else " (incomplete)"),
                run_layout_words(run),
                _seconds(predicted.step_time_s),
                "out of memory" if measured.out_of_memory else _seconds(measured.step_time_s),
                _signed(result.time_error),
                _gib(predicted.peak_memory_bytes) + _limit_mark(result),
                _gib(measured.memory_bytes) + analytic,
                _signed(result.memory_error),
            )
        )
    columns = ("run", "layout", "step s", "measured", "error", "memory GiB", "measured", "error")
    table = text_grid("Runs", columns, rows, right=(2, 3, 4, 5, 6, 7))
    table.caption = (
        "! hardly fits the GPU; ~ may not fit: near the limit runs took several times as long\n"
    )
    return table


def _assumed(predictions: Predictions) -> list[tuple[Assumed, int]]:
    return assumed_counts(
        result.run for result in (*predictions.results, *predictions.out_of_memory)
    )


def _assumed_table(assumed: Iterable[tuple[Assumed, int]]) -> Grid:
    rows = [(of.what, of.rule, of.reason, str(runs)) for of, runs in assumed]
    title = "Assumed where rows do not say it"
    return text_grid(title, ("what", "assumed", "because", "runs"), rows, right=(3,))


def _limit_mark(result: Scored) -> str:
    """The mark of a layout that is rejected, or that may not fit its GPU."""
    if result.rejected:
        return " !"
    return " ~" if (result.fit_chance or 1.0) < SURE else ""


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


def _time_table(title: str, what: str, sets: dict[str, Scores]) -> Grid:
    rows = [
        (
            name,
            str(t.count),
            finite_percent(t.mape),
            finite_percent(t.median),
            _signed(t.bias),
            finite_percent(t.within_10),
        )
        for name, t in ((name, scores.time) for name, scores in sets.items())
    ]
    columns = (what, "runs", "MAPE", "median", "bias", "within 10 %")
    return text_grid(title, columns, rows, right=range(1, 6))


def _memory_table(title: str, what: str, sets: dict[str, Scores]) -> Grid:
    rows = [
        (
            name,
            str(m.count),
            finite_percent(m.mape),
            finite_percent(m.median),
            _signed(m.bias),
            str(len(m.under)),
            _share(len(m.far_under), m.count),
            f"{len(m.rejected)} of {m.judged}",
            f"{len(m.accepted)} of {m.out_of_memory}",
        )
        for name, m in ((name, scores.memory) for name, scores in sets.items())
    ]
    columns = (
        what,
        "measured",
        "MAPE",
        "median",
        "bias",
        "over 10 % low",
        "over 15 % low",
        "ran, but rejected",
        "failed, but accepted",
    )
    return text_grid(title, columns, rows, right=range(1, 9))


def _share(count: int, of: int) -> str:
    return f"{count} ({finite_percent(count / of)})" if of else "-"


def _worst(scores: Scores) -> Grid:
    rows = [(name, _signed(error)) for name, error in scores.time.worst]
    return text_grid("Worst step times", ("run", "error"), rows, right=(1,))


def _ranking(scores: Scores) -> Grid:
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
    return text_grid("Ranking", columns, rows, right=(1, 2, 3, 4))


def _rank_words(of: LayoutGroup | RankScore) -> tuple[str, str, str]:
    return _number(of.spearman), finite_percent(of.regret), f"{of.pairs_right} of {of.pairs}"


def _chances(memory: MemoryScore) -> list[Grid]:
    """The reliability table of the chances in use, and of those with each fitted spread."""
    found = [_reliability(f"Chances to fit, spread {SPREAD}", memory.reliability)]
    for fit in memory.spreads:
        title = f"Chances to fit, spread {fit.spread:.3f} fitted on {fit.count} runs ({fit.name})"
        table = _reliability(title, fit.reliability)
        table.caption = f"area under the ROC curve: {finite_percent(fit.separation)}\n"
        found.append(table)
    return found


def _reliability(title: str, rows: Iterable[Reliability]) -> Grid:
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
    return text_grid(title, columns, texts, right=(1, 2, 3))


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


def text_grid(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()
) -> Grid:
    """A table of plain text. Texts from the file are not interpreted as markup."""
    from rich.text import Text

    return grid(title, columns, (list(map(Text, row)) for row in rows), right)


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
