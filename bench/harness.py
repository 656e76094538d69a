"""What the measurements share: a run of main.py without its folder, models of any shape with random weights, and a printed table."""

import contextlib
import json
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers

import main

# As published; random weights of these shapes cost what the real ones cost.
SHAPES = {
    "qwen2.5-3b": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
                   "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True},
    "qwen2.5-0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
                     "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True},
    "qwen2.5-head": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 2, "num_attention_heads": 14,
                     "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True},
    "small": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 8192, "tie_word_embeddings": True},
}


class SilentLog:
    """In place of logger.Logger: shows and writes nothing, and keeps the metrics of the last step."""

    folder = Path("runs/not-written")

    def step(self, step, metrics):
        self.metrics = metrics

    @contextlib.contextmanager
    def progress(self, label):
        yield lambda *_: None


def model_of_shape(shape: str):
    """For main.load_model: random weights, and the tokenizer of tiny/, of whose 274 tokens such a model hardly ever draws one."""
    def load_model(config, device):
        tokenizer = transformers.AutoTokenizer.from_pretrained(main.HERE / "tiny" / "model")
        model_config = transformers.Qwen2Config(**SHAPES[shape], max_position_embeddings=32_768, eos_token_id=tokenizer.eos_token_id)
        dtype = torch.bfloat16 if config.model.precision == "bfloat16" else torch.float32
        torch.manual_seed(0)
        with device:
            model = transformers.AutoModelForCausalLM.from_config(model_config, dtype=dtype)
        if config.model.gradient_checkpointing:
            model.activation_checkpointing_enable()
        return model, tokenizer
    return load_model


def random_rewards(trajectories, task):
    """For main.score: every group has signal, so every row is learned from."""
    stream = random.Random(0)
    for trajectory in trajectories:
        trajectory.parts = dict.fromkeys(task.REWARD_WEIGHTS, 0.0)
        trajectory.reward = stream.random()


def make_run(arguments: list[str], shape: str | None = None) -> main.Run:
    """What main.main would train. With a `shape`, its random weights and random rewards."""
    device, _ = main.setup_distributed()
    config = main.load_config(arguments)
    config.model.precision = config.model.precision or ("mixed" if device.type == "cuda" else "float32")
    if shape:
        main.load_model, main.score = model_of_shape(shape), random_rewards
    return main.prepare(config, device, SilentLog())


def synchronise(run: main.Run) -> None:
    main.dist.barrier()
    if run.device.type == "cuda":
        torch.cuda.synchronize()


def median(values) -> float:
    return statistics.median(values)


def say(text: str) -> None:
    if main.RANK == 0:
        print(text, flush=True)


def finish(result: dict) -> None:
    """The last line is one JSON object. The process ends as main.py does."""
    say(json.dumps(result))
    main.leave(0)
