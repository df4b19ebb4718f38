"""The tasks of benchmarks: a model on a cluster, as a function from pins to a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar import api
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.models import parse_model
from autopar.request.pins import Pins
from autopar.request.plan_request import PlanRequest, choose_precision

PlanUnder = Callable[[Mapping[str, Any]], Plan]
"""A function from pins to a plan. Raises AutoparError as `api.plan` does."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a benchmark plans: a model (as on the command line), a cluster (name or spec),
    `global_batch` sequences a step, of `seq` tokens.
    """

    model: str
    cluster: str | ClusterSpec
    global_batch: int
    seq: int

    def __str__(self) -> str:
        where = self.cluster if isinstance(self.cluster, str) else self.cluster.name
        return f"{self.model} on {where}: {self.global_batch} sequences of {self.seq} a step"

    @property
    def cluster_spec(self) -> ClusterSpec:
        return ClusterSpec.parse(self.cluster) if isinstance(self.cluster, str) else self.cluster

    def planner(self, time_limit_s: float = 60.0, precision: str | None = None) -> PlanUnder:
        """A function from pins to a plan of this task. The model is traced here, once. A search for
        a plan takes at most `time_limit_s` seconds.

        `precision` None: that of the model when tracing, the cluster's default when planning.
        """
        spec, cluster = parse_model(self.model), self.cluster_spec
        traced = api.trace_spec(spec, self.seq, precision)
        request = PlanRequest(
            cluster,
            self.global_batch,
            Pins(),
            precision or choose_precision(cluster),
            spec.name,
        )
        return lambda pin: api.plan_traced(traced, replace(request, pin=Pins.of(pin)), time_limit_s)
