"""GRPO in one file: reinforcement learning that teaches a language model to reason.

The algorithm, once per step:
  1. take the next questions, N of them for each rank                          questions
  2. sample a group of G answers to each                                       sample
  3. score every answer with the task's rewards                                score
  4. compare each answer with its group: A_ij = r_ij - mean_j r_ij             compute_advantages
  5. raise the log-probability of the better ones, lower that of the worse:    policy_loss
         loss = -sum_i sum_j sum_t A_ij log pi(a_ij[t] | q_i, a_ij[<t]) / (B L)
     where B is the number of answers of all ranks, and L the longest answer allowed
  6. an AdamW step on the gradient that all ranks share                        policy_gradient
  7. now and then, measure on questions that are never trained on              evaluate

That is Dr. GRPO. What it leaves out of GRPO as first published, and the key of `training` that
brings it back:
  - dividing by the group's standard deviation, which favours questions that are nearly always or
    nearly never solved                                                        scale_rewards
  - dividing by each answer's length, which favours long wrong answers         loss_normalizer
  - the ratio to the policy before the batch's first update, and its clipping: with one update
    the ratio is always 1                                             updates_per_batch, clip
  - the KL penalty: it needs a second model, and rewards computed from the answer leave no reward
    model to fool                                                              kl_beta
With `learning_type: sil` step 4 becomes self-imitation: the k best of n answers get advantage 1
and are all that is learned from. With `mask_truncated` nothing is learned from what was cut off.

    torchrun --nproc-per-node=4 main.py                     four GPUs, or four processes on a CPU
    python main.py training.max_steps=20 training.seed=1    one rank; any key of config.yaml
    torchrun --nproc-per-node=4 main.py --config my.yaml    a file of keys laid over config.yaml

The task is countdown.py, what is shown and kept logger.py. What would be the same under any other
algorithm (settings, ranks, loading a model, checkpoints, signals) is in machinery/.
"""

import machinery  # noqa: F401, I001  says what is being loaded, before it is
import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean, stdev
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from logger import Logger
from machinery.checkpoints import RunFolder
from machinery.errors import UserError
from machinery.launch import launch, stop_signals
from machinery.metrics import change_metrics, evaluation_metrics, sampler_metrics, step_metrics
from machinery.model import load_model, make_reference, make_sampler
from machinery.policy import Policy, hand_to_answers, make_micro_batches, read_prompts, warm_up
from machinery.ranks import RANK, WORLD_SIZE, over_ranks, random_stream, together
from machinery.settings import Config, TrainingSettings, load_config
from machinery.tasks import check_lengths, encode_prompt, grade, load_questions, load_task


@dataclass
class Trajectory:
    """One sampled answer. It carries its own lengths: masks are made of them, never by looking for
    pad or stop tokens, which are one and the same id in many base models."""

    row: dict
    prompt_ids: list[int]
    completion_ids: list[int]  # the sampled stop token included
    completion: str            # the text without it
    truncated: bool            # no stop token within max_new_gen_tokens
    parts: dict[str, float] = field(default_factory=dict)
    reward: float = 0.0
    advantage: float = 0.0
    old_logprobs: torch.Tensor | None = None        # (tokens,) before the batch's first update
    new_logprobs: torch.Tensor | None = None        # (tokens,) after its last, where measured
    reference_logprobs: torch.Tensor | None = None  # (tokens,) of the model as it was loaded

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass
class Run:
    """What the functions below share. All that a step changes: weights, moments, `step`, `best`."""

    config: Config
    folder: RunFolder
    log: Logger
    task: Any                        # countdown.py, or whatever file task.name says
    tokenizer: Any
    training_rows: list[dict]
    validation_rows: list[dict]
    model: nn.Module
    sampler: nn.Module               # what answers are drawn from: the model, or a bfloat16 copy
    policy: DistributedDataParallel  # what learns: answers -> log-probabilities of their tokens
    reference: Callable | None       # the same of the model as it was loaded, for the KL term
    optimizer: torch.optim.Optimizer
    step: int                        # training steps done
    best: tuple[float, float]        # best-of-n and mean accuracy of what is in best/


# ---------------------------------------------------------------- 1. questions

@lru_cache(maxsize=2)  # a step may reach from one epoch into the next
def epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    order = list(range(num_rows))
    random.Random(f"{seed} epoch {epoch}").shuffle(order)
    return order


def questions(rows: list[dict], step: int, config: Config) -> list[dict]:
    """This rank's N questions of a step. In an order that the seed decides, a step takes the next
    N x ranks of them: with half the ranks and twice the N they are the same."""
    N, seed = config.training.num_samples_per_step, config.training.seed
    first = ((step - 1) * WORLD_SIZE + RANK) * N
    places = [divmod(position, len(rows)) for position in range(first, first + N)]
    return [rows[epoch_order(len(rows), seed, epoch)[offset]] for epoch, offset in places]


# ---------------------------------------------------------------- 2. sampling

TOKENS_PER_SLICE = 16  # after so many tokens the finished answers leave the batch


@torch.inference_mode()
def complete(sampler, prompts: list[list[int]], L: int, bar) -> list[list[int]]:
    """One completion of each prompt, by Hugging Face's `generate`. Equal prompts are read once."""
    settings = sampler.generation_config  # what `make_sampler` gave it, never the model's own
    # (rows, time), padded on the left; and keys and values of all but the last token, from which
    # `generate` goes on.
    ids, mask, cache = read_prompts(sampler, prompts)
    completions: list[list[int]] = [[] for _ in prompts]
    unfinished = list(range(len(prompts)))  # which completion each row of the batch belongs to
    for done in range(0, L, TOKENS_PER_SLICE):
        settings.max_new_tokens = min(TOKENS_PER_SLICE, L - done)
        sequences = sampler.generate(ids, attention_mask=mask, past_key_values=cache,
                                     generation_config=settings)
        new_ids = sequences[:, ids.shape[1]:]  # (rows, slice); after a stop token only padding
        going_on = []
        for row, (i, row_ids) in enumerate(zip(unfinished, new_ids.tolist())):
            stops = [t for t, token in enumerate(row_ids) if token in settings.eos_token_id]
            completions[i] += row_ids[:stops[0] + 1] if stops else row_ids
            if not stops:
                going_on.append(row)
        bar.update(len(unfinished) - len(going_on))
        if not going_on:
            break
        ids = sequences[going_on]
        mask = pad(mask, (0, new_ids.shape[1]), value=True)[going_on]
        cache.batch_select_indices(torch.tensor(going_on, device=ids.device))
        unfinished = [unfinished[row] for row in going_on]
    return completions


def sample(run: Run, rows: list[dict], num_answers: int, bar) -> list[Trajectory]:
    """`num_answers` answers to each row, those to one row side by side."""
    config, L = run.config, run.config.training.max_new_gen_tokens
    prompts = [encode_prompt(row, run.task, run.tokenizer, config) for row in rows]
    asked = [prompt for prompt in prompts for _ in range(num_answers)]
    run.sampler.eval()  # in train mode gradient checkpointing would drop the cache
    completions, at_once = [], config.sampling.max_rows
    for start in range(0, len(asked), at_once):
        completions += complete(run.sampler, asked[start:start + at_once], L, bar)
    answers = []
    for i, ids in enumerate(completions):
        truncated = ids[-1] not in run.sampler.generation_config.eos_token_id
        text = run.tokenizer.decode(ids if truncated else ids[:-1],
                                    clean_up_tokenization_spaces=False)
        answers.append(Trajectory(rows[i // num_answers], asked[i], ids, text, truncated))
    return answers


@torch.no_grad()
def refresh_sampler(sampler, model) -> None:
    """After an update. (A sampler that shares the model's weights has them already.)"""
    for copied, parameter in zip(sampler.parameters(), model.parameters(), strict=True):
        if copied is not parameter and parameter.requires_grad:
            copied.copy_(parameter)


# ---------------------------------------------------------------- 3. rewards

def score(answers: list[Trajectory], task, bar) -> None:
    """The task's reward parts, and their weighted sum."""
    weights = task.REWARD_WEIGHTS.items()
    for answer in answers:
        answer.parts = grade(task, answer)  # a reward that fails ends the run, and says where
        answer.reward = sum(weight * answer.parts[part] for part, weight in weights)
        bar.update(1)


# ---------------------------------------------------------------- 4. advantages

def compute_advantages(group: list[Trajectory], training: TrainingSettings,
                       stream: random.Random) -> list[Trajectory]:
    """Sets A_ij for the answers j to one question i. Returns those that count in B: all of them, or
    with sil the k best."""
    rewards = [answer.reward for answer in group]
    if training.learning_type == "sil":
        k, _ = training.k_best_of_n
        best = sorted(group, key=lambda answer: (answer.reward, stream.random()), reverse=True)[:k]
        for answer in best:
            answer.advantage = float(answer.reward > 0)  # nothing that earned nothing is imitated
        return best
    if max(rewards) > min(rewards):  # else all stay exactly 0, whatever a mean would round to
        mean = sum(rewards) / len(rewards)
        scale = stdev(rewards) + 1e-4 if training.scale_rewards == "group" else 1.0
        for answer in group:
            answer.advantage = (answer.reward - mean) / scale
    return group


# ---------------------------------------------------------------- 5. the loss

def policy_loss(logprobs: torch.Tensor, batch: list[Trajectory], B: int, T: int,
                training: TrainingSettings) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-sum_i sum_j sum_t (gain_ij[t] - beta KL_ij[t]) / Z over the answers of a micro-batch, and
    what to watch besides. The gain is

        A_ij log pi                                          with one update per batch,
        min(rho A_ij, clip(rho, 1 - low, 1 + high) A_ij)     with several,

    where rho is pi(a_ij[t] | q_i, a_ij[<t]) over what it was before the first of them. The batch of
    all ranks has B answers, of T tokens in all. Every tensor is (tokens,), answer after answer.

    A sum, whose normaliser Z is settled before the first micro-batch: how rows are split into
    micro-batches, ordered or shared among ranks changes it only by rounding."""
    lengths = torch.tensor([len(answer.completion_ids) for answer in batch], device=logprobs.device)
    A = logprobs.new_tensor([answer.advantage for answer in batch])
    A = A.repeat_interleave(lengths)  # (rows,) -> (tokens,)
    watched = {}
    if training.updates_per_batch == 1:
        gains = A * logprobs  # for rho, which is 1 here and has the same gradient
    else:
        rho = (logprobs - torch.cat([answer.old_logprobs for answer in batch])).exp()
        gains = rho * A
        if training.clip:
            low, high = training.clip
            clipped = rho.clamp(1 - low, 1 + high) * A
            watched["clipped"] = (clipped < gains).sum()
            gains = torch.minimum(gains, clipped)
    if beta := training.kl_beta:
        d = torch.cat([answer.reference_logprobs for answer in batch]) - logprobs
        kl = torch.expm1(d) - d  # the estimator k3: never negative, and right on average
        watched["kl"] = kl.sum()
        gains = gains - beta * kl
    L, own_length = training.max_new_gen_tokens, lengths.repeat_interleave(lengths)  # (tokens,)
    Z = {"max_length": B * L,          # Dr. GRPO
         "tokens": T,                  # DAPO
         "sequence": B * own_length}   # GRPO
    return -(gains / Z[training.loss_normalizer]).sum(), watched


# ---------------------------------------------------------------- 6. its gradient

def learned_from(answers: list[Trajectory], training: TrainingSettings) -> list[Trajectory]:
    """Not what is masked; nor where the advantage, and so the gradient, is 0 but for a KL term."""
    return [answer for answer in answers if (answer.advantage or training.kl_beta)
            and not (training.mask_truncated and answer.truncated)]


def policy_gradient(run: Run, answers: list[Trajectory], bar) -> dict[str, float]:
    """Leaves the gradient of the batch of all ranks in the parameters of every rank, clipped.
    Returns what it was like, over all ranks."""
    policy, training = run.policy, run.config.training
    # Only these are run. A rank left with none runs one all the same and multiplies it by 0,
    # because every rank owes the others exactly one synchronised backward pass an update.
    learned = learned_from(answers, training)
    bar.update(len(answers) - len(learned))
    num_tokens = sum(len(answer.completion_ids) for answer in answers)
    num_learned, T = over_ranks([len(learned), num_tokens])  # their sums
    B = len(answers) * WORLD_SIZE  # what is skipped counts too, here and in T
    if num_learned == 0:
        nothing = {"entropy": math.nan, "grad_norm": math.nan}
        return {"loss": 0.0, **nothing, "updated": 0, "non_finite": 0}
    policy.train()
    policy.zero_grad(set_to_none=False)  # gradients lie in DDP's buckets: None would double them
    totals: dict[str, Any] = {}
    micro_batches = make_micro_batches(learned or answers[:1], training.tokens_per_micro_batch)
    for i, batch in enumerate(micro_batches):
        # The ranks' gradients meet once, at the last. `no_sync` has to wrap the forward pass too:
        # that is where DDP makes ready to share.
        with nullcontext() if i == len(micro_batches) - 1 else policy.no_sync():
            if training.kl_beta and batch[0].reference_logprobs is None:
                hand_to_answers(batch, reference_logprobs=run.reference(batch))
            logprobs, entropies = policy(batch)  # (tokens,) each, at the sampling temperature
            if batch[0].old_logprobs is None:  # every update cuts the same micro-batches
                hand_to_answers(batch, old_logprobs=logprobs)
            loss, watched = policy_loss(logprobs, batch, B, int(T), training)
            loss = loss * bool(learned)
            (loss * WORLD_SIZE).backward()  # DDP takes the mean over ranks, the formula the sum
        watched |= {"loss": loss, "entropy": entropies.sum(), "tokens": len(logprobs)}
        with torch.no_grad():
            for name, value in watched.items():
                totals[name] = totals.get(name, 0.0) + value * bool(learned)
        bar.update(len(batch))
    limit = training.max_grad_norm or math.inf
    grad_norm = float(nn.utils.clip_grad_norm_(policy.parameters(), limit))
    totals = dict(zip(totals, over_ranks([float(total) for total in totals.values()])))
    loss, num_tokens = totals.pop("loss"), totals.pop("tokens")
    means = {name: total / num_tokens for name, total in totals.items()}
    finite = math.isfinite(grad_norm) and math.isfinite(loss)  # on every rank, or on none
    return {"loss": loss, **means, "grad_norm": grad_norm,
            "updated": int(finite), "non_finite": int(not finite)}


def scheduled_learning_rate(step: int, training: TrainingSettings) -> float:
    """Linear warm-up, then constant, or a linear decay to 0 over `decay_steps`."""
    factor = min(1.0, step / max(1, training.warmup_steps))
    if training.decay_steps is not None and step > training.warmup_steps:
        factor = max(0.0, 1 - (step - 1 - training.warmup_steps) / training.decay_steps)
    return training.learning_rate * factor


# ---------------------------------------------------------------- 7. evaluation

def evaluate(run: Run) -> list[list[Trajectory]] | None:
    """n answers to every held-out question, shared among the ranks. Rank 0 gets all of them, a
    group for each question, the others None."""
    random_stream(run.config.training.seed, run.step, "evaluate")  # seeds torch, which samples
    n, rows = run.config.validation.best_of_n, run.validation_rows
    mine = rows[RANK::WORLD_SIZE]
    with run.log.phase("evaluate", len(mine) * n) as bar:
        answers = sample(run, mine, n, bar)
    with run.log.phase("score", len(answers)) as bar:
        score(answers, run.task, bar)
    gathered: list | None = [None] * WORLD_SIZE if RANK == 0 else None
    dist.gather_object(answers, gathered)
    if RANK != 0:
        return None
    places = [divmod(i, WORLD_SIZE) for i in range(len(rows))]  # row i was the rank's place-th
    return [gathered[rank][place * n:(place + 1) * n] for place, rank in places]


def evaluation_step(run: Run) -> None:
    groups = evaluate(run)
    if groups is None:
        return
    # A question counts as solved when its answer of highest reward solves it: best of n.
    best = [max(group, key=lambda answer: answer.reward).parts[run.task.SOLVED] for group in groups]
    solved = [fmean(answer.parts[run.task.SOLVED] for answer in group) for group in groups]
    metrics = evaluation_metrics(best, solved, groups, run.task)
    run.log.evaluation(run.step, metrics, groups)
    if (fmean(best), fmean(solved)) > run.best:
        run.best = (fmean(best), fmean(solved))
        run.folder.save_best(run, metrics)


# ---------------------------------------------------------------- the loop

def training_step(run: Run) -> bool:
    """The algorithm of the head of this file, line by line. Returns whether all was finite."""
    config, training, step = run.config, run.config.training, run.step + 1
    N, (_, G) = training.num_samples_per_step, training.k_best_of_n
    stream = random_stream(training.seed, step, "train")
    with run.log.phase("sample", N * G) as bar:
        rows = questions(run.training_rows, step, config)                          # 1.
        answers = sample(run, rows, G, bar)                                        # 2.
    with run.log.phase("score", N * G) as bar:
        score(answers, run.task, bar)                                              # 3.
    groups = [answers[i:i + G] for i in range(0, N * G, G)]
    chosen = [answer for group in groups
              for answer in compute_advantages(group, training, stream)]           # 4.
    run.optimizer.param_groups[0]["lr"] = scheduled_learning_rate(step, training)
    evaluating = step % config.validation.every == 0 or step == training.max_steps
    updates, measured = [], {}
    with run.log.phase("learn", len(chosen) * training.updates_per_batch) as bar:
        if step == 1:
            measured |= sampler_metrics(run, answers)
        for _ in range(training.updates_per_batch):  # mu
            updates.append(policy_gradient(run, chosen, bar))                      # 5.
            if not updates[-1]["updated"]:  # on every rank, or on none
                break
            run.optimizer.step()                                                   # 6.
        refresh_sampler(run.sampler, run.model)
        if step == 1 or evaluating:
            measured |= change_metrics(run, learned_from(chosen, training))
    run.step = step
    run.log.step(step, step_metrics(run, groups, updates, measured))
    if evaluating:
        evaluation_step(run)                                                       # 7.
    return not updates[-1]["non_finite"]


def train(run: Run) -> None:
    """From where the run stands to its last step. A step ends with its evaluation, and is saved
    after it, so that going on from there repeats nothing."""
    training, bad_steps = run.config.training, 0
    evaluated = over_ranks([run.log.evaluated(run.step)], dist.ReduceOp.MAX) == [1]  # rank 0 knows
    if not evaluated and (run.step == 0 or run.step >= training.max_steps):  # as it was stopped
        evaluation_step(run)
    stop_requested = stop_signals()  # SIGTERM, SIGINT and SIGHUP wait for the end of a step
    while run.step < training.max_steps:
        bad_steps = 0 if training_step(run) else bad_steps + 1
        if bad_steps == training.max_bad_steps:
            raise UserError(f"the gradient was not finite in {bad_steps} steps in a row, up to "
                            f"step {run.step}; no checkpoint was made of them. Lower "
                            "training.learning_rate, and start again under another run.name")
        stop = stop_requested()  # on any rank; all of them get the same answer
        due = run.step % run.config.checkpoint.every == 0 or run.step == training.max_steps
        if (due or stop) and not bad_steps:  # a run goes on from before them
            with run.log.phase("save"):
                run.folder.save(run)
        if stop and run.step < training.max_steps:
            raise stop  # the process ends with 128 + the signal's number


def prepare(config: Config, folder: RunFolder, log: Logger) -> Run:
    """All that a run works with, where its newest checkpoint left it."""
    training = config.training
    with together(), log.phase("read"):  # a mistake that one rank meets ends all of them
        task = load_task(config)
        model, tokenizer = load_model(config)
        training_rows, validation_rows = load_questions(task, tokenizer, config, log.say)
        check_lengths(training_rows + validation_rows, model, task, tokenizer, config)
    with log.phase("prepare"):
        policy = DistributedDataParallel(Policy(model, config), gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0, betas=training.adam_betas,
                                      weight_decay=training.weight_decay, fused=True)
        # Buckets and moments come into being here, so that a fresh run starts out as a resumed one.
        warm_up(policy, optimizer)
        reference = make_reference(model, config) if training.kl_beta else None  # as it was loaded
        step, best = folder.restore(model, optimizer)  # of the newest checkpoint, if there is one
        sampler = make_sampler(model, tokenizer, config)
    return Run(config, folder, log, task, tokenizer, training_rows, validation_rows, model, sampler,
               policy, reference, optimizer, step, best)


def main(arguments: list[str]) -> None:
    with together():
        config = load_config(arguments)
    with RunFolder(config) as folder, Logger(config, folder) as log:
        run = prepare(config, folder, log)
        log.start(run)
        train(run)
        log.finish()


if __name__ == "__main__":
    launch(main)
