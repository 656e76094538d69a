"""GRPO (group relative policy optimization) on three screens, for a CPU or two GPUs:

    torchrun --nproc-per-node=2 examples/pocket.py

A language model answers each puzzle (like "reach 56 with 29, 30 and 3") eight times, and a program
grades the answers. Those that are better than the average of their group become a little more
likely, and worse ones a little less. The difference from the average is the advantage.

This is Dr. GRPO, a later and simpler variant. The first GRPO also divided advantages by their
group's standard deviation and the loss by each answer's length, and penalized drifting away from
the first model (KL). So that several updates could use the same answers, it clipped each token's
probability ratio (now / when sampled). main.py adds all that a real run needs.
"""

import random
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))
from countdown import load, reward_function

NUM_VALIDATION = 256  # puzzles that the model never trains on
NUM_QUESTIONS = 8     # puzzles in a step, for each process
GROUP_SIZE = 8        # answers to each puzzle
MAX_TOKENS = 192      # in an answer
MICRO_BATCH = 16      # answers in one forward and backward pass
MAX_STEPS = 60
LEARNING_RATE = 3e-5


def sample(model, tokenizer, questions, group_size):
    """Samples a group of answers to each question, and grades them. Returns ids and mask, both
    (answers, prompt + answer), the column `start` where all answers begin, and the rewards."""
    prompts = [question["prompt"] for question in questions for _ in range(group_size)]
    inputs = tokenizer(prompts, padding=True, return_tensors="pt").to(model.device)
    settings = GenerationConfig(  # The model's own probabilities: nothing cut off, nothing scaled.
        do_sample=True, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=MAX_TOKENS,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    ids = model.generate(**inputs, generation_config=settings)
    start = inputs.input_ids.shape[1]
    is_end = (ids[:, start:] == tokenizer.eos_token_id).int()
    is_answer = (is_end.cumsum(1) - is_end) == 0  # true up to and including the first end token
    mask = torch.cat([inputs.attention_mask, is_answer], 1)
    rewards = []
    for i, text in enumerate(tokenizer.batch_decode(ids[:, start:], skip_special_tokens=True)):
        parts = reward_function(text, questions[i // group_size])
        rewards.append(parts["answer"] + 0.1 * parts["format"])  # solved: 1 or 0; format: 0 to 1
    return ids, mask, start, torch.tensor(rewards, device=ids.device)


def log_probs_of_tokens(policy, ids, mask, start):
    """Returns the log-probability of each token of the answers, (answers, tokens)."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # Padding before a prompt doesn't count.
    logits = policy(ids, attention_mask=mask, position_ids=positions).logits
    # The model predicts the next token, so the logits for a token are at the one before it.
    log_probs = logits[:, start - 1:-1].log_softmax(-1)  # (answers, tokens, vocabulary)
    return log_probs.gather(-1, ids[:, start:, None])[:, :, 0]


def policy_gradient(policy, ids, mask, start, rewards):
    """Leaves the gradient of the loss in the weights' `grad`, the same in all processes. This is
    fine-tuning on the model's own answers, each weighted by its advantage."""
    groups = rewards.view(-1, GROUP_SIZE)
    advantages = (groups - groups.mean(1, keepdim=True)).flatten()
    micro_batches = torch.arange(len(ids)).split(MICRO_BATCH)
    for batch in micro_batches:
        # In a backward pass, DistributedDataParallel replaces gradients by their mean over all
        # processes. `no_sync` puts that off. They add up, until the last pass averages their sum.
        is_last = batch is micro_batches[-1]
        with nullcontext() if is_last else policy.no_sync():
            log_probs = log_probs_of_tokens(policy, ids[batch], mask[batch], start)
            # The mean reward is the sum of p * reward over all possible answers, where p is their
            # probability. As grad p = p * grad log p, its gradient is the mean over sampled answers
            # of reward * grad log p. (log p of an answer is a sum over its tokens.)
            # All p add up to 1, so the mean of grad log p is 0. So we may subtract the mean reward.
            # That reduces noise. (It includes the answer's own reward, which only scales by 7/8.)
            objective = advantages[batch, None] * log_probs * mask[batch, start:]
            loss = -objective.sum() / (len(ids) * MAX_TOKENS)  # All tokens count the same.
            loss.backward()


def main():
    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # Each process samples answers of its own.
    device = f"cuda:{rank}" if torch.cuda.device_count() >= world_size else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny/model", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(ROOT / "tiny/model", dtype=torch.float32)
    policy = DistributedDataParallel(model.to(device))  # It shares the weights of `model`.
    model.generation_config = GenerationConfig()  # so that it adds nothing to `settings`
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    questions = load(str(ROOT / "tiny/countdown.parquet"), max_rows=None)
    random.Random(0).shuffle(questions)
    held_out, questions = questions[:NUM_VALIDATION], questions[NUM_VALIDATION:]
    for step in range(MAX_STEPS + 1):
        if step % 10 == 0:  # Evaluate: one answer to each held-out puzzle.
            *_, rewards = sample(model, tokenizer, held_out[rank::world_size], group_size=1)
            num_solved = (rewards >= 1).sum()  # The format alone earns less.
            dist.all_reduce(num_solved)  # the sum over processes
            if rank == 0:
                print(f"step {step}: solved {num_solved / NUM_VALIDATION:.3f}", flush=True)
        if step < MAX_STEPS:
            first = (step * world_size + rank) * NUM_QUESTIONS  # Processes take different puzzles.
            asked = [questions[(first + i) % len(questions)] for i in range(NUM_QUESTIONS)]
            ids, mask, start, rewards = sample(model, tokenizer, asked, GROUP_SIZE)
            optimizer.zero_grad()
            policy_gradient(policy, ids, mask, start, rewards)
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1, (step + 1) / 10)  # warm-up
            optimizer.step()


if __name__ == "__main__":
    main()
