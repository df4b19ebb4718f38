"""Tables of the models, devices and nodes that can be named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from autopar_cost_models import DEVICES, NODES, Device, NodePreset

from autopar.text.measured import device_errors
from autopar.text.replies import Reply
from autopar.text.tables import Table
from autopar.text.units import count, percent

if TYPE_CHECKING:
    from autopar.models.published import PublishedModel

_DTYPES = ("bf16", "fp16", "fp8", "tf32", "fp32", "fp64")


def _chosen(names: Sequence[str], words: Sequence[str]) -> list[str]:
    """Those of `names` that contain each of `words`, in any case. All without words."""
    return [name for name in names if all(word.lower() in name for word in words)]


def models_reply(words: Sequence[str] = ()) -> Reply:
    """The named models whose names contain each of `words`: parameters, layers, sequence, source."""
    from autopar.models.published import ALIASES, published_models

    models = published_models()
    found = [models[name] for name in _chosen(list(models), words)]
    columns = ("model", "parameters", "layers", "sequence", "built by", "source")
    others = ", ".join(f"{other} is {name}" for other, name in ALIASES.items())
    note = (
        "Parameters are as published (*: without embeddings), and the built model has as many within 0.5 %.  The sequence is that "
        f"of pre-training, and --seq sets another.  Other names: {others}.\n"
    )
    table = Table(columns, list(map(_model_row, found)), (1, 2, 3), title="Models")
    left_out = ("repeats", "different")
    data = [
        {key: value for key, value in asdict(model).items() if key not in left_out}
        | {"layers": model.layers}
        for model in found
    ]
    return Reply([table, note], data)


def _model_row(model: PublishedModel) -> tuple[str, ...]:
    parameters = count(model.parameters) if model.parameters else ""
    mark = "*" if model.without_embeddings else ""
    seq = f"{model.seq:,}" if model.seq > 1 else "images"
    by = f"transformers, {model.kind}" if model.is_hf else f"autopar, {model.kind}"
    return model.name, parameters + mark, model.layers, seq, by, model.source


def devices_reply(words: Sequence[str] = ()) -> Reply:
    """The devices of the catalogue whose names contain each of `words`: memory, dense rates, bandwidth,
    the error of predictions for runs on them, and source.
    """
    errors, found = device_errors(), [DEVICES[name] for name in _chosen(list(DEVICES), words)]
    columns = ("device", "memory", "TFLOP/s, dense", "bandwidth", "error", "source")
    table = Table(columns, list(map(_device_row, found)), (1, 3, 4), title="Devices")
    note = "Error: the mean of predicted step times, over published runs on the device.\n"
    data = [
        asdict(device) | {"measured": errors.get(device.name) and asdict(errors[device.name])}
        for device in found
    ]
    return Reply([table, note], data)


def _device_row(device: Device) -> tuple[str, ...]:
    rates = [
        f"{dtype} {device.flops[dtype] / 1e12:,.4g}" for dtype in _DTYPES if dtype in device.flops
    ]
    found = device_errors().get(device.name)
    return (
        device.name,
        f"{device.memory_bytes / 2**30:.1f} GiB",
        ", ".join(rates),
        f"{device.memory_bandwidth_Bps / 1e9:,.0f} GB/s",
        f"{percent(found.mean_error)} of {found.runs} runs" if found else "no runs known",
        device.source,
    )


def clusters_reply(words: Sequence[str] = ()) -> Reply:
    """The nodes of the catalogue whose names contain each of `words`: devices, links and sources."""
    found = [NODES[name] for name in _chosen(list(NODES), words)]
    columns = ("node", "devices", "inside, each device", "network of a node", "sources")
    note = (
        "NODE:4 is a cluster of 4 of them, such as dgx-h100:4.  Rates are line rates in one direction.  `autopar cluster NODE:4` "
        "prints one as a file to edit.\n"
    )
    table = Table(columns, list(map(_node_row, found)), title="Nodes")
    return Reply([table, note], [asdict(node) | {"device": node.device.name} for node in found])


def _node_row(node: NodePreset) -> tuple[str, ...]:
    nics = node.nics_per_node or node.devices_per_node
    return (
        node.name,
        f"{node.devices_per_node} x {node.device.name}",
        f"{node.intra.bandwidth_Bps / 1e9:g} GB/s",
        f"{nics} x {node.inter.bandwidth_Bps / 1e9:g} GB/s",
        f"{node.intra.source}; {node.inter.source}",
    )
