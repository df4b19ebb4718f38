"""transformers' models of images and text, trained on two ranks, against eager PyTorch on one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.captures import captured_once
from support.effort import slow_but
from support.exactness import moved, run_steps, sgd, train_in_place, update_error
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from autopar.verify.widened import Widened

pytest.importorskip("transformers")
from support.vision_language import CONTRASTIVE, GENERATIVE, captions, pairs, several_images

WHOLE = {
    "dp": {"dp": 2, "tp": 1},
    "tp": {"dp": 1, "tp": 2},
    "pp": {"pp": 2, "dp": 1, "tp": 1, "micro_batch": 8},
}
PARTS = {
    "micro-batches": {"dp": 2, "tp": 1, "micro_batch": 2},
    "pipeline": {"pp": 2, "dp": 1, "tp": 1, "micro_batch": 4},
}


def made(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = build().double().train()
    with torch.no_grad():  # what starts as 0 or 1 would hide errors
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


@captured_once()
def errors(
    rank: int, name: str, pins: dict[str, dict], data: list[dict[str, Tensor]]
) -> dict[str, float]:
    """On one rank: for each pin, the largest update-relative error over the tolerance of 1e-9."""
    build = CONTRASTIVE.get(name) or GENERATIVE[name][0]
    found = {}
    with Widened():
        result = train_in_place(made(build), data)
        assert moved(result) > 1e-3, "training moves the weights"
        for key, pin in pins.items():
            engine = autopar.parallelize(
                made(build),
                "cpu:2",
                data[0],
                sgd,
                pin=pin,
                precision="fp64",
                batch_dims={"position_ids": 1} if "position_ids" in data[0] else None,
            )
            losses, state = run_steps(engine, data)
            found[key] = update_error(result, state)
            assert losses == pytest.approx(result.losses, rel=1e-9)
    return found


def batches(name: str) -> list[dict[str, Tensor]]:
    make = pairs if name in CONTRASTIVE else GENERATIVE[name][1]
    return [make(seed) for seed in range(2)]


@pytest.mark.parametrize("name", slow_but([], CONTRASTIVE))
def test_losses_over_pairs_of_the_batch_are_exact(pool2, name):
    pins = {"dp": WHOLE["dp"]} if name == "CLIP" else WHOLE
    for found in pool2.run(errors, name, pins, batches(name), timeout_s=600):
        assert max(found.values()) <= 1, found


def test_losses_over_pairs_refuse_micro_batches():
    with pytest.raises(AutoparError, match=r"matmul .*combines rows of the batch") as refused:
        autopar.plan(made(CONTRASTIVE["CLIP"]), "cpu:2", pairs(0), pin=PARTS["micro-batches"])
    assert "Pin micro_batch=4" in str(refused.value)


@pytest.mark.parametrize("name", slow_but(["Llava"], GENERATIVE))
def test_models_that_read_images_are_exact(pool2, name):
    pins = {"pipeline": PARTS["pipeline"]} if name == "Llava" else WHOLE | PARTS
    for found in pool2.run(errors, name, pins, batches(name), timeout_s=600):
        assert max(found.values()) <= 1, found


def two_images_in_a_row() -> dict[str, Tensor]:
    batch = captions(0)
    batch["input_ids"][0, 6:10] = 95
    batch["input_ids"][1] = 7
    return batch


def one_that_is_padding() -> dict[str, Tensor]:
    batch = several_images(0)
    batch["pixel_values"][3] = 0
    return batch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch"), [("Llava", two_images_in_a_row), ("Idefics3", one_that_is_padding)]
)
def test_rows_with_other_numbers_of_images_are_refused(name, batch):
    with Widened():
        engine = autopar.parallelize(
            made(GENERATIVE[name][0]), "cpu:1", GENERATIVE[name][1](0), sgd, precision="fp64"
        )
        with pytest.raises(ValueError, match="give every row the same number of images"):
            engine.step(batch())
