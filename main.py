"""GRPO in one file: reinforcement learning of language models, from question to update.

GRPO is group relative policy optimization. The model answers questions, and a program scores the
answers. The model learns to give answers like the better ones more often. One training step:

  1. questions            takes the next questions of the data set.
  2. sample               samples a group of answers to each question from the model.
  3. score                computes the reward of every answer.
  4. compute_advantages   compares every answer with the others to the same question. Its
                          advantage is its reward minus the mean reward of its group.
  5. learn                takes an AdamW step down the gradient of `policy_loss`, which is the sum
                          of -advantage * log-probability of all tokens, divided by a constant.
  6. evaluate             now and then measures the model on questions that it never trains on.

An example with the settings of config.yaml and two ranks. The question is to make 56 of 29, 30 and
3. A right answer ends with <answer>(30+29)-3</answer> and has the reward 1.1: 1.0 for being right,
and 0.1 for its format. A wrong answer in this format has 0.1. Of eight answers two are right. The
mean reward is 0.35, so a right answer has the advantage +0.75, and a wrong one has -0.25. The step
has 2 ranks x 8 questions x 8 answers = 128 answers of at most 192 tokens. So the loss has
-0.75 / (128 x 192) times the log-probability of each token of a right answer, and +0.25 / (128 x
192) times that of each token of a wrong one. A step down makes right answers more likely. In 60
steps with the learning rate 3e-5, in two minutes on two CPU cores, a model of 1.4 million
parameters that knows the format goes from 39 % to 97 % right answers to held-out questions.

This is Dr. GRPO, "GRPO done right" (Liu et al. 2025). It does not divide by the standard deviation
of the rewards, nor by the length of an answer. The last section, "Variants", holds GRPO as it was
published, and what other papers do. A key of config.yaml switches each variant on.

    torchrun --nproc-per-node=4 main.py    four GPUs, or four processes on a CPU
    python main.py training.seed=1         one process, with one setting changed

Start reading at `training_step`. After part 5 you know the algorithm. Each process is a rank, and
all ranks learn the same weights. A docstring says "Collective" if all ranks have to call it.
"""

import machinery  # noqa: F401, I001  It prints a message before the slow imports below.
import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from statistics import stdev

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GenerationConfig, PreTrainedTokenizerBase

from logger import Logger
from machinery.check import check_model
from machinery.metrics import (NOTHING_LEARNED, StepReport, UpdateStatistics, count_skipped,
                               evaluation_metrics)
from machinery.model import (find_stop_ids, load_model, make_reference, make_sampler,
                             refresh_sampler, warm_up)
from machinery.passes import (HALF_PRECISION, LOGITS_PER_CHUNK, compute_in_chunks,
                              measure_in_batches, output_logits, pad_right,
                              split_into_micro_batches, store_in_answers)
from machinery.prompts import hidden_states
from machinery.ranks import (RANK, WORLD_SIZE, errors_on_all_ranks, launch, random_seed,
                             shuffled_order, sum_over_ranks)
from machinery.runs import RunFolder, check_weights
from machinery.sampling import generate
from machinery.settings import Config, TrainingSettings, is_due, load_config
from machinery.sharding import Sharded, unsharded
from machinery.tasks import Question, Task, encode_prompt, grade, load_questions, load_task


@dataclass
class Trajectory:
    """One sampled answer. Tensors of shape (tokens,) have one value for each sampled token.

    Answers are stored without padding. In padded ones a stop token would look like padding, because
    in many base models both have the same id."""

    question: Question         # It holds the row of the data set, and the tokens of the prompt.
    completion_ids: list[int]  # the tokens of the answer, with the sampled stop token
    completion: str            # their text, without the stop token
    is_truncated: bool         # No stop token came within max_new_gen_tokens.
    reward_parts: dict[str, float] = field(default_factory=dict)
    reward: float = 0.0
    advantage: float = 0.0
    old_log_probs: torch.Tensor | None = None        # (tokens,) before the first update on it
    new_log_probs: torch.Tensor | None = None        # (tokens,) after the last, by StepReport
    reference_log_probs: torch.Tensor | None = None  # (tokens,) of the model as it was loaded

    @property
    def prompt_ids(self) -> list[int]:
        return self.question.prompt_ids

    @property
    def num_tokens(self) -> int:
        return len(self.completion_ids)


@dataclass
class Run:
    """What the functions below share. A checkpoint holds the weights of `model`, the `optimizer`,
    `step`, `best` and `last_evaluation`, which are all that a step changes. By default `model`,
    `sampler` and `policy` share their weights. `prepare` names exceptions."""

    config: Config
    folder: RunFolder
    log: Logger
    task: Task                    # countdown.py, or the file that task.name says
    tokenizer: PreTrainedTokenizerBase
    stop_ids: list[int]           # Any of these tokens ends an answer.
    training_rows: list[dict]     # A row has a "prompt", and what the task needs for the reward.
    validation_rows: list[dict]   # These are held out.
    model: nn.Module              # the weights that learn
    sampler: nn.Module            # It samples answers.
    policy: DistributedDataParallel | Sharded  # a `Policy` of `model`, wrapped to share gradients
    reference: nn.Module | None   # a `Policy` of the model as it was loaded, for a KL penalty
    optimizer: torch.optim.Optimizer
    step: int                     # the number of the training step, from 1. Before, it is 0.
    best: list[float]             # how good the best model is, see `evaluate_and_keep_best`
    last_evaluation: int | None   # the step after which the model was last evaluated


# ---------------------------------------------------------------- the algorithm

def training_step(run: Run) -> dict[str, float]:
    """Takes one step of Dr. GRPO. Returns what its last update was like. Collective."""
    run.step += 1
    training = run.config.training
    # Random numbers are a function of seed, step, purpose and rank. (`random_seed` adds the rank.)
    torch.manual_seed(random_seed(training.seed, run.step, "train"))

    # 1. and 2. Sample a group of answers to each of the next questions.
    with run.log.phase("sample"):
        groups = sample(run, questions(run), training.group_size)

    # 3. Score every answer.
    with run.log.phase("score"):
        score(run, groups)

    # 4. Compare every answer with its group.
    answers = []
    for group in groups:
        answers += compute_advantages(group, training)

    # 5. Update the weights. (The report is only for the log.)
    with run.log.phase("measure"):  # Before the update. In step 1, do sampler and policy agree?
        report = StepReport(run.policy.module, run.task, run.config, run.step, groups)
    with run.log.phase("learn"):
        updates = learn(run, answers)
    with run.log.phase("measure"):  # After it. In step 1 and with evaluations, what has changed?
        metrics = report.metrics(answers, updates, run.log.seconds)
    run.log.step(run.step, {**metrics, "learning_rate": learning_rate_at(run.step, training)})

    # 6. Now and then, measure the model on questions that it never trains on.
    if is_due(run.step, run.config.validation.every, run.config):  # Also due after the last step.
        evaluate_and_keep_best(run)
    return updates[-1]


# ---------------------------------------------------------------- 1. questions

def questions(run: Run) -> list[Question]:
    """Returns the questions of a step for this rank. All ranks together take the next ones in
    shuffled order. So two ranks with 8 questions each take the same as one rank with 16."""
    num_per_rank = run.config.training.num_samples_per_step  # questions of a rank, not answers
    num_rows = len(run.training_rows)
    first = ((run.step - 1) * WORLD_SIZE + RANK) * num_per_rank
    questions_of_step = []
    for position in range(first, first + num_per_rank):
        epoch, offset = divmod(position, num_rows)
        order = shuffled_order(num_rows, run.config.training.seed, epoch)  # made once an epoch
        questions_of_step.append(make_question(run, run.training_rows[order[offset]]))
    return questions_of_step


def make_question(run: Run, row: dict) -> Question:
    return Question(row, encode_prompt(row, run.task, run.tokenizer, run.config))


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
    # Hugging Face's `generate`, for `max_rows` answers at once. After each 16 tokens the ended ones
    # leave. All answers come in the order of `prompts`, without padding, with their stop token.
    completions = generate(
        run.sampler, prompts, settings, config.sampling.max_rows, run.log.counter(len(prompts)))
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
    """Sets the reward of every answer. It is a weighted sum of the parts that the task returns,
    like {"format": 1.0, "answer": 0.0}. With the weights 0.1 and 1.0 this answer has 0.1."""
    for group in run.log.progress(groups):
        for answer in group:
            answer.reward_parts = grade(run.task, answer.completion, answer.question.row)
            answer.reward = 0.0
            for part, weight in run.task.REWARD_WEIGHTS.items():
                answer.reward += weight * answer.reward_parts[part]


# ---------------------------------------------------------------- 4. advantages

def compute_advantages(group: list[Trajectory], training: TrainingSettings) -> list[Trajectory]:
    """Sets the advantage of every answer to one question: its reward minus the group's mean reward.
    Returns the answers that count in the loss, by default all of them."""
    if training.learning_type == "sil":
        return imitate_best(group, training)  # a variant
    rewards = [answer.reward for answer in group]
    if max(rewards) == min(rewards):
        return group  # All advantages stay exactly 0. With a rounded mean they might not.
    mean_reward = sum(rewards) / len(rewards)
    for answer in group:
        answer.advantage = answer.reward - mean_reward
    if training.scale_rewards != "none":
        scale_advantages(group, training)  # a variant
    return group


# ---------------------------------------------------------------- 5. learning

def learn(run: Run, answers: list[Trajectory]) -> list[dict[str, float]]:
    """Updates the weights, by default once. Returns what each update was like. Collective."""
    training = run.config.training
    run.optimizer.param_groups[0]["lr"] = learning_rate_at(run.step, training)
    # Answers without an advantage cost no pass through the model. But they count in the totals.
    learned = [answer for answer in answers if is_learned_from(answer, training)]
    totals = sum_over_ranks({
        "answers": len(answers),
        "tokens": sum(answer.num_tokens for answer in answers),
        "learned": len(learned),
    })
    if totals["learned"] == 0:
        return [NOTHING_LEARNED]
    if training.kl_beta:
        add_reference_log_probs(run, learned)  # a variant
    updates = []
    for _ in range(training.updates_per_batch):
        update = policy_gradient(run, learned, totals)
        updates.append({**update, "learned": totals["learned"]})
        if update["non_finite"]:
            break  # Loss or gradient is inf or nan, for all ranks alike. The weights stay.
        run.optimizer.step()
    refresh_sampler(run.sampler, run.model)  # if it is a copy, see `prepare`
    return updates


def is_learned_from(answer: Trajectory, training: TrainingSettings) -> bool:
    has_gradient = answer.advantage != 0 or training.kl_beta > 0  # A KL penalty is a variant.
    return has_gradient and not is_masked(answer, training)  # Masking is a variant, too.


def policy_gradient(
    run: Run, learned: list[Trajectory], totals: dict[str, float]
) -> dict[str, float]:
    """Leaves the gradient of the whole loss, its norm limited, in the parameters of every rank.
    Returns what the update is like. Collective."""
    training = run.config.training
    policy = run.policy
    policy.train()  # For gradient checkpointing. Dropout is 0. `generate` sets eval mode again.
    policy.zero_grad(set_to_none=False)  # Gradients are views of DistributedDataParallel's buffers.
    statistics = UpdateStatistics()
    # Gradients of micro-batches add up on their rank. Each rank shares its sum once, in its last
    # backward pass. If a rank has nothing to learn, `split_into_micro_batches` makes up an answer
    # without tokens, so that it can take part. Its loss is an empty sum, with the gradient 0.
    micro_batches = split_into_micro_batches(learned, training)
    for batch in run.log.progress(micro_batches):
        is_last = batch is micro_batches[-1]
        # `no_sync` has to include the forward pass, where DistributedDataParallel prepares.
        with nullcontext() if is_last else policy.no_sync():
            token_log_probs, entropies = policy(batch)
            if batch[0].old_log_probs is None:  # In the first update. For metrics and variants.
                store_in_answers(batch, old_log_probs=token_log_probs.detach())
            loss, watched = policy_loss(token_log_probs, batch, totals, training)
            # Our loss is a sum over ranks, but DistributedDataParallel (like Sharded) takes a mean.
            (loss * WORLD_SIZE).backward()
        statistics.add(loss, entropies, watched)
    max_norm = training.max_grad_norm or math.inf
    grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), max_norm)
    return statistics.summary(float(unsharded(grad_norm)))


class Policy(nn.Module):
    """Computes the log-probabilities of answers. All that uses the weights happens in `forward`,
    because DistributedDataParallel has to see it in order to share gradients."""

    def __init__(self, model: nn.Module, config: Config):
        super().__init__()
        self.model = model
        self.temperature = config.sampling.temperature
        self.use_autocast = config.model.precision == "mixed"
        self.chunk_size = LOGITS_PER_CHUNK // model.config.get_text_config().vocab_size

    def forward(self, answers: list[Trajectory]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns two tensors of shape (tokens,), one answer after the other: the log-probability
        of each sampled token, and the entropy of the softmax at its place."""
        # The model predicts the next token. For a prompt p0 p1 p2 and an answer a0 a1 a2:
        #     prefix  p0 p1
        #     inputs        p2 a0 a1
        #     ids           a0 a1 a2    Each is predicted at the input above it.
        # For one answer alone this is model(prompt + answer).logits[len(prompt) - 1:-1].
        # Padding is on the right, where no token of a causal model looks. One column is the least.
        ids, is_token = pad_right([answer.completion_ids for answer in answers], self.model.device)
        last_of_prompt = ids.new_tensor([answer.prompt_ids[-1:] for answer in answers])
        inputs = torch.cat([last_of_prompt, ids[:, :-1]], 1)  # as ids: (answers, longest answer)
        prefixes = [answer.prompt_ids[:-1] for answer in answers]
        with torch.autocast(self.model.device.type, HALF_PRECISION, enabled=self.use_autocast):
            # The state at inputs[i, j] predicts ids[i, j]. We get those where is_token[i, j], row
            # after row. Equal prefixes are computed once, with gradient, if the model can do that.
            states = hidden_states(self.model, prefixes, inputs, is_token)  # (tokens, width)
            # Logits are large, so they are computed in chunks, and again in the backward pass.
            return compute_in_chunks(
                self.log_probs_of_chunk, states, ids[is_token], self.chunk_size)

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
    totals: dict[str, float],       # answers of the step and their tokens, of all ranks
    training: TrainingSettings,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns this micro-batch's part of the loss, and sums that variants log. Dr. GRPO's loss is

        - sum over answers, sum over their tokens: advantage * token_log_prob / normalizer
        with normalizer = num_answers * max_new_gen_tokens

    Why? We want a higher mean reward of answers that the model samples itself. As grad p = p * grad
    log p, the gradient of this mean is the mean of reward * grad log p(answer) (REINFORCE, Williams
    1992). log p(answer) is the sum over its tokens. So a step down the loss raises the mean reward.

    Why the advantage and not the reward? On average grad log p(answer) is 0: sum p * grad log p =
    sum grad p = grad 1 = 0. So a number that does not depend on the answer may be subtracted from
    its reward. The mean reward of the others takes away noise. Without it, a right answer would
    push as hard when seven of eight are right as when it is the only one. (Our mean includes the
    answer itself: reward - mean = (1 - 1/G) * (reward - mean of the others).)

    Why not the ratio of PPO? It corrects for a policy that has changed since it sampled. With one
    update for each batch it has not. The ratio is 1, and its gradient is that of log_prob.

    Why this normalizer? A constant only sets the scale, and AdamW nearly cancels that. Dividing by
    the length of the answer would give tokens of short answers more weight than those of long ones.
    All sums are over all ranks. So it does not matter which micro-batch or rank has an answer."""
    has_ratio = training.updates_per_batch > 1
    if has_ratio or training.kl_beta or training.loss_normalizer != "max_length":
        return variant_loss(token_log_probs, batch, totals, training)
    advantages = for_each_token([answer.advantage for answer in batch], batch, token_log_probs)
    normalizer = totals["answers"] * training.max_new_gen_tokens
    return -(advantages * token_log_probs / normalizer).sum(), {}


def for_each_token(values: list, batch: list[Trajectory], like: torch.Tensor) -> torch.Tensor:
    """Repeats the value of each answer for each of its tokens. Returns a tensor, (tokens,)."""
    lengths = torch.tensor([answer.num_tokens for answer in batch], device=like.device)
    return like.new_tensor(values).repeat_interleave(lengths)  # (answers,) -> (tokens,)


def learning_rate_at(step: int, training: TrainingSettings) -> float:
    """It rises over `warmup_steps`. Then it stays, or falls to 0 over `decay_steps`."""
    rising = step / max(1, training.warmup_steps)
    falling = 1.0
    if training.decay_steps:  # 1 in the first step after the warm-up, and 0 `decay_steps` later.
        falling = 1 - (step - 1 - training.warmup_steps) / training.decay_steps
    return training.learning_rate * max(0.0, min(1.0, rising, falling))


# ---------------------------------------------------------------- 6. evaluation

def evaluate(run: Run) -> list[list[Trajectory]] | None:
    """Samples a group of `best_of_n` answers to every held-out question, of which each rank takes a
    part. Rank 0 returns all groups, in the order of the rows. Others return None. Collective."""
    torch.manual_seed(random_seed(run.config.training.seed, run.step, "evaluate"))
    with run.log.phase("evaluate"):
        asked = [make_question(run, row) for row in run.validation_rows[RANK::WORLD_SIZE]]
        groups = sample(run, asked, run.config.validation.best_of_n)
    with run.log.phase("score"):
        score(run, groups)
    gathered = [None] * WORLD_SIZE if RANK == 0 else None
    dist.gather_object(groups, gathered)
    if RANK != 0:
        return None
    return [gathered[i % WORLD_SIZE][i // WORLD_SIZE] for i in range(len(run.validation_rows))]


def evaluate_and_keep_best(run: Run) -> None:
    """Evaluates the model, and saves it if it is the best so far. Collective.

    "eval/solved" is the share of right answers. "eval/best_of_n" is the share of questions whose
    answer with the highest reward is right."""
    groups = evaluate(run)
    run.last_evaluation = run.step
    if groups is None:
        return  # Rank 0 alone does the rest. It saves the sampler, which is never sharded.
    metrics = evaluation_metrics(groups, run.task)
    quality = [metrics["eval/best_of_n"], metrics["eval/solved"]]  # compared in this order
    if quality > run.best:
        run.best = quality
        run.folder.save_best(run.sampler, run.model.generation_config, run.tokenizer,
                             run.log.how_it_was_made(run.step, metrics))
    run.log.evaluation(run.step, metrics, groups)


# ---------------------------------------------------------------- the training loop

def train(run: Run) -> None:
    """Trains to the last step. A killed run resumes after the newest saved step. Collective."""
    training = run.config.training
    if run.step in (0, training.max_steps) and run.last_evaluation != run.step:
        evaluate_and_keep_best(run)
        save(run)
    num_skipped = 0  # steps in a row with a gradient that is not finite
    while run.step < training.max_steps:
        update = training_step(run)
        num_skipped = count_skipped(num_skipped, update, run.step)  # Five in a row end the run.
        if is_due(run.step, run.config.checkpoint.every, run.config):
            save(run)


def save(run: Run) -> None:
    """Rank 0 writes a checkpoint, unless the weights of the ranks differ. Collective."""
    with run.log.phase("save"):
        check_weights(run.model, run.sampler, run.step)
        run.folder.save(run.model, run.optimizer, step=run.step, best=run.best,
                        last_evaluation=run.last_evaluation)


def prepare(config: Config, folder: RunFolder, log: Logger) -> Run:
    """Loads all that a run needs, and restores its newest checkpoint, if any. Collective."""
    training = config.training
    with errors_on_all_ranks(), log.phase("read"):
        task = load_task(config)
        model, tokenizer = load_model(config)
        stop_ids = find_stop_ids(model, tokenizer)
        training_rows, validation_rows = load_questions(task, model, tokenizer, config)
        # With `shard` the sampler is a copy. In mixed precision it is a copy rounded to bfloat16.
        sampler = make_sampler(model, config)
        reference = Policy(make_reference(model, config), config) if training.kl_beta else None
    with log.phase("prepare"):
        policy = Policy(model, config)
        if training.shard:  # A rank keeps a part of each weight.
            policy = Sharded(policy)
        else:
            policy = DistributedDataParallel(policy, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(  # `learn` sets the learning rate of each step.
            policy.parameters(), lr=0.0, betas=training.adam_betas,
            weight_decay=training.weight_decay, fused=True)
        warm_up(policy, optimizer)  # Now the optimizer has its state, all 0, for `restore` to fill.
        any_prompt = encode_prompt(training_rows[0], task, tokenizer, config)
        # The run ends here if policy or sampler computes anything else than the model by itself.
        check_model(policy, sampler, any_prompt, stop_ids[0], config)
        restored = folder.restore(model, optimizer)  # step, best and last_evaluation
        refresh_sampler(sampler, model)
    return Run(
        config=config, folder=folder, log=log, task=task, tokenizer=tokenizer, stop_ids=stop_ids,
        training_rows=training_rows, validation_rows=validation_rows, model=model, sampler=sampler,
        policy=policy, reference=reference, optimizer=optimizer, **restored)


def main(arguments: list[str]) -> None:
    with errors_on_all_ranks():
        config = load_config(arguments)
    with RunFolder(config) as folder, Logger(config, folder) as log:
        run = prepare(config, folder, log)
        log.start(run.step, run.task, run.model, len(run.training_rows), len(run.validation_rows))
        train(run)
        log.finish()


# ---------------------------------------------------------------- Variants
# What other papers do. With the settings of config.yaml, none of it changes anything. All keys are
# those of `training`. Tensors are (tokens,).
# GRPO as published (Shao et al. 2024) has this loss for the G answers to one question:
#
#     - 1/G * sum over answers, 1/length * sum over tokens:
#           [min(ratio * A, clip(ratio, 1 - 0.2, 1 + 0.2) * A) - beta * (q - 1 - log q)]
#     A     = (reward - mean reward of the group) / standard deviation of its rewards
#     ratio = probability of the token / what it was before the first update on these answers
#     q     = probability of the token by the model as it was loaded / its probability now
# Its keys are scale_rewards=group, loss_normalizer=sequence, kl_beta=0.04, kl_in=loss and, with
# several updates_per_batch, clip=[0.2,0.2].

def imitate_best(group: list[Trajectory], training: TrainingSettings) -> list[Trajectory]:
    """Self-imitation (after Oh et al. 2018). Key: `learning_type: sil`.

    The model imitates the k best of n answers, and learns from nothing else. Each has the advantage
    1, or 0 if its reward is not above 0. Among equal rewards it takes the first."""
    k = training.k_best_of_n[0]  # It is [k, group_size].
    ranked = sorted(group, key=lambda answer: answer.reward, reverse=True)
    for answer in ranked[:k]:
        answer.advantage = 1.0 if answer.reward > 0 else 0.0
    return ranked[:k]


def scale_advantages(group: list[Trajectory], training: TrainingSettings) -> None:
    """Scaled advantages. Key: `scale_rewards`.

    `group` (GRPO, Shao et al. 2024) divides by the standard deviation of the group's rewards. With
    a share p of rewards 1 and the rest 0 it is about sqrt(p (1 - p)), so questions that are nearly
    always or never solved weigh more. `mean` (MaxRL) divides by the mean of absolute rewards."""
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


def variant_loss(
    token_log_probs: torch.Tensor, batch: list[Trajectory], totals: dict[str, float],
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
        kl = kl_in_loss(token_log_probs, batch)  # If kl_in is `reward`, it is only logged.
        watched["kl"] = kl.sum()
        if training.kl_in == "loss":
            objective = objective - training.kl_beta * kl
    lengths = for_each_token([answer.num_tokens for answer in batch], batch, token_log_probs)
    normalizer = variant_normalizer(lengths, totals, training)
    return -(objective / normalizer).sum(), watched


def variant_normalizer(
    lengths: torch.Tensor, totals: dict[str, float], training: TrainingSettings
) -> torch.Tensor | float:
    """Other normalizers. Key: `loss_normalizer`.

    `tokens` (DAPO, Yu et al. 2025): all tokens of the step. `sequence` (GRPO, Shao et al. 2024):
    the number of answers times the answer's length, so that all answers weigh the same."""
    if training.loss_normalizer == "tokens":
        return totals["tokens"]
    if training.loss_normalizer == "sequence":
        return totals["answers"] * lengths
    return totals["answers"] * training.max_new_gen_tokens


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
        # GSPO (Zheng et al. 2025, with loss_normalizer=sequence): the geometric mean over tokens.
        lengths = [answer.num_tokens for answer in batch]
        means = [of_answer.mean().expand_as(of_answer) for of_answer in log_ratio.split(lengths)]
        log_ratio = torch.cat(means)
    ratio = log_ratio.exp()
    low, high = training.clip or (math.inf, math.inf)  # By default nothing is clipped.
    if training.ratio == "cispo":
        # CISPO (MiniMax 2025): the ratio is a constant weight, with an upper bound alone.
        weight = ratio.detach().clamp(max=1 + high)
        return weight * advantages * token_log_probs, ratio > 1 + high
    # PPO: for A > 0 there is no gain above 1 + high, and for A < 0 none below 1 - low.
    unclipped = ratio * advantages
    objective = torch.minimum(unclipped, ratio.clamp(1 - low, 1 + high) * advantages)
    return objective, objective < unclipped


def add_reference_log_probs(run: Run, answers: list[Trajectory]) -> None:
    """Stores the log-probabilities of the model as it was loaded, which a KL penalty needs."""
    for batch, log_probs, _ in measure_in_batches(run.reference, answers, run.config.training):
        store_in_answers(batch, reference_log_probs=log_probs)


def kl_in_reward(token_log_probs: torch.Tensor, batch: list[Trajectory]) -> torch.Tensor:
    """KL penalty as a part of each token's reward. Keys: `kl_beta`, `kl_in: reward`.

    It keeps the policy near the model as it was loaded. Detached, it is subtracted from the
    advantage. With one update, and without sil, which selects answers, the gradient is on average
    that of KL(policy || reference), token by token."""
    reference_log_probs = torch.cat([answer.reference_log_probs for answer in batch])
    return (token_log_probs - reference_log_probs).detach()


def kl_in_loss(token_log_probs: torch.Tensor, batch: list[Trajectory]) -> torch.Tensor:
    """KL penalty as GRPO was published. Keys: `kl_beta`, `kl_in: loss`.

    Its value is q - 1 - log q, with q = reference / policy. It estimates KL(policy || reference)
    and is never negative. But its gradient is on average that of KL(reference || policy)."""
    reference_log_probs = torch.cat([answer.reference_log_probs for answer in batch])
    log_q = reference_log_probs - token_log_probs
    return torch.expm1(log_q) - log_q


if __name__ == "__main__":
    launch(main)
