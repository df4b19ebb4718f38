"""What export would drop without a word, and what cannot be split exactly, is refused with a reason."""

import dataclasses
from collections import UserDict

import pytest
import torch
from support.eager_runs import paragraph
from torch import nn

import autopar
from autopar.api import trace
from autopar.errors import AutoparError

BATCH = {"x": torch.ones(4, 6), "y": torch.ones(4, 6)}


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-1, 1)


class Model(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.linear, self.loss = nn.Linear(6, 6), loss

    def forward(self, x, y):
        return self.loss(self.linear(x), y)


def hooked(out, y):
    out.register_hook(lambda grad: 3 * grad)
    return (out - y).pow(2).mean()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda out, y: Clipped.apply(out).mean(), "autograd.Function .*Clipped.* is not linear"),
        (hooked, "register_hook"),
        (lambda out, y: out[y > 0].median(), "depends on data"),
    ],
)
def test_what_autopar_cannot_capture_is_refused(loss, message):
    with pytest.raises(AutoparError, match=message):
        autopar.plan(Model(loss), "cpu:1", BATCH)


def test_hooks_on_modules_are_refused():
    model = Model(lambda out, y: out.mean())
    model.linear.register_full_backward_hook(lambda module, grad_in, grad_out: None)
    with pytest.raises(AutoparError, match="'linear' has backward hooks"):
        autopar.plan(model, "cpu:1", BATCH)


@pytest.mark.parametrize(
    ("loss", "joins"),
    [
        (lambda out, y: (out - y).pow(2).mean(), "mean"),
        (lambda out, y: (out - y).pow(2).sum(), "sum"),
        (lambda out, y: (out - y).pow(2).sum() / out.shape[0], "mean"),
        (lambda out, y: (out - y).pow(2).sum() * (1.0 / out.shape[0]), "mean"),
        (lambda out, y: torch.full((out.shape[0],), 1 / out.shape[0]) @ out.sum(1), "sum"),
        (lambda out, y: out.sum(1) @ y[:, 0], "sum"),
        (lambda out, y: nn.functional.mse_loss(out, y, reduction="sum"), "sum"),
        (lambda out, y: (out * y).sum() / y.sum(), "sum"),
        (lambda out, y: (torch.softmax(y[:, 0], 0) * out.sum(1)).sum(), ""),
        (lambda out, y: torch.dot(out.sum(1), y[:, 0]), "sum"),
        (lambda out, y: torch.linalg.vecdot(out.sum(1), y[:, 0], dim=0), ""),
    ],
)
def test_whether_micro_batches_add_up(loss, joins):
    assert trace(Model(loss), BATCH).split.joins == joins


def test_a_loss_of_unknown_kind_is_not_split():
    model = Model(lambda out, y: (torch.softmax(y[:, 0], 0) * out.sum(1)).sum())
    with pytest.raises(
        AutoparError,
        match=r"softmax \(test_refusals.py:\d+: return self.loss.*combines rows of the batch",
    ):
        autopar.parallelize(model, "cpu:1", BATCH, pin={"micro_batch": 2})
    with pytest.raises(AutoparError, match="allow_micro_batch_mean=True"):
        autopar.plan(model, "cpu:1", BATCH, pin={"micro_batch": 2})
    engine = autopar.parallelize(model, "cpu:1", BATCH)
    assert engine.plan.num_microbatches == 1
    engine.step(BATCH)
    with pytest.raises(
        AutoparError,
        match=r"softmax \(test_refusals.py:\d+: return self.loss.*combines rows of the batch",
    ):
        engine.step({name: torch.cat([t, t]) for name, t in BATCH.items()})


class Counted(nn.Module):
    """Two linear layers over tokens, whose loss is some function of the mean cross-entropy."""

    def __init__(self, loss):
        super().__init__()
        self.embed, self.linear, self.loss = nn.Embedding(11, 6), nn.Linear(6, 11), loss

    def forward(self, x, labels):
        logits = self.linear(self.embed(x))
        return self.loss(
            nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits
        )


@pytest.mark.parametrize(("loss", "splits"), [
    (lambda mean, logits: mean, True), (lambda mean, logits: 3 - 2 * mean / 7, True),
    (lambda mean, logits: mean + mean + logits.pow(2).mean(), True), (lambda mean, logits: torch.stack([mean, 2 * mean]).sum(), True),
    (lambda mean, logits: torch.log1p(mean), False), (lambda mean, logits: mean * mean, False), (lambda mean, logits: 1 / mean, False),
    (lambda mean, logits: mean * logits.pow(2).mean(), False),
])  # fmt: skip
def test_a_loss_that_is_linear_in_the_mean_over_tokens_is_that_of_the_whole_batch(loss, splits):
    """However its tokens lie; the batch of any other is not split."""
    torch.manual_seed(0)
    model, tokens = Counted(loss).double(), torch.randint(11, (4, 5))
    labels = tokens.masked_fill(torch.rand(4, 5) < torch.tensor([[0.9], [0.7], [0.1], [0.0]]), -100)
    labels[0, 0], labels[1, 0] = 3, 4
    batch = {"x": tokens, "labels": labels}
    sgd = lambda params: torch.optim.SGD(params, 0.1)  # noqa: E731
    if not splits:
        with pytest.raises(AutoparError, match="combines rows of the batch"):
            autopar.parallelize(
                model, "cpu:1", batch, sgd, pin={"micro_batch": 2}, precision="fp64"
            )
    engine = autopar.parallelize(
        model, "cpu:1", batch, sgd, pin={"micro_batch": 2 if splits else 4}, precision="fp64"
    )
    found, expected = engine.step(batch), model(tokens, labels)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    expected.backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(
            engine.full_state_dict()[name], parameter - 0.1 * parameter.grad, rtol=1e-11, atol=1e-12
        ), name
    assert any("not split" in note for note in engine.plan.notes) is not splits


def test_what_a_plan_has_decided_is_not_asked_for_again():
    model = Model(lambda out, y: (out - y).pow(2).mean())
    plan = autopar.plan(model, "cpu:1", BATCH, 4)
    with pytest.raises(AutoparError, match="a plan has its choices"):
        autopar.parallelize(model, "cpu:1", BATCH, plan=plan, pin={"micro_batch": 2})
    with pytest.raises(AutoparError, match="a global batch of 4, not global_batch=8"):
        autopar.parallelize(model, "cpu:1", BATCH, plan=plan, global_batch=8)


@pytest.mark.parametrize(("given", "message"), [
    ({"model": None}, "model is None, not a torch.nn.Module"), ({"model": Model}, "model is the class Model"),
    ({"cluster": 4}, "cluster is 4, not a ClusterSpec"), ({"pin": "tp=2"}, "pin is 'tp=2', not a mapping"),
    ({"pin": {"zero": 1.0}}, "zero=1.0 is not a ZeRO stage"), ({"time_limit_s": "5"}, "time_limit_s='5' must be a positive number"),
    ({"time_limit_s": float("nan")}, "time_limit_s=nan must be"),
])  # fmt: skip
def test_arguments_of_another_kind_are_told(given, message):
    asked = {
        "model": Model(lambda out, y: out.mean()),
        "cluster": "cpu:1",
        "example_inputs": BATCH,
    } | given
    with pytest.raises(AutoparError, match=message):
        autopar.plan(**asked)


@pytest.mark.parametrize(("given", "message"), [
    ({"plan": "plan.json"}, "autopar.Plan.load"), ({"max_grad_norm": "1"}, "max_grad_norm='1' must be"), ({"seed": "a"}, "seed is 'a'"),
    ({"buckets": 3}, "buckets is 3, not a sequence"), ({"timeout_s": -1}, "timeout_s=-1 must be"),
])  # fmt: skip
def test_arguments_of_parallelize_of_another_kind_are_told(given, message):
    with pytest.raises(AutoparError, match=message):
        autopar.parallelize(Model(lambda out, y: out.mean()), "cpu:1", BATCH, **given)


def test_a_step_that_fails_leaves_nothing_to_the_next():
    """The second micro-batch has a token that is out of range."""
    torch.manual_seed(0)
    model, tokens = Counted(lambda mean, logits: mean).double(), torch.randint(11, (4, 5))
    batch, states = {"x": tokens, "labels": tokens}, []
    broken = {"x": tokens.clone().index_fill(0, torch.tensor(3), 99), "labels": tokens}
    for fails in (False, True):
        engine = autopar.parallelize(model, "cpu:1", batch, lambda params: torch.optim.SGD(params, 0.1), pin={"micro_batch": 2},
                                     precision="fp64")  # fmt: skip
        if fails:
            engine.batches.indices = ()  # which would tell before the step
            with pytest.raises(IndexError):
                engine.step(broken)
        engine.step(batch)
        states.append(engine.full_state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_model_with_nothing_to_train_is_refused():
    model = Model(lambda out, y: (out - y).pow(2).mean()).requires_grad_(False)
    with pytest.raises(AutoparError, match="no parameter of Model requires a gradient"):
        autopar.parallelize(model, "cpu:1", BATCH)
    next(model.parameters()).requires_grad_(True)
    assert float(autopar.parallelize(model, "cpu:1", BATCH).step(BATCH)) > 0


def test_a_part_of_a_batch_that_is_a_mapping_is_one():
    engine = autopar.parallelize(Model(lambda out, y: (out - y).pow(2).mean()), "cpu:1", BATCH)
    assert float(engine.step(engine.local_batch(UserDict(BATCH)))) >= 0
    with pytest.raises(AutoparError, match="'x' is a single number"):
        engine.local_batch(BATCH | {"x": torch.tensor(1.0)})


def test_an_optimizer_over_other_tensors_is_refused():
    model = Model(lambda out, y: out.mean())
    with pytest.raises(AutoparError, match="2 tensors that the engine does not train"):
        autopar.parallelize(
            model, "cpu:1", BATCH, optimizer=lambda params: torch.optim.SGD(model.parameters(), 0.1)
        )
    with pytest.raises(AutoparError, match="takes a function"):
        autopar.parallelize(
            model, "cpu:1", BATCH, optimizer=torch.optim.SGD(model.parameters(), 0.1)
        )
    with pytest.raises(AutoparError, match="max_grad_norm=-1"):
        autopar.parallelize(model, "cpu:1", BATCH, max_grad_norm=-1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"micro_batch": "x"}, "micro_batch is 'x'"),
        ({"global_batch": None}, "global_batch is None"),
        ({"num_microbatches": 7}, "is not its global_batch"),
        ({"zero": 7}, "zero=7 is not a ZeRO stage"),
    ],
)
def test_damaged_plans_do_not_run(change, message):
    model = Model(lambda out, y: out.mean())
    plan = autopar.plan(model, "cpu:1", BATCH)
    with pytest.raises(AutoparError, match=message):
        autopar.parallelize(model, "cpu:1", BATCH, plan=dataclasses.replace(plan, **change))


def test_inputs_that_forward_never_relates_are_of_one_batch():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x, w):
            return self.linear(x).mean() * w.sum()

    torch.manual_seed(0)
    model, batch = (
        Weighted().double(),
        {"x": torch.randn(4, 6).double(), "w": torch.arange(4.0).double()},
    )
    engine = autopar.parallelize(
        model,
        "cpu:1",
        batch,
        lambda p: torch.optim.SGD(p, 0.1),
        pin={"micro_batch": 1},
        precision="fp64",
    )
    assert engine.step(batch).item() == pytest.approx(model(**batch).item(), rel=1e-12)


class Tokens(nn.Module):
    """Embedding, `body`, classes; the loss is `end` of the mean cross-entropy."""

    def __init__(self, body=lambda x: x, end=lambda loss: loss):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.body, self.end = body, end

    def forward(self, tokens, labels):
        logits = self.head(self.body(self.embed(tokens)))
        return self.end(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


TOKENS = {
    "tokens": torch.zeros(4, 6, dtype=torch.long),
    "labels": torch.zeros(4, 6, dtype=torch.long),
}


def rotate(x):
    """By a function of complex numbers that autopar does not know."""
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))).tanh()).flatten(2)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Tokens(rotate),
            r"tanh \(test_refusals.py:\d+: .*of complex numbers .*real and imaginary parts",
        ),
        (
            Tokens(lambda x: x * float(x.detach().numpy().sum())),
            r"leaves PyTorch \(test_refusals.py:\d+: .*what .numpy\(\) computes .* write it with torch functions$",
        ),
        (
            Tokens(lambda x: x * x.sum().item()),
            "reads a number out of .* by .item.*keep it a tensor",
        ),
        (
            Tokens(lambda x: x if x.sum() > 0 else -x),
            r"reads a number out of a tensor \(test_refusals.py:\d+: .*torch.where",
        ),
        (
            Tokens(lambda x: x * x[x > 0].sort().values.sum()),
            "shape depends on data .*, by sort, .* not row by row.* use arithmetic with a mask instead",
        ),
        (Tokens(end=lambda loss: loss.expand(2)), r"tensor of shape \(2\), not a scalar loss"),
        (
            Tokens(end=lambda loss: loss.long()),
            "a loss of torch.int64; a loss is a real floating-point number",
        ),
        (
            Tokens(end=lambda loss: loss * 1j),
            "a loss of torch.complex64; a loss is a real floating-point number",
        ),
        (Tokens(end=lambda loss: loss.detach()), "a loss without gradient"),
    ],
)
def test_models_that_cannot_be_distributed_say_why_and_what_to_do(model, message):
    with pytest.raises(AutoparError, match=message) as refused:
        autopar.plan(model, "cpu:2", TOKENS)
    paragraph(refused.value)


def test_what_a_loss_function_returns_is_checked_too():
    with pytest.raises(
        AutoparError,
        match=r"loss_fn returned a tensor of shape \(batch, 6\), not a scalar loss: end it with .mean",
    ):
        autopar.plan(
            nn.Linear(6, 6),
            "cpu:2",
            (torch.ones(4, 6), torch.ones(4, 6)),
            loss_fn=lambda out, target: (out - target) ** 2,
        )
    with pytest.raises(AutoparError, match="loss_fn returned a float, not a scalar loss"):
        autopar.plan(
            nn.Linear(6, 6),
            "cpu:2",
            (torch.ones(4, 6), torch.ones(4, 6)),
            loss_fn=lambda out, target: 3.0,
        )


def test_an_input_of_a_name_that_is_taken():
    class Named(nn.Module):
        def forward(self, x, micro_batch_share):
            return (x * micro_batch_share).mean()

    with pytest.raises(AutoparError, match="rename it"):
        trace(Named(), {"x": torch.ones(2, 3), "micro_batch_share": torch.ones(2, 3)})


def test_example_inputs_that_forward_does_not_take():
    with pytest.raises(
        AutoparError,
        match=r"example_inputs \(tokens\) are not the arguments of forward of Tokens.*'labels'",
    ):
        autopar.plan(Tokens(), "cpu:2", {"tokens": TOKENS["tokens"]})
    with pytest.raises(
        AutoparError,
        match=r"fails on example_inputs \(tokens \(4, 6\) torch.int64, labels \(4, 6\) torch.complex64\)",
    ):
        autopar.plan(
            Tokens(), "cpu:2", TOKENS | {"labels": torch.zeros(4, 6, dtype=torch.complex64)}
        )
