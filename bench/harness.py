"""What the measurements share: a run of main.py without its folder, models of any shape with random
weights, and a printed table."""

import contextlib
import json
import random
import statistics
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import main
from machinery.launch import end_process
from machinery.model import add_adapters
from machinery.ranks import DEVICE, RANK, join, leave_group
from machinery.settings import ROOT, load_config

# As published; random weights of these shapes cost what the real ones cost.
SHAPES = {
    "qwen2.5-14b": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48,
                    "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152_064,
                    "tie_word_embeddings": False},
    "qwen2.5-7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                   "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064,
                   "tie_word_embeddings": False},
    "qwen2.5-3b": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
                   "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151_936,
                   "tie_word_embeddings": True},
    "qwen2.5-1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                     "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151_936,
                     "tie_word_embeddings": True},
    "qwen2.5-0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
                     "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151_936,
                     "tie_word_embeddings": True},
    "qwen2.5-head": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 2,
                     "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151_936,
                     "tie_word_embeddings": True},
    "300m": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 18,
             "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32_768,
             "tie_word_embeddings": True},
    "small": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
              "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 8192,
              "tie_word_embeddings": True},
}


# In place of checkpoints.RunFolder: nothing to resume from.
NO_FOLDER = SimpleNamespace(restore=lambda run: None)
# `training_step` would evaluate at these, which is not what is measured.
NEVER_EVALUATE = ["validation.every=1000000000", "training.max_steps=1000000000"]


class SilentLog:
    """In place of logger.Logger: shows and writes nothing, and keeps the metrics of the last
    step."""

    def __init__(self):
        self.seconds = {}

    @contextlib.contextmanager
    def phase(self, name, total=0):
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started

    def advance(self, count):
        pass

    def step(self, step, metrics):
        self.metrics = metrics


def model_of_shape(shape: str):
    """For main.load_model: random weights, and the tokenizer of tiny/, of whose 274 tokens such a
    model hardly ever draws one."""
    def load_model(config):
        tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "tiny" / "model")
        model_config = transformers.Qwen2Config(
            **SHAPES[shape], max_position_embeddings=32_768, eos_token_id=tokenizer.eos_token_id)
        dtype = torch.bfloat16 if config.model.precision == "bfloat16" else torch.float32
        torch.manual_seed(0)
        spread = config.training.shard and not config.model.lora_rank  # as main.load_model
        with torch.device("cpu") if spread else DEVICE:
            model = transformers.AutoModelForCausalLM.from_config(model_config, dtype=dtype)
            if config.model.lora_rank:
                add_adapters(model, config)
        if config.model.gradient_checkpointing:
            model.activation_checkpointing_enable()
        return model, tokenizer
    return load_model


def random_rewards(run, groups):
    """For main.score: every group has signal, so every row is learned from."""
    stream = random.Random(0)
    for group in groups:
        for answer in group:
            answer.reward_parts = dict.fromkeys(run.task.REWARD_WEIGHTS, 0.0)
            answer.reward = stream.random()


def make_run(arguments: list[str], shape: str | None = None) -> main.Run:
    """What main.main would train, but for evaluations. With a `shape`, its random weights and
    random rewards."""
    join()
    config = load_config([*arguments, *NEVER_EVALUATE])
    if shape:
        main.load_model, main.score = model_of_shape(shape), random_rewards
    return main.prepare(config, NO_FOLDER, SilentLog())


def never_stop(run: main.Run) -> None:
    """All answers run to the limit."""
    run.stop_ids = [10**9]  # no such token


def synchronise() -> None:
    dist.barrier()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def median(values) -> float:
    return statistics.median(values)


def say(text: str) -> None:
    if RANK == 0:
        print(text, flush=True)


def finish(result: dict) -> None:
    """The last line is one JSON object. The process ends as main.py does."""
    say(json.dumps(result))
    leave_group()
    end_process(0)


# ---------------------------------------------- what the machine can do, and what a step asks of it

def ceilings(dtype) -> tuple[float, float]:
    """Matrix multiply rate in FLOP/s and copy bandwidth in bytes/s, on all ranks at the same time,
    as they run in a step."""
    size, megabytes = (8192, 4096) if DEVICE.type == "cuda" else (1536, 256)
    a, b = (torch.randn(size, size, device=DEVICE, dtype=dtype) for _ in range(2))
    source = torch.empty(megabytes * 2**20, dtype=torch.uint8, device=DEVICE).fill_(1)
    target = torch.empty_like(source)
    return (2 * size**3 / fastest(lambda: torch.mm(a, b)),
            2 * source.numel() / fastest(lambda: target.copy_(source)))


def fastest(work, times: int = 5) -> float:
    seconds = []
    for _ in range(times + 1):
        dist.barrier()
        started = time.perf_counter()
        work()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def body_and_head(model) -> tuple[int, int]:
    """Weights that every token meets, and those of the vocabulary projection, which only completion
    tokens meet."""
    head = model.get_output_embeddings().weight.numel()
    embeddings = {id(module.weight): module.weight.numel()
                  for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    return (sum(parameter.numel() for parameter in model.parameters()) - sum(embeddings.values()),
            head)


def span(trajectory) -> tuple[int, int]:
    """Where an answer begins behind its prompt, and where it ends."""
    first = len(trajectory.prompt_ids)
    return first, first + len(trajectory.completion_ids)


def learning_flops(model, trajectories) -> float:
    """Forward and backward over what there is to learn from, each prompt read once: no padding,
    nothing computed twice."""
    body, head = body_and_head(model)
    width, layers = model.config.hidden_size, model.config.num_hidden_layers
    learned = [trajectory for trajectory in trajectories if trajectory.advantage != 0]
    prompts = {tuple(trajectory.prompt_ids) for trajectory in learned}
    spans = ([(0, len(prompt)) for prompt in prompts]
             + [span(trajectory) for trajectory in learned])
    tokens = sum(last - first for first, last in spans)
    attended = sum((last * (last + 1) - first * (first + 1)) / 2 for first, last in spans)
    return 3 * (2 * body * tokens + 2 * head * sum(len(t.completion_ids) for t in learned)
                + 4 * width * layers * attended)


def sampling_floors(model, trajectories, max_rows: int) -> tuple[float, float]:
    """Bytes that have to be read and FLOP that have to be done to sample these: the weights once a
    token for all rows of a call, each row's keys and values once a token."""
    config = model.config
    body, head = body_and_head(model)
    size = next(model.parameters()).element_size()
    head_width = (getattr(config, "head_dim", None)
                  or config.hidden_size // config.num_attention_heads)
    cache_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_width * size
    calls = [trajectories[i:i + max_rows] for i in range(0, len(trajectories), max_rows)]
    steps = sum(max(len(t.completion_ids) for t in call) for call in calls)
    tokens = sum(len(t.completion_ids) for t in trajectories)
    attended = sum((last * (last + 1) - first * (first + 1)) / 2
                   for first, last in map(span, trajectories))
    return (steps * (body + head) * size + attended * cache_bytes,
            2 * (body + head) * tokens
            + 4 * config.hidden_size * config.num_hidden_layers * attended)


class LiveBytes(TorchDispatchMode):
    """What tensors hold, in bytes, counted at each operation: on a CPU in place of what an
    allocator of a GPU tells. Not in it: what a single operation needs inside."""

    counting = None  # the one that does, for `peak_memory`

    def __enter__(self):
        self.now, self.peak, self.seen = 0, 0, set()
        LiveBytes.counting = self
        return super().__enter__()

    def __exit__(self, *error):
        LiveBytes.counting = None
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor.untyped_storage())
        return result

    def see(self, storage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address not in self.seen:  # several tensors may share it
            self.seen.add(address)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.gone, address, size)

    def gone(self, address: int, size: int) -> None:
        self.seen.remove(address)
        self.now -= size


def peak_memory() -> dict[str, float]:
    """Of this rank since it was last asked for, in GB: on a GPU its tensors, and what the allocator
    has taken for them; on a CPU its tensors where `LiveBytes` counts them, else, on Linux, the
    whole process."""
    if DEVICE.type == "cuda":
        peaks = {"memory_gb": torch.cuda.max_memory_allocated() / 1e9,
                 "reserved_gb": torch.cuda.max_memory_reserved() / 1e9}
        torch.cuda.reset_peak_memory_stats()
        return peaks
    if counter := LiveBytes.counting:
        peak, counter.peak = counter.peak, counter.now
        return {"memory_gb": peak / 1e9}
    status = Path("/proc/self/status")
    if not status.exists():
        return {"memory_gb": float("nan")}
    peak = next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines()
                if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return {"memory_gb": peak / 1e9}
