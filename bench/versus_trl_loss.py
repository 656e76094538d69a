"""Loss and gradient of one batch, by this trainer's `policy_loss` and by TRL's `_compute_loss`.

    bench/.venv/bin/python bench/versus_trl_loss.py

In TRL's environment (bench/requirements.txt). Same weights, in float64, same answers, of random
tokens and ragged lengths, same advantages, same log-probabilities of before and of the reference;
temperature 0.7. Where a loss is a different value by design only the gradient is compared."""

import copy
import json
import os
import random
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
import datasets
import torch
import trl

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import main
from machinery.batches import store_in_answers

L, ANSWERS, TEMPERATURE, BETA = 24, 16, 0.7, 0.5
NORMALISERS = {"dr_grpo": "max_length", "dapo": "tokens", "grpo": "sequence"}
LOW, HIGH = 0.2, 0.28


def cases():
    """Name; keys of this trainer's; TRL's; whether the values of the loss are to be equal."""
    for loss_type, normaliser in NORMALISERS.items():
        here = {"loss_normalizer": normaliser}
        there = {"loss_type": loss_type}
        yield f"{loss_type}, one update", here, there, False
        twice = here | {"updates_per_batch": 2}
        clipped = twice | {"clip": (LOW, HIGH)}
        yield f"{loss_type}, second update, clipped", clipped, there, True
        for kl_in, corrected in (("loss", False), ("reward", True)):
            kl_here = {"kl_beta": BETA, "kl_in": kl_in}
            kl_there = there | {"beta": BETA, "use_bias_correction_kl": corrected}
            what = f"{loss_type}, KL in the {kl_in}"
            yield f"{what}, one update", here | kl_here, kl_there, False
            yield (f"{what}, second update", twice | kl_here,
                   kl_there | {"epsilon_low": 1e9, "epsilon_high": 1e9}, kl_in == "loss")
    sequence = {"loss_normalizer": "sequence", "updates_per_batch": 2, "ratio": "sequence"}
    yield ("GSPO, second update", sequence | {"clip": (0.03, 0.04)},
           {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.03,
            "epsilon_high": 0.04}, True)
    yield ("CISPO, second update",
           {"loss_normalizer": "tokens", "updates_per_batch": 2, "ratio": "cispo",
            "clip": (LOW, HIGH)}, {"loss_type": "cispo", "epsilon_high": 1 + HIGH}, True)


def made_up_answers(tokenizer) -> list[main.Trajectory]:
    stream, answers = random.Random(0), []
    for i in range(ANSWERS):
        prompt, completion = ([stream.randrange(3, len(tokenizer)) for _ in range(length)]
                              for length in (stream.randint(2, 12), stream.randint(1, L)))
        answers.append(main.Trajectory(main.Question({}, prompt), completion, "", False,
                                       advantage=stream.uniform(-1, 1)))
    return answers


def padded(rows: list, value, left: bool = False) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[value] * (longest - len(row)) * left + [*row]
                         + [value] * (longest - len(row)) * (not left) for row in rows])


def trl_trainer(model_name: str):
    trainer = trl.GRPOTrainer(
        model=model_name, reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=datasets.Dataset.from_list([{"prompt": "a"}] * ANSWERS),
        args=trl.GRPOConfig(
            output_dir=tempfile.mkdtemp(), per_device_train_batch_size=ANSWERS, num_generations=8,
            max_completion_length=L, beta=BETA, temperature=TEMPERATURE, report_to="none",
            use_cpu=True, bf16=False, gradient_checkpointing=False, steps_per_generation=1,
            model_init_kwargs={"dtype": "float32"}))
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.double().train()
    return trainer


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


def command() -> None:
    config = main.load_config([f"sampling.temperature={TEMPERATURE}",
                               f"training.max_new_gen_tokens={L}"])
    model, tokenizer = main.load_model(config)
    model.double().train()
    answers = made_up_answers(tokenizer)
    torch.manual_seed(0)
    for name, spread in (("old_log_probs", 0.03), ("reference_log_probs", 0.1)):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(spread * parameter.std() * torch.randn_like(parameter))
            store_in_answers(answers, **{name: main.Policy(other, config)(answers)[0]})
    T = sum(len(answer.completion_ids) for answer in answers)
    trainer = trl_trainer(str(ROOT / "tiny" / "model"))
    inputs = {
        "prompt_ids": padded([answer.prompt_ids for answer in answers], 0, left=True),
        "prompt_mask": padded([[1] * len(answer.prompt_ids) for answer in answers], 0, left=True),
        "completion_ids": padded([answer.completion_ids for answer in answers], 0),
        "completion_mask": padded([[1] * len(answer.completion_ids) for answer in answers], 0),
        "advantages": torch.tensor([answer.advantage for answer in answers], dtype=torch.float64),
        "ref_per_token_logps": padded([answer.reference_log_probs.tolist() for answer in answers],
                                      0.0).double(),
        "num_items_in_batch": torch.tensor(T)}
    old = padded([answer.old_log_probs.tolist() for answer in answers], 0.0).double()

    print("| batch | gradient | loss |\n| --- | --- | --- |")
    worst = 0.0
    for name, here, there, same_value in cases():
        training = config.training.model_copy(update=here)
        model.zero_grad()
        log_probs, _ = main.Policy(model, config)(answers)
        loss, _ = main.policy_loss(log_probs, answers, len(answers), T, training)
        loss.backward()
        theirs = {"loss_type": "grpo", "beta": 0.0, "importance_sampling_level": "token",
                  "epsilon_low": LOW, "epsilon_high": HIGH, **there}
        trainer.args.use_bias_correction_kl = theirs.pop("use_bias_correction_kl", True)
        vars(trainer).update(theirs)
        trainer.model.zero_grad()
        their_loss = trainer._compute_loss(
            trainer.model, inputs | ({"old_per_token_logps": old}
                                     if training.updates_per_batch > 1 else {}))
        their_loss.backward()
        ours, others = (torch.cat([parameter.grad.flatten() for parameter in each.parameters()])
                        for each in (model, trainer.model))
        errors = [relative(ours, others)]
        if same_value:
            errors.append(abs(loss.item() / their_loss.item() - 1))
        worst = max(worst, *errors)
        print(f"| {name} | {errors[0]:.1e} | {f'{errors[1]:.1e}' if same_value else ''} |")
    print(json.dumps({"worst": worst, "trl": trl.__version__}))


if __name__ == "__main__":
    command()
