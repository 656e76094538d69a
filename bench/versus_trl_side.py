"""One rank of one side of versus_trl.py or speedrun.py:
`versus_trl_side.py ours|trl steps|training PASSES [section.key=value ...]`, RANK and the like set.

Each line on its standard input asks for what comes next, and is answered by a line on its standard
output. `steps`: training.max_steps steps, one a line, each from the same weights. `training`: an
evaluation, then validation.every steps and an evaluation, and so on up to training.max_steps. The
trl side runs in an environment of its own, takes its settings from config.yaml as well, and a
rank's rows in PASSES micro-batches."""

import hashlib
import json
import os
import sys
import time
from types import SimpleNamespace

from harness import SilentLog, end_process, main, make_run, synchronise, torch

from machinery.checkpoints import state_tensors
from machinery.disk import beside_main
from machinery.errors import UserError, describe
from machinery.evaluation import evaluation_metrics
from machinery.ranks import RANK, WORLD_SIZE, leave_group, shuffled_order
from machinery.schedule import learning_rate_at
from machinery.settings import load_config
from machinery.tasks import load_questions, load_task

side, pace, passes, *arguments = sys.argv[1:]


def ask() -> None:
    if not sys.stdin.readline():
        leave_group()
        end_process(0)


def answer(seconds: float, **more) -> None:
    if RANK == 0:
        print(json.dumps({"seconds": seconds, **more}), flush=True)


def told(seen, learning_rate: float, prompts: list[str]) -> None:
    """What the sides must have in common in a step: the rate, and rank 0's questions in order."""
    seen.update(json.dumps([learning_rate, prompts]).encode())


# ---------------------------------------------------------------- the two trainers

def ours(config) -> SimpleNamespace:
    run, seen = make_run(arguments), hashlib.sha256()
    state = state_tensors(run.model, run.optimizer)
    first = {name: tensor.clone() for name, tensor in state.items()}

    def restore():
        for name, tensor in state.items():
            tensor.copy_(first[name])
        main.refresh_sampler(run.sampler, run.model)

    def cost():
        metrics = run.log.metrics
        return {"tokens": metrics["completion_length"] * config.training.num_samples_per_step
                * WORLD_SIZE * config.training.group_size,
                "sample": metrics["seconds/sample"], "learn": metrics["seconds/learn"]}

    def train(begin, end):
        for step in range(1, config.training.max_steps + 1):
            begin(step)
            main.training_step(run)
            told(seen, run.log.metrics["learning_rate"],
                 [question.row["prompt"] for question in main.questions(run)])
            end(step)

    return SimpleNamespace(restore=restore, cost=cost, train=train, seen=seen, as_run=lambda: run)


def trl(config) -> SimpleNamespace:
    import datasets
    import transformers
    import trl

    training, sampling = config.training, config.sampling
    if (training.learning_type, training.scale_rewards, training.loss_normalizer, training.kl_beta,
            training.updates_per_batch, training.mask_truncated, config.model.lora_rank,
            config.data.prompt_style) != ("grpo", "none", "max_length", 0, 1, False, 0, "base"):
        raise UserError("TRL's side is set up for Dr. GRPO: plain prompts, one update per batch, "
                        "no KL term, nothing masked, all weights learning; leave those keys alone")
    task, seen = load_task(config), hashlib.sha256()
    tokenizer = transformers.AutoTokenizer.from_pretrained(beside_main(config.model.name))
    training_questions, validation_questions = load_questions(task, tokenizer, config)
    training_rows = training_questions.rows
    G, N = training.group_size, training.num_samples_per_step * WORLD_SIZE
    # as main.questions takes them
    places = [divmod(position, len(training_rows)) for position in range(training.max_steps * N)]
    rows = [training_rows[shuffled_order(len(training_rows), training.seed, epoch)[offset]]
            for epoch, offset in places]

    def reward(prompts, completions, completion_ids, row, **_):
        nonlocal tokens, asked
        tokens += sum(map(len, completion_ids))
        asked = prompts[::G]
        parts = [task.reward_function(completion, json.loads(text))
                 for completion, text in zip(completions, row)]
        return [sum(weight * each[part] for part, weight in task.REWARD_WEIGHTS.items())
                for each in parts]

    tokens, asked, run = 0, [], None
    rows_per_rank = training.num_samples_per_step * G
    rows_per_pass = rows_per_rank // int(passes)
    on_gpu = torch.cuda.is_available()
    trainer = trl.GRPOTrainer(
        model=beside_main(config.model.name), reward_funcs=reward,
        train_dataset=datasets.Dataset.from_list(
            [{"prompt": row["prompt"], "row": json.dumps(row)} for row in rows]),
        args=trl.GRPOConfig(
            output_dir="runs/trl", max_steps=training.max_steps,
            per_device_train_batch_size=rows_per_pass,
            gradient_accumulation_steps=rows_per_rank // rows_per_pass,
            num_generations=G, max_completion_length=training.max_new_gen_tokens,
            learning_rate=training.learning_rate, lr_scheduler_type="constant",
            adam_beta1=training.adam_betas[0], adam_beta2=training.adam_betas[1],
            weight_decay=training.weight_decay, max_grad_norm=training.max_grad_norm or 0.0,
            optim="adamw_torch_fused", loss_type="dr_grpo", scale_rewards="none", beta=0.0,
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k,
            shuffle_dataset=False, seed=training.seed, bf16=on_gpu,
            gradient_checkpointing=config.model.gradient_checkpointing,
            model_init_kwargs={"dtype": "float32"}, report_to="none", save_strategy="no",
            logging_steps=1_000_000, disable_tqdm=True, use_cpu=not on_gpu))
    first = [parameter.detach().clone() for parameter in trainer.model.parameters()]

    @torch.no_grad()
    def restore():
        nonlocal tokens
        for parameter, value in zip(trainer.model.parameters(), first):
            parameter.copy_(value)
        trainer.optimizer.state.clear()
        tokens = 0

    def cost():
        own = torch.tensor(tokens, device=trainer.accelerator.device)
        return {"tokens": trainer.accelerator.gather(own).sum().item()}

    def train(begin, end):
        class AStepALine(transformers.TrainerCallback):
            def on_step_begin(self, _, state, *__, optimizer, **___):
                begin(state.global_step + 1)
                for group in optimizer.param_groups:  # as main.training_step does
                    group["lr"] = learning_rate_at(state.global_step + 1, training)

            def on_optimizer_step(self, *_, optimizer, **__):  # the rate of this step is still set
                told(seen, optimizer.param_groups[0]["lr"], asked)

            def on_step_end(self, _, state, *__, **___):
                end(state.global_step)

        trainer.add_callback(AStepALine())
        trainer.train()

    @torch.no_grad()
    def as_run():
        """What main.evaluate works with, on a copy of TRL's weights."""
        nonlocal run
        if run is None:
            model, _ = main.load_model(config)
            run = SimpleNamespace(
                config=config, log=SilentLog(), task=task, tokenizer=tokenizer,
                stop_ids=main.find_stop_ids(model, tokenizer), model=model,
                validation_questions=validation_questions,
                sampler=main.make_sampler(model, config))
        for copied, parameter in zip(run.model.parameters(), trainer.model.parameters()):
            copied.copy_(parameter)
        main.refresh_sampler(run.sampler, run.model)
        return run

    return SimpleNamespace(restore=restore, cost=cost, train=train, seen=seen, as_run=as_run)


# ---------------------------------------------------------------- the two ways of timing them

def time_steps(trainer) -> None:
    started = 0.0

    def begin(step):
        nonlocal started
        ask()
        trainer.restore()
        synchronise()
        started = time.perf_counter()

    def end(step):
        synchronise()
        answer(time.perf_counter() - started, **trainer.cost())

    trainer.train(begin, end)


def time_training(trainer, config) -> None:
    """The clock stands while others have their turn, and during evaluations."""
    every, last = config.validation.every, config.training.max_steps
    started = seconds = 0.0

    def evaluate(step):
        run = trainer.as_run()
        run.step = step
        with torch.random.fork_rng():  # TRL keeps the state of one stream, which goes on after it
            groups = main.evaluate(run)
        metrics = evaluation_metrics(groups, run.task) if groups else {}
        answer(seconds, step=step, left=last - step, solved=metrics.get("eval/solved"),
               low=metrics.get("eval/solved_low"), seen=trainer.seen.hexdigest())

    def begin(step):
        nonlocal started
        if step == 1:
            ask()
            evaluate(0)
        if (step - 1) % every == 0:
            ask()
            synchronise()
            started = time.perf_counter()

    def end(step):
        nonlocal seconds
        if step % every == 0 or step == last:
            synchronise()
            seconds += time.perf_counter() - started
            evaluate(step)

    trainer.train(begin, end)


try:
    config = load_config(arguments)
    if config.training.max_steps == 0:
        raise UserError("training.max_steps=0: there is nothing to time")
    trainer = {"ours": ours, "trl": trl}[side](config)
    # The layout's: `join` gives each of several ranks its share of all cores.
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if pace == "steps":
        time_steps(trainer)
    else:
        time_training(trainer, config)
except UserError as error:
    if RANK == 0:
        print(json.dumps({"error": describe(error)}), flush=True)
end_process(0)
