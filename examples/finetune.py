"""Finetune a Hugging Face language model on texts of several lengths, under a plan that autopar chooses.

    python examples/finetune.py                                      # one process
    torchrun --nproc-per-node 4 examples/finetune.py --epochs 3      # four, on this machine's CPU

A text is a paragraph of the Python documentation, byte by byte, and a batch is filled up to its longest text. The last batch of an epoch
has fewer texts and is not dropped. An epoch ends with an evaluation and a checkpoint. Started again, the run goes on from there:

    torchrun --nproc-per-node 4 examples/finetune.py --epochs 3 --checkpoints DIR

--weights names a folder with a config.json and weights, as Hugging Face publishes them, of a vocabulary of 258 or more.
"""

import argparse
import os
from pydoc_data.topics import topics

import torch
import transformers
from torch.utils.data import DataLoader

import autopar
from autopar.runtime.engine import Engine

PAD, START, VOCABULARY, LONGEST = 256, 257, 258, 96
TOPICS = (
    "assert",
    "break",
    "continue",
    "del",
    "global",
    "import",
    "pass",
    "raise",
    "return",
    "with",
)


def texts() -> list[list[int]]:
    """The paragraphs of some topics as tokens: one that starts a text, and one for each byte."""
    found = "\n\n".join(topics[name] for name in TOPICS).split("\n\n")
    return [[START, *text.strip().encode()][:LONGEST] for text in found if text.strip()]


def collate(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """A batch as long as its longest text. Labels of what fills it up are -100, which the loss ignores."""
    longest = max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
    real = ids != PAD
    return {
        "input_ids": ids,
        "attention_mask": real.long(),
        "labels": ids.masked_fill(~real, -100),
    }


def make_model(weights: str | None) -> torch.nn.Module:
    """A small Llama with random parameters, or the model of a folder, whose parameters are read by autopar."""
    if weights is not None:
        config = transformers.AutoConfig.from_pretrained(weights)
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=LONGEST,
            pad_token_id=PAD,
            bos_token_id=START,
            eos_token_id=None,
        )
    )


def evaluate(engine: Engine, loader: DataLoader) -> float:
    """The mean loss of a token over all batches."""
    total, tokens = 0.0, 0
    for batch in loader:
        count = int((batch["labels"][:, 1:] != -100).sum())
        total += float(engine.eval_step(engine.local_batch(batch))) * count
        tokens += count
    return total / tokens


def finetune(args: argparse.Namespace) -> None:
    """Train for all epochs, or until the one that `--until` names."""
    rows = texts()
    held_out, train = rows[::8], [row for index, row in enumerate(rows) if index % 8]
    engine = autopar.parallelize(
        make_model(args.weights),
        f"cpu:{os.environ.get('WORLD_SIZE', 1)}",
        collate([[START] * LONGEST] * args.batch),  # the longest batch that there may be
        optimizer=lambda parameters: torch.optim.AdamW(parameters, args.rate, weight_decay=0.01),
        global_batch=args.batch,
        max_grad_norm=1.0,
        weights=args.weights,
        buckets=(32, 64),
    )
    sampler = engine.sampler(train, drop_last=False)
    loader = DataLoader(train, batch_sampler=sampler, collate_fn=collate)
    evaluation = DataLoader(held_out, args.batch, collate_fn=collate)
    steps = args.epochs * sampler.batches_per_epoch
    scheduler = transformers.get_cosine_schedule_with_warmup(engine.optimizer, 5, steps)

    def say(line: str) -> None:
        if engine.rank == 0:
            print(line, flush=True)

    extra = {"scheduler": scheduler}
    say(f"{engine.plan.mesh}: {len(train)} texts in {sampler.batches_per_epoch} batches an epoch")
    if args.checkpoints and engine.load(args.checkpoints, extra=extra, missing_ok=True):
        say(f"going on after step {engine.steps}")
    while sampler.epoch < (args.until or args.epochs):
        epoch = sampler.epoch + 1
        for batch in loader:
            loss = engine.step(batch)
            scheduler.step()
            say(f"epoch {epoch} step {engine.steps:3} of {steps}: loss {float(loss):.6f}")
        say(f"epoch {epoch} evaluation: loss {evaluate(engine, evaluation):.6f}")
        if args.checkpoints:
            engine.save(args.checkpoints, extra=extra, keep=2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=16, help="texts per step over all processes")
    parser.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate")
    parser.add_argument("--weights", help="a folder with config.json and weights")
    parser.add_argument("--checkpoints", help="directory of checkpoints (default: none are saved)")
    parser.add_argument("--until", type=int, help="stop after this epoch, to go on another time")
    args = parser.parse_args()
    torch.set_num_threads(1)
    finetune(args)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except autopar.AutoparError as error:
        raise SystemExit(f"Error: {error}") from None
