"""Named ranges in a torch profiler's trace."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_NOTHING = nullcontext()


def named(*words: object) -> AbstractContextManager:
    """A context whose ops appear under these words, joined by spaces, in the trace of a running
    profiler. Without a profiler, or while compiling, it does nothing.
    """
    if torch.compiler.is_compiling() or not torch.autograd._profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(" ".join(map(str, words)))
