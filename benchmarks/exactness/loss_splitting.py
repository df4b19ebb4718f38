"""Thousands of random losses under micro-batches: each is exact, or its batch is not split.

    python benchmarks/exactness/loss_splitting.py --losses 2000 --seed 0 --jobs 2 [--dp 2] [--log FILE.jsonl]

Prints how many losses were exact under micro-batches, how many were exact only with one, and which were
wrong or failed, with their source.  The exit code is 1 if any was wrong or failed, or could not be captured.
`tests/support/loss_generator.py` writes the losses.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.loss_check import Outcome, check
from support.loss_generator import generate
from support.loss_writer import COUPLINGS

from autopar.runtime.ranks.launch import WorkerError, WorkerPool

KINDS = ("exact", "one micro-batch", "uncaptured", "wrong", "crash")
LIMIT_S = 120.0
SHOWN = 20


@dataclass(frozen=True, slots=True)
class Result:
    seed: int
    coupling: str
    tags: tuple[str, ...]
    outcome: Outcome


def prepare() -> None:
    """Use one thread, and keep imported objects out of garbage collection, which took a quarter of the time."""
    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def result(seed: int, ranks: int = 1) -> Result:
    loss = generate(seed)
    return Result(seed, loss.coupling, tuple(sorted(loss.tags)), check(loss, ranks))


def result_on_rank(rank: int, seed: int, ranks: int) -> Result:
    return result(seed, ranks)


def results(seeds: range, jobs: int, ranks: int) -> Iterator[Result]:
    if ranks > 1:
        with WorkerPool(ranks) as pool:
            for seed in seeds:
                yield _on_ranks(pool, seed, ranks)
    elif jobs == 1:
        yield from map(result, seeds)
    else:
        with ProcessPoolExecutor(jobs, initializer=prepare) as pool:
            yield from pool.map(result, seeds)


def _on_ranks(pool: WorkerPool, seed: int, ranks: int) -> Result:
    """The result of the random loss `seed` on `ranks` processes: the worst of all ranks. A process
    that ends or fails gives a "crash".
    """
    try:
        return max(
            pool.run(result_on_rank, seed, ranks, timeout_s=LIMIT_S),
            key=lambda one: KINDS.index(one.outcome.kind),
        )
    except WorkerError as error:
        loss = generate(seed)
        outcome = Outcome("crash", str(error).strip().splitlines()[-1], float("inf"), False)
        return Result(seed, loss.coupling, tuple(sorted(loss.tags)), outcome)


def report(found: list[Result]) -> str:
    """A text: a table of outcomes by what couples the rows of a loss, and the shares of losses that
    are exact under micro-batches.
    """
    counts = {
        coupling: Counter(one.outcome.kind for one in found if one.coupling == coupling)
        for coupling in COUPLINGS
    }
    lines = ["", "rows coupled by".ljust(16) + "".join(kind.rjust(17) for kind in KINDS)]
    for coupling, number in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        name = {"rows": "integers at most"}.get(coupling, coupling)
        lines.append(name.ljust(16) + "".join(str(number[kind]).rjust(17) for kind in KINDS))
    sums = counts["rows"]
    naive = sum(one.outcome.naive_wrong for one in found)
    lines += [
        "",
        f"{_share(sum(number['exact'] for number in counts.values()), len(found))} recognised: exact under micro-batches",
        f"{_share(sums['exact'], sums.total())} of the losses that are sums over rows, given the integers of the batch",
        f"{_share(naive, len(found))} would be wrong if micro-batches were added up or averaged",
    ]
    return "\n".join(lines)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} % ({part} of {whole})" if whole else "none of 0"


def failures(found: list[Result]) -> str:
    """A text about wrong, failed and uncaptured losses: their messages, how often each feature
    occurs among them, and the first SHOWN sources. '' if there are none.
    """
    lines = []
    for kind in ("wrong", "crash", "uncaptured"):
        bad = [one for one in found if one.outcome.kind == kind]
        if not bad:
            continue
        lines += ["", f"{kind}: {len(bad)}"]
        if kind != "wrong":
            messages: dict[str, list[int]] = defaultdict(list)
            for one in bad:
                messages[one.outcome.message[:100]].append(one.seed)
            lines += [
                f"  {len(seeds)} {text}: seeds {seeds[:8]}"
                for text, seeds in sorted(messages.items(), key=lambda x: -len(x[1]))
            ]
        tags, seen = (Counter(tag for one in some for tag in one.tags) for some in (bad, found))
        lines += [f"  {number} of {seen[tag]} {tag}" for tag, number in tags.most_common()]
        for one in bad[:SHOWN]:
            loss = generate(one.seed)
            lines += [
                "",
                f"seed {one.seed}, {loss.rows} rows, {one.outcome.error:.2g} times the tolerance: {one.outcome.message[:300]}",
                loss.source,
            ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--losses", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--dp", type=int, default=1, help="processes that share the batch out besides"
    )
    parser.add_argument("--log", type=Path, help="one JSON object a loss")
    options = parser.parse_args(arguments)
    found = []
    for one in results(
        range(options.seed, options.seed + options.losses), options.jobs, options.dp
    ):
        found.append(one)
        if options.log:
            with options.log.open("a") as log:
                log.write(json.dumps(asdict(one)) + "\n")
        if len(found) % 100 == 0:
            print(len(found), dict(Counter(one.outcome.kind for one in found)), flush=True)
    print(failures(found))
    print(report(found))
    return int(any(one.outcome.kind in ("wrong", "crash", "uncaptured") for one in found))


if __name__ == "__main__":
    prepare()
    atexit.register(gc.unfreeze)  # what is frozen at the end counts as leaked
    sys.exit(main())
