"""`autopar predict`: reads files of runs, predicts each, and scores the predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.errors import AutoparError
from autopar.foreign.published.run import Evaluate, Run
from autopar.foreign.published.runs import Problem, out_of_memory_layouts, read_files
from autopar.foreign.published.score import Scored
from autopar.foreign.published.subsets import picked
from autopar.garbage import seldom_collected


@dataclass(frozen=True, slots=True)
class Predictions:
    """Every run with its prediction, in the order of the files; layouts that ran out of memory
    according to the notes; and runs that were not predicted, with the reason.
    """

    paths: tuple[str, ...]
    results: tuple[Scored, ...]
    out_of_memory: tuple[Scored, ...]
    problems: tuple[Problem, ...]

    @property
    def scored(self) -> tuple[Scored, ...]:
        """The results of complete runs, which count in the scores."""
        return tuple(result for result in self.results if result.run.complete)


def predict_file(
    path: str | Path, evaluate: Evaluate, tell: Callable[[str], None] = lambda text: None
) -> Predictions:
    """`predict_files` of one file."""
    return predict_files((path,), evaluate, tell)


def predict_files(
    paths: Sequence[str | Path],
    evaluate: Evaluate,
    tell: Callable[[str], None] = lambda text: None,
    pick: Callable[[Run], bool] = lambda run: True,
) -> Predictions:
    """The predictions of the runs in CSV files by `evaluate`. Raises AutoparError if a file cannot
    be read, or if `pick` picks no run. A row that cannot be read, or a run that cannot be
    predicted, becomes a problem. `tell` is called with a line of text for each run. Runs that
    `pick` refuses are left out.
    """
    every, problems = read_files(paths)
    runs = picked(every, pick, paths)
    results, failed = predict_runs(runs, evaluate, tell)
    failing = out_of_memory_layouts(tuple(run for run in runs if run.complete))
    layouts, unpredicted = predict_runs(failing, evaluate, tell)
    # they are no rows of the file
    layout_problems = (replace(problem, complete=False) for problem in unpredicted)
    return Predictions(
        tuple(map(str, paths)), results, layouts, (*problems, *failed, *layout_problems)
    )


@seldom_collected()
def predict_runs(
    runs: Iterable[Run], evaluate: Evaluate, tell: Callable[[str], None] = lambda text: None
) -> tuple[tuple[Scored, ...], tuple[Problem, ...]]:
    """(runs with predictions, runs that were refused or failed, with the reason)."""
    results, problems = [], []
    for run in runs:
        tell(f"predicting {run.id}")
        try:
            results.append(Scored(run, evaluate(run)))
        except AutoparError as error:
            problems.append(Problem(run.id, str(error), run.complete))
        # a defect of ours must not cost the other rows; it is shown as one
        except Exception as error:
            reason = f"internal error: {type(error).__name__}: {error}"
            problems.append(Problem(run.id, reason, run.complete))
    return tuple(results), tuple(problems)
