"""Analytic cost models of training on accelerators: hardware, kernels, collectives, memory, pipelines.  Standard library only; SI units."""

from autopar_cost_models.catalogue import DEVICES, HOSTS, LINKS, device, devices
from autopar_cost_models.collectives import (
    COLLECTIVES,
    Traffic,
    all_gather_time_s,
    all_reduce_time_s,
    all_to_all_time_s,
    collective_time_s,
    dispatch_time_s,
    distinct,
    neighbour_traffic,
    point_to_point_time_s,
    reduce_scatter_time_s,
)
from autopar_cost_models.fitted import FITTED, ISOLATED, FittedConstants
from autopar_cost_models.hardware import DTYPES, Device, Host, Link
from autopar_cost_models.memory import (
    OFFLOADS,
    StaticMemory,
    activation_itemsize,
    communicator_bytes,
    static_bytes,
)
from autopar_cost_models.pipeline import (
    PipelineTime,
    held_moments,
    late_moments,
    peak_held,
    pipeline_time,
)
from autopar_cost_models.pipeline_order import SCHEDULES, check_schedule, splits_backward
from autopar_cost_models.roofline import arithmetic_intensity, matmul_time_s, memory_time_s
from autopar_cost_models.simulate import Action, Simulation, Span, simulate_pipeline
from autopar_cost_models.stage_times import StageTimes
from autopar_cost_models.topology import (
    NODES,
    NodePreset,
    Topology,
    group_shape,
    home_of,
    node_preset,
)

__all__ = [
    "COLLECTIVES",
    "COST_MODEL_VERSION",
    "DEVICES",
    "DTYPES",
    "FITTED",
    "HOSTS",
    "ISOLATED",
    "LINKS",
    "NODES",
    "OFFLOADS",
    "SCHEDULES",
    "Action",
    "Device",
    "FittedConstants",
    "Host",
    "Link",
    "NodePreset",
    "PipelineTime",
    "Simulation",
    "Span",
    "StageTimes",
    "StaticMemory",
    "Topology",
    "Traffic",
    "activation_itemsize",
    "all_gather_time_s",
    "all_reduce_time_s",
    "all_to_all_time_s",
    "arithmetic_intensity",
    "check_schedule",
    "collective_time_s",
    "communicator_bytes",
    "device",
    "devices",
    "dispatch_time_s",
    "distinct",
    "group_shape",
    "held_moments",
    "home_of",
    "late_moments",
    "matmul_time_s",
    "memory_time_s",
    "neighbour_traffic",
    "node_preset",
    "peak_held",
    "pipeline_time",
    "point_to_point_time_s",
    "reduce_scatter_time_s",
    "simulate_pipeline",
    "splits_backward",
    "static_bytes",
]

COST_MODEL_VERSION = "17"
"""The version of the cost models. Plans record it, since predictions of different versions are not
comparable.
"""
