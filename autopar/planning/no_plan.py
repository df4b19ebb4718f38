"""Errors for requests that no plan fits."""

from __future__ import annotations

from autopar.errors import NoPlanFits
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan_fields import Prediction
from autopar.request.plan_request import PlanRequest
from autopar.solve.search.result import SearchResult


def no_plan_fits(found: SearchResult, request: PlanRequest) -> NoPlanFits:
    """The error to raise for a search without a plan: it ran out of time, no layouts are
    consistent, or nothing fits.

    If nothing fits, `least_bytes` has the bytes per device of the smallest plan that was found, if
    computed. `proven` says whether it is proved that none fits: never after a time-out or with
    several kinds of devices. For what would fit, see `planning/remedies.py`.
    """
    if found.status == "time limit":
        devices = request.cluster.num_devices
        return NoPlanFits(
            f"no plan that fits {devices} devices was found in {found.solve_time_s:.0f} s of search, nor a proof that there is none; "
            "raise the time limit, or pin what saves memory (recompute=full, a higher ZeRO stage)",
            proven=False,
            is_cut=True,
        )
    if found.smallest is None:
        return NoPlanFits(
            f"no choice of layouts is consistent under the pins {request.pin or 'given'}: drop pins, or report the model"
        )
    candidate, reason = found.smallest
    needed = reason.memory_bytes if reason.memory_bytes is not None else reason.bound_bytes or 0
    if request.is_mixed:
        kinds = ", ".join(
            f"{_room_words(group)} on {group.device.name}" for group in request.cluster.groups
        )
        return NoPlanFits(
            f"No plan that fits was found: {reason.detail}, "
            f"needs {needed / 2**30:.2f} GiB per device in the plan that lacks least ({candidate.mesh}, "
            f"micro-batch {candidate.micro_batch}, ZeRO {candidate.zero}, recompute {candidate.recompute}); there are {kinds}",
            reason.memory_bytes,
            proven=False,
        )
    room = _room_words(request.cluster.one_kind)
    # of pipelines not every placement is tried
    proven = all(outcome["outcome"] == "infeasible" for outcome in found.outcomes)
    what = "No plan fits: the smallest" if proven else "No plan that fits was found: the smallest"
    return NoPlanFits(
        f"{what} needs {needed / 2**30:.2f} GiB per device of {room} ({candidate.mesh}, "
        f"micro-batch {candidate.micro_batch}, ZeRO {candidate.zero}, recompute {candidate.recompute})",
        reason.memory_bytes,
        proven,
    )


def _room_words(group: ClusterSpec) -> str:
    """The memory of a device that a plan may take, in GiB, as text. It says what is kept free."""
    room, memory = group.room_bytes, group.device.memory_bytes
    kept = f", {(memory - room) / 2**30:.2f} of {memory / 2**30:.2f} being kept free"
    return f"{room / 2**30:.2f}{kept if room < memory else ''}"


def check_host(prediction: Prediction, request: PlanRequest) -> None:
    """Raises NoPlanFits if the plan needs more host memory per device than there is, if that is
    known. Other plans would not help, since offloaded bytes hardly depend on the layout.
    """
    host = request.cluster.host if prediction.host_bytes else None
    if host is not None and prediction.host_bytes > host.memory_bytes:
        raise NoPlanFits(
            "No plan that fits was found: the optimizer state of the fastest one needs "
            f"{prediction.host_bytes / 2**30:.2f} GiB of host memory per "
            f"device of {host.memory_bytes / 2**30:.2f}. Use more devices, or a ZeRO stage that shares it out",
            proven=False,
        )
