"""One rank of one side of versus_trl.py:
`versus_trl_side.py ours|trl STEPS [section.key=value ...]`, RANK and the like set.

Each line on its standard input asks for one step, which begins with the same weights as any other,
and is answered by a line with its seconds and tokens. The trl side runs in an environment of its
own and takes its settings from config.yaml as well."""

import json
import sys
import time

from harness import leave, main, make_run, say, synchronise, torch

from machinery.checkpoints import state_tensors
from machinery.ranks import RANK, WORLD_SIZE
from machinery.settings import beside_main, load_config
from machinery.tasks import load_questions, load_task

side, steps, arguments = sys.argv[1], int(sys.argv[2]), sys.argv[3:]


def ask() -> None:
    if not sys.stdin.readline():
        leave(0)


def answer(seconds: float, tokens: float, **more) -> None:
    if RANK == 0:
        print(json.dumps({"seconds": seconds, "tokens": tokens, **more}), flush=True)


def ours() -> None:
    run = make_run(arguments)
    state = state_tensors(run.model, run.optimizer)
    first = {name: tensor.clone() for name, tensor in state.items()}
    for _ in range(steps):
        ask()
        for name, tensor in state.items():
            tensor.copy_(first[name])
        main.refresh_sampler(run.sampler, run.model)
        synchronise()
        started = time.perf_counter()
        main.training_step(run)
        synchronise()
        metrics = run.log.metrics
        answer(time.perf_counter() - started,
               metrics["completion_length"] * run.config.training.num_samples_per_step
               * WORLD_SIZE * run.config.training.k_best_of_n[1],
               sample=metrics["seconds/sample"], learn=metrics["seconds/learn"])


def trl() -> None:
    import datasets
    import transformers
    import trl

    rows_per_pass = int(arguments.pop(0))
    config = load_config(arguments)
    training, sampling = config.training, config.sampling
    task = load_task(config)
    training_rows, _ = load_questions(task, None, config, say)
    N = training.num_samples_per_step * WORLD_SIZE
    # as main.questions takes them
    order = main.epoch_order(len(training_rows), training.seed, 0)[:steps * N]
    rows = [training_rows[i] for i in order]

    def reward(prompts, completions, completion_ids, row, **_):
        nonlocal tokens
        tokens += sum(map(len, completion_ids))
        parts = [task.reward_function(completion, json.loads(text))
                 for completion, text in zip(completions, row)]
        return [sum(weight * each[part] for part, weight in task.REWARD_WEIGHTS.items())
                for each in parts]

    class AStepALine(transformers.TrainerCallback):
        def on_step_begin(self, *_, model, optimizer, **__):
            nonlocal started, tokens
            ask()
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), first):
                    parameter.copy_(value)
            optimizer.state.clear()
            trainer.accelerator.wait_for_everyone()
            started, tokens = time.perf_counter(), 0

        def on_step_end(self, *_, **__):
            trainer.accelerator.wait_for_everyone()
            seconds = time.perf_counter() - started
            answer(seconds, trainer.accelerator.gather(
                torch.tensor(tokens, device=trainer.accelerator.device)).sum().item())

    started = tokens = 0
    rows_per_rank = training.num_samples_per_step * training.k_best_of_n[1]
    on_gpu = torch.cuda.is_available()
    trainer = trl.GRPOTrainer(
        model=beside_main(config.model.name), reward_funcs=reward, callbacks=[AStepALine()],
        train_dataset=datasets.Dataset.from_list(
            [{"prompt": row["prompt"], "row": json.dumps(row)} for row in rows]),
        args=trl.GRPOConfig(
            output_dir="runs/trl", max_steps=steps, per_device_train_batch_size=rows_per_pass,
            gradient_accumulation_steps=rows_per_rank // rows_per_pass,
            num_generations=training.k_best_of_n[1],
            max_completion_length=training.max_new_gen_tokens,
            learning_rate=training.learning_rate, lr_scheduler_type="constant",
            adam_beta1=training.adam_betas[0], adam_beta2=training.adam_betas[1],
            weight_decay=training.weight_decay, max_grad_norm=training.max_grad_norm,
            optim="adamw_torch_fused", loss_type="dr_grpo", scale_rewards="none", beta=0.0,
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k,
            shuffle_dataset=False, bf16=on_gpu,
            gradient_checkpointing=config.model.gradient_checkpointing,
            model_init_kwargs={"dtype": "float32"}, report_to="none", save_strategy="no",
            logging_steps=1_000_000, disable_tqdm=True, use_cpu=not on_gpu))
    first = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.train()


{"ours": ours, "trl": trl}[side]()
leave(0)
