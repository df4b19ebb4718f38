"""Measures what an operation costs within a step besides its kernel: Python, torch's dispatcher,
autograd, the allocator, cold caches.

One operation repeated is several times faster than operations within a step. Therefore small models
are timed whose kernels take almost no time. The cost is the extra time of one more layer, forward
and backward, divided by the number of operations that plans count in a layer.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from math import fsum

import torch
from torch import Tensor

from autopar import api
from autopar.annotate.annotator import annotator_of
from autopar.annotate.setting import Setting
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import MeshShape
from autopar.models import parse_model
from autopar.planning.model_facts import prepare_model

_KINDS = ("llama", "gpt")
_SHALLOW, _DEEP = 2, 6
_SEQ = 16
_TOO_FAST_TO_TELL = 1e30
"""FLOP/s and bytes/s of an imaginary device on which only operations take time, not kernels."""


def _model(kind: str, layers: int) -> str:
    return f"{kind}:layers={layers},hidden=32,heads=4,vocab=64,seq={_SEQ}"


def count_operations(device_type: str) -> float:
    """The number of operations in one layer of each small model together, as plans count them:
    kernels, and on CUDA also views, which take host time.
    """
    device = ClusterSpec.parse("cpu:1" if device_type == "cpu" else "h100:1").device
    rates = {dtype: _TOO_FAST_TO_TELL for dtype in device.flops}
    device = replace(
        device, flops=rates, memory_bandwidth_Bps=_TOO_FAST_TO_TELL, launch_s=1.0, dispatch_s=1.0
    )
    setting = Setting(
        mesh=MeshShape(),
        micro_batch=1,
        num_microbatches=1,
        zero=0,
        recompute="none",
        precision="fp32",
        cluster=ClusterSpec.make(device, 1, 1),
    )

    def operations(kind: str, layers: int) -> float:
        traced = api.trace_spec(parse_model(_model(kind, layers)), _SEQ, "fp32")
        model = annotator_of(prepare_model(traced, "off", None)).annotate(setting)
        ops = chain.from_iterable(model.classes[segment].ops for segment in model.segments)
        found = [op.strategies[0] for op in ops if op.kind == "op"]
        if device_type == "cpu":
            return fsum(s.forward_s + s.backward_s for s in found)
        return fsum(s.forward_dispatch_s + s.backward_dispatch_s for s in found)

    more = sum(operations(kind, _DEEP) - operations(kind, _SHALLOW) for kind in _KINDS)
    return more / (_DEEP - _SHALLOW)


def layers_s(
    clock: Callable[[Callable[[], object]], float], rounds: int, device: torch.device
) -> float:
    """Seconds of one layer of each small model together, forward and backward. `clock` gives the
    seconds of a call; the median of `rounds` counts. The models take turns.
    """
    models = [(kind, layers) for kind in _KINDS for layers in (_SHALLOW, _DEEP)]
    works = [_training(*model, device) for model in models]
    # the first is the warm-up
    seconds = [[clock(work) for work in works] for _ in range(rounds + 1)][1:]
    taken = dict(zip(models, map(statistics.median, zip(*seconds, strict=True)), strict=True))
    more = [taken[kind, _DEEP] - taken[kind, _SHALLOW] for kind in _KINDS]
    return max(sum(more), 0.0) / (_DEEP - _SHALLOW)


def _training(kind: str, layers: int, device: torch.device) -> Callable[[], None]:
    """A function that runs forward and backward of a small model."""
    spec = parse_model(_model(kind, layers))
    model, batch = spec.build(str(device)), spec.example_inputs(1, _SEQ, str(device))

    def work() -> None:
        loss: Tensor = model(**batch)
        loss.backward()

    return work
