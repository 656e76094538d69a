"""GRPO in one file: reinforcement learning that teaches a language model to reason.

The algorithm, once per step:
  1. take the next questions, N of them for each rank                          questions
  2. sample a group of G answers to each                                       sample
  3. score every answer with the task's rewards                                score
  4. compare each answer with its group: A_ij = r_ij - mean_j r_ij             compute_advantages
  5. raise the log-probability of the better ones, lower that of the worse:    policy_loss
         loss = -sum_i sum_j sum_t A_ij log pi(a_ij[t] | q_i, a_ij[<t]) / (B L)
     where B is how many answers of all ranks count, and L the longest answer allowed
  6. an AdamW step on the gradient that all ranks share                        learn
  7. now and then, measure on questions that are never trained on              evaluate

That is Dr. GRPO. What it leaves out of GRPO as first published, and the key of `training` that
brings it back:
  - dividing by the group's standard deviation, which favours questions that are nearly always or
    nearly never solved (by its mean, MaxRL: nearly never)                     scale_rewards
  - dividing by each answer's length, which favours long wrong answers         loss_normalizer
  - the ratio to the policy before the batch's first update, and its clipping: with one update
    (mu = 1) the ratio is always 1                             updates_per_batch, clip, ratio
  - the KL penalty: it needs a second model, and rewards computed from the answer leave no reward
    model to fool                                                              kl_beta, kl_in
With `learning_type: sil` step 4 becomes self-imitation: the k best of n answers get advantage 1 if
their reward is above 0, and are all that is learned from. With `mask_truncated` an answer that was
cut off counts, but has no gradient; with `refill` other questions take the place of those solved by
all answers or by none (DAPO).

    torchrun --nproc-per-node=4 main.py                     four GPUs, or four processes on a CPU
    python main.py --config my.yaml training.seed=1         one rank; keys laid over config.yaml

The task is countdown.py, what is shown and kept logger.py. machinery/ holds what can be believed
unread: settings, ranks, checkpoints, signals, and for the algorithm these functions:
  read_prompts                 keys and values of each prompt, read once for all its answers
  states_before, project       the state from which each token is predicted; and its logits,
  in_chunks                    which never exist for all tokens at once
  make_micro_batches           answers of similar length, as many together as fit
  in_step                      adds idle ones where a rank has none; with `shard`, fewer than others
  hand_to_answers              splits a tensor of all their tokens, (tokens,), among the answers
  Sharded, whole               `shard`, in place of DDP: a rank keeps but a part of each weight, and
                               every pass gathers them; and all of such a tensor
  over_ranks, random_stream    sums over ranks; random numbers as a function of seed, step, rank
Functions that say "Collective" meet the other ranks: all have to call them, in the same order.
"""

import machinery  # noqa: F401, I001  says what is being loaded, before it is
import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from statistics import stdev

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
from machinery.model import load_model, make_reference, make_sampler, refresh_sampler, warm_up
from machinery.policy import (HALF, hand_to_answers, in_chunks, in_step, make_micro_batches,
                              project, read_prompts, states_before)
from machinery.ranks import RANK, WORLD_SIZE, epoch_order, errors_shared, over_ranks, random_stream
from machinery.settings import ADVICE, Config, TrainingSettings, load_config
from machinery.sharding import Sharded, whole
from machinery.tasks import (check_lengths, contents_of, encode_prompt, grade, load_questions,
                             load_task)


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


@dataclass
class Run:
    """What the functions below share. A step changes weights, moments, `step` and `best` alone."""

    config: Config
    folder: RunFolder
    log: Logger
    task: object                     # countdown.py, or whatever file task.name says
    tokenizer: object
    training_rows: list[dict]
    validation_rows: list[dict]
    model: nn.Module
    sampler: nn.Module               # what answers are drawn from: the model, or a bfloat16 copy
    policy: DistributedDataParallel  # or Sharded: a `Policy`, whose gradients all ranks share
    reference: Callable | None       # the same of the model as it was loaded: for the KL term
    optimizer: torch.optim.Optimizer
    step: int                        # training steps done
    best: tuple[float, float]        # best-of-n and mean accuracy of what is in best/


# ---------------------------------------------------------------- 1. questions

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
    # (answers, time), padded on the left; and keys and values of all but the last token
    ids, mask, cache = read_prompts(sampler, prompts)
    completions: list[list[int]] = [[] for _ in prompts]
    unfinished = list(range(len(prompts)))  # which completion each place of the batch belongs to
    for done in range(0, L, TOKENS_PER_SLICE):
        settings.max_new_tokens = min(TOKENS_PER_SLICE, L - done)
        sequences = sampler.generate(ids, attention_mask=mask, past_key_values=cache,
                                     generation_config=settings)
        new_ids = sequences[:, ids.shape[1]:]  # (answers, slice); after a stop token only padding
        going_on = []  # places
        for place, (i, own_ids) in enumerate(zip(unfinished, new_ids.tolist(), strict=True)):
            stops = [t for t, token in enumerate(own_ids) if token in settings.eos_token_id]
            completions[i] += own_ids[:stops[0] + 1] if stops else own_ids
            if not stops:
                going_on.append(place)
        bar.update(len(unfinished) - len(going_on))
        unfinished = [unfinished[place] for place in going_on]
        if not unfinished:
            break
        ids = sequences[going_on]
        mask = pad(mask, (0, new_ids.shape[1]), value=True)[going_on]
        cache.batch_select_indices(torch.tensor(going_on, device=ids.device))
    bar.update(len(unfinished))  # those cut off
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


# ---------------------------------------------------------------- 3. rewards

def score(answers: list[Trajectory], task, bar) -> None:
    """The task's reward parts, and their weighted sum."""
    weights = task.REWARD_WEIGHTS.items()
    for answer in answers:
        answer.parts = grade(task, answer)  # a reward that fails ends the run, and says where
        answer.reward = sum(weight * answer.parts[part] for part, weight in weights)
        bar.update(1)


def refill(run: Run, groups: list[list[Trajectory]], step: int, bar) -> tuple[list, list]:
    """Returns the groups, but in place of those whose answers are all alike in SOLVED (not in
    reward: form alone is worth no question) groups of newly drawn questions; and those replaced."""
    G, solved, replaced = run.config.training.k_best_of_n[1], run.task.SOLVED, []
    for attempt in range(run.config.training.refill):
        alike = [i for i, group in enumerate(groups)
                 if len({answer.parts[solved] for answer in group}) == 1]
        if not alike:
            break
        stream = random_stream(run.config.training.seed, step, f"refill {attempt}")
        answers = sample(run, [stream.choice(run.training_rows) for _ in alike], G, bar)
        score(answers, run.task, bar)
        replaced += [groups[i] for i in alike]
        new = {i: answers[place * G:(place + 1) * G] for place, i in enumerate(alike)}
        groups = [new.get(i, group) for i, group in enumerate(groups)]
    return groups, replaced


# ---------------------------------------------------------------- 4. advantages

def compute_advantages(group: list[Trajectory], training: TrainingSettings,
                       stream: random.Random) -> list[Trajectory]:
    """Sets A_ij for the answers j to one question i. Returns those that B counts: all of them, or
    with sil the k best."""
    rewards = [answer.reward for answer in group]
    if training.learning_type == "sil":
        k, _ = training.k_best_of_n
        best = sorted(group, key=lambda answer: (answer.reward, stream.random()), reverse=True)[:k]
        for answer in best:
            answer.advantage = float(answer.reward > 0)  # else it has earned nothing
        return best
    if max(rewards) > min(rewards):  # else all stay exactly 0, whatever a mean would round to
        mean = sum(rewards) / len(rewards)
        scale = {"none": 1.0, "group": stdev(rewards) + 1e-4,
                 "mean": sum(map(abs, rewards)) / len(rewards)}[training.scale_rewards]
        for answer in group:
            answer.advantage = (answer.reward - mean) / scale
    return group


# ---------------------------------------------------------------- 5. the loss

class Policy(nn.Module):
    """pi as the learner sees it, all of it inside DDP: gradients from outside are not shared."""

    def __init__(self, model: nn.Module, config: Config):
        super().__init__()
        self.model, self.temperature = model, config.sampling.temperature
        self.mixed = config.model.precision == "mixed"

    def forward(self, answers: list[Trajectory]) -> tuple[torch.Tensor, torch.Tensor]:
        """log pi(a[t] | q, a[<t]) of each token sampled, and the entropy of pi there: (tokens,)
        each, answer after answer."""
        with torch.autocast(self.model.device.type, HALF, enabled=self.mixed):
            # The state at t predicts the token at t + 1.
            states, tokens = states_before(self.model, answers)  # (tokens, width), (tokens,)
            return in_chunks(self.log_pi, self.model, states, tokens)

    def log_pi(self, states, tokens):
        logits = project(self.model, states)  # (tokens, vocabulary), in float32 at least
        log_pi = (logits / self.temperature).log_softmax(-1)  # at which answers are sampled
        with torch.no_grad():
            entropies = -log_pi.exp().mul_(log_pi).sum(-1)  # in place: such tensors are large
        return log_pi.gather(-1, tokens[:, None])[:, 0], entropies


def policy_loss(logprobs: torch.Tensor, batch: list[Trajectory], B: int, T: int,
                training: TrainingSettings) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-sum_i sum_j sum_t gain_ij[t] / Z over the answers of a micro-batch, and what to watch
    besides. With one update per batch, or with several, the gain is

        A log pi     or     min(rho A, clip(rho, 1 - low, 1 + high) A)

    where rho is pi(a_ij[t] | q_i, a_ij[<t]) over what it was before the first of them, and A is
    A_ij; with a KL term A_ij + beta log(pi_ref / pi), held constant, unless `kl_in` says otherwise.
    The batch of all ranks has B answers, of T tokens. Tensors are (tokens,), answer after answer.

    A sum, whose normaliser Z is settled before the first micro-batch: how answers are split into
    micro-batches, ordered or shared among ranks changes it only by rounding."""
    lengths = torch.tensor([len(answer.completion_ids) for answer in batch], device=logprobs.device)
    A = logprobs.new_tensor([answer.advantage for answer in batch])
    A = A.repeat_interleave(lengths)  # (answers,) -> (tokens,)
    watched, penalty = {}, 0.0
    if beta := training.kl_beta:
        d = torch.cat([answer.reference_logprobs for answer in batch]) - logprobs
        kl = torch.expm1(d) - d  # the estimator k3 of KL(pi || pi_ref): never negative
        watched["kl"] = kl.sum()
        if training.kl_in == "reward":
            A = A + beta * d.detach()  # part of a token's reward; its mean gradient is that of KL
        else:
            penalty = beta * kl  # GRPO as published; its mean gradient is that of KL(pi_ref || pi)
    if training.updates_per_batch == 1:
        gains = A * logprobs  # rho is 1: the gradient of rho A, though not its value
    else:
        change = logprobs - torch.cat([answer.old_logprobs for answer in batch])
        if training.ratio == "sequence":  # GSPO: the geometric mean over an answer's tokens
            own = change.split(lengths.tolist())
            change = torch.cat([each.mean().expand_as(each) for each in own])
        rho = change.exp()
        low, high = training.clip or (math.inf, math.inf)
        if training.ratio == "cispo":  # a weight, held constant, with an upper bound alone
            gains, clipped = rho.detach().clamp(max=1 + high) * A * logprobs, rho > 1 + high
        else:
            gains = torch.minimum(rho * A, rho.clamp(1 - low, 1 + high) * A)
            clipped = gains < rho * A
        if training.clip:
            watched["clipped"] = clipped.sum()
    L, own_length = training.max_new_gen_tokens, lengths.repeat_interleave(lengths)  # (tokens,)
    Z = {"max_length": B * L,          # Dr. GRPO
         "tokens": T,                  # DAPO
         "sequence": B * own_length}   # GRPO
    return -((gains - penalty) / Z[training.loss_normalizer]).sum(), watched


# ---------------------------------------------------------------- 6. its gradient

def learned_from(answers: list[Trajectory], training: TrainingSettings) -> list[Trajectory]:
    """Those that have a gradient: an advantage or a KL term, and no mask."""
    return [answer for answer in answers if (answer.advantage or training.kl_beta)
            and not (training.mask_truncated and answer.truncated)]


def policy_gradient(run: Run, answers: list[Trajectory], bar) -> dict[str, float]:
    """If any rank has something to learn, leaves the gradient of the batch of all ranks, clipped,
    in the parameters of every rank. Returns what it was like, over all ranks. Collective."""
    policy, training = run.policy, run.config.training
    learned = learned_from(answers, training)  # the others are not run, and cost nothing
    bar.update(len(answers) - len(learned))
    num_learned, T = over_ranks([len(learned), sum(len(each.completion_ids) for each in answers)])
    B = len(answers) * WORLD_SIZE  # what is not run counts too, here and in T
    if num_learned == 0:
        return {"loss": 0.0, "entropy": math.nan, "grad_norm": math.nan, "learned": 0,
                "updated": 0, "non_finite": 0}
    policy.train()
    policy.zero_grad(set_to_none=False)  # None would allocate them again, beside DDP's buckets
    totals = {}
    # All ranks meet in the last backward pass, and with sharded weights in every pass. One with
    # nothing left to learn joins them idly: with an answer, and a loss of 0.
    idle = answers[:1]
    micro_batches = in_step(make_micro_batches(learned, training.tokens_per_micro_batch), idle,
                            training.shard)
    for i, batch in enumerate(micro_batches):
        # The ranks' gradients meet once, at the last. `no_sync` has to wrap the forward pass too:
        # that is where DDP makes ready to share.
        with nullcontext() if i == len(micro_batches) - 1 else policy.no_sync():
            if training.kl_beta and batch[0].reference_logprobs is None:
                hand_to_answers(batch, reference_logprobs=run.reference(batch)[0])
            logprobs, entropies = policy(batch)  # (tokens,) each, at the sampling temperature
            if batch[0].old_logprobs is None:  # constants: for rho, and for `change_metrics`
                hand_to_answers(batch, old_logprobs=logprobs)
            loss, watched = policy_loss(logprobs, batch, B, int(T), training)
            if batch is idle:
                loss = 0 * logprobs.sum()  # and not 0 * loss: nan, if rho overflows
            (loss * WORLD_SIZE).backward()  # DDP takes the mean over ranks, the formula the sum
        watched |= {"loss": loss, "entropy": entropies.sum(), "tokens": len(logprobs)}
        with torch.no_grad():
            for name, value in watched.items():
                totals[name] = totals.get(name, 0.0) + (0.0 if batch is idle else value)
        bar.update(0 if batch is idle else len(batch))
    limit = training.max_grad_norm or math.inf
    grad_norm = float(whole(nn.utils.clip_grad_norm_(policy.parameters(), limit)))
    totals = dict(zip(totals, over_ranks([float(total) for total in totals.values()])))
    loss, learned_tokens = totals.pop("loss"), totals.pop("tokens")
    means = {name: total / learned_tokens for name, total in totals.items()}
    finite = math.isfinite(grad_norm) and math.isfinite(loss)  # on every rank, or on none
    return {"loss": loss, **means, "grad_norm": grad_norm, "learned": num_learned,
            "updated": int(finite), "non_finite": int(not finite)}


def learn(run: Run, answers: list[Trajectory], bar) -> list[dict[str, float]]:
    """mu updates on the same answers, and what each was like. Collective."""
    updates = []
    for _ in range(run.config.training.updates_per_batch):  # mu
        updates.append(policy_gradient(run, answers, bar))
        if not updates[-1]["updated"]:  # on every rank, or on none
            break
        run.optimizer.step()
    refresh_sampler(run.sampler, run.model)
    return updates


def scheduled_learning_rate(step: int, training: TrainingSettings) -> float:
    """Linear warm-up, then constant, or a linear decay to 0 over `decay_steps`."""
    rising = step / max(1, training.warmup_steps)
    falling = 1 - (step - 1 - training.warmup_steps) / (training.decay_steps or math.inf)
    return training.learning_rate * max(0.0, min(1.0, rising, falling))


# ---------------------------------------------------------------- 7. evaluation

def evaluate(run: Run) -> list[list[Trajectory]] | None:
    """n answers to every held-out question, sampled as in training, shared among the ranks. Rank 0
    gets all of them, a group for each question, the others None. Collective."""
    random_stream(run.config.training.seed, run.step, "evaluate")  # seeds torch, too
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
    places = [divmod(i, WORLD_SIZE) for i in range(len(rows))]  # question i: (place, rank)
    return [gathered[rank][place * n:(place + 1) * n] for place, rank in places]


def evaluation_step(run: Run) -> None:
    """Measures, shows and keeps it; and the model, if it is the best so far. Collective."""
    if (groups := evaluate(run)) is None:
        return
    metrics = evaluation_metrics(groups, run.task)
    run.log.evaluation(run.step, metrics, groups)
    quality = metrics["eval/best_of_n"], metrics["eval/solved"]
    if quality > run.best:
        run.best = quality
        run.folder.save_best(run, metrics)


# ---------------------------------------------------------------- the loop

def training_step(run: Run) -> dict[str, float]:
    """The head of this file, line by line. Returns what its last update was like. Collective."""
    config, training, step = run.config, run.config.training, run.step + 1
    N, G = training.num_samples_per_step, training.k_best_of_n[1]  # k is for sil alone
    stream = random_stream(training.seed, step, "train")  # seeds torch, which samples, too
    with run.log.phase("sample", N * G) as bar:
        rows = questions(run.training_rows, step, config)                          # 1.
        answers = sample(run, rows, G, bar)                                        # 2.
    with run.log.phase("score", N * G) as bar:
        score(answers, run.task, bar)                                              # 3.
    groups = [answers[i:i + G] for i in range(0, N * G, G)]
    with run.log.phase("refill") as bar:
        kept, replaced = refill(run, groups, step, bar)
    counted = [answer for group in kept
               for answer in compute_advantages(group, training, stream)]          # 4.
    run.optimizer.param_groups[0]["lr"] = scheduled_learning_rate(step, training)
    evaluating = step % config.validation.every == 0 or step == training.max_steps
    with run.log.phase("learn", len(counted) * training.updates_per_batch) as bar:
        measured = sampler_metrics(run, answers) if step == 1 else {}
        updates = learn(run, counted, bar)                                         # 5. 6.
        if step == 1 or evaluating:
            measured |= change_metrics(run, learned_from(counted, training))
    run.step = step
    run.log.step(step, step_metrics(run, groups, kept + replaced, updates, measured))
    if evaluating:
        evaluation_step(run)                                                       # 7.
    return updates[-1]


def train(run: Run) -> int:
    """From where the run stands to its last step. A step is saved after its evaluation, so that
    going on repeats nothing. Returns how many of the last steps were not finite. Collective."""
    training, bad_steps = run.config.training, 0
    evaluated = over_ranks([run.log.evaluated(run.step)], dist.ReduceOp.MAX) == [1]  # rank 0 knows
    if not evaluated and (run.step == 0 or run.step >= training.max_steps):  # none, or killed
        evaluation_step(run)
    stop_requested = stop_signals()  # SIGTERM, SIGINT and SIGHUP wait for the end of a step
    while run.step < training.max_steps:
        update = training_step(run)
        if update["learned"]:  # a step without a signal neither counts nor makes up for one
            bad_steps = bad_steps + 1 if update["non_finite"] else 0
        if bad_steps == training.max_bad_steps:
            raise UserError(ADVICE["bad_steps"].format(bad_steps=bad_steps, step=run.step))
        stop = stop_requested()  # on any rank; all of them get the same answer
        due = run.step % run.config.checkpoint.every == 0 or run.step == training.max_steps
        if (due or stop) and not bad_steps:  # else a restart goes on from before them
            with run.log.phase("save"):
                run.folder.save(run)
        if stop and run.step < training.max_steps:
            raise stop  # the process ends with 128 + the signal's number
    return bad_steps


def prepare(config: Config, folder: RunFolder, log: Logger) -> Run:
    """All that a run works with, where its newest checkpoint left it. Collective."""
    training = config.training
    with errors_shared(in_turn=training.shard), log.phase("read"):  # a mistake of one ends them all
        task = load_task(config)
        model, tokenizer = load_model(config)
        training_rows, validation_rows = load_questions(task, tokenizer, config, log.say)
        check_lengths(training_rows + validation_rows, model, task, tokenizer, config)
        contents = contents_of(task, training_rows + validation_rows, model, tokenizer, config)
        reference = make_reference(Policy, model, config) if training.kl_beta else None
        sampler = make_sampler(model, tokenizer, config)
        policy = Policy(model, config)
        sharded = Sharded(policy) if training.shard else None  # leaves room for the next rank
    with log.phase("prepare"):
        policy = sharded or DistributedDataParallel(policy, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0, betas=training.adam_betas,
                                      weight_decay=training.weight_decay, fused=True)
        warm_up(policy, optimizer)  # buckets and moments are there from the start, resumed or not
        step, best = folder.restore(model, optimizer, contents)  # of the newest checkpoint, if any
        refresh_sampler(sampler, model)
    return Run(config, folder, log, task, tokenizer, training_rows, validation_rows, model, sampler,
               policy, reference, optimizer, step, best)


def main(arguments: list[str]) -> None:
    with errors_shared():
        config = load_config(arguments)
    with RunFolder(config) as folder, Logger(config, folder) as log:
        run = prepare(config, folder, log)
        log.start(run)
        log.finish(bad_steps=train(run))


if __name__ == "__main__":
    launch(main)
