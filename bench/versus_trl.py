"""This trainer beside TRL's GRPOTrainer: seconds per step, and gradients of the same batch.

    python3 -m venv bench/.venv && bench/.venv/bin/pip install -r bench/requirements.txt
    .venv/bin/python bench/versus_trl.py --trl-python bench/.venv/bin/python
        runs both alternately on the same steps, in the layouts that you name
    CUDA_VISIBLE_DEVICES= bench/.venv/bin/python bench/versus_trl.py --gradients
        compares `policy_loss` with TRL's `_compute_loss`

Steps: both sides get the same 16 questions in each step, and their learning rate is practically 0,
so both keep the same weights. The loss is Dr. GRPO without KL, and groups and lengths come from
config.yaml and the keys you add. The fastest layout of each side counts. All are in memory at the
same time. For a 135 M-parameter model, 24 GB isn't enough for that, so set --ranks 2 --passes 1.

Gradients: both have the same weights in float64, the same answers of random tokens and different
lengths, and the same advantages and log-probabilities. Some losses have different values by design,
so no values are compared."""

import argparse
import copy
import dataclasses
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from statistics import median

import changed
from harness import ROOT, load_config, main, make_run, synchronise, torch, transformers
from torch.nn.utils.rnn import pad_sequence

from machinery.model import load_model
from machinery.passes import store_in_answers
from machinery.ranks import DEVICE, RANK, WORLD_SIZE, end_process, leave_group, shuffled_order
from machinery.settings import beside_main
from machinery.tasks import Question

QUESTIONS = 16  # per step, over all ranks
WARM_UP = 3  # steps that don't count
MOST_STEPS = 200
CORES = 2

# ---------------------------------------------------------------- one rank of one side


def wait_for_turn() -> None:
    synchronise()
    if not sys.stdin.readline():
        leave_group()
        end_process(0)


def report(started: float) -> None:
    synchronise()
    if RANK == 0:
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)


def train_ours(run: main.Run) -> None:
    while True:
        wait_for_turn()
        started = time.perf_counter()
        run.step += 1
        main.training_step(run)
        report(started)


def train_trl(run: main.Run, passes: int) -> None:
    """Dr. GRPO with one update per batch and no KL term, and no other keys."""
    import datasets
    import trl

    training = run.config.training
    assert (training.learning_type, training.scale_rewards, training.loss_normalizer) == (
        "grpo", "none", "max_length"), "TRL's side does Dr. GRPO alone"
    assert training.updates_per_batch == 1 and training.kl_beta == run.config.model.lora_rank == 0

    class Turns(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            wait_for_turn()
            self.started = time.perf_counter()

        def on_step_end(self, *_, **__):
            report(self.started)

    def reward(completions, row, **_):
        weights = run.task.REWARD_WEIGHTS
        rewards = []
        for completion, text in zip(completions, row):
            parts = run.task.reward_function(completion, json.loads(text))
            rewards.append(sum(weights[name] * parts[name] for name in weights))
        return rewards

    # TRL has its own, and needs the memory.
    run.model = run.sampler = run.policy = run.optimizer = None
    trainer = trl.GRPOTrainer(
        model=beside_main(run.config.model.name), reward_funcs=reward,
        train_dataset=datasets.Dataset.from_list(rows_in_order(run)),
        args=trl.GRPOConfig(**trl_settings(run.config, passes)), callbacks=[Turns()])
    trainer.train()


def rows_in_order(run: main.Run) -> list[dict]:
    """Returns prompts and rows of many steps, in the order in which main.questions takes them."""
    training = run.config.training
    order = shuffled_order(len(run.training_rows), training.seed, epoch=0)
    found = []
    for place in order[:MOST_STEPS * training.num_samples_per_step * WORLD_SIZE]:
        row = run.training_rows[place]
        prompt = run.tokenizer.decode(main.make_question(run, row).prompt_ids)
        found.append({"prompt": prompt, "row": json.dumps(row)})
    return found


def trl_settings(config, passes: int) -> dict:
    training, sampling = config.training, config.sampling
    return {
        "per_device_train_batch_size":
            training.num_samples_per_step * training.group_size // passes,
        "gradient_accumulation_steps": passes, "num_generations": training.group_size,
        "max_completion_length": training.max_new_gen_tokens,
        "learning_rate": training.learning_rate, "lr_scheduler_type": "constant",
        "adam_beta1": training.adam_betas[0], "adam_beta2": training.adam_betas[1],
        "weight_decay": training.weight_decay, "max_grad_norm": training.max_grad_norm or 0.0,
        "optim": "adamw_torch_fused", "loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0,
        "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
        "shuffle_dataset": False, "seed": training.seed,
        "bf16": config.model.precision == "mixed", "use_cpu": DEVICE.type == "cpu",
        "gradient_checkpointing": config.model.gradient_checkpointing,
        "model_init_kwargs": {"dtype": "float32"}, "output_dir": tempfile.mkdtemp(),
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True}


def be_a_side(side: str, passes: int, keys: list[str]) -> None:
    run = make_run(keys)
    # With several ranks, `join` gave each its share of all cores. The layout overrides that.
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if side == "ours":
        train_ours(run)
    else:
        train_trl(run, passes)


# ---------------------------------------------------------------- both sides take turns

class Side:
    """One trainer, with a process for each rank. Before its next step, each process waits for a
    line on its standard input."""

    def __init__(self, side: str, python: str, ranks: int, passes: int, keys: list[str]):
        threads = max(1, CORES // ranks)
        self.name = f"{side}, {ranks} x {threads} threads, micro-batches: {passes or 'by length'}"
        self.seconds: list[float] = []
        keys = [*keys, f"training.num_samples_per_step={QUESTIONS // ranks}",
                "training.learning_rate=1.0e-30"]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes = []
        for rank in range(ranks):
            layout = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks,
                      "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                      "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": 1}
            self.processes.append(subprocess.Popen(
                [python, __file__, *keys, "--side", side, "--passes", str(passes)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
                env=os.environ | {key: str(value) for key, value in layout.items()}))

    def take_turn(self) -> float:
        for process in self.processes:
            process.stdin.write("\n")
            process.stdin.flush()
        for line in self.processes[0].stdout:
            if line.startswith('{"seconds"'):
                self.seconds.append(json.loads(line)["seconds"])
                return self.seconds[-1]
        sys.exit(f"error: {self.name} exited before its turn")

    def end(self) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait(60)


def take_turns(options: argparse.Namespace) -> None:
    ours = [Side("ours", sys.executable, ranks, 0, options.keys) for ranks in options.ranks]
    theirs = [Side("trl", options.trl_python, ranks, passes, options.keys)
              for ranks in options.ranks for passes in options.passes]
    for step in range(1, WARM_UP + options.pairs + 1):
        for side in ours + theirs:
            print(f"step {step:>2}  {side.name:<45} {side.take_turn():6.3f} s", flush=True)
    medians = {side.name: round(median(side.seconds[WARM_UP:]), 3) for side in ours + theirs}
    mine = min(ours, key=lambda side: medians[side.name])
    other = min(theirs, key=lambda side: medians[side.name])
    ratios = [b / a for a, b in zip(mine.seconds[WARM_UP:], other.seconds[WARM_UP:])]
    print(f"\nthe fastest: {mine.name}; {other.name}")
    print(json.dumps({"times_as_fast": round(median(ratios), 3), "seconds": medians}), flush=True)
    for side in ours + theirs:
        side.end()


# ---------------------------------------------------------------- gradients

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
               {**there, "beta": BETA})
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
        prompt, completion = ([stream.randrange(3, len(tokenizer)) for _ in range(length)]
                              for length in (stream.randint(2, 12), stream.randint(1, L)))
        answers.append(main.Trajectory(Question({}, prompt), completion, "", False,
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


def trl_inputs(answers: list[main.Trajectory]) -> dict[str, torch.Tensor]:
    def padded(rows, side="right"):
        return pad_sequence([torch.as_tensor(row) for row in rows], True, padding_side=side)

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


def compare_gradients() -> None:
    """Prints how far the gradients differ, relative to their norm."""
    import datasets
    import trl

    config = load_config([f"sampling.temperature={TEMPERATURE}",
                          f"training.max_new_gen_tokens={L}"])
    model, tokenizer = load_model(config)
    model.double().train()
    answers = random_answers(model, tokenizer, config)
    totals = {"answers": ANSWERS, "tokens": sum(answer.num_tokens for answer in answers)}
    trainer = trl.GRPOTrainer(
        model=beside_main(config.model.name), reward_funcs=lambda completions, **_: [],
        train_dataset=datasets.Dataset.from_list([{"prompt": "a"}] * ANSWERS),
        args=trl.GRPOConfig(**trl_settings(config, passes=1), steps_per_generation=1))
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.double().train()
    print("| batch | gradient |\n| --- | --- |")
    worst = 0.0
    for name, here, there in cases():
        training = config.training.model_copy(update=here)
        log_probs, entropies = main.Policy(model, config)(answers)
        batch, inputs = answers, trl_inputs(answers)
        if training.updates_per_batch == 1:
            batch = [dataclasses.replace(answer) for answer in answers]
            store_in_answers(batch, old_log_probs=log_probs)
            del inputs["old_per_token_logps"]
        changed_main = changed.main_with(CHANGES.get(name, []))
        loss, _ = changed_main.policy_loss(log_probs, entropies, batch, totals, training)
        gradient = gradient_of(loss, model)
        theirs = THEIR_DEFAULTS | there
        trainer.args.use_bias_correction_kl = theirs.pop("use_bias_correction_kl")
        vars(trainer).update(theirs)
        expected = gradient_of(trainer._compute_loss(trainer.model, inputs), trainer.model)
        error = ((gradient - expected).norm() / expected.norm()).item()
        worst = max(worst, error)
        print(f"| {name} | {error:.1e} |")
    print(json.dumps({"worst": worst, "trl": trl.__version__}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python",
                        help="the Python of an environment with bench/requirements.txt")
    parser.add_argument("--gradients", action="store_true")
    parser.add_argument("--pairs", type=int, default=10, help="steps of each side that count")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="the layouts to try")
    parser.add_argument("--passes", type=int, nargs="+", default=[1, 4],
                        help="how many micro-batches TRL may split a rank's rows into")
    parser.add_argument("--side", choices=["ours", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("keys", nargs="*", help="section.key=value, for both sides")
    options = parser.parse_intermixed_args()
    if options.side:
        main.launch(lambda keys: be_a_side(options.side, options.passes[0], keys), options.keys)
    elif options.gradients:
        compare_gradients()
    elif options.trl_python is None:
        parser.error("set --trl-python, or --gradients")
    else:
        take_turns(options)
