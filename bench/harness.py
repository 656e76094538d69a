"""What the measurements share: a run of main.py without its folder, models of known shapes with
random weights, what a step needs, and what the machine can do."""

import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import transformers

import main
from machinery.model import add_adapters, make_masters, type_when_loaded
from machinery.ranks import DEVICE, RANK, end_process, join, leave_group
from machinery.runs import NEW
from machinery.settings import ROOT, Config, load_config

median = statistics.median


def qwen(width: int, mlp: int, layers: int, heads: int, kv_heads: int, vocabulary: int = 151_936,
         tied: bool = True) -> dict:
    return {"hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "vocab_size": vocabulary, "tie_word_embeddings": tied}


# As published. Random weights of these shapes cost what the real ones cost.
SHAPES = {
    "qwen2.5-14b": qwen(5120, 13824, 48, 40, 8, vocabulary=152_064, tied=False),
    "qwen2.5-7b": qwen(3584, 18944, 28, 28, 4, vocabulary=152_064, tied=False),
    "qwen2.5-3b": qwen(2048, 11008, 36, 16, 2),
    "qwen2.5-1.5b": qwen(1536, 8960, 28, 12, 2),
    "qwen2.5-0.5b": qwen(896, 4864, 24, 14, 2),
    "small": qwen(256, 768, 4, 4, 2, vocabulary=8192),
}

# `training_step` would evaluate at these steps, and evaluations are not measured.
NEVER_EVALUATE = ["validation.every=1000000000", "training.max_steps=1000000000"]


class NoFolder:
    """Takes the place of runs.RunFolder. There is nothing to resume from."""

    def restore(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict:
        return NEW


class SilentLog:
    """Takes the place of logger.Logger. It prints and writes nothing, and keeps the metrics of the
    last step."""

    def __init__(self):
        self.seconds = {}
        self.metrics = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started

    def progress(self, items: Sequence) -> Iterator:
        return iter(items)

    def counter(self, total: int) -> Callable[[int], object]:
        return lambda count: None

    def step(self, step: int, metrics: dict) -> None:
        self.metrics = metrics


def model_of_shape(shape: str):
    """Returns what takes the place of main.load_model: random weights, and the tiny model's
    tokenizer. Such a model hardly ever samples one of the tokenizer's 274 tokens."""
    def load_model(config):
        tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "tiny" / "model")
        model_config = transformers.Qwen2Config(
            **SHAPES[shape], max_position_embeddings=32_768, eos_token_id=tokenizer.eos_token_id)
        torch.manual_seed(0)
        with DEVICE:
            model = transformers.AutoModelForCausalLM.from_config(
                model_config, dtype=type_when_loaded(config.model))
            if config.model.lora_rank:
                add_adapters(model, config)
            make_masters(model, config)
        if config.model.gradient_checkpointing:
            model.activation_checkpointing_enable()
        return model, tokenizer
    return load_model


def random_rewards(run: main.Run, groups: list[list[main.Trajectory]]) -> None:
    """Takes the place of main.score. Every group has a signal, so every answer is learned from."""
    stream = random.Random(0)
    for group in groups:
        for answer in group:
            answer.reward_parts = dict.fromkeys(run.task.REWARD_WEIGHTS, 0.0)
            answer.reward = stream.random()


def prepare(config: Config) -> main.Run:
    """Returns what main.main would train, without its folder and its log."""
    if not dist.is_initialized():
        join()
    return main.prepare(config, NoFolder(), SilentLog())


def make_run(arguments: list[str], shape: str | None = None) -> main.Run:
    """Returns what main.main would train, but it never evaluates. With a `shape` it has random
    weights and random rewards."""
    config = load_config([*arguments, *NEVER_EVALUATE])
    if shape:
        main.load_model = model_of_shape(shape)
        main.score = random_rewards
    return prepare(config)


def never_stop(run: main.Run) -> None:
    """Lets all answers reach the length limit."""
    run.stop_ids = [10**9]  # There is no such token.


def synchronise() -> None:
    dist.barrier()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def say(text: str) -> None:
    if RANK == 0:
        print(text, flush=True)


def finish(result: dict) -> None:
    """Prints the last line, one JSON object, and ends the process as main.py does."""
    say(json.dumps(result))
    leave_group()
    end_process(0)


# ---------------------------------------------- what the machine can do, and what a step needs

def ceilings(dtype: torch.dtype) -> tuple[float, float]:
    """Returns FLOP/s of matrix products, and bytes/s of copies, on all ranks at the same time."""
    size, megabytes = (8192, 4096) if DEVICE.type == "cuda" else (1536, 256)
    a = torch.randn(size, size, device=DEVICE, dtype=dtype)
    b = torch.randn(size, size, device=DEVICE, dtype=dtype)
    source = torch.ones(megabytes * 2**20, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    flops = 2 * size**3 / fastest(lambda: torch.mm(a, b))
    bandwidth = 2 * source.numel() / fastest(lambda: target.copy_(source))
    return flops, bandwidth


def fastest(work) -> float:
    seconds = []
    for _ in range(6):
        synchronise()
        started = time.perf_counter()
        work()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])  # The first one warms up.


def body_and_head(model) -> tuple[int, int]:
    """Returns the number of weights that every token meets, and of those in the projection onto
    the vocabulary, which only completion tokens meet."""
    head = model.get_output_embeddings().weight
    embeddings = model.get_input_embeddings().weight
    body = sum(parameter.numel() for parameter in model.parameters()) - head.numel()
    if embeddings is not head:
        body -= embeddings.numel()
    return body, head.numel()


def attended(begin: int, length: int) -> float:
    """Returns how many pairs of positions attention computes for so many tokens from `begin` on."""
    return length * (begin + (length + 1) / 2)


def attention_flops(model, answers: list[main.Trajectory], prompts: set[tuple]) -> float:
    """Returns those of a forward pass over these answers, and over these prompts."""
    pairs = sum(attended(0, len(prompt)) for prompt in prompts)
    for answer in answers:
        pairs += attended(len(answer.prompt_ids), len(answer.completion_ids))
    return 4 * model.config.hidden_size * model.config.num_hidden_layers * pairs


def learning_flops(model, answers: list[main.Trajectory]) -> float:
    """Returns what forward and backward passes need at least: each prompt is processed once,
    nothing is padded, and nothing is computed twice."""
    body, head = body_and_head(model)
    learned = [answer for answer in answers if answer.advantage != 0]
    prompts = {tuple(answer.prompt_ids) for answer in learned}
    completion_tokens = sum(len(answer.completion_ids) for answer in learned)
    all_tokens = completion_tokens + sum(len(prompt) for prompt in prompts)
    products = 2 * body * all_tokens + 2 * head * completion_tokens
    return 3 * (products + attention_flops(model, learned, prompts))


def sampling_floors(model, answers: list[main.Trajectory],
                    max_rows: int) -> tuple[float, float]:
    """Returns the bytes that have to be read, and the FLOP that have to be done, to sample these
    answers. A call reads the weights once for each token, and each answer its KV cache."""
    weights = sum(body_and_head(model))
    size = next(model.parameters()).element_size()
    config = model.config
    lengths = [len(answer.completion_ids) for answer in answers]
    passes = sum(max(lengths[i:i + max_rows]) for i in range(0, len(lengths), max_rows))
    flops = attention_flops(model, answers, set())
    # Attention does 4 FLOP a pair for each query head, and reads 2 numbers for each KV head.
    cache = flops / 2 * config.num_key_value_heads / config.num_attention_heads
    return (passes * weights + cache) * size, 2 * weights * sum(lengths) + flops


# ---------------------------------------------- memory

def peak_memory() -> dict[str, float]:
    """Returns this rank's peak in GB since the last call. On a GPU this is what its tensors held,
    and what the allocator reserved for them. On a CPU it is the peak of the whole process, as Linux
    tells it."""
    if DEVICE.type == "cuda":
        peaks = {
            "memory_gb": torch.cuda.max_memory_allocated() / 1e9,
            "reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
        }
        torch.cuda.reset_peak_memory_stats()
        return peaks
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            peak = int(line.split()[1]) * 1024
    Path("/proc/self/clear_refs").write_text("5")
    return {"memory_gb": peak / 1e9}
