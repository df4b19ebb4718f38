"""Plain loops that finetune Hugging Face models on padded texts: with AdamW, a schedule, clipping, evaluations and a checkpoint from
which they go on, against the same loop of eager PyTorch on one device. `tests/cli/test_finetune_example.py` runs a third, by torchrun.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.captures import captured_once
from support.exactness import Reference, moved, update_error
from torch import Tensor, nn
from torch.utils.data import DataLoader

import autopar
from autopar.runtime.batches.sampler import DataParallelSampler
from autopar.verify.widened import Widened

transformers = pytest.importorskip("transformers")
VOCAB, LONGEST, BATCH, EPOCHS, NORM, CLASSES = 24, 10, 8, 2, 0.5, 3
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": LONGEST,
    "pad_token_id": 0,
}
Batch = dict[str, Tensor]
Text = tuple[list[int], int]


def texts() -> list[Text]:
    """Texts of 3 to 10 tokens with a class each; batches do not divide their number."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, LONGEST + 1, (21,), generator=generator).tolist()
    return [
        (torch.randint(1, VOCAB, (length,), generator=generator).tolist(), length % CLASSES)
        for length in lengths
    ]


def filled(rows: list[Text]) -> Batch:
    longest = max(len(text) for text, _ in rows)
    ids = torch.tensor([text + [0] * (longest - len(text)) for text, _ in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def classified(rows: list[Text]) -> Batch:
    return filled(rows) | {"labels": torch.tensor([kind for _, kind in rows])}


def translated(rows: list[Text]) -> Batch:
    """A text as the target of its reverse; labels of what fills it up are -100."""
    labels = filled(rows)["input_ids"]
    reverse = filled([(text[::-1], kind) for text, kind in rows])
    return reverse | {"labels": labels.masked_fill(labels == 0, -100)}


def continued(rows: list[Text]) -> Batch:
    batch = filled(rows)
    return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


class LowRank(nn.Module):
    """A frozen linear layer and a trained product of two thin matrices beside it (Hu et al. 2021, arXiv:2106.09685)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.b(self.a(x))


def classifier() -> nn.Module:
    config = transformers.BertConfig(
        **SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=CLASSES
    )
    return transformers.BertForSequenceClassification(config)


def translator() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 24, "num_layers": 2}
    config = transformers.T5Config(
        vocab_size=VOCAB, **sizes, dropout_rate=0.0, pad_token_id=0, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def low_rank() -> nn.Module:
    model = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**SIZES, num_key_value_heads=2, use_cache=False)
    ).requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, LowRank(getattr(layer.self_attn, name)))
    return model


LOOPS: dict[str, tuple[Callable[[], nn.Module], Callable[[list[Text]], Batch]]] = {
    "classes by BERT": (classifier, classified),
    "translation by T5": (translator, translated),
    "low rank by Qwen2": (low_rank, continued),
}
PINS = ({"dp": 2, "tp": 1, "micro_batch": 2}, {"dp": 1, "tp": 2}, {"pp": 2, "micro_batch": 4})


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = LOOPS[name][0]().double().train()
    with torch.no_grad():  # what starts as 0 or 1 would hide errors
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def adamw(parameters) -> torch.optim.Optimizer:
    """Of larger `eps` than by default: gradients that are 0 but for rounding, as of keys' biases, must not become steps."""
    return torch.optim.AdamW(parameters, 0.02, eps=1e-5, weight_decay=0.01)


def schedule_of(optimizer: torch.optim.Optimizer, steps: int):
    return transformers.get_cosine_schedule_with_warmup(optimizer, 2, steps)


def eager(name: str, train: list[Text], held_out: list[Text]) -> tuple[Reference, list[float]]:
    """The loop on one device: (losses of steps and parameters, losses of evaluations)."""
    model, collate = made(name), LOOPS[name][1]
    before = copy.deepcopy(model.state_dict())
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    losses: list[float] = []
    evaluations: list[float] = []
    sampler = DataParallelSampler(train, BATCH, 1, 0, lambda: len(losses), drop_last=False)
    scheduler = schedule_of(optimizer, EPOCHS * sampler.batches_per_epoch)
    for _ in range(EPOCHS):
        for batch in DataLoader(train, batch_sampler=sampler, collate_fn=collate):
            loss = model(**batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), NORM)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(float(loss))
        with torch.no_grad():
            evaluations += [
                float(model(**batch).loss)
                for batch in DataLoader(held_out, BATCH, collate_fn=collate)
            ]
    return Reference(losses, before, model.state_dict()), evaluations


@captured_once()
def parallel(
    name: str, pin: dict, train: list[Text], held_out: list[Text], directory: Path
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The loop under a plan, started anew for each epoch: (losses of steps, of evaluations, parameters)."""
    losses: list[float] = []
    evaluations: list[float] = []
    collate = LOOPS[name][1]
    for epoch in range(EPOCHS):
        engine = autopar.parallelize(
            made(name),
            "cpu:2",
            collate([([1] * LONGEST, 0)] * BATCH),
            adamw,
            global_batch=BATCH,
            max_grad_norm=NORM,
            pin=pin,
            precision="fp64",
            buckets=(6,),
        )
        sampler = engine.sampler(train, drop_last=False)
        scheduler = schedule_of(engine.optimizer, EPOCHS * sampler.batches_per_epoch)
        extra = {"scheduler": scheduler}
        assert bool(engine.load(directory, extra=extra, missing_ok=True)) == (epoch > 0)
        assert sampler.epoch == epoch
        for batch in DataLoader(train, batch_sampler=sampler, collate_fn=collate):
            losses.append(float(engine.step(batch)))
            scheduler.step()
        evaluations += [
            float(engine.eval_step(engine.local_batch(batch)))
            for batch in DataLoader(held_out, BATCH, collate_fn=collate)
        ]
        engine.save(directory, extra=extra)
    return losses, evaluations, engine.full_state_dict()


def trained(result: Reference, model: nn.Module) -> Reference:
    """The result without what is frozen."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    before, after = ({n: state[n] for n in names} for state in (result.before, result.after))
    return Reference(result.losses, before, after)


def errors(rank: int, name: str, directory: Path) -> list[float]:
    """On one rank: the update error over its tolerance under each of PINS."""
    rows, found = texts(), []
    held_out, train = rows[:9], rows[8:]
    with Widened():
        expected, evaluated = eager(name, train, held_out)
        assert moved(trained(expected, made(name))) > 1e-3, "training moves the weights"
        assert len(expected.losses) == 4 and len(evaluated) == 4
        for number, pin in enumerate(PINS):
            losses, evaluations, state = parallel(
                name, pin, train, held_out, directory / str(number)
            )
            assert losses == pytest.approx(expected.losses, rel=1e-9)
            assert evaluations == pytest.approx(evaluated, rel=1e-9)
            found.append(update_error(expected, state))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_loops_compute_what_eager_loops_do(name, pool2, tmp_path):
    for found in pool2.run(errors, name, tmp_path, timeout_s=900):
        assert max(found) <= 1, found
