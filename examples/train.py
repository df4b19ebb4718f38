"""Train a small Llama on the Python documentation, byte by byte, under a plan that autopar chooses.

    python examples/train.py                                     # one process
    torchrun --nproc-per-node 4 examples/train.py --steps 200    # four, on this machine's CPU

With --checkpoints DIR it saves as it goes and, started again, goes on from the last checkpoint, on any number of processes:

    torchrun --nproc-per-node 4 --max-restarts 3 examples/train.py --steps 200 --checkpoints DIR
"""

import argparse
import os
from pydoc_data.topics import topics

import torch
from torch.utils.data import DataLoader, Dataset

import autopar
from autopar.models import parse_model


class Text(Dataset):
    """Rows of `seq` bytes; a language model predicts each from those before it."""

    def __init__(self, text: str, seq: int) -> None:
        content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
        self.rows = content[: len(content) // seq * seq].view(-1, seq)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default="llama-small",
        help="a model with a vocabulary of 256 or more (default: llama-small)",
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--batch", type=int, default=8, help="sequences per step over all processes"
    )
    parser.add_argument("--seq", type=int, default=64, help="bytes per sequence")
    parser.add_argument("--checkpoints", help="directory of checkpoints (default: none are saved)")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="run what is between collectives through torch.compile",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    spec = parse_model(args.model)
    text = Text("\n".join(topics.values()), args.seq)
    cluster = f"cpu:{os.environ.get('WORLD_SIZE', 1)}"
    engine = autopar.parallelize(
        spec.build("cpu"),
        cluster,
        spec.example_inputs(args.batch, args.seq, "cpu"),
        optimizer=lambda p: torch.optim.AdamW(p, 1e-3),
        global_batch=args.batch,
        max_grad_norm=1.0,
        compile=args.compile,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, args.steps)

    def say(line: str) -> None:
        if engine.rank == 0:
            print(line, flush=True)

    say(
        f"{args.model} on {cluster}: {engine.plan.mesh}, {engine.plan.num_microbatches} micro-batch(es) of {engine.plan.micro_batch}"
    )
    if args.checkpoints and engine.load(
        args.checkpoints, extra={"scheduler": scheduler}, missing_ok=True
    ):
        say(f"going on after step {engine.steps}")
    saving = None
    while engine.steps < args.steps:
        for batch in DataLoader(text, batch_sampler=engine.sampler(text)):
            engine.step(batch)
            scheduler.step()
            say(str(engine.metrics))
            if args.checkpoints and engine.steps % args.every == 0:
                saving = engine.save(
                    args.checkpoints, extra={"scheduler": scheduler}, keep=2, asynchronous=True
                )
            if engine.steps == args.steps:
                break
    if saving is not None:
        saving.wait()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except autopar.AutoparError as error:
        raise SystemExit(f"Error: {error}") from None
