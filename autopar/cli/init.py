"""The command that writes a training script and a cluster file to start from."""

from __future__ import annotations

from string import Template

import click

from autopar.cli import options
from autopar.errors import AutoparError
from autopar.files import made_folder, write_text

_SCRIPT, _CLUSTER_FILE = "train.py", "cluster.yaml"
_TRAIN = Template('''\
"""Trains $model under a plan of autopar, as `autopar init` wrote it.

    python train.py --plan                                  # plan for cluster.yaml, and print
    torchrun --nproc-per-node N train.py                    # train on the devices of cluster.yaml
    torchrun --nproc-per-node 4 train.py --cluster cpu:4 --model llama-tiny --batch 8 --seq 32
"""

import argparse

import torch
from torch.utils.data import DataLoader, Dataset

import autopar
from autopar.models import parse_model


class Rows(Dataset):
    """Random rows, in the place of your data. Each is a mapping from input names to tensors."""

    def __init__(self, spec, seq, rows=1024):
        self.rows = spec.example_inputs(rows, seq, "cpu")

    def __len__(self):
        return len(next(iter(self.rows.values())))

    def __getitem__(self, index):
        return {name: tensor[index] for name, tensor in self.rows.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=$model_text)
    parser.add_argument("--cluster", default="cluster.yaml")
    parser.add_argument("--batch", type=int, default=$batch, help="sequences of a step")
    parser.add_argument("--seq", type=int, default=$seq, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--plan", action="store_true", help="print the plan, and train nothing")
    args = parser.parse_args()
    spec = parse_model(args.model)
    if args.plan:
        model, batch = spec.build("meta"), spec.example_inputs(2, args.seq)
        plan = autopar.plan(model, args.cluster, batch, global_batch=args.batch)
        print(autopar.explain(plan))
        return
    data = Rows(spec, args.seq)
    engine = autopar.parallelize(
        spec.build("meta"),
        args.cluster,
        spec.example_inputs(args.batch, args.seq, "cpu"),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 3e-4),
        global_batch=args.batch,
    )
    while engine.steps < args.steps:
        for batch in DataLoader(data, batch_sampler=engine.sampler(data)):
            engine.step(batch)
            if engine.rank == 0:
                print(engine.metrics, flush=True)
            if engine.steps == args.steps:
                break
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
''')


@click.command(cls=options.Command)
@click.argument("model", type=options.MODEL)
@click.argument("cluster", type=options.CLUSTER)
@options.option(
    "global_batch", help="Sequences per step over all devices (default: 8 for each device)."
)
@options.option("seq")
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False),
    default=".",
    show_default=True,
    help="Where the files are written.",
)
@click.option("--force", is_flag=True, help="Replace files that are there.")
def init(
    model: str,
    cluster: str,
    global_batch: int | None,
    seq: int | None,
    directory: str,
    force: bool,
) -> None:
    """Write train.py and cluster.yaml for MODEL on CLUSTER, to start from.

    The script plans for the cluster file, and trains under torchrun on rows of random tokens, which
    you replace by your data.
    \u000c
    `seq` are tokens of a sequence (None: what the model was designed for, or 512). `directory` is
    made if it is missing. `force` replaces files that are there.
    """
    from autopar.ir.cluster import ClusterSpec
    from autopar.models import parse_model

    spec, at = parse_model(model), ClusterSpec.parse(cluster)
    text = _TRAIN.substitute(
        model=model,
        model_text=f'"{model}"' if '"' not in model and "\\" not in model else repr(model),
        batch=global_batch or 8 * at.num_devices,
        seq=seq or spec.max_seq or 512,
    )
    folder = made_folder(directory)
    files = {folder / _SCRIPT: text, folder / _CLUSTER_FILE: at.to_yaml()}
    if there := [str(path) for path in files if path.exists() and not force]:
        raise AutoparError(
            f"{', '.join(there)} {'is' if len(there) == 1 else 'are'} there already; give --force to replace, or another --dir"
        )
    for path, content in files.items():
        write_text(path, content, "file")
    click.echo(f"Written: {', '.join(map(str, files))}")
    click.echo(f"Next: python {folder / _SCRIPT} --plan")
