"""Ablation of the cost model: measured runs predicted with one mechanism switched off at a time.

A mechanism is switched off by values alone: fields of the run, of the software or of the cluster,
or constants. The planner stays the same. Constants were fitted with all mechanisms on. Each error
is therefore given twice: with the constants in use, and with constants fitted again without the
mechanism. Those fits take the sensitivities of errors to constants from the model with all
mechanisms on (`fit.Sensitivities`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from math import log, prod
from typing import Any

import numpy as np
from autopar_cost_models import FITTED, FittedConstants

from autopar.errors import AutoparError
from autopar.foreign.published.evaluate import (
    PredictionInputs,
    case_of,
    evaluate,
    price_run,
    settle,
)
from autopar.foreign.published.fit import FREE_CONSTANTS, NO_RUN, Sensitivities, sensitivities
from autopar.foreign.published.run import Run, RunPrediction
from autopar.foreign.published.score import Scored, mape
from autopar.garbage import seldom_collected

CHANGED = 0.001
"""A mechanism counts as changing a run if it changes the step time by more than this fraction."""
INFINITE_BPS = 1e21
GENERATIONS = ("ampere_efficiency", "hopper_efficiency", "blackwell_efficiency")


def _as_it_is(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Mechanism:
    """A mechanism of the cost model, and how to switch it off.

    Attributes:
        name: its name.
        instead: what the model assumes without it.
        run: changes the run so that it is off.
        constants: changes the constants so that it is off.
        case: changes the case so that it is off.
        parts: parts of the step time that are left out without it.
        as_printed: runs that do not fit are not predicted with options that save memory.
        settled: constants that a fit without it does not change.
        joined: constants that a fit without it changes by one common amount.
    """

    name: str
    instead: str
    run: Callable[[Run], Run] = _as_it_is
    constants: Callable[[FittedConstants], FittedConstants] = _as_it_is
    case: Callable[[PredictionInputs], PredictionInputs] = _as_it_is
    parts: tuple[str, ...] = ()
    as_printed: bool = False
    settled: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()

    def off(self, run: Run) -> PredictionInputs:
        """The case of a run with the mechanism switched off."""
        return self.case(case_of(self.run(run), self.constants(FITTED)))

    def predict(self, run: Run, whole: RunPrediction) -> RunPrediction:
        """The prediction of a run without the mechanism. `whole` is the prediction with it, which
        is reused if switching it off changes no value.
        """
        without = self.off(run)
        if self.as_printed:
            return price_run(without)
        found = whole if without == case_of(run) else settle(without)
        left_out_s = sum(found.breakdown.get(part, 0.0) for part in self.parts)
        return replace(found, step_time_s=found.step_time_s - left_out_s) if left_out_s else found

    def slopes(self, table: np.ndarray) -> np.ndarray:
        """The sensitivities of errors to constants, (runs, constants), without the mechanism.
        `table` has those with it.
        """
        found = table.copy()
        places = [FREE_CONSTANTS.index(name) for name in self.joined]
        if places:
            found[:, places[0]] = table[:, places].sum(axis=1)
        found[:, [*places[1:], *(FREE_CONSTANTS.index(name) for name in self.settled)]] = 0.0
        return found


def _software(**fields: Any) -> Callable[[PredictionInputs], PredictionInputs]:
    return lambda case: replace(case, software=replace(case.software, **fields))


def _ran(**fields: Any) -> Callable[[Run], Run]:
    return lambda run: replace(run, software=replace(run.software, **fields))


def _constants(**values: float) -> Callable[[FittedConstants], FittedConstants]:
    return lambda constants: replace(constants, **values)


def _recompute(**modes: str) -> Callable[[Run], Run]:
    def without(run: Run) -> Run:
        own = run.layout.recompute
        mode = modes.get(own.partition("-")[0], own)
        return replace(run, layout=replace(run.layout, recompute=mode))

    return without


def _one_node(case: PredictionInputs) -> PredictionInputs:
    topology = case.cluster.topology
    flat = replace(topology, devices_per_node=topology.num_devices, nodes=1, nics_per_node=None)
    return replace(case, cluster=replace(case.cluster, topology=flat))


def _device(**fields: Any) -> Callable[[PredictionInputs], PredictionInputs]:
    return lambda case: replace(
        case, cluster=replace(case.cluster, device=replace(case.cluster.device, **fields))
    )


def _unpadded(run: Run) -> Run:
    return _ran(padded_vocab=run.shape.vocab)(run)


def _all_keys(run: Run) -> Run:
    return replace(run, shape=replace(run.shape, window=0, window_every=1))


def _one_efficiency(constants: FittedConstants) -> FittedConstants:
    middle = prod(getattr(constants, name) for name in GENERATIONS) ** (1 / len(GENERATIONS))
    return replace(constants, **dict.fromkeys(GENERATIONS, middle))


MECHANISMS = (
    Mechanism("recomputation", "nothing runs again", run=_recompute(full="none", every="none", op="none", selective="none")),
    Mechanism("partial recomputation", "of attention alone: nothing; of ops or some layers: all",
              run=_recompute(every="full", op="full", selective="none")),
    Mechanism("early stop of recomputation", "a block runs again to its end", case=_software(early_stop=False)),
    Mechanism("pipeline bubble", "ranks never wait", parts=("bubble",)),
    Mechanism("scattered messages", "each rank of tp sends all of a pipeline's message", case=_software(scatters_messages=False)),
    Mechanism("work once a step", "no optimizer, no gather or reduction once a step", parts=("step",)),
    Mechanism("late weight gradients", "tp sends while nothing is computed", case=_software(late_gradients=False)),
    Mechanism("overlap over tp", "products and their transfers take turns", case=_software(tp_overlap=False)),
    Mechanism("overlap over dp", "parameters and gradients travel while nothing is computed", case=_software(dp_overlap=False)),
    Mechanism("overlap contention", "a transfer takes nothing from compute", constants=_constants(overlap_slowdown=0.0),
              settled=("overlap_slowdown",)),
    Mechanism("nodes", "all GPUs as in one node", case=_one_node, settled=("inter_efficiency",)),
    Mechanism("one interface for ZeRO-3", "all interfaces of a node", case=_software(sharded_interfaces=0)),
    Mechanism("link efficiency", "links as in benchmarks", constants=_constants(intra_efficiency=1.0, inter_efficiency=1.0),
              settled=("intra_efficiency", "inter_efficiency")),
    Mechanism("kernel launches", "kernels start at once", constants=_constants(launch_s=0.0), settled=("launch_s",)),
    Mechanism("host", "the host issues operations at once", case=_software(issue_s=0.0)),
    Mechanism("stalled hosts", "messages between nodes do not delay the host", case=_software(network_slows_host=0.0)),
    Mechanism("routing on the host", "only the operations of the model", case=_software(routing_operations=0)),
    Mechanism("CUDA graphs", "the host issues every operation", case=_software(cuda_graphs="none")),
    Mechanism("dispatch once", "a token goes to each of its experts", case=_software(dispatch="copies")),
    Mechanism("memory traffic", "memory is infinitely fast", case=_device(memory_bandwidth_Bps=INFINITE_BPS), settled=("hbm_efficiency",)),
    Mechanism("compiler fusion", "all run in eager mode", case=_software(compiled=False)),
    Mechanism("kernels by hand", "Megatron's too run op by op", case=_software(fused_kernels=False)),
    Mechanism("joined products", "queries, keys, values, gate and up run apart", case=_software(joins_products=False)),
    Mechanism("composite norms", "norms have a kernel", case=_software(composite_norms=False)),
    Mechanism("optimizer op by op", "one kernel updates all", case=_software(fused_optimizer=True)),
    Mechanism("fused accumulation", "a kernel adds gradients of weights", case=_software(fused_accumulation=False)),
    Mechanism("accumulation kernels", "all products add to gradients", case=_software(fused_accumulation=True)),
    Mechanism("tiles and waves", "products of any shape run at the full rate", case=_device(compute_units=1)),
    Mechanism("efficiency by generation", "one for all, their geometric mean", constants=_one_efficiency, joined=GENERATIONS),
    Mechanism("power limit", "the rate does not depend on it", constants=_constants(power_exponent=0.0)),
    Mechanism("attention kernel", "the fastest that was measured on the GPU", case=_software(attention_kernel=None)),
    Mechanism("attention written out", "one kernel", run=_ran(flash=True)),
    Mechanism("sliding windows", "queries see all keys", run=_all_keys),
    Mechanism("fp8", "products in bf16", case=_software(matmul_dtype=None), settled=("fp8_efficiency",)),
    Mechanism("fp8 gathers", "tp gathers in bf16", case=_software(fp8_gathers=False)),
    Mechanism("fp8 scaling", "delayed", case=_software(fp8_scaling="delayed")),
    Mechanism("head outside fp8", "the head too multiplies in fp8", case=_software(fp8_head=True)),
    Mechanism("vocabulary padding", "the vocabulary of the tokenizer", run=_unpadded),
    Mechanism("DeepSpeed's passes", "as fast as Megatron's", case=_software(deepspeed_passes=False),
              settled=("deepspeed_pass_s",)),
    Mechanism("dropout", "none", run=_ran(dropout=0.0)),
    Mechanism("dispatch beside compute", "tokens travel while nothing is computed", case=_software(dispatch_overlap=False)),
    Mechanism("sorting by expert", "tokens arrive in order", case=_software(sorts_by_expert=False)),
    Mechanism("permutation by operations", "kernels join them", case=_software(permutes_by_op=False)),
    Mechanism("experts one by one", "grouped products", case=_software(sequential_experts=False)),
    Mechanism("biases of experts", "experts add no bias", case=_software(expert_bias=False)),
    Mechanism("clamps of experts", "experts do not clamp", case=_software(clamps_experts=False)),
    Mechanism("recomputed activations", "experts keep what they activate", case=_software(recomputes_activation=False)),
    Mechanism("gather again", "gathered inputs are kept", case=_software(gathers_again=False)),
    Mechanism("loss kernels", "torch's cross-entropy", case=_software(loss_kernel="plain")),
    Mechanism("state of frameworks", "that of the precision", case=_software(state_recipe=None)),
    Mechanism("inputs kept in fp8", "as they came", case=_software(keeps_fp8=False)),
    Mechanism("fp8 copies of weights", "none", case=_software(fp8_weight_copies=False)),
    Mechanism("freed stage outputs", "they are kept until backward", case=_software(keeps_stage_outputs=True)),
    Mechanism("framework buffers", "none", case=_software(workspace_bytes=0)),
    Mechanism("root unit", "segments free what they gather", case=_software(root_unit=False)),
    Mechanism("live parameters", "segments free what they gather", case=_software(live_parameters=0)),
    Mechanism("fragmentation", "the allocator loses nothing", constants=_constants(fragmentation=0.0)),
    Mechanism("CUDA context", "none", constants=_constants(reserved_bytes=0.0)),
    Mechanism("options that save memory", "layouts run as they are printed", as_printed=True),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Without:
    """Errors without one mechanism.

    `errors` are relative errors of step time, by run. `refitted` are the errors after fitting the
    constants again. `changed` are the ids of runs whose step time it changes. `refused` are those
    of runs that cannot be predicted without it; they keep their prediction. `memory_errors` are
    those of memory, of runs whose memory was measured; `memory_changed` are runs whose memory it
    changes. `rejected` counts runs whose chance to fit is too low (`Scored.rejected`).
    """

    mechanism: Mechanism
    errors: dict[str, float]
    refitted: dict[str, float]
    changed: tuple[str, ...]
    refused: tuple[str, ...]
    memory_errors: dict[str, float]
    memory_changed: tuple[str, ...]
    rejected: int

    def mape(self, refitted: bool = False, changed: bool = False) -> float:
        """The mean absolute relative error over all runs, or if `changed` over the runs that the
        mechanism changes; with constants fitted again if `refitted`. NaN if there is no run.
        """
        found = self.refitted if refitted else self.errors
        return mape(found[run] for run in (self.changed if changed else found))


@dataclass(frozen=True, slots=True)
class Ablation:
    """The result of an ablation. `errors`, `refitted`, `memory_errors` and `rejected` are those with
    all mechanisms on; `refitted` uses constants fitted on the same runs.
    """

    errors: dict[str, float]
    refitted: dict[str, float]
    memory_errors: dict[str, float]
    rejected: int
    without: tuple[Without, ...]


@seldom_collected()
def ablate(
    runs: Sequence[Run],
    mechanisms: Sequence[Mechanism] = MECHANISMS,
    tell: Callable[[str], None] = lambda text: None,
) -> Ablation:
    """Predict all runs with each mechanism switched off in turn. Runs without a measured step time,
    and runs that cannot be predicted, are left out. Raises AutoparError if none remains. Runs are
    processed one by one, so that a model is traced once.
    """
    tables: list[Sensitivities] = []
    # by run: the prediction with all mechanisms on, and without each; None where refused
    wholes: list[RunPrediction] = []
    others: list[list[RunPrediction | None]] = []
    for run in runs:
        try:
            table, whole = sensitivities((run,), evaluate, tell), evaluate(run)
        except AutoparError:
            continue
        tables.append(table)
        wholes.append(whole)
        tell(f"pricing {run.id} without each of {len(mechanisms)} mechanisms")
        others.append([_without_it(mechanism, run, whole) for mechanism in mechanisms])
    if not tables:
        raise AutoparError(f"{NO_RUN}: there is nothing to compare")
    table = Sensitivities(
        tuple(run for table in tables for run in table.runs),
        np.concatenate([table.errors for table in tables]),
        np.concatenate([table.slopes for table in tables]),
    )
    errors, refitted = _errors(table)
    memory_errors, rejected = _memory(table.runs, wholes)
    columns = zip(mechanisms, zip(*others, strict=True), strict=True)
    without = tuple(_without(mechanism, column, wholes, table) for mechanism, column in columns)
    return Ablation(errors, refitted, memory_errors, rejected, without)


def _without_it(mechanism: Mechanism, run: Run, whole: RunPrediction) -> RunPrediction | None:
    try:
        return mechanism.predict(run, whole)
    except AutoparError:
        return None


def _memory(
    runs: Sequence[Run], predictions: Sequence[RunPrediction]
) -> tuple[dict[str, float], int]:
    """(errors of memory by run, of runs whose memory was measured; how many runs are rejected)."""
    results = [Scored(run, found) for run, found in zip(runs, predictions, strict=True)]
    errors = {r.run.id: error for r in results if (error := r.memory_error) is not None}
    return errors, sum(bool(r.rejected) for r in results)


def _without(
    mechanism: Mechanism,
    column: Sequence[RunPrediction | None],
    wholes: Sequence[RunPrediction],
    table: Sensitivities,
) -> Without:
    """The errors without a mechanism. `column` has the predictions without it by run, None where
    refused, and `wholes` those with it.
    """
    names = [run.id for run in table.runs]
    refused = [found is None for found in column]
    found = [whole if one is None else one for one, whole in zip(column, wholes, strict=True)]
    pairs = list(zip(found, wholes, strict=True))
    gains = np.array([log(one.step_time_s / whole.step_time_s) for one, whole in pairs])
    slopes = mechanism.slopes(table.slopes)
    errors, refitted = _errors(replace(table, errors=table.errors + gains, slopes=slopes))
    memory_errors, rejected = _memory(table.runs, found)
    bytes_changed = [one.peak_memory_bytes != whole.peak_memory_bytes for one, whole in pairs]
    changed, fails, holds_other = (
        tuple(compress(names, of))
        for of in (np.abs(np.expm1(gains)) > CHANGED, refused, bytes_changed)
    )
    return Without(
        mechanism, errors, refitted, changed, fails, memory_errors, holds_other, rejected
    )


def _errors(table: Sensitivities) -> tuple[dict[str, float], dict[str, float]]:
    """Relative errors by run: (with the constants in use, with constants fitted on these runs)."""
    change = table.fit(np.ones(len(table.runs), bool))
    return table.errors_after(np.zeros(len(FREE_CONSTANTS))), table.errors_after(change)
