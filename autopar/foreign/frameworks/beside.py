"""What runs beside training: rollout engines, and reference, reward, critic and teacher models."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.foreign.frameworks.raw_options import JobOptions, shown_option
from autopar.foreign.frameworks.weights import Weight, parts_by_rule
from autopar.foreign.job import Finding, Job, Unmodelled

_REFERENCE, _REWARD = "a reference model", "a reward model"
_CRITIC, _TEACHER = "a critic", "a teacher model"

_RULES = (
    Weight("enable_ema|use_ema|ema.(enabled?|decay)|ema_decay|ema_beta_on", "a moving average of the weights", "memory", place="beside"),
    Weight("predict_with_generate|generate_during_eval|do_bench_eval|eval_use_evalscope", "generation in evaluation", "memory",
         place="beside"),
    Weight("enable_hybrid_engine|hybrid_engine.enabled", "generation by the trained model", place="beside"),
    Weight("perform_rl_step", "generation by the trained model", place="beside"),
    Weight("teacher_model(_name_or_path)?|teacher_model_path|teacher[.]\\w*model\\w*|teacher_load|export_kd_teacher_load|kd_teacher\\w*|"
         "teacher_model.pretrained_model_name_or_path|teacher_models[.].*model_path", _TEACHER, place="beside"),
    Weight("reward_model|reward_model_path|reward_pretrain|reward.model_name_or_path|reward_model_name_or_path|rm_model_path|"
         "reward_model.(model.path|model_path)", _REWARD, place="beside", value="(?!true$).+"),
    Weight("reward_model.enable", _REWARD, place="beside"),
    Weight("ref_model|ref_load|mcore_ref_model|ref.model_name_or_path|ref_model_name_or_path|sync_ref_model|reference_model_path",
         _REFERENCE, place="beside"),
    Weight("critic_pretrain|critic.model_name_or_path|critic_model_name_or_path|critic.model.path|value_model_path|critic_load",
         _CRITIC, place="beside"),
)  # fmt: skip

_STAGES = ("stage", "rlhf_type", "rl")
"""Options that name the kind of training: LLaMA-Factory's, ms-swift's, Axolotl's."""
_PAIRED = re.compile(r"(^|[^a-z])(dpo|ipo|kto|ebft|gdpo)($|[^a-z])", re.IGNORECASE)
"""Trainings against a reference model."""
_WITHOUT_REFERENCE = ("orpo", "simpo", "cpo", "reference_free")
_ONLINE = re.compile(r"(^|[^a-z])(grpo|gdpo|ppo|rloo|online_?dpo|gkd|reinforce\w*|dapo|gspo)($|[^a-z])", re.IGNORECASE)  # fmt: skip
"""Trainings on what the model itself generates."""
_CLASSES = re.compile(r"\b(DPO|KTO|GRPO|PPO|RLOO|OnlineDPO|GKD|NashMD|XPO)(?:Config|Trainer)\b")


@dataclass(frozen=True, slots=True)
class Beside:
    """What runs beside a training.

    Attributes:
        parts: what shares its devices.
        notes: what lies on other devices.
    """

    parts: tuple[Unmodelled, ...] = ()
    notes: tuple[Finding, ...] = ()


def beside(job: Job, options: JobOptions) -> Beside:
    """What runs beside the training of a job."""
    notes = [_note(f"the script starts {line}: not counted among the devices of training") for line in options.servers]  # fmt: skip
    parts = list(_models(options))
    for engine in _engines(options):
        if engine.apart:
            notes.append(_note(f"{engine.what} has devices of its own: only those of training are priced"))  # fmt: skip
        else:
            parts.append(Unmodelled(engine.what, engine.option, place="beside"))
    parts += parts_by_rule(job, options, _RULES)
    first = {part.what: part for part in reversed(parts)}
    return Beside(tuple(part for part in parts if first[part.what] is part), tuple(notes))


def _note(what: str) -> Finding:
    return Finding("note", what, legal=("give --cluster with the devices of training alone",))


@dataclass(frozen=True, slots=True)
class _Engine:
    """A rollout engine, the option that says it, and whether it has devices of its own."""

    what: str
    option: str
    apart: bool


def _engine(name: str, memory: str) -> str:
    share = f" with {memory} of the memory" if memory else ""
    return f"a rollout engine ({name}){share}" if name else f"a rollout engine{share}"


def _engines(options: JobOptions) -> Iterator[_Engine]:
    for engine in (_of_verl, _of_openrlhf, _of_slime, _of_nemo_rl, _of_vllm_switch):
        if (found := engine(options)) is not None:
            yield found
            return


def _of_verl(options: JobOptions) -> _Engine | None:
    of = "actor_rollout_ref."
    if not any(path.startswith((f"{of}actor", f"{of}rollout")) for path in options.values):
        return None
    name = options.text(f"{of}rollout.name") or "vllm, sglang or another"
    memory = options.text(f"{of}rollout.gpu_memory_utilization")
    mode = options.text("trainer.v1.trainer_mode")
    apart = f"{of}hybrid_engine" in options.off or options.text(f"{of}rollout.nnodes") not in ("", "0")  # fmt: skip
    apart = apart or (mode.startswith("separate") and "trainer.v1.trainer_mode" in options.values)
    option = f"{of}rollout.gpu_memory_utilization={memory}" if memory else f"{of}rollout"
    return _Engine(_engine(name, memory), option, apart)


def _of_openrlhf(options: JobOptions) -> _Engine | None:
    count = options.path("vllm_num_engines") or options.path("vllm.num_engines")
    online = "train_ppo" in options.program
    if not count and not online:
        return None
    if not count:
        return _Engine("generation by the trained model", "train_ppo without engines", False)
    memory = options.text("vllm_gpu_memory_utilization", "vllm.gpu_memory_utilization")
    together = options.path("colocate_all_models") or options.path("train.colocate_all")
    return _Engine(
        _engine("vLLM", memory), shown_option(count, options.values[count]), not together
    )


def _of_slime(options: JobOptions) -> _Engine | None:
    names = ("rollout_num_gpus_per_engine", "rollout_num_gpus", "rollout_batch_size")
    named = next((path for name in names if (path := options.path(name))), "")
    if not named or not options.path("actor_num_gpus_per_node") or "openrlhf" in options.program:
        return None
    memory = options.text("sglang_mem_fraction_static")
    together = options.path("colocate")
    option = together or named
    return _Engine(
        _engine("SGLang", memory), shown_option(option, options.values[option]), not together
    )


def _of_nemo_rl(options: JobOptions) -> _Engine | None:
    of = "policy.generation."
    if not any(path.startswith(of) for path in options.values):
        return None
    name = options.text(f"{of}backend")
    memory = options.text(f"{of}vllm_cfg.gpu_memory_utilization")
    apart = f"{of}colocated.enabled" in options.off
    option = f"{of}vllm_cfg.gpu_memory_utilization={memory}" if memory else f"{of}colocated.enabled"
    return _Engine(_engine(name, memory), option, apart)


def _of_vllm_switch(options: JobOptions) -> _Engine | None:
    """The engine of TRL, ms-swift and Axolotl; without one, the trained model generates itself."""
    if path := options.path("use_vllm"):
        memory = options.text("vllm_gpu_memory_utilization", "vllm.gpu_memory_utilization")
        mode = options.text("vllm_mode")
        apart = mode == "server" or bool(options.text("vllm_server_host", "vllm_server_base_url"))
        option = shown_option(path, options.values[path]) + (f", vllm_mode={mode}" if mode else "")
        return _Engine(_engine("vLLM", memory), option, apart)
    if kind := _named(options, _ONLINE):
        return _Engine("generation by the trained model", kind, False)
    return None


def _named(options: JobOptions, pattern: re.Pattern[str]) -> str:
    """What names the kind of a training, if it matches a pattern: an option, the program, or a
    class of TRL.
    """
    for name in _STAGES:
        if path := options.path(name):
            value = options.values[path]
            return shown_option(path, value) if pattern.search(value) else ""
    program = " ".join(options.program.split()[:8])
    if found := pattern.search(program.replace("/", " ").replace(".py", " ")):
        return found[0].strip(" /_.-")
    classes = _CLASSES.search(options.called)
    return classes[0] if classes and pattern.search(f" {classes[1]} ") else ""


def _models(options: JobOptions) -> Iterator[Unmodelled]:
    """Models that a kind of training has without an option of their own."""
    if options.path("precompute_ref_log_probs") or options.path("reference_free"):
        return
    loss = options.text("pref_loss", "loss_type", "dpo_loss_type")
    paired = _named(options, _PAIRED)
    if paired and not any(word in loss.lower() for word in _WITHOUT_REFERENCE):
        yield Unmodelled(_REFERENCE, paired, place="beside")
    elif re.search(r"train_(dpo|kto)\b", options.program):
        yield Unmodelled(_REFERENCE, options.program.split()[-1], place="beside")
    if any(path.startswith("dpo.") for path in options.values):  # of NeMo-RL
        yield Unmodelled(_REFERENCE, "dpo", place="beside")
    if kl := options.path("loss_fn.reference_policy_kl_penalty"):
        yield Unmodelled(_REFERENCE, shown_option(kl, options.values[kl]), place="beside")
    for name in ("use_kl_loss", "algorithm.use_kl_in_reward", "kl_coef", "init_kl_coef", "algo.kl.init_coef"):  # fmt: skip
        if path := options.path(name):
            yield Unmodelled(_REFERENCE, shown_option(path, options.values[path]), place="beside")
    if re.search(r"train_kd\b", options.program):
        yield Unmodelled(_TEACHER, "train_kd", place="beside")
    ppo = _named(options, re.compile(r"(^|[^a-z])ppo($|[^a-z])", re.IGNORECASE))
    rollouts = any(path.startswith("actor_rollout_ref.") for path in options.values)
    estimator = options.text("algorithm.adv_estimator", "advantage_estimator", "algo.advantage.estimator")  # fmt: skip
    # without an estimator, train_ppo of OpenRLHF takes gae, and other trainers by PPO have a critic
    of_openrlhf = "openrlhf" in options.program
    by_default = "train_ppo" in options.program if of_openrlhf else ppo and not rollouts
    if estimator == "gae" or (by_default and not estimator):
        yield Unmodelled(_CRITIC, f"advantages by {estimator or 'gae'}", place="beside")
    grpo = (
        options.text("rlhf_type") == "grpo" and options.text("train_type", "tuner_type") == "full"
    )
    if (
        grpo and not options.is_off("beta") and options.text("beta") != "0.0"
    ):  # 0.04 by default, against the first weights
        yield Unmodelled(_REFERENCE, "rlhf_type=grpo", place="beside")
