"""Commands that list what can be named: models, devices, clusters, and a cluster as a file."""

from __future__ import annotations

from collections.abc import Callable

import click

from autopar.cli import options
from autopar.cli.pictures import show_reply

LIST_WIDTH = 200
"""Width of the tables in columns if stdout is not a terminal."""


def _listing(command: Callable) -> Callable:
    """A decorator that adds the arguments of every command of this kind: words of names, and
    --json.
    """
    return click.argument("words", nargs=-1, metavar="[WORD]...")(options.as_json(command))


@click.command(cls=options.Command)
@_listing
def models(words: tuple[str, ...], as_json: bool) -> None:
    """List the models that can be named, with parameters, layers and source; only those whose
    names have every WORD.
    \u000c
    `as_json`: prints JSON instead of a table.
    """
    from autopar.text.catalogues import models_reply

    show_reply(models_reply(words), as_json, width=LIST_WIDTH)


@click.command("devices", cls=options.Command)
@_listing
def devices_command(words: tuple[str, ...], as_json: bool) -> None:
    """List the devices of the catalogue, with figures and source; only those whose names have
    every WORD.
    \u000c
    `as_json`: prints JSON instead of a table.
    """
    from autopar.text.catalogues import devices_reply

    show_reply(devices_reply(words), as_json, width=LIST_WIDTH)


@click.command(cls=options.Command)
@_listing
def clusters(words: tuple[str, ...], as_json: bool) -> None:
    """List the nodes of the catalogue, instances of clouds among them, with links and sources; only
    those whose names have every WORD.
    \u000c
    `as_json`: prints JSON instead of a table.
    """
    from autopar.text.catalogues import clusters_reply

    show_reply(clusters_reply(words), as_json, width=LIST_WIDTH)


@click.command(cls=options.Command)
@click.argument("cluster", type=options.CLUSTER)
def cluster(cluster: str) -> None:
    """Print CLUSTER as a file with comments, to be edited and then given as CLUSTER.
    \u000c
    `cluster` is a text such as 'dgx-h100:4', or the path of a cluster file.
    """
    from autopar.ir.cluster import ClusterSpec
    from autopar.text.cluster_file import cluster_file

    click.echo(cluster_file(ClusterSpec.parse(cluster)), nl=False)
