"""Compares the gradient of one batch from this trainer's `policy_loss` and TRL's `_compute_loss`.

    bench/.venv/bin/python bench/versus_trl_loss.py

It runs in TRL's environment (bench/requirements.txt). Both have the same weights in float64, the
same answers of random tokens and different lengths, the same advantages, and the same
log-probabilities from before the update and from the reference. It prints how far the gradients
differ, relative to their norm. Some losses have different values by design, so no values are
compared."""

import copy
import dataclasses
import json
import random
import tempfile

import changed
import datasets
import trl
from harness import ROOT, main, torch
from torch.nn.utils.rnn import pad_sequence

from machinery.model import load_model
from machinery.passes import store_in_answers

L, ANSWERS, TEMPERATURE, BETA = 24, 16, 0.7, 0.5
LOW, HIGH = 0.2, 0.28
NORMALIZERS = {"dr_grpo": "max_length", "dapo": "tokens", "grpo": "sequence"}
THEIR_DEFAULTS = {"loss_type": "grpo", "beta": 0.0, "importance_sampling_level": "token",
                  "epsilon_low": LOW, "epsilon_high": HIGH, "use_bias_correction_kl": True}
TWICE = {"updates_per_batch": 2}
NOT_CLIPPED = {"epsilon_low": 1e9, "epsilon_high": 1e9}
# The cases that need a diff of main.py.
CHANGES = {"GSPO, second update": ["gspo"], "CISPO, second update": ["cispo"]}


def cases():
    """Yields a name, this trainer's keys, and TRL's."""
    for loss_type, normalizer in NORMALIZERS.items():
        here = {"loss_normalizer": normalizer}
        there = {"loss_type": loss_type}
        clipped = {**here, **TWICE, "clip": (LOW, HIGH)}
        yield f"{loss_type}, one update", here, there
        yield f"{loss_type}, second update, clipped", clipped, there
        in_loss = {**here, "kl_beta": BETA, "kl_in": "loss"}
        there_kl = {**there, "beta": BETA, "use_bias_correction_kl": False}
        yield f"{loss_type}, KL in the loss, one update", in_loss, there_kl
        yield f"{loss_type}, KL in the loss, second update", in_loss | TWICE, there_kl | NOT_CLIPPED
        # In a second update TRL computes this penalty again, and this trainer doesn't.
        yield (f"{loss_type}, KL in the reward, one update", in_loss | {"kl_in": "reward"},
               there_kl | {"use_bias_correction_kl": True})
    yield ("GSPO, second update",
           {**TWICE, "loss_normalizer": "sequence", "clip": (0.03, 0.04)},
           {"importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04})
    yield ("CISPO, second update",
           {**TWICE, "loss_normalizer": "tokens", "clip": (LOW, HIGH)},
           {"loss_type": "cispo", "epsilon_high": 1 + HIGH})


def random_answers(model, tokenizer, config) -> list[main.Trajectory]:
    stream = random.Random(0)
    answers = []
    for _ in range(ANSWERS):
        prompt_length, length = stream.randint(2, 12), stream.randint(1, L)
        prompt = [stream.randrange(3, len(tokenizer)) for _ in range(prompt_length)]
        completion = [stream.randrange(3, len(tokenizer)) for _ in range(length)]
        answers.append(main.Trajectory(main.Question({}, prompt), completion, "", False,
                                       advantage=stream.uniform(-1, 1)))
    torch.manual_seed(0)
    for name, distance in (("old_log_probs", 0.03), ("reference_log_probs", 0.1)):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(distance * parameter.std() * torch.randn_like(parameter))
            log_probs, _ = main.Policy(other, config)(answers)
        store_in_answers(answers, **{name: log_probs})
    return answers


def padded(rows: list, side: str = "right") -> torch.Tensor:
    return pad_sequence([torch.as_tensor(row) for row in rows], True, padding_side=side)


def trl_trainer() -> trl.GRPOTrainer:
    trainer = trl.GRPOTrainer(
        model=str(ROOT / "tiny" / "model"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=datasets.Dataset.from_list([{"prompt": "a"}] * ANSWERS),
        args=trl.GRPOConfig(
            output_dir=tempfile.mkdtemp(), per_device_train_batch_size=ANSWERS, num_generations=8,
            max_completion_length=L, beta=BETA, temperature=TEMPERATURE, report_to="none",
            use_cpu=True, bf16=False, gradient_checkpointing=False, steps_per_generation=1,
            model_init_kwargs={"dtype": "float32"}))
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.double().train()
    return trainer


def trl_inputs(answers: list[main.Trajectory]) -> dict[str, torch.Tensor]:
    prompts = [answer.prompt_ids for answer in answers]
    completions = [answer.completion_ids for answer in answers]
    return {
        "prompt_ids": padded(prompts, side="left"),
        "prompt_mask": padded([[1] * len(prompt) for prompt in prompts], side="left"),
        "completion_ids": padded(completions),
        "completion_mask": padded([[1] * len(completion) for completion in completions]),
        "advantages": torch.tensor([answer.advantage for answer in answers], dtype=torch.float64),
        "ref_per_token_logps": padded([answer.reference_log_probs for answer in answers]),
        "old_per_token_logps": padded([answer.old_log_probs for answer in answers]),
        "num_items_in_batch": torch.tensor(sum(answer.num_tokens for answer in answers))}


def gradient_of(loss: torch.Tensor, model) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def compare() -> float:
    """Prints the table, and returns the largest difference."""
    config = main.load_config([f"sampling.temperature={TEMPERATURE}",
                               f"training.max_new_gen_tokens={L}"])
    model, tokenizer = load_model(config)
    model.double().train()
    answers = random_answers(model, tokenizer, config)
    trainer = trl_trainer()
    print("| batch | gradient |\n| --- | --- |")
    worst = 0.0
    for name, here, there in cases():
        training = config.training.model_copy(update=here)
        log_probs, entropies = main.Policy(model, config)(answers)
        inputs = trl_inputs(answers)
        if training.updates_per_batch == 1:
            batch = [dataclasses.replace(answer) for answer in answers]
            store_in_answers(batch, old_log_probs=log_probs)
        else:
            batch = answers
        totals = {"answers": ANSWERS, "tokens": int(inputs["num_items_in_batch"])}
        changed_main = changed.main_with(CHANGES.get(name, []))
        loss, _ = changed_main.policy_loss(log_probs, entropies, batch, totals, training)
        gradient = gradient_of(loss, model)

        theirs = THEIR_DEFAULTS | there
        trainer.args.use_bias_correction_kl = theirs.pop("use_bias_correction_kl")
        vars(trainer).update(theirs)
        if training.updates_per_batch == 1:
            del inputs["old_per_token_logps"]
        expected = gradient_of(trainer._compute_loss(trainer.model, inputs), trainer.model)
        error = ((gradient - expected).norm() / expected.norm()).item()
        worst = max(worst, error)
        print(f"| {name} | {error:.1e} |")
    return worst


if __name__ == "__main__":
    print(json.dumps({"worst": compare(), "trl": trl.__version__}))
