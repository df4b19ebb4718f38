"""Batches of public models as they come, against eager PyTorch: padded, with one label a row, in pairs of which one is preferred, with two
tensors of labels, with soft labels of weighted classes."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.effort import tried
from support.exactness import loss_of, run_steps, sgd, train, update_error
from torch import Tensor, nn

import autopar
from autopar.verify.widened import Widened

transformers = pytest.importorskip("transformers")

ROWS, SEQ, VOCAB = 4, 8, 32
SIZES = {
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = SIZES | {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
GPT2 = SIZES | {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": SEQ}
BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": SEQ,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def padded(seed: int, left: bool = False) -> dict[str, Tensor]:
    """Rows of several lengths, filled up with token 0, which the mask hides and no label counts."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (ROWS, SEQ), generator=generator)
    lengths = torch.tensor([SEQ, 3, 6, 5])[torch.randperm(ROWS, generator=generator)]
    mask = (torch.arange(SEQ) < lengths[:, None]).long()
    if left:
        mask = mask.flip(1)
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


def classified(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return padded(seed) | {"labels": torch.randint(3, (ROWS,), generator=generator)}


def pairs(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for number, kind in enumerate(("chosen", "rejected")):
        batch = padded(10 * seed + number, left=True)
        found[kind], found[f"{kind}_mask"] = batch["input_ids"], batch["attention_mask"]
        found[f"{kind}_before"] = torch.randn(ROWS, generator=generator, dtype=torch.float64)
    return found


class Preference(nn.Module):
    """Direct preference optimization: likelihoods of labels by gather, of both texts of a pair in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))

    def forward(
        self,
        chosen: Tensor,
        chosen_mask: Tensor,
        chosen_before: Tensor,
        rejected: Tensor,
        rejected_mask: Tensor,
        rejected_before: Tensor,
    ) -> Tensor:
        ids, mask = torch.cat([chosen, rejected]), torch.cat([chosen_mask, rejected_mask])
        logits = self.policy(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
        tokens = logits.gather(2, ids[:, 1:, None]).squeeze(2)
        better, worse = (tokens * mask[:, 1:]).sum(1).chunk(2)
        return -F.logsigmoid(0.1 * (better - chosen_before - worse + rejected_before)).mean()


def answers(seed: int) -> dict[str, Tensor]:
    """Where answers begin and end; the place behind the last token is ignored."""
    generator, batch = torch.Generator().manual_seed(seed), padded(seed)
    ends = torch.randint(SEQ, (2, ROWS), generator=generator)
    ends[1, 1] = SEQ
    found = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return found | {"start_positions": ends[0], "end_positions": ends[1]}


def followed(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return padded(seed) | {"next_sentence_label": torch.randint(2, (ROWS,), generator=generator)}


def soft(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.randn(ROWS, SEQ, VOCAB, generator=generator, dtype=torch.float64).softmax(-1)
    return padded(seed) | {"teacher": teacher}


class Distilled(nn.Module):
    """Labels and a teacher's probabilities, both with weights of classes and smoothing."""

    def __init__(self) -> None:
        super().__init__()
        self.student = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
        self.register_buffer("weights", torch.linspace(0.3, 2, VOCAB))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, teacher: Tensor
    ) -> Tensor:
        logits = self.student(input_ids=input_ids, attention_mask=attention_mask).logits
        logits = logits.flatten(0, 1)
        hard = F.cross_entropy(logits, labels.flatten(), weight=self.weights, label_smoothing=0.1)
        return hard + F.cross_entropy(logits, teacher.flatten(0, 1), weight=self.weights)


def question_answering() -> nn.Module:
    return transformers.BertForQuestionAnswering(transformers.BertConfig(**BERT))


def pre_training() -> nn.Module:
    return transformers.BertForPreTraining(transformers.BertConfig(**BERT))


def decoder() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))


def classifier() -> nn.Module:
    config = transformers.GPT2Config(**GPT2, **NO_DROPOUT, num_labels=3)
    return transformers.GPT2ForSequenceClassification(config)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]]]] = {
    "decoder": (decoder, padded),
    "classifier": (classifier, classified),
    "preference": (Preference, pairs),
    "question answering": (question_answering, answers),
    "pre-training": (pre_training, followed),
    "distilled": (Distilled, soft),
}
DP, TP, PP = {"dp": 2, "micro_batch": 1}, {"tp": 2, "micro_batch": 2}, {"pp": 2, "micro_batch": 2}
CP = {"cp": 2, "micro_batch": 2}


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[name][0]().double()


def errors(rank: int, cells: list[tuple[str, dict]]) -> dict[str, float | str]:
    """The update error over its tolerance of each kind under its pins, or the traceback."""
    found: dict[str, float | str] = {}
    for name, pin in cells:
        batches = [KINDS[name][1](seed) for seed in range(2)]
        try:
            with Widened():
                call = lambda model, batch: loss_of(model(**batch))  # noqa: E731
                reference = train(model_of(name), batches, call=call)
                engine = autopar.parallelize(
                    model_of(name), "cpu:2", batches[0], sgd, pin=pin, precision="fp64"
                )
                losses, state = run_steps(engine, batches)
            found[f"{name} {pin}"] = update_error(reference, state)
            assert losses == pytest.approx(reference.losses, rel=1e-11)
        except Exception:
            found[f"{name} {pin}"] = traceback.format_exc()
    return found


def check(results: list[dict[str, float | str]]) -> None:
    for result in results:
        for name, error in result.items():
            assert isinstance(error, float) and error <= 1, f"{name}: {error}"


def test_each_kind_is_exact_under_one_axis_in_micro_batches(pool2):
    cells = [("decoder", PP), ("classifier", DP), ("preference", TP)]
    check(pool2.run(errors, tried(cells[::2], cells)))


@pytest.mark.slow
def test_two_tensors_of_labels_and_soft_labels_are_exact(pool2):
    cells = [("question answering", DP), ("pre-training", TP), ("distilled", PP)]
    check(pool2.run(errors, cells))


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_each_kind_is_exact_under_every_axis(pool2, name):
    check(pool2.run(errors, [(name, pin) for pin in (DP, TP, PP, CP)], timeout_s=600))
