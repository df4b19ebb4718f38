"""Tables of the models, devices and nodes that can be named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autopar_cost_models import DEVICES, NODES, Device, NodePreset

from autopar.text.measured import device_errors
from autopar.text.tables import grid
from autopar.text.units import count, percent

if TYPE_CHECKING:
    from rich.console import Group

    from autopar.models.published import PublishedModel

_DTYPES = ("bf16", "fp16", "fp8", "tf32", "fp32", "fp64")


def _chosen(names: Sequence[str], words: Sequence[str]) -> list[str]:
    """Those of `names` that contain each of `words`, in any case. All without words."""
    return [name for name in names if all(word.lower() in name for word in words)]


def models_data(words: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The named models whose names contain each of `words`, as plain data."""
    from autopar.models.published import published_models

    models = published_models()
    return [
        {
            key: value
            for key, value in asdict(models[name]).items()
            if key not in ("repeats", "different")
        }
        | {"layers": models[name].layers}
        for name in _chosen(list(models), words)
    ]


def models_table(words: Sequence[str] = ()) -> Group:
    """The named models as a rich renderable: parameters, layers, sequence and source."""
    from rich.console import Group
    from rich.text import Text

    from autopar.models.published import ALIASES, published_models

    models = published_models()
    rows = [_model_row(models[name]) for name in _chosen(list(models), words)]
    columns = ("model", "parameters", "layers", "sequence", "built by", "source")
    others = ", ".join(f"{other} is {name}" for other, name in ALIASES.items())
    return Group(
        grid("Models", columns, rows, right=(1, 2, 3)),
        Text(
            "Parameters are as published (*: without embeddings), and the built model has as many within 0.5 %.  The sequence is that "
            f"of pre-training, and --seq sets another.  Other names: {others}.\n"
        ),
    )


def _model_row(model: PublishedModel) -> tuple[str, ...]:
    parameters = count(model.parameters) if model.parameters else ""
    mark = "*" if model.without_embeddings else ""
    seq = f"{model.seq:,}" if model.seq > 1 else "images"
    by = f"transformers, {model.kind}" if model.is_hf else f"autopar, {model.kind}"
    return model.name, parameters + mark, model.layers, seq, by, model.source


def devices_data(words: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The devices of the catalogue whose names contain each of `words`, as plain data."""
    errors = device_errors()
    return [
        asdict(DEVICES[name]) | {"measured": asdict(errors[name]) if name in errors else None}
        for name in _chosen(list(DEVICES), words)
    ]


def devices_table(words: Sequence[str] = ()) -> Group:
    """The devices of the catalogue as a rich renderable: memory, dense rates, bandwidth, the error
    of predictions for runs on them, and source.
    """
    from rich.console import Group
    from rich.text import Text

    rows = [_device_row(DEVICES[name]) for name in _chosen(list(DEVICES), words)]
    columns = ("device", "memory", "TFLOP/s, dense", "bandwidth", "error", "source")
    return Group(
        grid("Devices", columns, rows, right=(1, 3, 4)),
        Text("Error: the mean of predicted step times, over published runs on the device.\n"),
    )


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


def clusters_data(words: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The nodes of the catalogue whose names contain each of `words`, as plain data."""
    return [
        asdict(NODES[name]) | {"device": NODES[name].device.name}
        for name in _chosen(list(NODES), words)
    ]


def clusters_table(words: Sequence[str] = ()) -> Group:
    """The nodes of the catalogue as a rich renderable: devices, links and their sources."""
    from rich.console import Group
    from rich.text import Text

    rows = [_node_row(NODES[name]) for name in _chosen(list(NODES), words)]
    columns = ("node", "devices", "inside, each device", "network of a node", "sources")
    return Group(
        grid("Nodes", columns, rows),
        Text(
            "NODE:4 is a cluster of 4 of them, such as dgx-h100:4.  Rates are line rates in one direction.  `autopar cluster NODE:4` "
            "prints one as a file to edit.\n"
        ),
    )


def _node_row(node: NodePreset) -> tuple[str, ...]:
    nics = node.nics_per_node or node.devices_per_node
    return (
        node.name,
        f"{node.devices_per_node} x {node.device.name}",
        f"{node.intra.bandwidth_Bps / 1e9:g} GB/s",
        f"{nics} x {node.inter.bandwidth_Bps / 1e9:g} GB/s",
        f"{node.intra.source}; {node.inter.source}",
    )
