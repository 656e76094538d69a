"""Makes everything in this folder from nothing: the tokenizer, the Countdown problems and a small
base model.

    python tiny/build.py
        what stands in tiny/
    python tiny/build.py --out tiny/lab --search guesses --numbers 3 4 --layers 4 --hidden 160 \
            --steps 3000 --optimizer adamw --learning-rate 3e-3 --practice 0.5 --micro-batch-size 8
        what stands in tiny/lab/
    python tiny/build.py --out /tmp/toy --problems 200 --hidden 32 --layers 1 --steps 10
        seconds, for a test
    python tiny/build.py --out big --numbers 3 4 --largest 99 --hidden 512 --layers 8 --heads 8
        a larger sibling (CUDA)

The base model is what reinforcement learning wants to start from: it knows how a reply looks, it
can calculate and keep account of a search, but it gives up its search too early and then answers
wrongly. The traces it imitates are made up here, and none of their problems stands in
countdown.parquet. They search from the target backwards, for numbers 12, 4, 7 and target 56:

    56+7=63, 12*4=48 no                 <- if -7 came last, 12 and 4 would have to make 63
    56-7=49, 12*4=48 no                 <- if +7 did, 49
    56/7=8, 12-4=8 yes                  <- (the prompt has opened <think>)
    </think>
    <answer>(12-4)*7</answer>

That of tiny/lab/ searches as people do, by guesses: in no order, now and then the same once more,
now and then with a slip.

    12-7=5, 4*5=20 no
    12-4=8, 7*8=56 yes
    </think>
    <answer>(12-4)*7</answer>
"""

import argparse
import itertools
import math
import random
import re
import sys
import time
from functools import lru_cache
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import AddedToken, pre_tokenizers
from torch.nn import functional as F
from tqdm import tqdm
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import countdown

TARGETS = range(10, 100)
EOS, PAD = "<|endoftext|>", "<|pad|>"

# Practice comes first, then come searches that give up: {after how many tries: how often}, None for
# never. Practice with whole searches, or with few guesses most of which end in a hit, is what
# calculating, and comparing or keeping account, are learned from. That giving up early is the
# likelier choice is on purpose, so a low temperature does not search on either. The rest is on
# purpose too: reinforcement can only make more frequent what the base model does at times.
BUDGETS = {
    "backwards": ({None: 1}, {1: 50, 2: 40, None: 10}),
    "guesses": ({1: 1, 2: 1, 3: 1},
                {1: 40, 2: 40, 3: 10} | {budget: 1 for budget in range(5, 15)})}
# How many of the problems searched backwards have no solution: from these it is learned to end
# after all has been tried, rather than to go round in circles.
UNSOLVABLE = 0.15
# Of guesses: how much of the practice ends in a hit; how often a sum or product is turned round;
# and, after practice, how often an earlier guess is made again, and how often the result is wrong.
LUCKY, TURNED, AGAIN, SLIPS = 0.6, 0.3, 0.06, 0.04
# A guess that is off by less than this comes about as early as one that hits.
NEAR = 6
# " yes" or " no" is one token in sixteen, and the one that the most depends on
VERDICT_WEIGHT = 5.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Build a base model, its tokenizer and its Countdown problems.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent,
                        help="folder to write to")
    parser.add_argument("--seed", type=int, default=0, help="of problems, traces and weights")
    parser.add_argument("--search", choices=list(BUDGETS), default="backwards",
                        help="how the traces search")
    parser.add_argument("--problems", type=int, default=24_000, help="rows of countdown.parquet")
    parser.add_argument("--numbers", type=int, nargs="+", default=[3],
                        help="how many numbers a problem may have")
    parser.add_argument("--largest", type=int, default=30, help="largest number in a problem")
    parser.add_argument("--largest-result", type=int, default=99,
                        help="of any step of a calculation")
    parser.add_argument("--hidden", type=int, default=192, help="hidden size")
    parser.add_argument("--layers", type=int, default=3, help="transformer layers")
    parser.add_argument("--heads", type=int, default=4,
                        help="attention heads; half as many for keys and values")
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps")
    parser.add_argument("--practice", type=float, default=0.75,
                        help="share of the steps spent on practice, before searches give up")
    parser.add_argument("--batch-size", type=int, default=32, help="traces per step")
    parser.add_argument("--micro-batch-size", type=int, default=32,
                        help="traces per forward pass; memory and speed only")
    parser.add_argument("--optimizer", choices=["muon", "adamw"], default="muon",
                        help="of the matrices in the layers; muon is slow where a processor has no "
                             "bfloat16")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="at its peak")
    parser.add_argument("--workers", type=int, default=0,
                        help="processes that make traces (worth it with a GPU)")
    return parser.parse_args()


# ---------------------------------------------------------------- problems and their exact solver

def made_of(a: int, b: int, largest_result: int) -> dict[str, int]:
    """What two numbers make: {calculation: its result}. The larger one comes first. Negative
    results and fractions are left out, and so are results above `largest_result`."""
    b, a = sorted((a, b))
    results = {f"{a}+{b}": a + b, f"{a}-{b}": a - b, f"{a}*{b}": a * b}
    if b > 0 and a % b == 0:
        results[f"{a}/{b}"] = a // b
    return {text: result for text, result in results.items() if result <= largest_result}


def undone(target: int, last: int, largest_result: int) -> list[tuple[str, int, str]]:
    """What the other numbers would have to make if `last` came last: (the calculation, its result,
    the expression that it undoes)."""
    options = [(f"{target}+{last}", target + last, f"({{}})-{last}"),
               (f"{target}-{last}", target - last, f"({{}})+{last}"),
               (f"{last}-{target}", last - target, f"{last}-({{}})")]
    if last > 1 and target > 0:
        options.append((f"{target}*{last}", target * last, f"({{}})/{last}"))
        if target % last == 0:
            options.append((f"{target}/{last}", target // last, f"({{}})*{last}"))
        if last % target == 0:
            options.append((f"{last}/{target}", last // target, f"{last}/({{}})"))
    return [option for option in options if 0 <= option[1] <= largest_result]


@lru_cache(maxsize=100_000)
def tries(nums: tuple[int, ...], target: int,
          largest_result: int) -> tuple[tuple[str, str, bool], ...]:
    """A whole search, as (calculations, expression, whether it hits) of each try. One number after
    the other is taken to come last, with + - * and / undone in turn, until two are left. These make
    whatever comes nearest."""
    if len(nums) == 2:
        options = made_of(*nums, largest_result)
        nearest = min(options, key=lambda text: abs(options[text] - target))
        return ((f"{nearest}={options[nearest]}", nearest, options[nearest] == target),)
    found = {}
    for i, last in enumerate(nums):
        for calculation, wanted, expression in undone(target, last, largest_result):
            for rest, inner, hit in tries(nums[:i] + nums[i + 1:], wanted, largest_result):
                found.setdefault(f"{calculation}={wanted}, {rest}", (expression.format(inner), hit))
    return tuple((calculations, *rest) for calculations, rest in found.items())


@lru_cache(maxsize=100_000)
def reachable(nums: tuple[int, ...], largest_result: int) -> frozenset[int]:
    """All that a whole search can hit."""
    if len(nums) == 2:
        return frozenset(made_of(*nums, largest_result).values())
    return frozenset(
        result for i, last in enumerate(nums)
        for inner in reachable(nums[:i] + nums[i + 1:], largest_result)
        for result in made_of(inner, last, largest_result).values()
        if inner or result)  # a search does not undo 0 times a number


@lru_cache(maxsize=10_000)
def guesses(nums: tuple[int, ...],
            largest_result: int) -> tuple[tuple[tuple[str, ...], str, int], ...]:
    """All that can be made of the numbers, as (calculations, expression, what it makes)."""
    found = {}

    def combine(terms: list[tuple[int, str]], calculations: tuple[str, ...]) -> None:
        if len(terms) == 1:
            made, expression = terms[0]
            found.setdefault(expression[1:-1], (calculations, made))
        for pair in itertools.combinations(range(len(terms)), 2):
            (b, b_text), (a, a_text) = sorted(terms[i] for i in pair)
            rest = [term for i, term in enumerate(terms) if i not in pair]
            for text, made in made_of(a, b, largest_result).items():
                operator = text.strip("0123456789")
                combine([*rest, (made, f"({a_text}{operator}{b_text})")],
                        (*calculations, f"{text}={made}"))

    combine([(number, str(number)) for number in nums], ())
    return tuple((calculations, expression, made)
                 for expression, (calculations, made) in found.items())


def random_problem(rng: random.Random, args: argparse.Namespace,
                   solvable: bool = True) -> tuple[tuple[int, ...], int]:
    while True:
        nums = tuple(rng.randint(1, args.largest) for _ in range(rng.choice(args.numbers)))
        inputs = tuple(sorted(nums)), args.largest_result
        can = (reachable(*inputs) if args.search == "backwards"
               else {made for *_, made in guesses(*inputs)})
        if choice := [target for target in TARGETS if (target in can) == solvable]:
            return nums, rng.choice(choice)


def make_problems(args: argparse.Namespace) -> dict:
    """{(sorted numbers, target): numbers in the order shown}: no two problems are the same in
    another order."""
    rng = random.Random(f"problems {args.seed}")
    problems = {}
    while len(problems) < args.problems:
        nums, target = random_problem(rng, args)
        problems.setdefault((tuple(sorted(nums)), target), nums)
    return problems


# ---------------------------------------------------------------- traces to imitate

class Traces(torch.utils.data.Dataset):
    """Trace number i is a function of the seed and i alone, so the number of workers cannot change
    it; none repeats."""

    def __init__(self, problems: dict, args: argparse.Namespace):
        self.reserved, self.args, self.length = problems.keys(), args, args.steps * args.batch_size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[str, str]:
        rng = random.Random(f"trace {self.args.seed} {index}")
        backwards = self.args.search == "backwards"
        practice = index < self.args.practice * self.length
        while True:
            nums, target = random_problem(
                rng, self.args, solvable=not backwards or rng.random() >= UNSOLVABLE)
            # those belong to reinforcement and validation
            if (tuple(sorted(nums)), target) not in self.reserved:
                # Now and then with the system message in front, as the chat template puts it.
                system = f"{countdown.SYSTEM_MESSAGE}\n" if rng.random() < 0.05 else ""
                budgets = BUDGETS[self.args.search][0 if practice else 1]
                budget = rng.choices(list(budgets), budgets.values())[0]
                largest = self.args.largest_result
                return (system + countdown.generate_prompt(list(nums), target),
                        make_trace(nums, target, budget, largest, rng) if backwards else
                        make_guesses(nums, target, budget, practice, largest, rng))


def make_trace(nums: tuple[int, ...], target: int, budget: int | None, largest_result: int,
               rng: random.Random) -> str:
    """A search through the numbers in a random order, until a try hits or `budget` of them have
    been made."""
    shuffled, lines = tuple(rng.sample(nums, len(nums))), []
    for calculations, expression, hit in tries(shuffled, target, largest_result)[:budget]:
        lines.append(f"{calculations} {'yes' if hit else 'no'}\n")
        if hit:
            break
    # the last one tried, right or wrong
    return f"{''.join(lines)}</think>\n<answer>{expression}</answer>"


def make_guesses(nums: tuple[int, ...], target: int, budget: int, practice: bool,
                 largest_result: int, rng: random.Random) -> str:
    """Guesses in a random order, in which one that makes nearly the target tends to come early,
    until one hits or `budget` of them have been made."""
    order = sorted(guesses(tuple(sorted(nums)), largest_result),
                   key=lambda guess: rng.expovariate(1 / (NEAR + abs(guess[2] - target))))
    if practice and rng.random() < LUCKY:
        misses = [guess for guess in order if guess[2] != target]
        order = misses[:budget - 1] + [guess for guess in order if guess[2] == target][:1]
    lines = []
    for i, guess in enumerate(order[:budget]):
        if i and not practice and rng.random() < AGAIN:
            guess = rng.choice(order[:i])
        calculations, expression, made = guess
        written = [turned(each) if rng.random() < TURNED else each for each in calculations]
        if not practice and rng.random() < SLIPS:
            made = max(0, made + rng.choice([-2, -1, 1, 2]))
            written[-1] = f"{written[-1].split('=')[0]}={made}"
        lines.append(f"{', '.join(written)} {'yes' if made == target else 'no'}\n")
        if made == target:
            break
    # the last one tried, right or wrong
    return f"{''.join(lines)}</think>\n<answer>{expression}</answer>"


def turned(calculation: str) -> str:
    """12*4=48 as 4*12=48; what is not the same either way round stays as it is."""
    return re.sub(r"^(\d+)([+*])(\d+)", r"\3\2\1", calculation)


# ---------------------------------------------------------------- tokenizer

def make_tokenizer(texts: list[str]) -> Qwen2Tokenizer:
    """Every byte is a token, and so is every piece of text that stands between numbers, operators
    and tags in the prompt and in the traces (" into an expression that equals ", " no\\n"). A digit
    or an operator is thus the same token wherever it stands, which makes arithmetic learnable, and
    whatever else is written can be encoded too.

    No other class would do: for the Qwen2 architecture AutoTokenizer always makes a Qwen2Tokenizer,
    with Qwen2's own way of cutting text before merging. Tokens added on top are found before that
    cut, so there is nothing to merge."""
    pieces = sorted({
        piece for text in texts
        for piece in re.findall(r"</?[a-z]+>|, |[^-0-9+*/=()<>,\n]{2,}\n?", text)})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate([EOS, PAD] + alphabet)}, merges=[],
        eos_token=EOS, pad_token=PAD, unk_token=None, padding_side="left", model_max_length=512)
    # Not special ones: decoding with skip_special_tokens=True must keep the tags.
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in pieces])
    tokenizer.chat_template = ("{% for message in messages %}{{ message['content'] | trim }}\n"
                               "{% endfor %}")
    return tokenizer


# ---------------------------------------------------------------- supervised training

def make_model(args: argparse.Namespace, tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    torch.manual_seed(args.seed)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=args.hidden, intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=args.heads,
        num_key_value_heads=max(1, args.heads // 2), max_position_embeddings=512,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id))
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def collate(batch: list[tuple[str, str]], tokenizer: Qwen2Tokenizer,
            micro_batch_size: int) -> list[tuple]:
    """Micro-batches of traces of about the same length, so that little of them is padding."""
    prompts = tokenizer([prompt for prompt, _ in batch])["input_ids"]
    traces = tokenizer([trace for _, trace in batch])["input_ids"]
    rows = sorted(((p, t + [tokenizer.eos_token_id]) for p, t in zip(prompts, traces)),
                  key=lambda row: len(row[0]) + len(row[1]))
    micro_batches = []
    for start in range(0, len(rows), micro_batch_size):
        part = rows[start:start + micro_batch_size]
        longest = max(len(p) + len(t) for p, t in part)
        # Padded on the right, where causal attention never looks; -100 is what cross_entropy skips.
        ids = torch.tensor([p + t + [tokenizer.pad_token_id] * (longest - len(p) - len(t))
                            for p, t in part])
        labels = torch.tensor([[-100] * len(p) + t + [-100] * (longest - len(p) - len(t))
                               for p, t in part])
        micro_batches.append((ids, labels))  # both (micro_batch, longest)
    return micro_batches


def train(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, problems: dict,
          args: argparse.Namespace) -> None:
    loader = torch.utils.data.DataLoader(
        Traces(problems, args), batch_size=args.batch_size, num_workers=args.workers,
        collate_fn=lambda batch: collate(batch, tokenizer, args.micro_batch_size))
    # Muon is for the matrices inside the layers. It needs far fewer steps than AdamW: with traces
    # like these the loss at step 400 was 0.33, where AdamW for all left 0.58.
    matrices = [parameter for parameter in model.model.layers.parameters()
                if parameter.ndim == 2 and args.optimizer == "muon"]
    others = [parameter for parameter in model.parameters()
              if all(parameter is not matrix for matrix in matrices)]
    optimizers = [torch.optim.AdamW(others, lr=args.learning_rate, betas=(0.9, 0.98),
                                    weight_decay=0.05)]
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=args.learning_rate, weight_decay=0.05,
                                           adjust_lr_fn="match_rms_adamw"))
    warmup = min(100, args.steps // 5 + 1)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(
        (step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / args.steps)))
        for optimizer in optimizers]
    verdicts = torch.tensor(tokenizer([" no\n", " yes\n"])["input_ids"],
                            device=model.device).flatten()
    model.train()
    progress = tqdm(loader, desc="supervised training", unit="step")
    for micro_batches in progress:
        trained_tokens = sum((labels != -100).sum().item() for _, labels in micro_batches)
        loss_of_step = 0.0
        for ids, labels in micro_batches:
            ids, labels = ids.to(model.device), labels.to(model.device)
            # (micro_batch, time, vocab) -> one position less
            logits = model(ids, use_cache=False).logits[:, :-1]
            losses = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(),
                                     reduction="none")  # (micro_batch x time,)
            weights = 1 + (VERDICT_WEIGHT - 1) * torch.isin(labels[:, 1:].flatten(), verdicts)
            loss = (losses * weights).sum() / trained_tokens
            loss.backward()
            loss_of_step += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        progress.set_postfix(loss=f"{loss_of_step:.3f}", refresh=False)


# ---------------------------------------------------------------- what came of it

@torch.no_grad()
def measure(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, rows: list[dict],
            temperature: float = 1.0, max_new_tokens: int = 240) -> dict[str, float]:
    """Graded by the task itself: one sample for each of the rows."""
    model.eval()
    torch.manual_seed(0)
    prompts = tokenizer([row["prompt"] for row in rows], return_tensors="pt",
                        padding=True).to(model.device)
    output = model.generate(**prompts, do_sample=True, temperature=temperature, top_k=0, top_p=1.0,
                            max_new_tokens=max_new_tokens)
    completions = output[:, prompts["input_ids"].shape[1]:]  # (rows, new tokens)
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    parts = [countdown.reward_function(text, row) for text, row in zip(texts, rows)]
    lengths = (completions != tokenizer.pad_token_id).sum(1)
    return {"solved": sum(part["answer"] for part in parts) / len(rows),
            "format": sum(part["format"] == 1 for part in parts) / len(rows),
            "tokens": lengths.float().mean().item()}


def main():
    args = parse_arguments()
    begin = time.time()
    problems = make_problems(args)
    table = [{"nums": list(nums), "target": target} for (_, target), nums in problems.items()]
    args.out.mkdir(parents=True, exist_ok=True)
    Dataset.from_list(table).to_parquet(args.out / "countdown.parquet")

    traces = Traces(problems, args)
    tokenizer = make_tokenizer([text for i in range(min(4000, len(traces))) for text in traces[i]])
    model = make_model(args, tokenizer)
    train(model, tokenizer, problems, args)
    model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")

    size = sum(file.stat().st_size for file in args.out.rglob("*") if file.is_file())
    figures = measure(model, tokenizer, countdown.load(str(args.out / "countdown.parquet"), 256))
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens, "
          f"{size / 1e6:.1f} MB in {args.out}, {time.time() - begin:.0f} seconds")
    print("at temperature 1: "
          + ", ".join(f"{name} {value:.2f}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
