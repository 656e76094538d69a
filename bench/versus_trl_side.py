"""One rank of one side of versus_trl.py or speedrun.py.

    versus_trl_side.py ours|trl steps|training PASSES [section.key=value ...]

RANK and the like are set. Each line on the standard input asks for a turn, and a line on the
standard output reports on it. A turn is validation.every steps. With `training` there's an
evaluation before the first turn, as a turn of its own, and after each turn. The trl side runs in
its own environment, and takes a rank's rows in PASSES micro-batches. Whatever the keys say, it
always does Dr. GRPO with one update per batch and no KL term."""

import hashlib
import json
import os
import sys
import time

from harness import end_process, main, make_run, synchronise, torch, transformers

from machinery.metrics import evaluation_metrics
from machinery.ranks import DEVICE, RANK, WORLD_SIZE, leave_group, shuffled_order
from machinery.settings import beside_main, load_config

# Hashes what both sides must have in common: each step's learning rate, and rank 0's prompts.
seen = hashlib.sha256()


def see(learning_rate: float, prompts: list[str]) -> None:
    seen.update(json.dumps([learning_rate, prompts]).encode())


# ---------------------------------------------------------------- the two trainers

class Ours:
    def __init__(self, run: main.Run, config):
        self.run = run
        self.training = config.training

    def train(self, turns: "Turns") -> None:
        for step in range(1, self.training.max_steps + 1):
            turns.begin(step)
            main.training_step(self.run)
            prompts = [text_of(self.run, question) for question in main.questions(self.run)]
            see(self.run.log.metrics["learning_rate"], prompts)
            turns.end(step)

    def run_to_evaluate(self) -> main.Run:
        return self.run


class Trl:
    def __init__(self, run: main.Run, config, passes: int):
        training = config.training
        assert (training.learning_type, training.scale_rewards, training.loss_normalizer) == (
            "grpo", "none", "max_length"), "TRL's side does Dr. GRPO alone"
        assert training.updates_per_batch == 1 and training.kl_beta == 0
        import datasets
        import trl

        self.run = run  # for its task and questions, and to evaluate
        run.policy = run.optimizer = None  # TRL has its own, and needs the memory.
        for parameter in run.model.parameters():
            parameter.grad = None
        self.training = config.training
        rows = []
        for row in in_order(run.training_rows, config.training):
            prompt = text_of(run, main.make_question(run, row))
            rows.append({"prompt": prompt, "row": json.dumps(row)})
        self.trainer = trl.GRPOTrainer(
            model=beside_main(config.model.name), reward_funcs=self.reward,
            train_dataset=datasets.Dataset.from_list(rows),
            args=trl.GRPOConfig(**grpo_settings(config, passes)))

    def reward(self, prompts, completions, row, **_) -> list[float]:
        self.prompts = prompts[::self.training.group_size]
        weights = self.run.task.REWARD_WEIGHTS
        rewards = []
        for completion, text in zip(completions, row):
            parts = self.run.task.reward_function(completion, json.loads(text))
            rewards.append(sum(weights[name] * parts[name] for name in weights))
        return rewards

    def train(self, turns: "Turns") -> None:
        side = self

        class EachStep(transformers.TrainerCallback):
            def on_step_begin(self, _, state, control, optimizer, **kwargs):
                turns.begin(state.global_step + 1)
                rate = main.learning_rate_at(state.global_step + 1, side.training)
                for group in optimizer.param_groups:  # as main.learn does
                    group["lr"] = rate

            def on_optimizer_step(self, _, state, control, optimizer, **kwargs):
                see(optimizer.param_groups[0]["lr"], side.prompts)

            def on_step_end(self, _, state, control, **kwargs):
                turns.end(state.global_step)

        self.trainer.add_callback(EachStep())
        self.trainer.train()

    @torch.no_grad()
    def run_to_evaluate(self) -> main.Run:
        for copy, parameter in zip(self.run.model.parameters(), self.trainer.model.parameters()):
            copy.copy_(parameter)
        main.refresh_sampler(self.run.sampler, self.run.model)
        return self.run


def text_of(run: main.Run, question: main.Question) -> str:
    """Returns the prompt as the model sees it, including any chat template."""
    return run.tokenizer.decode(question.prompt_ids)


def in_order(rows: list[dict], training) -> list[dict]:
    """Returns the rows of all steps, in the order in which main.questions takes them."""
    ordered = []
    for position in range(training.max_steps * training.num_samples_per_step * WORLD_SIZE):
        epoch, offset = divmod(position, len(rows))
        ordered.append(rows[shuffled_order(len(rows), training.seed, epoch)[offset]])
    return ordered


def grpo_settings(config, passes: int) -> dict:
    training, sampling = config.training, config.sampling
    on_gpu = DEVICE.type == "cuda"
    return {
        "per_device_train_batch_size":
            training.num_samples_per_step * training.group_size // passes,
        "gradient_accumulation_steps": passes, "max_steps": training.max_steps,
        "num_generations": training.group_size,
        "max_completion_length": training.max_new_gen_tokens,
        "learning_rate": training.learning_rate, "lr_scheduler_type": "constant",
        "adam_beta1": training.adam_betas[0], "adam_beta2": training.adam_betas[1],
        "weight_decay": training.weight_decay, "max_grad_norm": training.max_grad_norm or 0.0,
        "optim": "adamw_torch_fused", "loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0,
        "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
        "shuffle_dataset": False, "seed": training.seed, "bf16": on_gpu, "use_cpu": not on_gpu,
        "gradient_checkpointing": config.model.gradient_checkpointing,
        "model_init_kwargs": {"dtype": "float32"}, "output_dir": "runs/trl", "report_to": "none",
        "save_strategy": "no", "logging_steps": 1_000_000, "disable_tqdm": True}


# ---------------------------------------------------------------- turns, and their time

class Turns:
    """Times each turn, but not the waiting and evaluating."""

    def __init__(self, trainer: Ours | Trl, config, evaluates: bool):
        self.trainer = trainer
        self.evaluates = evaluates
        self.every = config.validation.every
        self.last = config.training.max_steps

    def begin(self, step: int) -> None:
        if step == 1 and self.evaluates:
            self.wait()
            self.report(0, seconds=0.0)
        if (step - 1) % self.every == 0:
            self.wait()
            synchronise()
            self.started = time.perf_counter()

    def end(self, step: int) -> None:
        if step % self.every == 0 or step == self.last:
            synchronise()
            self.report(step, time.perf_counter() - self.started)

    def wait(self) -> None:
        if not sys.stdin.readline():
            leave_group()
            end_process(0)

    def report(self, step: int, seconds: float) -> None:
        found = {"seconds": seconds, "step": step, "left": self.last - step,
                 "seen": seen.hexdigest()}
        if self.evaluates:
            found |= self.evaluation(step)
        if RANK == 0:
            print(json.dumps(found), flush=True)

    def evaluation(self, step: int) -> dict[str, float]:
        run = self.trainer.run_to_evaluate()
        run.step = step
        with torch.random.fork_rng():  # TRL continues with one stream of random numbers.
            groups = main.evaluate(run)
        if RANK != 0:
            return {}
        metrics = evaluation_metrics(groups, run.task)
        return {"solved": metrics["eval/solved"], "low": metrics["eval/solved_low"]}


def work(arguments: list[str]) -> None:
    side, pace, passes, *keys = arguments
    config = load_config(keys)
    run = make_run(keys)
    trainer = Ours(run, config) if side == "ours" else Trl(run, config, int(passes))
    # With several ranks, `join` gave each its share of all cores. The layout overrides that.
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    trainer.train(Turns(trainer, config, evaluates=pace == "training"))


main.launch(work)
