"""What the measurements share: a run of main.py without its folder, models of known shapes with
random weights, and the peak memory."""

import json
import random
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "examples")]

import torch
import torch.distributed as dist
import transformers
from silent import NoFolder, SilentLog

import main
from machinery.model import make_masters, type_when_loaded
from machinery.ranks import DEVICE, RANK, end_process, join, leave_group
from machinery.settings import ROOT, Config, load_config

median = statistics.median

# Random weights of these shapes cost what the real ones cost.
SHAPES = {
    "qwen2.5-3b": {
        "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151_936,
    },
    "small": {
        "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 8192,
    },
}

NEVER = 10**9  # No run gets to this step.


def model_of_shape(shape: str):
    """Returns a replacement for main.load_model: random weights, and the tiny model's tokenizer.
    Such a model rarely samples one of the tokenizer's 274 tokens."""
    def load_model(config):
        tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "tiny" / "model")
        model_config = transformers.Qwen2Config(
            **SHAPES[shape], tie_word_embeddings=True, max_position_embeddings=32_768,
            eos_token_id=tokenizer.eos_token_id)
        torch.manual_seed(0)
        with DEVICE:
            model = transformers.AutoModelForCausalLM.from_config(
                model_config, dtype=type_when_loaded(config.model))
            make_masters(model, config)
        if config.model.gradient_checkpointing:
            model.activation_checkpointing_enable()
        return model, tokenizer
    return load_model


def random_rewards(run: main.Run, groups: list[list[main.Trajectory]]) -> None:
    """Replaces main.score. Every group has a signal, so every answer is learned from."""
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
    """Returns what main.main would train, except that it never evaluates. With a `shape` it has
    random weights and random rewards."""
    config = load_config(arguments)
    # `training_step` would evaluate at these steps, and evaluations aren't measured.
    config = config.model_copy(update={
        "training": config.training.model_copy(update={"max_steps": NEVER}),
        "validation": config.validation.model_copy(update={"every": NEVER})})
    if shape:
        assert config.model.lora_rank == 0, "random weights have no adapters"
        main.load_model = model_of_shape(shape)
        main.score = random_rewards
    return prepare(config)


def never_stop(run: main.Run) -> None:
    """Makes all answers reach the length limit."""
    run.stop_ids = [10**9]  # There's no such token.


def synchronise() -> None:
    dist.barrier()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def say(text: str) -> None:
    if RANK == 0:
        print(text, flush=True)


def finish(result: dict) -> None:
    """Prints the last line, one JSON object, and exits as main.py does."""
    say(json.dumps(result))
    leave_group()
    end_process(0)


# ---------------------------------------------- memory

def peak_memory() -> dict[str, float]:
    """Returns this rank's peak in GB since the last call. On a GPU this is what its tensors held,
    and what the allocator reserved for them. On a CPU it's the peak of the whole process, as Linux
    reports it."""
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
