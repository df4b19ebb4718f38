"""Draws the cluster: some of its nodes with the ranks on them, and what each mesh axis crosses."""

from __future__ import annotations

from dataclasses import dataclass

from autopar_cost_models import Topology, group_shape, neighbour_traffic

from autopar.ir.cluster import Cluster, ClusterSpec, MixedCluster
from autopar.ir.mesh import AXES, MeshShape
from autopar.ir.plan import Plan
from autopar.report.svg import Svg
from autopar.text.numbers import Number, Numbers

_WIDE, _MOST_NODES, _MOST_DEVICES = 900.0, 4, 16


@dataclass(frozen=True, slots=True)
class AxisPlace:
    """Where the `ranks` of a mesh axis lie: `per_node` share a node, on `nodes` nodes. `rate_Bps` is
    what a device has on the slowest link that they cross, in bytes per second.
    """

    axis: str
    ranks: int
    per_node: int
    nodes: int
    rate_Bps: float

    @property
    def words(self) -> str:
        """'inside a node', 'across nodes', or how many share a node."""
        if self.nodes == 1:
            return "inside a node"
        return "across nodes" if self.per_node == 1 else f"{self.per_node} to a node, across nodes"


def axis_places(plan: Plan, cluster: Cluster) -> list[AxisPlace]:
    """Where each axis with several ranks lies, innermost first. With several kinds of devices, pp
    crosses from group to group. Of the other axes, the place is that in the group with the lowest
    rate.
    """
    mesh, found = plan.mesh, []
    groups = [cluster.groups[number] for number in dict.fromkeys(mesh.groups)]
    for axis in reversed([axis for axis in mesh.placed if mesh.size(axis) > 1]):
        if axis == "pp" and isinstance(cluster, MixedCluster):
            rate_Bps = cluster.between.achieved_Bps
            found.append(AxisPlace(axis, mesh.pp, 1, len(groups), rate_Bps))
        else:
            places = (_place(mesh, axis, group.topology) for group in groups)
            found.append(min(places, key=lambda place: place.rate_Bps))
    return found


def _place(mesh: MeshShape, axis: str, topology: Topology) -> AxisPlace:
    here, nodes = group_shape(mesh.size(axis), mesh.stride(axis), topology)
    rate_Bps = topology.intra.achieved_Bps
    if nodes > 1 and axis == "pp":
        traffic = neighbour_traffic(mesh.pp, mesh.stride("pp"), topology)
        rate_Bps = topology.group_inter_Bps(1, traffic.concurrent_groups)
    elif nodes > 1:
        rate_Bps = topology.group_inter_Bps(here) / here
    return AxisPlace(axis, mesh.size(axis), here, nodes, rate_Bps)


def cluster_figure(plan: Plan, cluster: Cluster, numbers: Numbers) -> Svg:
    """The drawing of a cluster with the plan's ranks. `numbers` has the axes under
    'report.axes.N'.
    """
    places = axis_places(plan, cluster)
    figure = Svg("cluster", f"{plan.model_name} on {plan.cluster_name}", _WIDE, 40)
    y, first = 6.0, 0
    each = plan.mesh.num_devices // plan.mesh.pp
    for number in dict.fromkeys(plan.mesh.groups):
        used = each * plan.mesh.groups.count(number)
        y = _group(figure, plan, cluster.groups[number], first, used, y)
        first += used
    figure.text(0, y + 16, "axis", "soft")
    for x, words in (
        (110, "ranks"),
        (200, "where its ranks lie"),
        (_WIDE - 4, "reached per device"),
    ):
        figure.text(x, y + 16, words, "soft", "end" if x > 800 else "start")
    for number, place in enumerate(places):
        row = y + 38 + 21 * number
        figure.rect(0, row - 11, 12, 12, _colour(place.axis))
        figure.text(18, row, place.axis, "strong")
        figure.text(110, row, numbers.count(f"report.axes.{number}.ranks"), "ink")
        figure.text(200, row, place.words, "ink")
        figure.text(_WIDE - 4, row, _rate(numbers, number), "ink", "end")
    figure.height = y + 38 + 21 * len(places)
    return figure


def _colour(axis: str) -> str:
    return "c-p2p" if axis == "pp" else f"c-{axis}"


def _rate(numbers: Numbers, number: int) -> Number:
    return numbers.number(f"report.axes.{number}.rate_Bps", lambda rate: f"{rate / 1e9:,.4g} GB/s")


def _group(figure: Svg, plan: Plan, group: ClusterSpec, first: int, used: int, y: float) -> float:
    """Draw the nodes of a group of devices, whose first rank is `first`. Returns the y below."""
    per_node = group.topology.devices_per_node
    nodes = -(-used // per_node)
    drawn = list(range(nodes)) if nodes <= _MOST_NODES else [0, 1, 2, nodes - 1]
    words = f"{nodes} node{'s' if nodes > 1 else ''} of {per_node} {group.device.name}"
    figure.text(0, y + 12, words, "strong")
    links = group.topology
    inter = f", {links.inter.bandwidth_Bps * links.nics / per_node / 1e9:g} GB/s between nodes" * (
        nodes > 1
    )
    figure.text(
        _WIDE - 4,
        y + 12,
        f"line rates: {links.intra.bandwidth_Bps / 1e9:g} GB/s inside{inter}",
        "soft",
        "end",
    )
    gap = 34.0 if nodes > _MOST_NODES else 14.0
    wide = (_WIDE - gap * (len(drawn) - 1)) / len(drawn)
    for place, node in enumerate(drawn):
        x = place * (wide + gap)
        _node(
            figure,
            plan,
            (x, y + 22, wide),
            first + node * per_node,
            min(per_node, used - node * per_node),
            node,
        )
        if place and node != drawn[place - 1] + 1:
            figure.text(x - gap / 2, y + 68, "...", "soft", "middle")
    return y + 22 + 96 + 14


def _node(
    figure: Svg,
    plan: Plan,
    box: tuple[float, float, float],
    first: int,
    devices: int,
    node: int,
) -> None:
    x, y, wide = box
    figure.rect(x, y, wide, 96, "box")
    mesh = plan.mesh
    stages = sorted({mesh.coordinate(first + device, "pp") for device in range(devices)})
    ends = "-".join(map(str, dict.fromkeys((stages[0], stages[-1]))))
    figure.text(x + 6, y + 13, f"node {node}" + f", pp {ends}" * (mesh.pp > 1), "small")
    shown = list(range(devices)) if devices <= _MOST_DEVICES else [*range(15), devices - 1]
    columns = min(len(shown), 4 if wide < 300 else 8)
    rows = -(-len(shown) // columns)
    cell, tall = (wide - 10) / columns, (96 - 20) / rows
    for place, device in enumerate(shown):
        rank = first + device
        at_x, at_y = x + 5 + (place % columns) * cell, y + 17 + (place // columns) * tall
        own = [axis for axis in AXES if mesh.size(axis) > 1]
        words = " ".join(f"{axis}{mesh.coordinate(rank, axis)}" for axis in own)
        stage = mesh.coordinate(rank, "pp")
        figure.rect(
            at_x + 1, at_y + 1, cell - 2, tall - 2, _shade(stage, mesh.pp), f"rank {rank}: {words}"
        )
        figure.text(at_x + cell / 2, at_y + tall / 2 + 3.5, str(rank), "small", "middle")


def _shade(stage: int, ranks: int) -> str:
    return "k0" if ranks == 1 else f"k{stage % 4}"
