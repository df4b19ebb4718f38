"""Captures that tests share: torch.export takes most of the time of a small test."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import lru_cache, wraps
from inspect import signature
from typing import Any, Self
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from autopar import api
from autopar.ir.traced import TracedModel
from autopar.models.base import ModelSpec, NativeSpec
from autopar.runtime.ranks.launch import WorkerPool


def kept(trace_spec: Callable[..., TracedModel]) -> Callable[..., TracedModel]:
    """`trace_spec` that keeps its last captures of native models.

    Specs of users' functions and of config files are captured each time.
    """

    @lru_cache(maxsize=24)
    def of_native(spec: NativeSpec, seq: int, precision: str | None, dtype: torch.dtype) -> Any:
        return trace_spec(spec, seq, precision)

    @wraps(trace_spec)
    def of(spec: ModelSpec, seq: int, precision: str | None = None) -> TracedModel:
        if type(spec) is not NativeSpec:
            return trace_spec(spec, seq, precision)
        return of_native(spec, seq, precision, torch.get_default_dtype())

    return of


class Counted:
    """`trace`, and how often it has returned a capture."""

    def __init__(self, trace: Callable[..., TracedModel]) -> None:
        self.number = 0
        self._trace = trace

    def wrapped(self) -> Callable[..., TracedModel]:
        @wraps(self._trace)
        def trace(*arguments: Any, **options: Any) -> TracedModel:
            found = self._trace(*arguments, **options)
            self.number += 1
            return found

        return trace


def _pid(rank: int) -> int:
    """The process of a rank."""
    return os.getpid()


class Ranks(WorkerPool):
    """A pool that is forked anew after new captures of this process, which its ranks then have too.

    A fork takes 0.1 s, a capture of a small model some seconds on every rank.
    """

    def __init__(self, nproc: int, captures: Counted) -> None:
        super().__init__(nproc)
        self._captures, self._known = captures, 0

    def __enter__(self) -> Self:
        self.run(_pid)  # now, since a test may start a process group
        return self

    def run(self, *arguments: Any, **options: Any) -> list[Any]:
        # with a process group this process cannot be forked
        if self._captures.number != self._known and not dist.is_initialized():
            self.close()
            self._known = self._captures.number
        return super().run(*arguments, **options)


@contextlib.contextmanager
def captured_once() -> Iterator[None]:
    """Within it, `parallelize` captures a model once, for all pins.

    Models of one class must be equal, whatever their number. The first is captured as everywhere;
    later ones take its capture if their batches have its shapes.
    """
    real: Callable[..., TracedModel] = api.trace
    found: dict[Any, TracedModel] = {}

    def trace(*arguments: Any, **options: Any) -> TracedModel:
        given = signature(real).bind(*arguments, **options).arguments
        shapes = tuple(
            (tuple(leaf.shape), leaf.dtype)
            for leaf in tree_leaves(given["example_inputs"])
            if isinstance(leaf, torch.Tensor)
        )
        buffers = given.get("kept_buffers")
        key = (
            *(type(given["model"]), shapes, given.get("loss_fn"), given.get("precision")),
            repr(given.get("batch_dims")),
            None if buffers is None else frozenset(buffers),
        )
        if key not in found:
            found[key] = real(*arguments, **options)
        return found[key]

    with patch.object(api, "trace", trace):
        yield
