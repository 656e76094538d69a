"""GRPO, from question to update. The whole algorithm is in this file, and the plumbing is in
machinery/ and logger.py.

A language model answers each question several times, and a program gives every answer a reward.
Answers with more than the average of their group become a little more likely, the others a little
less. That's group relative policy optimization, and the policy is the model that learns. One
training step:

  1. questions            takes the next questions.
  2. sample               has the model write a group of answers to each of them.
  3. score                gives every answer its reward.
  4. compute_advantages   compares every answer with its group: the advantage is the reward minus
                          the group's mean reward.
  5. learn                takes an AdamW step down the gradient of `policy_loss`, the sum of
                          -advantage * log-probability over all tokens, divided by a constant.
  6. evaluate             tests the model every few steps on questions it never trains on.

Let's follow one question through a step. It asks for 56 from the numbers 29, 30 and 3. The model
answers it eight times, and two of the answers are right. They end with <answer>(30+29)-3</answer>
and get the reward 1.1: 1.0 for the result and 0.1 for the format. The other six only get the 0.1
for the format. The mean reward is 0.35, so a right answer has the advantage +0.75 and a wrong one
-0.25.

With config.yaml as it is, a step of two processes samples 2 processes x 8 questions x 8 answers =
128 answers, of at most 192 tokens each. Each token of a right answer adds -0.75 / (128 x 192) times
its log-probability to the loss, and each token of a wrong one adds +0.25 / (128 x 192) times its
log-probability. So when the loss goes down, right answers become more likely. How far does this
get? We start with a model of 1.4 million parameters that knows the format. It solves 39% of the
puzzles it never trains on. After 60 steps, or two to three minutes on two CPU cores, it solves 97%.

This is Dr. GRPO, "GRPO done right" (Liu et al. 2025), with one update per step. When GRPO was
published, it did four more things:

  - It divided the advantages by the standard deviation of the group's rewards.
  - It divided the loss of each answer by the answer's length.
  - It kept the policy close to the model it started from, with a KL penalty.
  - It clipped a ratio: the probability of a token now, divided by its probability when it was
    sampled. With one update per step, this ratio is 1.

Keys in config.yaml bring them back. Where the code says "a variant", it's off by default, and what
it does is in the last section.

How to run it:

    torchrun --nproc-per-node=2 main.py    on two GPUs, or as two processes on a CPU
    python main.py training.seed=1         as one process, with one setting changed

How to read it: for a first look, examples/pocket.py has the algorithm in 120 lines. Here, skim
the two data classes, then read from `training_step` to the end of part 6. The processes are called
ranks. Each one runs this file on questions of its own, and all of them hold the same weights. A
docstring says "Collective" if the ranks exchange something in this function and wait for each
other, so all of them have to call it.
"""

import machinery  # noqa: F401, I001  First, because it prints a line before the slow imports below.
import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from statistics import stdev

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GenerationConfig, PreTrainedTokenizerBase

# machinery/ is what you can take on trust for now: padding, loading, counting, checking, saving.
# For sampling and scoring:
from machinery.sampling import generate
from machinery.tasks import Question, Task, encode_prompt, grade, load_questions, load_task
# For learning:
from machinery.passes import (autocast, measure_in_batches, pad_right, split_into_micro_batches,
                              store_in_answers)
from machinery.prompts import in_pieces, states_at
from machinery.model import (find_stop_ids, load_model, load_teacher, make_reference,
                             make_sampler, refresh_sampler, warm_up)
# For all ranks to do the same:
from machinery.ranks import (RANK, WORLD_SIZE, errors_on_all_ranks, launch, random_seed,
                             shuffled_order, sum_over_ranks)
from machinery.sharding import Sharded
# For the settings, the log and the checkpoints of a run:
from logger import Logger
from machinery.check import check_model
from machinery.code import code_of
from machinery.metrics import (UpdateStatistics, count_skipped, evaluation_metrics,
                               step_metrics)
from machinery.runs import RunFolder, check_weights
from machinery.settings import Config, SamplingSettings, TrainingSettings, is_due, load_config


@dataclass
class Trajectory:
    """One sampled answer. Tensors of shape (tokens,) hold one value for each of its tokens.

    Answers are stored without padding, because in padded ones a stop token could not be told from
    padding: in many base models, both have the same id."""

    question: Question         # the row of the data set, and the prompt as tokens
    completion_ids: list[int]  # the tokens of the answer, with the stop token if one was sampled
    completion: str            # their text, without the stop token
    is_truncated: bool         # No stop token came within max_new_gen_tokens.
    reward_parts: dict[str, float] = field(default_factory=dict)
    reward: float = 0.0
    advantage: float = 0.0
    # The log-probabilities of its tokens, each (tokens,), for the log and for variants:
    sampler_log_probs: torch.Tensor | None = None    # by `Run.sampler`, while sampling
    old_log_probs: torch.Tensor | None = None        # by `Run.policy`, in the first update
    reference_log_probs: torch.Tensor | None = None  # by `Run.reference`

    @property
    def prompt_ids(self) -> list[int]:
        return self.question.prompt_ids

    @property
    def num_tokens(self) -> int:
        return len(self.completion_ids)

    @property
    def token_advantages(self) -> torch.Tensor:
        """The advantage of each token, (tokens,). If you want different ones for the tokens of an
        answer, set `advantage` to such a tensor."""
        return torch.as_tensor(self.advantage, dtype=torch.float64).expand(self.num_tokens)


@dataclass
class Run:
    """What the functions below share.

    `model`, `sampler` and `policy` are one network with one set of weights: we load `model`, sample
    from `sampler` and learn through `policy`. (With some settings, the sampler has a copy of the
    weights: see `make_sampler`.)

    A step changes nothing but the weights, the state of `optimizer`, `step`, `best`,
    `last_evaluation` and `own_state`. So that's what a checkpoint holds."""

    config: Config
    folder: RunFolder
    log: Logger
    task: Task                    # countdown.py, or the file that task.name says
    tokenizer: PreTrainedTokenizerBase
    stop_ids: list[int]           # Any of these tokens ends an answer.
    training_rows: list[dict]     # A row has a "prompt" and what the task needs for the reward.
    validation_rows: list[dict]   # the held-out questions
    model: nn.Module              # the weights that learn
    sampler: nn.Module            # the model that answers are sampled from
    policy: nn.Module             # a Policy of `model`, wrapped so that ranks share gradients
    reference: nn.Module | None   # a Policy of the model as it was loaded, or of a teacher
    optimizer: torch.optim.Optimizer
    step: int                     # training steps done, including the one that is running
    best: list[float]             # `quality` of the best model, on rank 0; [-1, -1] at first
    last_evaluation: int | None   # the step after which the model was last evaluated
    own_state: dict               # Empty, for what a change of yours has to remember, as JSON.


# ---------------------------------------------------------------- the algorithm

def training_step(run: Run) -> dict[str, float]:
    """Takes one step of Dr. GRPO. Returns statistics of its update. Collective."""
    run.step += 1
    training = run.config.training
    # Random numbers depend on the seed, the step, the purpose, and the rank, which `random_seed`
    # adds itself.
    torch.manual_seed(random_seed(training.seed, run.step, "train"))

    # 1. to 3. Sample a group of answers to each of the next questions, and score them.
    groups = rollout(run, questions(run), training.group_size, run.config.sampling, "sample")

    # 4. Compare every answer with its group.
    answers = compute_advantages(groups, training)

    # 5. Update the weights.
    with run.log.phase("learn"):
        updates = learn(run, answers)
    with run.log.phase("measure"):  # This is for the log, and changes nothing.
        metrics = step_metrics(run, groups, answers, updates)
    run.log.step(run.step, {**metrics, "learning_rate": learning_rate_at(run.step, training)})

    # 6. Every few steps, and after the last one, measure the model on held-out questions.
    if is_due(run.step, run.config.validation.every, run.config):
        evaluate_and_keep_best(run)
    return updates[-1]


# ---------------------------------------------------------------- 1. questions

def questions(run: Run) -> list[Question]:
    """Returns this rank's questions for the step. All ranks together take the next ones in shuffled
    order, so two ranks with 8 questions each get the same ones as one rank with 16."""
    num_per_rank = run.config.training.num_samples_per_step  # questions of a rank, not answers
    num_rows = len(run.training_rows)
    first = ((run.step - 1) * WORLD_SIZE + RANK) * num_per_rank
    questions_of_step = []
    for position in range(first, first + num_per_rank):
        epoch, offset = divmod(position, num_rows)
        # The order is the same on every rank. It's made once per epoch and then kept.
        order = shuffled_order(num_rows, run.config.training.seed, epoch)
        questions_of_step.append(make_question(run, run.training_rows[order[offset]]))
    return questions_of_step


def make_question(run: Run, row: dict) -> Question:
    return Question(row, encode_prompt(row, run.task, run.tokenizer, run.config))


# ---------------------------------------------------------------- 2. sampling

def rollout(
    run: Run, asked: list[Question], group_size: int, sampling: SamplingSettings, phase: str
) -> list[list[Trajectory]]:
    """Samples and scores `group_size` answers to each question, for training and for evaluation.
    Returns one group per question. `phase` is its name in the log."""
    with run.log.phase(phase):
        groups = sample(run, asked, group_size, sampling)
    with run.log.phase("score"):
        score(run, groups)
    return groups


def sample(
    run: Run, asked: list[Question], group_size: int, sampling: SamplingSettings
) -> list[list[Trajectory]]:
    prompts = []
    for question in asked:
        prompts += [question.prompt_ids] * group_size
    settings = GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_new_tokens=run.config.training.max_new_gen_tokens,
        eos_token_id=run.stop_ids,
        pad_token_id=run.stop_ids[0],
    )
    # `generate` calls Hugging Face's own `generate` for 16 tokens at a time, so that answers leave
    # the batch when they've ended. For each answer it returns the tokens, up to and including the
    # first stop token, and their log-probabilities at this temperature, before top_p and top_k.
    completions = []
    on_ended = run.log.counter(len(prompts))  # It moves a progress bar.
    for start in range(0, len(prompts), sampling.max_rows):  # as many answers as fit into memory
        some = prompts[start:start + sampling.max_rows]
        completions += generate(run.sampler, some, settings, on_ended)
    groups = []
    for i, question in enumerate(asked):
        group = []
        for ids, log_probs in completions[i * group_size:(i + 1) * group_size]:
            group.append(make_trajectory(run, question, ids, log_probs))
        groups.append(group)
    return groups


def make_trajectory(
    run: Run, question: Question, completion_ids: list[int], log_probs: list[float]
) -> Trajectory:
    is_truncated = completion_ids[-1] not in run.stop_ids
    text_ids = completion_ids if is_truncated else completion_ids[:-1]
    text = run.tokenizer.decode(text_ids, clean_up_tokenization_spaces=False)
    return Trajectory(question, completion_ids, text, is_truncated,
                      sampler_log_probs=torch.tensor(log_probs))


# ---------------------------------------------------------------- 3. rewards

def score(run: Run, groups: list[list[Trajectory]]) -> None:
    """Sets the reward of every answer: a weighted sum of the parts that the task returns. With the
    weights {"format": 0.1, "answer": 1.0}, the parts {"format": 1.0, "answer": 0.0} make 0.1."""
    for group in run.log.progress(groups):
        for answer in group:
            answer.reward_parts = grade(run.task, answer.completion, answer.question.row)
            answer.reward = 0.0
            for part, weight in run.task.REWARD_WEIGHTS.items():
                answer.reward += weight * answer.reward_parts[part]


# ---------------------------------------------------------------- 4. advantages

def compute_advantages(
    groups: list[list[Trajectory]], training: TrainingSettings
) -> list[Trajectory]:
    """Sets the advantage of every answer of the step. Returns the answers that count in the
    normalizer of the loss, by default all of them."""
    answers = []
    for group in groups:
        if training.learning_type == "grpo":
            compare_with_group(group, training)
        elif training.learning_type == "sil":  # a variant
            group = imitate_best(group, training)
        # With "distill", a variant, they stay 0, and `variant_objective` adds what a teacher says.
        answers += group
    return answers


def compare_with_group(group: list[Trajectory], training: TrainingSettings) -> None:
    """The advantage of an answer is its reward minus the mean reward of its group."""
    rewards = [answer.reward for answer in group]
    if max(rewards) == min(rewards):
        return  # All advantages stay exactly 0. With a rounded mean they might not.
    mean_reward = sum(rewards) / len(rewards)
    for answer in group:
        answer.advantage = answer.reward - mean_reward
    if training.scale_rewards == "group":
        scale_advantages(group)  # a variant


# ---------------------------------------------------------------- 5. learning: the loss

# The loss of Dr. GRPO, with the log-probability that the policy gives to each sampled token, is
#
#     - sum over answers, sum over their tokens: advantage * log_prob / normalizer
#     with normalizer = number of answers * max_new_gen_tokens
#
# Why? We want a higher mean reward for answers that the model samples itself. For one question,
# that mean is the sum of p(answer) * reward over all possible answers. As grad log p = grad p / p,
# its gradient is
#
#     sum of (grad p) * reward  =  sum of p * (grad log p) * reward
#
# which is a mean over sampled answers again, so samples estimate it (REINFORCE, Williams 1992). As
# log p of an answer is the sum over its tokens, a small step down this loss raises the mean reward
# on average.
#
# Why the advantage and not the reward? On average, grad log p is 0:
#
#     sum of p * grad log p  =  sum of grad p  =  grad of (sum of p)  =  grad of 1  =  0
#
# So we may subtract any number that doesn't depend on the answer, such as the mean reward of the
# others in its group. That removes noise: without it, a right answer would push as hard when seven
# of eight are right as when it's the only one. (Our mean includes the answer itself. That only sets
# the scale: in a group of 8, reward - mean = 7/8 * (reward - mean of the others).)
#
# Why no ratio? A token's probability now, divided by what it was when sampled, corrects for a
# policy that has changed since then. Ours hasn't, so the ratio is 1. And as grad ratio = ratio *
# grad log p, the gradient is the same with a ratio of 1 as with log p. (In mixed precision, the
# sampler's weights are rounded, so it's only nearly 1: `sampler_gap` in the log says how nearly.)
#
# Why this normalizer? A constant only sets the scale. AdamW nearly cancels it, and only the limit
# max_grad_norm notices. Dividing by each answer's length would give tokens of short answers more
# weight. Sums are over all ranks, so it doesn't matter which rank or micro-batch has an answer.

def policy_loss(
    log_probs: torch.Tensor,   # (tokens,) of a micro-batch, one answer after the other
    entropies: torch.Tensor,   # (tokens,), which the default loss does not use
    batch: list[Trajectory],   # the micro-batch
    totals: dict[str, float],  # the answers of the step and their tokens, over all ranks
    training: TrainingSettings,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns this micro-batch's part of the loss, and sums for the log."""
    advantages = torch.cat([answer.token_advantages for answer in batch]).to(log_probs)
    objective = advantages * log_probs  # (tokens,)
    normalizer = totals["answers"] * training.max_new_gen_tokens
    watched = {}
    if training.updates_per_batch > 1 or training.has_reference:  # a variant
        objective, watched = variant_objective(advantages, log_probs, batch, training)
    if training.loss_normalizer != "max_length":  # a variant
        normalizer = variant_normalizer(batch, totals, training, log_probs)
    # Add a term of your own to `objective` here, after the variants, which may replace it.
    return -(objective / normalizer).sum(), watched


def is_learned_from(answer: Trajectory, training: TrainingSettings) -> bool:
    """Whether `policy_loss` has a gradient for the answer. By default it has none where the
    advantage is 0. If you add a term that has one for every answer, return True here."""
    if training.has_reference:  # a variant
        return True
    return bool(answer.token_advantages.any())


# ---------------------------------------------------------------- 5. learning: the update

def learn(run: Run, answers: list[Trajectory]) -> list[dict[str, float]]:
    """Updates the weights, once by default. Returns statistics of each update. Collective."""
    training = run.config.training
    run.optimizer.param_groups[0]["lr"] = learning_rate_at(run.step, training)
    # An answer whose advantage is 0 has no gradient, so it needs no pass through the model. But it
    # counts in the normalizer. The totals are over all ranks.
    learned = [answer for answer in answers if is_learned_from(answer, training)]
    totals = sum_over_ranks({
        "answers": len(answers),
        "tokens": sum(answer.num_tokens for answer in answers),
        "learned": len(learned),
    })
    if totals["learned"] == 0:
        return [UpdateStatistics.OF_NOTHING]  # AdamW takes no step, so no weight changes.
    if training.has_reference:  # a teacher or a KL penalty, both variants
        add_reference_log_probs(run, learned)
    updates = []
    for _ in range(training.updates_per_batch):
        update = policy_gradient(run, learned, totals)
        updates.append(update)
        if update["non_finite"]:  # On some rank, the loss or the gradient is inf or nan.
            break
        run.optimizer.step()
    refresh_sampler(run.sampler, run.model)  # By default they share their weights already.
    return updates


def policy_gradient(
    run: Run, learned: list[Trajectory], totals: dict[str, float]
) -> dict[str, float]:
    """Leaves the gradient of the whole loss, its norm clipped, in the parameters of every rank.
    Returns statistics of the update. Collective.

    `policy` is wrapped in DistributedDataParallel: during `backward` it replaces each gradient by
    its mean over all ranks, so all ranks take the same step. Within `no_sync` it doesn't. There,
    the gradients of micro-batches add up on their rank, and the sums are shared once, in the
    backward pass of the last micro-batch. (With training.shard, `Sharded` takes its place. It
    averages as well, but after every micro-batch.)"""
    training = run.config.training
    policy = run.policy
    policy.train()  # Only gradient checkpointing needs this: dropout is 0.
    policy.zero_grad(set_to_none=False)  # The tensors stay: DistributedDataParallel sums in them.
    statistics = UpdateStatistics()
    # A micro-batch has at most tokens_per_micro_batch tokens. Ranks may have different numbers of
    # micro-batches, because they share gradients only in the last pass. A rank with nothing to
    # learn from gets a made-up answer that has no tokens, so its loss is an empty sum.
    micro_batches = split_into_micro_batches(learned, training)
    for batch in run.log.progress(micro_batches):
        is_last = batch is micro_batches[-1]
        sharing = nullcontext() if is_last else policy.no_sync()
        with sharing:  # from the forward pass on, where DistributedDataParallel prepares for it
            log_probs, entropies = policy(batch)  # both (tokens,), one answer after the other
            if batch[0].old_log_probs is None:  # In the first update, no answer has them yet.
                store_in_answers(batch, old_log_probs=log_probs)  # detached, (tokens,) in each
            loss, watched = policy_loss(log_probs, entropies, batch, totals, training)  # a scalar
            # Our loss is a sum over ranks, but DistributedDataParallel averages over them.
            (loss * WORLD_SIZE).backward()
        statistics.add(loss, entropies, watched)
    max_norm = training.max_grad_norm or math.inf
    grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), max_norm)  # a scalar
    return statistics.summary(grad_norm)  # over all ranks


class Policy(nn.Module):
    """Computes the log-probabilities of answers. Everything that uses the weights happens in
    `forward`, because DistributedDataParallel has to see it to share gradients."""

    def __init__(self, model: nn.Module, config: Config):
        super().__init__()
        self.model = model
        self.config = config

    def forward(self, answers: list[Trajectory]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the log-probability of each token of the answers, and the entropy of the
        distribution it's drawn from. Both are (tokens,), one answer after the other."""
        rows = []
        answer_rows = []
        for answer in answers:
            rows.append(answer.prompt_ids + answer.completion_ids)
            answer_rows.append([False] * len(answer.prompt_ids) + [True] * answer.num_tokens)
        ids, mask = pad_right(rows, self.model.device)  # both (answers, longest row)
        is_answer, _ = pad_right(answer_rows, self.model.device)
        # The model predicts the next token, so the logits for a token are at the one before it:
        #     ids           p0 p1 p2 a0 a1    three tokens of prompt, two of answer
        #     is_answer     0  0  0  1  1
        #     is_before     0  0  1  1  0     The logits at p2 predict a0, those at a0 predict a1.
        is_before = is_answer.roll(-1, dims=1)
        with autocast(self.config):
            # The next two lines compute what these would, in less time and memory:
            #     logits = self.model(ids, mask).logits[is_before]  # (tokens, vocabulary)
            #     return self.log_probs_of_tokens(logits, ids[is_answer])
            # A model turns tokens into hidden states, and its output layer turns states into
            # logits. `states_at` reads a prompt once for all of its answers. `in_pieces` calls
            # `log_probs_of_tokens` with the logits, in float32, of some of the tokens at a time.
            states = states_at(self.model, ids, mask, is_before)  # (tokens, width)
            return in_pieces(self.log_probs_of_tokens, self.model, states, ids[is_answer])

    def log_probs_of_tokens(
        self, logits: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits are (tokens, vocabulary). Tokens and both results are (tokens,)."""
        # The temperature is that of sampling. If top_p or top_k are set, they are left out here,
        # and the gradient is only approximate.
        logits = logits / self.config.sampling.temperature
        log_probs = logits.log_softmax(-1)  # (tokens, vocabulary)
        token_log_probs = log_probs.gather(-1, tokens[:, None])[:, 0]  # (tokens,)
        # Entropies are for the log. To learn from them, remove `no_grad`, and make sure that
        # `is_learned_from` keeps the answers that you want to learn from.
        with torch.no_grad():
            entropies = -(log_probs.exp() * log_probs).sum(-1)  # (tokens,)
        return token_log_probs, entropies


def learning_rate_at(step: int, training: TrainingSettings) -> float:
    """Rises over `warmup_steps`, then stays or falls to 0 over `decay_steps`."""
    rising = step / max(1, training.warmup_steps)
    falling = 1.0
    if training.decay_steps:  # 1 in the first step after the warm-up, and 0 `decay_steps` later
        falling = 1 - (step - 1 - training.warmup_steps) / training.decay_steps
    return training.learning_rate * max(0.0, min(1.0, rising, falling))


# ---------------------------------------------------------------- 6. evaluation

def evaluate(run: Run) -> list[list[Trajectory]] | None:
    """Samples a group of `best_of_n` answers to every held-out question, at the same temperature as
    in training. Each rank takes a part of the questions. Rank 0 returns all groups in the order of
    the rows, and other ranks return None. Collective."""
    torch.manual_seed(random_seed(run.config.training.seed, run.step, "evaluate"))
    asked = [make_question(run, row) for row in run.validation_rows[RANK::WORLD_SIZE]]
    groups = rollout(
        run, asked, run.config.validation.best_of_n, run.config.sampling, "evaluate")
    gathered = [None] * WORLD_SIZE if RANK == 0 else None
    dist.gather_object(groups, gathered)
    if RANK != 0:
        return None
    # Row i went to rank i % WORLD_SIZE, as its question number i // WORLD_SIZE.
    return [gathered[i % WORLD_SIZE][i // WORLD_SIZE] for i in range(len(run.validation_rows))]


def evaluate_and_keep_best(run: Run) -> None:
    """Evaluates the model, and saves it as the last one, and perhaps as the best. Collective.

    The best model has the highest `solved`, the share of right answers. If two are equal,
    `best_of_n` decides: the share of questions where the best of the n answers, by reward, is
    right."""
    groups = evaluate(run)
    run.last_evaluation = run.step
    if groups is None:
        return  # Only rank 0 has the answers. Rank 0 saves the sampler, which is never sharded.
    metrics = evaluation_metrics(groups, run.task)
    quality = [metrics["eval/solved"], metrics["eval/best_of_n"]]
    is_best = quality > run.best  # Lists are compared from left to right.
    if is_best:
        run.best = quality
    run.folder.save_model(run.sampler, run.model.generation_config, run.tokenizer,
                          run.log.how_it_was_made(run.step, metrics), is_best)
    run.log.evaluation(run.step, metrics, groups)


# ------------------------------------------------- You may stop here: that was the whole algorithm.
# What follows starts a run, saves it and resumes it. After that come the variants.

# ---------------------------------------------------------------- the training loop

def main(arguments: list[str]) -> None:
    with errors_on_all_ranks():
        config = load_config(arguments)
        # A run resumes only with the code that made it. With other code a new run starts, or if
        # run.name is set, the trainer refuses to start.
        code = code_of(main, config)
    with RunFolder(config, code) as folder, Logger(config, folder) as log:
        run = prepare(config, folder, log)
        log.start(run.step, run.task, run.model, len(run.training_rows), len(run.validation_rows))
        train(run)
        log.finish()


def train(run: Run) -> None:
    """Trains until step `max_steps`. Collective."""
    training = run.config.training
    # A run begins with an evaluation. And if max_steps was lowered to the step of the checkpoint,
    # the loop below has nothing to do, so the last evaluation is made here.
    if run.step in (0, training.max_steps) and run.last_evaluation != run.step:
        evaluate_and_keep_best(run)
        save(run)
    num_skipped = 0  # steps in a row whose gradient was not finite
    while run.step < training.max_steps:
        update = training_step(run)
        num_skipped = count_skipped(num_skipped, update, run.step)  # Five in a row end the run.
        if is_due(run.step, run.config.checkpoint.every, run.config):
            save(run)


def save(run: Run) -> None:
    """Rank 0 writes a checkpoint, unless ranks have different weights: that ends the run.
    Collective."""
    with run.log.phase("save"):
        check_weights(run.model, run.sampler, run.step)
        run.folder.save(run.model, run.optimizer, step=run.step, best=run.best,
                        last_evaluation=run.last_evaluation, own_state=run.own_state)


def prepare(config: Config, folder: RunFolder, log: Logger) -> Run:
    """Loads everything a run needs, and restores its newest checkpoint, if any. Collective."""
    training = config.training
    with errors_on_all_ranks(), log.phase("read"):
        task = load_task(config)
        model, tokenizer = load_model(config)
        stop_ids = find_stop_ids(model, tokenizer)
        teacher = load_teacher(model, tokenizer, config)  # None, unless `distill` is set
        training_rows, validation_rows = load_questions(task, model, teacher, tokenizer, config)
        sampler = make_sampler(model, config)  # By default it shares the model's weights.
        reference = None
        if training.has_reference:
            reference = Policy(teacher or make_reference(model, config), config)
    with log.phase("prepare"):
        folder.check_data(training_rows, validation_rows, model, teacher)
        policy = Policy(model, config)
        if training.shard:  # Each rank keeps a part of every weight.
            policy = Sharded(policy)
        else:
            policy = DistributedDataParallel(policy, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(  # `learn` sets the learning rate of each step.
            policy.parameters(), lr=0.0, betas=training.adam_betas,
            weight_decay=training.weight_decay, fused=True)
        warm_up(policy, optimizer)  # It changes no weight.
        any_prompt = encode_prompt(training_rows[0], task, tokenizer, config)
        # The run ends here if `Policy` or `generate` doesn't compute what the model computes.
        sampled = Policy(sampler, config)
        check_model(sampled, policy, reference, any_prompt, stop_ids[0], config)
        restored = folder.restore(model, optimizer)  # step, best, last_evaluation and own_state
        refresh_sampler(sampler, model)
    return Run(
        config=config, folder=folder, log=log, task=task, tokenizer=tokenizer, stop_ids=stop_ids,
        training_rows=training_rows, validation_rows=validation_rows, model=model, sampler=sampler,
        policy=policy, reference=reference, optimizer=optimizer, **restored)


# ---------------------------------------------------------------- Variants
# What other papers do. With the settings of config.yaml, none of it changes anything. Every key
# below is one of `training`, and every tensor is (tokens,). More papers are in changes/, each as a
# diff of this file.
#
# GRPO as published (Shao et al. 2024) has this loss for the G answers to one question:
#
#     - 1/G * sum over answers (1/length * sum over tokens (
#           min(ratio * A, clip(ratio, 1 - 0.2, 1 + 0.2) * A) - beta * (q - 1 - log q)))
#     A     = (reward - mean reward of the group) / standard deviation of its rewards
#     ratio = policy / old policy: the probability of the token now, divided by what it was before
#             the first update on these answers
#     q     = reference / policy: its probability by the model as it was loaded, divided by what it
#             is now
#
# Its keys, each with its default -> its value for GRPO:
#     scale_rewards: none -> group
#     loss_normalizer: max_length -> sequence
#     updates_per_batch: 1 -> 2, for example
#     clip: null -> [0.2, 0.2]
#     kl_beta: 0 -> 0.04
#     kl_in: reward -> loss

def imitate_best(group: list[Trajectory], training: TrainingSettings) -> list[Trajectory]:
    """Self-imitation (after Oh et al. 2018). Keys: `learning_type: sil`, `k_best_of_n: [k, n]`.

    The model samples n answers (the group), imitates the k best of them, and learns from nothing
    else. Each of these has the advantage 1, or 0 if its reward isn't above 0. With equal rewards,
    earlier answers win."""
    k = training.k_best_of_n[0]
    ranked = sorted(group, key=lambda answer: answer.reward, reverse=True)
    for answer in ranked[:k]:
        answer.advantage = 1.0 if answer.reward > 0 else 0.0
    return ranked[:k]


def scale_advantages(group: list[Trajectory]) -> None:
    """Scaled advantages (GRPO, Shao et al. 2024). Key: `scale_rewards: group`.

    Divides them by the standard deviation of the group's rewards. With a share p of rewards 1 and
    the rest 0 it's about sqrt(p (1 - p)), so questions that are almost always or almost never
    solved weigh more."""
    scale = stdev(answer.reward for answer in group) + 1e-4
    for answer in group:
        answer.advantage = answer.advantage / scale


def variant_normalizer(
    batch: list[Trajectory], totals: dict[str, float], training: TrainingSettings,
    like: torch.Tensor,
) -> torch.Tensor | float:
    """Other normalizers. Key: `loss_normalizer`.

    `tokens` (DAPO, Yu et al. 2025): the number of tokens in the step. `sequence` (GRPO, Shao et al.
    2024): the number of answers times the answer's length, so that all answers weigh the same."""
    if training.loss_normalizer == "tokens":
        return totals["tokens"]
    lengths = []  # for each token, the length of its answer
    for answer in batch:
        lengths += [answer.num_tokens] * answer.num_tokens
    return totals["answers"] * like.new_tensor(lengths)


def variant_objective(
    advantages: torch.Tensor, log_probs: torch.Tensor, batch: list[Trajectory],
    training: TrainingSettings,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The objective with a ratio, a KL penalty or a teacher. Returns it, and sums for the log."""
    watched = {}
    if training.has_reference and training.kl_in == "reward":
        of_reference = reference_advantages(batch, training)
        if training.learning_type == "distill":
            watched["teacher_lower"] = (of_reference < 0).sum()
        advantages = advantages + of_reference
    if training.updates_per_batch == 1:  # The ratio is 1, so `clip` changes nothing.
        objective = advantages * log_probs
    else:
        objective, is_clipped = ratio_objective(advantages, log_probs, batch, training)
        if training.clip:
            watched["clipped"] = is_clipped.sum()
    if training.has_reference:
        kl = kl_estimate(log_probs, batch)
        watched["kl"] = kl.sum()
        if training.kl_in == "loss":
            objective = objective - training.kl_beta * kl
    return objective, watched


def ratio_objective(
    advantages: torch.Tensor, log_probs: torch.Tensor, batch: list[Trajectory],
    training: TrainingSettings,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ratio and clipping (PPO, Schulman et al. 2017). Keys: `updates_per_batch`, `clip`.

    From the second update on, the policy isn't the one that sampled the answers, and the ratio of
    their probabilities corrects for that. Clipping removes what would be gained by moving further.
    In the first update the ratio is 1, so neither changes anything. Returns each token's objective,
    and whether it's clipped."""
    log_ratio = log_probs - torch.cat([answer.old_log_probs for answer in batch])
    ratio = log_ratio.exp()
    low, high = training.clip or (math.inf, math.inf)  # By default nothing is clipped.
    # For A > 0 there's no gain above 1 + high, and for A < 0 none below 1 - low.
    unclipped = ratio * advantages
    objective = torch.minimum(unclipped, ratio.clamp(1 - low, 1 + high) * advantages)
    return objective, objective < unclipped


def add_reference_log_probs(run: Run, answers: list[Trajectory]) -> None:
    """Stores the log-probabilities of the teacher, or for a KL penalty those of the model as it was
    loaded."""
    for batch, log_probs, _ in measure_in_batches(run.reference, answers, run.config.training):
        store_in_answers(batch, reference_log_probs=log_probs)


def reference_advantages(batch: list[Trajectory], training: TrainingSettings) -> torch.Tensor:
    """What a teacher, or a KL penalty in the reward, adds to the advantage of each token:

        weight * (log-probability of the reference - log-probability of the policy)

    Both are taken before the first update, because they are a part of the reward. So a token
    becomes more likely if the reference likes it better than the policy does.

    On-policy distillation (Agarwal et al. 2023). Keys: `learning_type: distill`, `teacher`. The
    policy is a student, which samples the answers. The reference is its teacher, a model that is
    never trained. The weight is 1, and rewards are logged, but teach nothing. On average a step
    lowers KL(student || teacher) at each token, given everything before it.

    A KL penalty in the reward. Keys: `kl_beta`, `kl_in: reward`. The reference is the model as it
    was loaded, and the weight is `kl_beta`. That keeps the policy near this model: on average, the
    result is the gradient of -kl_beta * KL(policy || reference) at each token. (A token also
    changes the KL of later ones, which is left out.) The result is this gradient only in the first
    update, and only if all answers are learned from, so not with `sil`."""
    reference_log_probs = torch.cat([answer.reference_log_probs for answer in batch])
    old_log_probs = torch.cat([answer.old_log_probs for answer in batch])
    return training.kl_weight * (reference_log_probs - old_log_probs)


def kl_estimate(log_probs: torch.Tensor, batch: list[Trajectory]) -> torch.Tensor:
    """q - 1 - log q, with q = reference / policy. It estimates KL(policy || reference) and is never
    negative. With a reference it's logged. With `kl_in: loss` it is the penalty, as in GRPO.

    As a penalty it isn't what its value suggests. Its gradient is (1 - q) * grad log policy. In the
    mean over samples of the policy, grad log policy gives 0, and -q * grad log policy gives

        sum of policy * -q * grad log policy  =  sum of -reference * grad log policy

    over all possible tokens. This is the gradient of KL(reference || policy)."""
    reference_log_probs = torch.cat([answer.reference_log_probs for answer in batch])
    log_q = reference_log_probs - log_probs
    return torch.expm1(log_q) - log_q


if __name__ == "__main__":
    launch(main)
