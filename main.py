"""GRPO in one file: reinforcement learning of language models, from question to update.

GRPO is group relative policy optimization. The model answers questions, and a program scores the
answers. The model learns to give answers like the better ones more often. One training step:

  1. questions            takes the next questions of the data set.
  2. sample               samples a group of answers to each question from the model.
  3. score                computes the reward of every answer.
  4. compute_advantages   compares every answer with the others to the same question. Its
                          advantage is its reward minus the mean reward of its group.
  5. policy_loss          sums -advantage * log-probability of all tokens, divided by a constant.
  6. learn                takes an AdamW step down the gradient of this loss over all ranks.
  7. evaluate             now and then measures the model on questions that it never trains on.

An example with the settings of config.yaml and two ranks. Eight answers to one question have the
rewards 1, 0, 0, 1, 0, 0, 0, 0. Their mean is 0.25, so a right answer has the advantage +0.75, and a
wrong one has -0.25. The step has 2 ranks x 8 questions x 8 answers = 128 answers of at most 192
tokens. So the loss has -0.75 / (128 x 192) times the log-probability of a right answer's token, and
+0.25 / (128 x 192) times that of a wrong one's. A step down makes right answers more likely.

This is Dr. GRPO, "GRPO done right" (Liu et al. 2025). It does not divide by the standard deviation
of the rewards, nor by the length of an answer. The last section, "Variants", holds what other
papers do differently. A key of config.yaml switches each variant on.

    torchrun --nproc-per-node=4 main.py    four GPUs, or four processes on a CPU
    python main.py training.seed=1         one process, with one setting changed

Start reading at `training_step`. Each process is a rank, and all ranks learn the same weights. If
a docstring says "Collective", all ranks have to call that function, because they communicate in it.
"""

import machinery  # noqa: F401, I001  It prints a message before the slow imports below.
import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from statistics import stdev

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GenerationConfig, PreTrainedTokenizerBase

from logger import Logger
from machinery.batches import backward_idly, batches_in_step, store_in_answers
from machinery.card import model_card
from machinery.check import check_model
from machinery.checkpoints import RunFolder
from machinery.evaluation import evaluation_metrics
from machinery.launch import launch
from machinery.memory import fit_into_memory
from machinery.metrics import NOTHING_LEARNED, StepReport, UpdateStatistics
from machinery.model import (find_stop_ids, load_model, make_reference, make_sampler,
                             refresh_sampler, warm_up)
from machinery.policy import HALF_PRECISION, compute_in_chunks, output_logits, states_before_tokens
from machinery.ranks import (RANK, WORLD_SIZE, errors_on_all_ranks, random_stream, shuffled_order,
                             sum_over_ranks)
from machinery.sampling import generate
from machinery.schedule import count_skipped, is_due, learning_rate_at
from machinery.settings import Config, TrainingSettings, load_config
from machinery.sharding import Sharded, unsharded
from machinery.tasks import (Question, Questions, Task, check_prompt_lengths, grade,
                             load_questions, load_task)


@dataclass
class Trajectory:
    """One sampled answer. Tensors of shape (tokens,) have one value for each sampled token.

    Answers are not padded. In padded ones a stop token would look like padding, because in many
    base models both have the same id."""

    question: Question         # It holds the row of the data set, and the tokens of the prompt.
    completion_ids: list[int]  # The sampled stop token is included.
    completion: str            # This is the text without the stop token.
    is_truncated: bool         # No stop token came within max_new_gen_tokens.
    reward_parts: dict[str, float] = field(default_factory=dict)
    reward: float = 0.0
    advantage: float = 0.0
    old_log_probs: torch.Tensor | None = None        # (tokens,) before the step's first update
    new_log_probs: torch.Tensor | None = None        # (tokens,) after its last, by StepReport
    reference_log_probs: torch.Tensor | None = None  # (tokens,) of the model as it was loaded

    @property
    def prompt_ids(self) -> list[int]:
        return self.question.prompt_ids

    @property
    def num_tokens(self) -> int:
        return len(self.completion_ids)


@dataclass
class Run:
    """What the functions below share. A step changes the weights of `model`, the `optimizer`,
    `step`, `best` and `last_evaluation`. A checkpoint holds these five."""

    config: Config
    folder: RunFolder
    log: Logger
    task: Task                       # countdown.py, or the file that task.name says
    tokenizer: PreTrainedTokenizerBase
    stop_ids: list[int]              # Any of these tokens ends an answer.
    training_questions: Questions
    validation_questions: Questions
    model: nn.Module                 # the weights that learn
    sampler: nn.Module               # `model` itself, or a copy. It samples answers.
    policy: DistributedDataParallel | Sharded  # a `Policy` of `model` with gradients of all ranks
    reference: Callable | None       # the policy as it was loaded, frozen, for a KL penalty
    optimizer: torch.optim.Optimizer
    step: int                        # the number of training steps that have begun
    best: tuple[float, float]        # its best_of_n and solved, compared in this order
    last_evaluation: int | None      # the step after which the model was last evaluated


# ---------------------------------------------------------------- the algorithm

def training_step(run: Run) -> dict[str, float]:
    """Takes one step of Dr. GRPO. Returns what its last update was like. Collective."""
    run.step += 1
    training = run.config.training
    num_sampled = training.num_samples_per_step * training.group_size  # own questions x answers
    # Random numbers are a function of seed, step, purpose and rank. `random_stream` adds the rank.
    stream = random_stream(training.seed, run.step, "train")
    torch.manual_seed(stream.getrandbits(63))

    # 1. and 2. Sample a group of answers to each of the next questions.
    with run.log.phase("sample", num_sampled):
        sampled_groups = sample(run, questions(run), training.group_size)

    # 3. Score every answer.
    with run.log.phase("score", num_sampled):
        score(run, sampled_groups)
    groups, all_groups = refill(run, sampled_groups)  # A variant. By default both are the same.

    # 4. Compare every answer with its group. (Only a variant uses `stream` here.)
    answers = []
    for group in groups:
        answers += compute_advantages(group, training, stream)

    # 5. and 6. Compute the loss and its gradient, and update the weights.
    report = StepReport(run, sampled_groups, all_groups)  # for metrics from before and after
    with run.log.phase("learn", len(answers) * training.updates_per_batch):
        updates = learn(run, answers)
    run.log.step(run.step, report.metrics(answers, updates))

    # 7. Now and then, measure the model on questions that it never trains on.
    if is_due(run.step, run.config.validation.every, run.config):  # Also due after the last step.
        evaluate_and_keep_best(run)
    return updates[-1]


# ---------------------------------------------------------------- 1. questions

def questions(run: Run) -> list[Question]:
    """Returns this rank's questions of a step. All ranks together take the next ones in shuffled
    order. So two ranks with 8 questions each take the same as one rank with 16."""
    num_per_rank = run.config.training.num_samples_per_step
    num_questions = len(run.training_questions)
    first = ((run.step - 1) * WORLD_SIZE + RANK) * num_per_rank
    questions_of_step = []
    for position in range(first, first + num_per_rank):
        epoch, offset = divmod(position, num_questions)
        order = shuffled_order(num_questions, run.config.training.seed, epoch)
        questions_of_step.append(run.training_questions[order[offset]])
    return questions_of_step


# ---------------------------------------------------------------- 2. sampling

def sample(run: Run, asked: list[Question], group_size: int) -> list[list[Trajectory]]:
    """Samples `group_size` answers to each question. Returns one group for each question."""
    config = run.config
    prompts = []
    for question in asked:
        prompts += [question.prompt_ids] * group_size
    settings = GenerationConfig(
        do_sample=True,
        temperature=config.sampling.temperature,
        top_p=config.sampling.top_p,
        top_k=config.sampling.top_k,
        max_new_tokens=config.training.max_new_gen_tokens,
        eos_token_id=run.stop_ids,
        pad_token_id=run.stop_ids[0],
    )
    # Hugging Face's `generate`, made faster. Answers come without padding, with their stop token.
    completions = generate(
        run.sampler, prompts, settings, config.sampling.max_rows, run.log.advance)
    groups = []
    for i, question in enumerate(asked):
        completions_of_group = completions[i * group_size:(i + 1) * group_size]
        groups.append([make_trajectory(run, question, ids) for ids in completions_of_group])
    return groups


def make_trajectory(run: Run, question: Question, completion_ids: list[int]) -> Trajectory:
    is_truncated = completion_ids[-1] not in run.stop_ids
    text_ids = completion_ids if is_truncated else completion_ids[:-1]
    text = run.tokenizer.decode(text_ids, clean_up_tokenization_spaces=False)
    return Trajectory(question, completion_ids, text, is_truncated)


# ---------------------------------------------------------------- 3. rewards

def score(run: Run, groups: list[list[Trajectory]]) -> None:
    """Sets the reward of every answer. It is a weighted sum of the parts that the task returns."""
    for group in groups:
        for answer in group:
            answer.reward_parts = grade(run.task, answer)
            answer.reward = 0.0
            for part, weight in run.task.REWARD_WEIGHTS.items():
                answer.reward += weight * answer.reward_parts[part]
            run.log.advance(1)


# ---------------------------------------------------------------- 4. advantages

def compute_advantages(
    group: list[Trajectory], training: TrainingSettings, stream: random.Random
) -> list[Trajectory]:
    """Sets the advantage of every answer to one question: its reward minus the group's mean reward.
    Returns the answers that count in the loss, by default all of them."""
    if training.learning_type == "sil":
        return imitate_best(group, training, stream)  # a variant
    rewards = [answer.reward for answer in group]
    if max(rewards) == min(rewards):
        return group  # All advantages stay exactly 0. A rounded mean could make them differ from 0.
    mean_reward = sum(rewards) / len(rewards)
    for answer in group:
        answer.advantage = answer.reward - mean_reward
    if training.scale_rewards != "none":
        scale_advantages(group, training)  # a variant
    return group


# ---------------------------------------------------------------- 5. the loss

class Policy(nn.Module):
    """Computes the log-probabilities of answers. All that uses the weights happens in `forward`,
    because DistributedDataParallel has to see it in order to share gradients."""

    def __init__(self, model: nn.Module, config: Config, one_pass: bool = False):
        super().__init__()
        self.model = model
        self.temperature = config.sampling.temperature
        self.use_autocast = config.model.precision == "mixed"
        self.one_pass = one_pass  # for sharded weights, which every pass has to gather

    def forward(self, answers: list[Trajectory]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns two tensors of shape (tokens,), one answer after the other: the log-probability
        of each sampled token, and the entropy of the softmax at its place."""
        with torch.autocast(self.model.device.type, HALF_PRECISION, enabled=self.use_autocast):
            # The hidden state at position t predicts the token at position t + 1.
            states, tokens = states_before_tokens(  # (tokens, width), (tokens,)
                self.model, answers, self.one_pass)
            # Logits are large, so they are computed in chunks, and again in the backward pass.
            return compute_in_chunks(self.log_probs_of_chunk, states, tokens, self.model)

    def log_probs_of_chunk(
        self, states: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = output_logits(self.model, states)  # (tokens, vocabulary), in float32 at least
        # Answers are sampled at this temperature. (top_p and top_k, if set, are left out here.)
        log_probs = (logits / self.temperature).log_softmax(-1)
        token_log_probs = log_probs.gather(-1, tokens[:, None])[:, 0]  # (tokens,)
        with torch.no_grad():  # `mul_` multiplies in place, which saves a large tensor.
            entropies = -log_probs.exp().mul_(log_probs).sum(-1)  # (tokens,)
        return token_log_probs, entropies


def policy_loss(
    token_log_probs: torch.Tensor,  # (tokens,), one answer of the micro-batch after the other
    batch: list[Trajectory],        # the micro-batch
    num_answers: int,               # of all ranks and all micro-batches
    num_tokens: int,                # in these answers, for a variant
    training: TrainingSettings,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns this micro-batch's part of the loss. The whole loss of Dr. GRPO is

        - sum over answers, sum over their tokens: advantage * token_log_prob / normalizer
        with normalizer = num_answers * max_new_gen_tokens

    Why? We want a higher mean reward of answers that the model samples itself. The gradient of this
    mean is the mean of reward * gradient of log_prob(answer) (REINFORCE, Williams 1992), where
    log_prob(answer) is the sum over its tokens.

    Why the advantage and not the reward? The gradient of log_prob(answer) is 0 on average, so the
    same number may be subtracted from all rewards. The group's mean takes away noise. Without it,
    nearly every answer to an easy question would push as hard as a rare right answer to a hard one.
    The mean includes the answer itself, which only scales the gradient by 1 - 1 / group_size.

    Why not the ratio of PPO? It corrects for a policy that has changed since it sampled. With one
    update for each batch it has not. The ratio is 1, and its gradient is that of log_prob.

    Why this normalizer? A constant only sets the scale. Division by the length of the answer would
    give tokens of short answers more weight than those of long ones. All sums are over all ranks,
    so it does not matter how answers are split into micro-batches or ranks.

    The dictionary is empty. Variants return sums over tokens in it, for metrics."""
    has_ratio = training.updates_per_batch > 1
    if has_ratio or training.kl_beta or training.loss_normalizer != "max_length":
        return variant_loss(token_log_probs, batch, num_answers, num_tokens, training)
    advantages = for_each_token([answer.advantage for answer in batch], batch, token_log_probs)
    normalizer = num_answers * training.max_new_gen_tokens
    return -(advantages * token_log_probs / normalizer).sum(), {}


def for_each_token(values: list, batch: list[Trajectory], like: torch.Tensor) -> torch.Tensor:
    """Repeats the value of each answer for each of its tokens. Returns a tensor, (tokens,)."""
    lengths = torch.tensor([answer.num_tokens for answer in batch], device=like.device)
    return like.new_tensor(values).repeat_interleave(lengths)  # (answers,) -> (tokens,)


# ---------------------------------------------------------------- 6. learning

def learn(run: Run, answers: list[Trajectory]) -> list[dict[str, float]]:
    """Updates the weights, by default once. Returns what each update was like. Collective."""
    training = run.config.training
    run.optimizer.param_groups[0]["lr"] = learning_rate_at(run.step, training)
    updates = []
    for _ in range(training.updates_per_batch):
        update = policy_gradient(run, answers)
        updates.append(update)
        if not update["updated"]:
            break  # No rank had anything to learn, or the gradient was not finite.
        run.optimizer.step()
    refresh_sampler(run.sampler, run.model)
    return updates


def policy_gradient(run: Run, answers: list[Trajectory]) -> dict[str, float]:
    """Leaves the gradient of the whole loss, its norm limited, in the parameters of every rank.
    Returns what it is like. Collective."""
    policy = run.policy
    training = run.config.training
    learned = [answer for answer in answers if is_learned_from(answer, training)]
    run.log.advance(len(answers) - len(learned))
    num_own_tokens = sum(answer.num_tokens for answer in answers)
    totals = sum_over_ranks({"learned": len(learned), "tokens": num_own_tokens})
    if totals["learned"] == 0:
        return dict(NOTHING_LEARNED)

    # These two also count answers without a gradient. All ranks have equally many answers.
    num_answers = len(answers) * WORLD_SIZE
    num_tokens = int(totals["tokens"])
    policy.train()  # `generate` sets eval mode again.
    policy.zero_grad(set_to_none=False)  # Gradients stay in DistributedDataParallel's buffers.
    statistics = UpdateStatistics(training)
    # Gradients of micro-batches add up on their rank. Each rank shares its sum once, in its last
    # backward pass. A rank without micro-batches takes part with an idle pass, of zeros.
    # (With `shard` every pass is shared, so all ranks make equally many. `no_sync` does nothing.)
    batches, num_idle_passes = batches_in_step(learned, training)
    for batch in batches:
        if training.kl_beta:
            add_reference_log_probs(run, batch)  # a variant
        is_last = batch is batches[-1]
        # `no_sync` has to include the forward pass, where DistributedDataParallel prepares.
        with nullcontext() if is_last else policy.no_sync():
            token_log_probs, entropies = policy(batch)
            if batch[0].old_log_probs is None:  # In the first update. For metrics and variants.
                store_in_answers(batch, old_log_probs=token_log_probs.detach())
            loss, watched = policy_loss(token_log_probs, batch, num_answers, num_tokens, training)
            # Our loss is a sum over ranks, but DistributedDataParallel takes their mean.
            (loss * WORLD_SIZE).backward()
        statistics.add(loss=loss, entropy=entropies.sum(), tokens=len(token_log_probs), **watched)
        run.log.advance(len(batch))
    backward_idly(policy, num_idle_passes)
    max_norm = training.max_grad_norm or math.inf
    grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), max_norm)
    return statistics.summary(totals["learned"], float(unsharded(grad_norm)))


def is_learned_from(answer: Trajectory, training: TrainingSettings) -> bool:
    """Whether anything is learned from an answer. The others cost no pass through the model."""
    has_gradient = answer.advantage != 0 or training.kl_beta > 0  # A KL penalty is a variant.
    return has_gradient and not is_masked(answer, training)  # Masking is a variant, too.


# ---------------------------------------------------------------- 7. evaluation

def evaluate(run: Run) -> list[list[Trajectory]] | None:
    """Samples a group of answers to every held-out question. The ranks share the questions. Rank 0
    returns all groups, and the others return None. Collective."""
    stream = random_stream(run.config.training.seed, run.step, "evaluate")
    torch.manual_seed(stream.getrandbits(63))
    group_size = run.config.validation.best_of_n
    own_questions = run.validation_questions[RANK::WORLD_SIZE]
    num_sampled = len(own_questions) * group_size
    with run.log.phase("evaluate", num_sampled):
        groups = sample(run, own_questions, group_size)
    with run.log.phase("score", num_sampled):
        score(run, groups)
    gathered = [None] * WORLD_SIZE if RANK == 0 else None
    dist.gather_object(groups, gathered)
    if RANK != 0:
        return None
    return [gathered[i % WORLD_SIZE][i // WORLD_SIZE] for i in range(len(run.validation_questions))]


def evaluate_and_keep_best(run: Run) -> None:
    """Evaluates the model, and saves it if it is the best so far. Collective."""
    groups = evaluate(run)
    run.last_evaluation = run.step
    if groups is None:
        return  # Rank 0 does the rest. It saves the sampler, which is never sharded.
    metrics = evaluation_metrics(groups, run.task)
    run.log.evaluation(run.step, metrics, groups)
    quality = (metrics["eval/best_of_n"], metrics["eval/solved"])
    if quality > run.best:
        run.best = quality
        run.folder.save_best(run, model_card(run, run.log.first_evaluation, metrics))


# ---------------------------------------------------------------- the training loop

def train(run: Run) -> None:
    """Trains to the last step. A run that is killed at any time resumes after the newest step that
    was saved, and repeats what came after it. Collective."""
    training = run.config.training
    # Evaluate before the first step, or when max_steps was lowered and no step is left.
    if run.last_evaluation != run.step and (run.step == 0 or run.step >= training.max_steps):
        evaluate_and_keep_best(run)
    num_skipped = 0  # steps in a row with a gradient that is not finite; five end the run
    while run.step < training.max_steps:
        update = training_step(run)
        num_skipped = count_skipped(num_skipped, update, run.step)
        if is_due(run.step, run.config.checkpoint.every, run.config):
            with run.log.phase("save"):
                run.folder.save(run)


def prepare(config: Config, folder: RunFolder, log: Logger) -> Run:
    """Loads all that a run needs, and restores the newest checkpoint if there is one. Collective.

    The policy computes log-probabilities of answers, with gradients. The sampler generates answers.
    Usually one set of weights serves both. In mixed precision the sampler is a copy in bfloat16,
    which differs by rounding. With `shard` it is a whole copy on each rank."""
    training = config.training
    with errors_on_all_ranks(in_turn=training.shard), log.phase("read"):
        task = load_task(config)
        model, tokenizer = load_model(config)
        stop_ids = find_stop_ids(model, tokenizer)
        training_questions, validation_questions = load_questions(task, tokenizer, config)
        check_prompt_lengths([training_questions, validation_questions], model, tokenizer, config)
        sampler = make_sampler(model, config)
        reference = make_reference(Policy, model, config) if training.kl_beta else None
        policy = Policy(model, config, one_pass=training.shard)
        if training.shard:
            policy = Sharded(policy)  # Each rank keeps a part of every weight of `model`.
    with log.phase("prepare"):
        if not training.shard:
            policy = DistributedDataParallel(policy, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(  # `learn` sets the learning rate of each step.
            policy.parameters(), lr=0.0, betas=training.adam_betas,
            weight_decay=training.weight_decay, fused=True)
        warm_up(policy, optimizer)  # It allocates memory, and changes no weight.
        run = Run(
            config, folder, log, task, tokenizer, stop_ids, training_questions,
            validation_questions, model, sampler, policy, reference, optimizer,
            step=0, best=(-math.inf, -math.inf), last_evaluation=None)
        folder.restore(run)
        refresh_sampler(sampler, model)
        check_model(run)  # Policy and sampler do as the model by itself, or the run ends here.
        fit_into_memory(run)  # It chooses tokens_per_micro_batch, if the settings leave it open.
    return run


def main(arguments: list[str]) -> None:
    with errors_on_all_ranks():
        config = load_config(arguments)
    with RunFolder(config) as folder, Logger(config, folder) as log:
        run = prepare(config, folder, log)
        log.start(run)
        train(run)
        log.finish()


# ---------------------------------------------------------------- Variants
# What other papers do differently. With the settings of config.yaml, none of it changes anything.
# Keys are those of `training`. GRPO as published is scale_rewards=group, loss_normalizer=sequence,
# kl_beta=0.04, kl_in=loss and, with several updates, clip=[0.2,0.2]. Tensors are (tokens,).

def imitate_best(
    group: list[Trajectory], training: TrainingSettings, stream: random.Random
) -> list[Trajectory]:
    """Self-imitation (Oh et al. 2018). Key: `learning_type: sil`.

    The model imitates the k best of n answers, and learns from nothing else. Each has the advantage
    1, or 0 if its reward is not above 0. Answers of equal reward come in random order."""
    k, _ = training.k_best_of_n  # n is the group size.
    ranked = sorted(group, key=lambda answer: (answer.reward, stream.random()), reverse=True)
    for answer in ranked[:k]:
        answer.advantage = 1.0 if answer.reward > 0 else 0.0
    return ranked[:k]


def scale_advantages(group: list[Trajectory], training: TrainingSettings) -> None:
    """Scaled advantages. Key: `scale_rewards`.

    `group` (GRPO, Shao et al. 2024) divides by the standard deviation of the group's rewards. This
    favours questions that are nearly always or nearly never solved. `mean` (MaxRL) divides by the
    mean of their absolute values. This favours questions that are nearly never solved."""
    rewards = [answer.reward for answer in group]
    if training.scale_rewards == "group":
        scale = stdev(rewards) + 1e-4
    else:
        scale = sum(abs(reward) for reward in rewards) / len(rewards)
    for answer in group:
        answer.advantage = answer.advantage / scale


def is_masked(answer: Trajectory, training: TrainingSettings) -> bool:
    """Overlong filtering (DAPO, Yu et al. 2025). Key: `mask_truncated`.

    Nothing is learned from a truncated answer, but it counts in the mean and the normalizer."""
    return training.mask_truncated and answer.is_truncated


def refill(run: Run, groups: list[list[Trajectory]]) -> tuple[list, list]:
    """Dynamic sampling (DAPO, Yu et al. 2025). Key: `refill`, the most rounds; 0 is off.

    A group in which all answers or none are solved is replaced by one for a question that is chosen
    at random. Returns the groups to learn from, and all that were sampled."""
    training = run.config.training
    groups, replaced = list(groups), []
    with run.log.phase("refill"):
        for attempt in range(training.refill):
            stream = random_stream(training.seed, run.step, f"refill {attempt}")
            torch.manual_seed(stream.getrandbits(63))
            alike = [i for i in range(len(groups)) if all_or_none(groups[i], run.task)]
            if not alike:
                break
            new_questions = [stream.choice(run.training_questions) for _ in alike]
            new_groups = sample(run, new_questions, training.group_size)
            score(run, new_groups)
            for i, new_group in zip(alike, new_groups, strict=True):
                replaced.append(groups[i])
                groups[i] = new_group
    return groups, groups + replaced


def all_or_none(group: list[Trajectory], task: Task) -> bool:
    return len({answer.reward_parts[task.SOLVED] for answer in group}) == 1


def variant_loss(
    token_log_probs: torch.Tensor, batch: list[Trajectory], num_answers: int, num_tokens: int,
    training: TrainingSettings,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss with another normalizer, with a ratio, or with a KL penalty."""
    watched = {}
    advantages = for_each_token([answer.advantage for answer in batch], batch, token_log_probs)
    if training.kl_beta and training.kl_in == "reward":
        advantages = advantages - training.kl_beta * kl_in_reward(token_log_probs, batch)
    if training.updates_per_batch == 1:
        objective = advantages * token_log_probs
    else:
        objective, is_clipped = ratio_objective(advantages, token_log_probs, batch, training)
        if training.clip:
            watched["clipped"] = is_clipped.sum()
    if training.kl_beta:
        kl = kl_in_loss(token_log_probs, batch)  # With `kl_in: reward` only for metrics.
        watched["kl"] = kl.sum()
        if training.kl_in == "loss":
            objective = objective - training.kl_beta * kl
    lengths = for_each_token([answer.num_tokens for answer in batch], batch, token_log_probs)
    normalizer = variant_normalizer(lengths, num_answers, num_tokens, training)
    return -(objective / normalizer).sum(), watched


def variant_normalizer(
    lengths: torch.Tensor, num_answers: int, num_tokens: int, training: TrainingSettings
) -> torch.Tensor | int:
    """Other normalizers. Key: `loss_normalizer`.

    `tokens` (DAPO, Yu et al. 2025): all tokens of these answers. `sequence` (GRPO, Shao et al.
    2024): num_answers times the answer's own length, so that all answers weigh the same."""
    if training.loss_normalizer == "tokens":
        return num_tokens
    if training.loss_normalizer == "sequence":
        return num_answers * lengths
    return num_answers * training.max_new_gen_tokens


def ratio_objective(
    advantages: torch.Tensor, token_log_probs: torch.Tensor, batch: list[Trajectory],
    training: TrainingSettings,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ratio and clipping, of PPO, GSPO and CISPO. Keys: `updates_per_batch`, `ratio`, `clip`.

    From the second update on, the policy is not the one that sampled the answers. The ratio of
    their probabilities corrects for that. Clipping takes away the gain of moving further. With one
    update neither has an effect. Returns the objective of each token, and whether it is clipped."""
    log_ratio = token_log_probs - torch.cat([answer.old_log_probs for answer in batch])
    if training.ratio == "sequence":
        # GSPO (Zheng et al. 2025, with loss_normalizer=sequence): the geometric mean of an answer.
        lengths = [answer.num_tokens for answer in batch]
        means = [of_answer.mean().expand_as(of_answer) for of_answer in log_ratio.split(lengths)]
        log_ratio = torch.cat(means)
    ratio = log_ratio.exp()
    low, high = training.clip or (math.inf, math.inf)  # By default nothing is clipped.
    if training.ratio == "cispo":
        # CISPO (MiniMax 2025): the ratio is a constant weight, with an upper bound alone.
        weight = ratio.detach().clamp(max=1 + high)
        return weight * advantages * token_log_probs, ratio > 1 + high
    unclipped = ratio * advantages
    objective = torch.minimum(unclipped, ratio.clamp(1 - low, 1 + high) * advantages)
    return objective, objective < unclipped


def add_reference_log_probs(run: Run, batch: list[Trajectory]) -> None:
    """Stores the log-probabilities of the model as it was loaded, which a KL penalty needs."""
    if batch[0].reference_log_probs is None:
        log_probs, _ = run.reference(batch)
        store_in_answers(batch, reference_log_probs=log_probs)


def kl_in_reward(token_log_probs: torch.Tensor, batch: list[Trajectory]) -> torch.Tensor:
    """KL penalty as a part of each token's reward. Keys: `kl_beta`, `kl_in: reward`.

    It keeps the policy near the model as it was loaded. Detached, it is subtracted from the
    advantage. The gradient is on average that of the per-token KL(policy || reference)."""
    reference_log_probs = torch.cat([answer.reference_log_probs for answer in batch])
    return (token_log_probs - reference_log_probs).detach()


def kl_in_loss(token_log_probs: torch.Tensor, batch: list[Trajectory]) -> torch.Tensor:
    """KL penalty as GRPO was published. Keys: `kl_beta`, `kl_in: loss`.

    Its value is r - 1 - log r, where r is reference / policy. It estimates KL(policy || reference)
    and is never negative. But its gradient is on average that of KL(reference || policy)."""
    reference_log_probs = torch.cat([answer.reference_log_probs for answer in batch])
    log_ratio = reference_log_probs - token_log_probs
    return torch.expm1(log_ratio) - log_ratio


if __name__ == "__main__":
    launch(main)
