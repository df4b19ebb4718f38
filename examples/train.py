"""Train a small Llama on text under a plan that autopar chooses.

    python examples/train.py                                    # one process
    torchrun --nproc-per-node 4 examples/train.py --steps 20    # four, on this machine's CPU
"""

import argparse
import os

import torch

import autopar
from autopar.demo import text_batches
from autopar.models import parse_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-small", help="a model with a vocabulary of 256 or more (default: llama-small)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step over all processes")
    parser.add_argument("--seq", type=int, default=64, help="bytes per sequence")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    spec = parse_model(args.model)
    batches = text_batches(args.steps, args.batch, args.seq)  # source files of Python's standard library
    cluster = f"cpu:{os.environ.get('WORLD_SIZE', 1)}"
    engine = autopar.parallelize(spec.build("cpu"), cluster, batches[0], optimizer=lambda p: torch.optim.AdamW(p, 3e-4),
                                 global_batch=args.batch, max_grad_norm=1.0)

    if engine.rank == 0:
        print(f"{args.model} on {cluster}: {engine.plan.mesh}, {engine.plan.num_microbatches} micro-batch(es) of {engine.plan.micro_batch}")
    for step, batch in enumerate(batches, 1):
        loss = engine.step(engine.local_batch(batch))
        if engine.rank == 0:
            print(f"step {step:3d}   loss {loss.item():.4f}", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except autopar.AutoparError as error:
        raise SystemExit(f"Error: {error}") from None
