"""What `autopar predict` does: read, predict every run, score."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.errors import AutoparError
from autopar.predict.run import Evaluate, Run
from autopar.predict.runs import Problem, out_of_memory_layouts, read_runs
from autopar.predict.score import Scored


@dataclass(frozen=True, slots=True)
class Predictions:
    """Every run with its prediction, in the file's order; layouts that the notes say ran out of memory; what was not predicted, and why.

    `scored` are the results of complete runs: those count in the scores.
    """

    path: str
    results: tuple[Scored, ...]
    out_of_memory: tuple[Scored, ...]
    problems: tuple[Problem, ...]

    @property
    def scored(self) -> tuple[Scored, ...]:
        return tuple(result for result in self.results if result.run.complete)


def predict_file(
    path: str | Path, evaluate: Evaluate, tell: Callable[[str], None] = lambda text: None
) -> Predictions:
    """Predict the runs of a CSV file.  Raises AutoparError if it cannot be read; a run that cannot be predicted is a problem."""
    runs, problems = read_runs(path)
    results, failed = predict_runs(runs, evaluate, tell)
    layouts, unpredicted = predict_runs(
        out_of_memory_layouts(tuple(run for run in runs if run.complete)), evaluate, tell
    )
    # they are no rows of the file
    layout_problems = (replace(problem, complete=False) for problem in unpredicted)
    return Predictions(str(path), results, layouts, (*problems, *failed, *layout_problems))


def predict_runs(
    runs: Iterable[Run], evaluate: Evaluate, tell: Callable[[str], None] = lambda text: None
) -> tuple[tuple[Scored, ...], tuple[Problem, ...]]:
    """(run and prediction, the runs that were refused or failed, with the reason)."""
    results, problems = [], []
    for run in runs:
        tell(f"predicting {run.id}")
        try:
            results.append(Scored(run, evaluate(run)))
        except AutoparError as error:
            problems.append(Problem(run.id, str(error), run.complete))
        except (
            Exception
        ) as error:  # a defect of ours must not cost the other rows; it is shown as one
            problems.append(
                Problem(run.id, f"internal error: {type(error).__name__}: {error}", run.complete)
            )
    return tuple(results), tuple(problems)
