"""What goes wrong with checkpoints: crashes, full disks, damaged files, other models and optimizers.  Nothing is lost and nobody hangs."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
from datetime import timedelta
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.exactness import setting, solved_plan
from torch import Tensor, nn

from autopar.annotate.annotator import Annotator
from autopar.api import trace
from autopar.errors import AutoparError
from autopar.ir.mesh import MeshShape
from autopar.runtime.checkpoint import checkpoint
from autopar.runtime.checkpoint.files import HEADER, newest
from autopar.runtime.engine import Engine
from autopar.runtime.ranks.agreement import lost_ranks
from autopar.runtime.ranks.launch import WorkerError, run_workers

ONE, TP2, DP2 = MeshShape(), MeshShape(tp=2), MeshShape(dp=2)


class Small(nn.Module):
    """Tied, frozen and unused parameters, buffers, dropout."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.inner, self.outer, self.again = (
            nn.Linear(10, width),
            nn.Linear(width, 10),
            nn.Linear(10, width),
        )
        self.again.weight = self.inner.weight
        self.outer.bias.requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.register_buffer("scale", torch.linspace(0.5, 2.0, 10))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(
            self.outer(
                F.dropout(
                    torch.tanh(self.inner(x * self.scale) + self.again(x)), 0.3, self.training
                )
            ),
            target,
        )


class Wide(Small):
    def __init__(self) -> None:
        super().__init__(16)
        self.extra = nn.Linear(10, 10)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return super().forward(self.extra(x), target)


MODELS = {"small": Small, "wide": Wide}


def model_of(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return MODELS[name]().double()


def batches(steps: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {k: torch.randn(8, 10, generator=generator, dtype=torch.float64) for k in ("x", "target")}
        for _ in range(steps)
    ]


@cache
def traced(name: str):
    found = trace(model_of(name), batches(1)[0])
    return found, Annotator(found)


def adamw(parameters):
    return torch.optim.AdamW(parameters, 0.05)


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def engine_of(mesh: MeshShape, optimizer=adamw, name: str = "small") -> Engine:
    found, annotator = traced(name)
    return Engine(
        model_of(name),
        found,
        solved_plan(found, annotator, setting(mesh)),
        optimizer,
        None,
        None,
        "cpu",
    )


def go(engine: Engine, steps: int) -> list[float]:
    """Steps from where the engine is."""
    start = engine.steps
    return [
        float(engine.step(engine.local_batch(batch))) for batch in batches(start + steps)[start:]
    ]


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return set(found) == set(expected) and all(
        torch.equal(found[k], v) for k, v in expected.items()
    )


def message_of(function) -> str:
    try:
        function()
    except AutoparError as error:
        return str(error)
    return "no error"


# ------------------------------------------------------------------------------------------------------------- several checkpoints


def several(rank: int, directory: str) -> dict:
    """Asynchronous saves, the newest, one by name, and the number to keep."""
    found, engine, root = {}, engine_of(TP2), Path(directory)
    states, savings = [], []
    for step in range(3):
        states.append(engine.full_state_dict())
        savings.append(engine.save(root, asynchronous=True))
        found["waited"] = step == 0 or savings[step - 1].done  # a save waits for the one before
        go(engine, 1)
    first, second, third = (saving.wait() for saving in savings)
    found["names"] = [path.name for path in (first, second, third)]
    other = engine_of(TP2)
    found["newest"] = other.load(root) == 2 and same(other.full_state_dict(), states[2])
    found["by name"] = (
        other.load(first) == 0
        and same(other.full_state_dict(), states[0])
        and not other.optimizer.state
    )
    engine.save(root, keep=2).wait()
    found["kept"] = sorted(path.name for path in root.iterdir())
    torch.manual_seed(7 + rank)
    engine.save(root).wait()
    drawn = torch.rand(3)
    other.load(root)
    found["random"] = torch.equal(torch.rand(3), drawn)
    found["next"] = go(other, 3) == go(engine, 3)  # the same masks of dropout
    return found


def test_several_checkpoints(pool2, tmp_path):
    for found in pool2.run(several, str(tmp_path)):
        assert found.pop("names") == ["000001-step-0", "000002-step-1", "000003-step-2"]
        assert found.pop("kept") == ["000003-step-2", "000004-step-3"]
        assert all(found.values()), found


def test_an_asynchronous_save_has_the_values_of_its_moment(tmp_path, monkeypatch):
    gate, write = threading.Event(), checkpoint.write_pieces
    monkeypatch.setattr(
        checkpoint, "write_pieces", lambda *arguments: gate.wait(30.0) and write(*arguments)
    )
    engine = engine_of(ONE)
    go(engine, 1)
    state, saving = engine.full_state_dict(), engine.save(tmp_path, asynchronous=True)
    losses = go(engine, 2)
    assert not saving.done
    gate.set()
    saving.wait()
    other = engine_of(ONE)
    assert (
        other.load(tmp_path) == 1
        and same(other.full_state_dict(), state)
        and go(other, 2) == losses
    )


def test_incomplete_checkpoints_are_passed_over(tmp_path):
    engine = engine_of(ONE)
    state = engine.full_state_dict()
    good = engine.save(tmp_path).wait()
    go(engine, 2)
    for damage in ("truncate", "remove", "header", "metadata"):
        newest_one = engine.save(tmp_path).wait()
        data = next(newest_one.glob("*.distcp"))
        if damage == "truncate":
            os.truncate(data, data.stat().st_size // 2)
        elif damage == "remove":
            data.unlink()
        elif damage == "header":
            (newest_one / HEADER).write_text('{"format_version": 1, "fi')
        else:
            (newest_one / ".metadata").unlink()
        other = engine_of(ONE)
        assert other.load(tmp_path) == 0 and same(other.full_state_dict(), state), damage
    shutil.rmtree(good)
    text = message_of(lambda: engine.load(tmp_path))
    assert (
        "no checkpoint in" in text
        and "incomplete: .metadata is missing" in text
        and "bytes of" not in text.split(";")[0]
    )
    assert "incomplete" in message_of(lambda: engine.load(newest_one))


OTHERS = {"Optimizer", "LBFGS", "SparseAdam", "Muon"}
"""The base class, what needs a closure, and what takes only sparse gradients or matrices."""


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in torch.optim.__all__
        if isinstance(getattr(torch.optim, n), type) and n not in OTHERS
    ],
)
def test_every_optimizer_goes_on(tmp_path, name):
    def optimizer(parameters):
        return getattr(torch.optim, name)(parameters, 0.05)

    engine = engine_of(ONE, optimizer)
    go(engine, 2)
    engine.save(tmp_path)
    other = engine_of(ONE, optimizer)
    other.load(tmp_path)
    assert go(other, 2) == go(engine, 2) and same(other.full_state_dict(), engine.full_state_dict())


# ------------------------------------------------------------------------------------------------------------------------ mistakes


class Odd:
    """Its state holds an object of a class of the user's."""

    def state_dict(self) -> dict:
        return {"self": Odd}

    def load_state_dict(self, state: dict) -> None:
        raise AssertionError("it cannot be saved")


def mistakes(rank: int, directory: str) -> dict[str, str]:
    root = Path(directory)
    engine = engine_of(DP2)
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1)
    found = {
        "absent": message_of(lambda: engine.load(root / "absent")),
        "missing": str(engine.load(root / "absent", missing_ok=True)),
    }
    (root / "empty").mkdir(exist_ok=True)
    found["empty"] = message_of(lambda: engine.load(root / "empty"))
    go(engine, 1)
    path = engine.save(root, extra={"scheduler": scheduler}).wait()
    found["other model"] = message_of(lambda: engine_of(DP2, name="wide").load(root))
    other = engine_of(DP2, sgd)
    found["other optimizer"] = message_of(lambda: other.load(root))
    fresh = engine_of(DP2, sgd)
    found["unharmed"] = str(
        go(other, 2) == go(fresh, 2) and same(other.full_state_dict(), fresh.full_state_dict())
    )
    found["without optimizer"] = str(
        other.load(root, optimizer=False) == 1
        and same(other.full_state_dict(), engine.full_state_dict())
    )
    found["extra"] = message_of(lambda: engine.load(root, extra={"sampler": scheduler}))
    found["no extra"] = message_of(lambda: engine.save(root, extra={"sampler": 3}))
    found["one rank saves"] = message_of(
        lambda: engine.save(root, extra={"scheduler": scheduler if rank == 0 else None})
    )
    found["no numbers"] = message_of(lambda: engine.save(root, extra={"odd": Odd()}))
    found["keep"] = message_of(lambda: engine.save(root, keep=0))
    found["one rank's extra"] = message_of(
        lambda: engine.load(root, extra={"scheduler": scheduler if rank == 0 else None})
    )
    (root / "file").write_text("")
    found["unwritable"] = message_of(lambda: engine.save(root / "file" / "below"))
    found["later"] = message_of(
        lambda: engine.save(root / "file" / "below", asynchronous=True).wait()
    )
    if rank == 0:
        header = json.loads((path / HEADER).read_text())
        (path / HEADER).write_text(json.dumps(header | {"format_version": 99}))
    dist.barrier()
    found["format"] = message_of(lambda: engine.load(root))
    return found


def test_mistakes_are_heard_on_every_rank(pool2, tmp_path):
    words = {
        "absent": "does not exist; write one with engine.save",
        "missing": "0",
        "empty": "holds no checkpoint",
        "other model": "another model (test, structure",
        "other optimizer": "has exp_avg, exp_avg_sq, step for",
        "unharmed": "True",
        "without optimizer": "True",
        "extra": "no extra 'sampler'; it has scheduler",
        "no extra": "is a int, without state_dict()",
        "one rank saves": "rank 1: extra 'scheduler' is a NoneType",
        "no numbers": "may hold numbers, text, lists, dicts and tensors",
        "keep": "keep=0",
        "one rank's extra": "is a NoneType",
        "unwritable": "cannot save to",
        "later": "cannot save to",
        "format": "checkpoint format 99; this autopar reads format 1",
    }
    for found in pool2.run(mistakes, str(tmp_path), timeout_s=120):
        assert set(found) == set(words)
        for what, text in words.items():
            assert text in found[what], (what, found[what])
        assert (
            "inner.weight is (12, 10) there and (16, 10) here" in found["other model"]
            and "more" in found["other model"]
        )
        assert (
            "this SGD has momentum_buffer" in found["other optimizer"]
            and "optimizer=False" in found["other optimizer"]
        )
        assert found["one rank's extra"].startswith("rank 1: ")


def full_disk(rank: int, directory: str) -> tuple[str, list[str], bool]:
    """Rank 1 may write no file of more than 2,000 bytes."""
    engine = engine_of(TP2)
    state = engine.full_state_dict()
    engine.save(directory).wait()
    go(engine, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        text = message_of(lambda: engine.save(directory))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    other = engine_of(TP2)
    loads = other.load(directory) == 0 and same(other.full_state_dict(), state)
    go(engine, 1)
    return text, sorted(os.listdir(directory)), loads


def test_full_disk(pool2, tmp_path):
    for text, names, loads in pool2.run(full_disk, str(tmp_path), timeout_s=120):
        assert "cannot save" in text and "rank 1:" in text
        assert names == ["000001-step-0"] and loads


def damaged(rank: int, directory: str) -> list[str]:
    """One bit of every file, one file at a time: somewhere, and where all readers stumble over it."""
    engine = engine_of(TP2)
    path = engine.save(directory).wait()
    go(engine, 1)
    state, found = engine.full_state_dict(), []
    for file, place in product(sorted(path.iterdir()), (0.4, 0.0)):
        content = file.read_bytes()
        dist.barrier()
        if rank == 0 and file.name != HEADER:
            flipped = bytearray(content)
            flipped[int(place * len(content))] ^= 4
            file.write_bytes(flipped)
        dist.barrier()
        if file.name != HEADER:
            found.append(message_of(lambda: engine.load(directory)))
            assert same(engine.full_state_dict(), state) and engine.steps == 1, (
                "nothing of the engine has changed"
            )
        dist.barrier()
        if rank == 0:
            file.write_bytes(content)
    dist.barrier()
    assert engine.load(directory) == 0
    return found


def test_damaged_content_of_the_right_size(pool2, tmp_path):
    for found in pool2.run(damaged, str(tmp_path), timeout_s=120):
        assert len(found) == 8 and all(
            "is damaged: " in text and "has changed since it was saved" in text for text in found
        ), found


# -------------------------------------------------------------------------------------------------------------------------- kills


def save_and_die(rank: int, directory: str, victim: int, calls: int, asynchronous: bool) -> int:
    """Go on from the newest checkpoint, one step, and save; the victim is killed at the given call of a function within the save, the
    thread that writes included.  Returns the number of calls."""
    engine = engine_of(TP2)
    engine.load(directory, missing_ok=True)
    go(engine, 1)
    dist.barrier()
    seen = 0

    def count(frame, event, argument) -> None:
        nonlocal seen
        seen += event == "call"
        if rank == victim and seen == calls:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        engine.save(directory, keep=2, asynchronous=asynchronous).wait()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    dist.barrier()
    return seen


def kill_during_saves(directory: Path, number: int, seed: int) -> tuple[int, int]:
    """(saves that finished, saves that left a partial directory) of `number` saves with a kill each."""
    traced("small")
    losses = go(engine_of(ONE), number + 2)
    rng = random.Random(seed)
    calls = run_workers(save_and_die, 2, (str(directory), -1, 0, False))
    finished, partial = 0, 0
    for index in range(number):
        before, victim = newest(directory).header["steps"], rng.randrange(2)
        # some saves make more calls than the first one, some fewer
        at = rng.randrange(1, int(1.3 * calls[victim]))
        try:
            run_workers(save_and_die, 2, (str(directory), victim, at, index % 2 == 1), 60)
        except WorkerError as error:
            assert f"rank {victim} of 2 was killed by SIGKILL" in str(error)
        partial += any(directory.glob(".*.partial"))
        engine = engine_of(ONE)
        assert engine.load(directory) in (before, before + 1), (
            "the last complete checkpoint, or the one that was just finished"
        )
        finished += engine.steps - before
        assert go(engine, 1) == pytest.approx(losses[engine.steps - 1 : engine.steps], rel=1e-10)
    return finished, partial


def test_kills_during_saves(tmp_path):
    _, partial = kill_during_saves(tmp_path, 3, seed=2)
    assert partial > 0


@pytest.mark.slow
def test_kills_during_twenty_saves(tmp_path):
    finished, partial = kill_during_saves(tmp_path, 20, seed=0)
    print(f"{finished} of 20 saves finished, {partial} left a partial directory")
    assert finished > 0 and partial > 0, "kills before and after a checkpoint is complete"


# --------------------------------------------------------------------------------------------------------------------- lost ranks


def outlive(rank: int, directory: str, how: int, limit_s: float) -> None:
    """Rank 1 ends or stops in its second step; rank 0 writes down what it then hears."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=limit_s)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2, timeout=limit
    )
    engine = engine_of(TP2)
    engine.save(f"{directory}/before")
    go(engine, 1)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), how)
    heard = []
    for function in (lambda: go(engine, 1), lambda: engine.save(f"{directory}/after")):
        start = time.perf_counter()
        text = message_of(function)
        heard.append((text, time.perf_counter() - start))
    Path(directory, "heard").write_text(json.dumps(heard))


@pytest.mark.parametrize(("how", "limit_s"), [(signal.SIGKILL, 60.0), (signal.SIGSTOP, 2.0)])
def test_the_others_stop_when_a_rank_is_gone(tmp_path, how, limit_s):
    traced("small")
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=outlive, args=(rank, str(tmp_path), how, limit_s))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    processes[0].join(30.0)
    processes[1].kill()
    assert processes[0].exitcode == 0
    for doing, (text, took_s) in zip(
        ("in a step", "while saving"), json.loads((tmp_path / "heard").read_text()), strict=True
    ):
        assert text.startswith(f"rank 0 lost the other ranks {doing}: one of them ended"), text
        assert "torchrun --max-restarts" in text and "engine.load" in text
        assert took_s < limit_s + 5.0
    assert (
        newest(tmp_path / "before").header["steps"] == 0
        and newest(tmp_path / "after", missing_ok=True) is None
    )


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("gloo")])
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error), match=str(error)), lost_ranks("in a step"):
        raise error
