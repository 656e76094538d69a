"""What the tests share: small random models of several architectures, made-up trajectories, and real `torchrun` processes."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import main

torch.set_num_threads(1)  # models this small lose by sharing their work, and more so beside other processes
os.environ["OMP_NUM_THREADS"] = "1"  # the same for the processes that tests start
VOCABULARY = 24
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "eos_token_id": 0, "bos_token_id": 1,
         "pad_token_id": 0}
ARCHITECTURES = {
    "gpt2": lambda **more: transformers.GPT2Config(**{"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4,
                                                      "n_positions": 256, "eos_token_id": 0, "bos_token_id": 1, "resid_pdrop": 0,
                                                      "embd_pdrop": 0, "attn_pdrop": 0, **more}),
    "llama": lambda **more: transformers.LlamaConfig(**{**SIZES, **more}),
    "qwen2": lambda **more: transformers.Qwen2Config(**{**SIZES, **more}),
    # caps low enough to matter, and a window shorter than the sequences
    "gemma2": lambda **more: transformers.Gemma2Config(**{**SIZES, "final_logit_softcapping": 4.0, "attn_logit_softcapping": 1.0,
                                                          "sliding_window": 8, **more}),
}


def make_model(architecture: str = "qwen2", dtype: torch.dtype = torch.float32, **more):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(ARCHITECTURES[architecture](**more), dtype=torch.float32)
    with torch.no_grad():  # the usual initialisation gives nearly equal logits; spread them so that mistakes show
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.25)
    return model.to(dtype).eval()  # drawn in float32 whatever the type, so that all types mean the same model


def make_config(**overrides):
    """config.yaml with keys changed; dots written as two underscores: training__seed=1."""
    return main.load_config([f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in overrides.items()])


def make_trajectories(count: int, seed: int = 0, longest: int = 12) -> list:
    """Random token ids of ragged lengths, some cut off. Advantages are positive, negative and 0, as after `compute_advantages`."""
    stream = random.Random(seed)
    trajectories = []
    for i in range(count):
        prompt_ids = [stream.randrange(VOCABULARY) for _ in range(stream.randint(2, 9))]
        completion_ids = [stream.randrange(VOCABULARY) for _ in range(stream.randint(1, longest))]
        advantage = 0.0 if i % 4 == 3 else stream.uniform(-1, 1)
        trajectories.append(main.Trajectory({}, prompt_ids, completion_ids, "", i % 5 == 2, advantage=advantage))
    return trajectories


def plain_loss(model, trajectories: list, B: int, L: int, temperature: float, *, normalizer: str = "max_length", clip=None,
               old: list[list[float]] | None = None, beta: float = 0.0, reference: list[list[float]] | None = None,
               mask_truncated: bool = False) -> torch.Tensor:
    """The loss as the papers write it, in plain loops, one unpadded sequence at a time. `old`, `reference`: log-probabilities of each token."""
    total = torch.zeros((), dtype=model.dtype)
    num_tokens = sum(len(trajectory.completion_ids) for trajectory in trajectories)
    for i, (trajectory, logprobs) in enumerate(zip(trajectories, plain_logprobs(model, trajectories, temperature))):
        if mask_truncated and trajectory.truncated:
            continue
        for t, logprob in enumerate(logprobs):
            if old is None:
                gain = trajectory.advantage * logprob
            else:
                ratio = torch.exp(logprob - old[i][t])
                gain = trajectory.advantage * ratio
                if clip is not None:
                    low, high = clip
                    if trajectory.advantage > 0 and ratio > 1 + high:
                        gain = trajectory.advantage * torch.tensor(1 + high, dtype=model.dtype)
                    if trajectory.advantage < 0 and ratio < 1 - low:
                        gain = trajectory.advantage * torch.tensor(1 - low, dtype=model.dtype)
            if beta:
                against = torch.exp(reference[i][t] - logprob)
                gain = gain - beta * (against - torch.log(against) - 1)
            total = total + gain / {"max_length": B * L, "tokens": num_tokens, "sequence": B * len(logprobs)}[normalizer]
    return -total


def plain_logprobs(model, trajectories: list, temperature: float) -> list[list[torch.Tensor]]:
    """log pi(a_i[t] | q_i, a_i[<t]) from the model's own logits."""
    all_logprobs = []
    for trajectory in trajectories:
        prompt_ids = trajectory.prompt_ids
        logits = model(torch.tensor([prompt_ids + trajectory.completion_ids])).logits[0]
        all_logprobs.append([torch.log(torch.softmax(logits[len(prompt_ids) + t - 1] / temperature, dim=-1)[token])
                             for t, token in enumerate(trajectory.completion_ids)])
    return all_logprobs


def gradient(module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters()])


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return float((value - reference).norm() / reference.norm())


def torchrun(num_ranks: int, *arguments, timeout: int = 300, torchrun_options=(), **environment) -> subprocess.CompletedProcess:
    """A script of this repository under a real torchrun, on a free port."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", *torchrun_options,
               *map(str, arguments)]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW")}
    return subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=timeout,
                          env={**inherited, "HF_HUB_OFFLINE": "1", **environment})


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


KEPT = []


def stay(code: int) -> int:
    """In place of main.leave: what main.main() was called from goes on, with a group that is never freed, see there."""
    if torch.distributed.is_initialized():
        KEPT.append(torch.distributed.group.WORLD)
        torch.distributed.destroy_process_group()
    return code


@pytest.fixture(autouse=True)
def staying(monkeypatch):
    monkeypatch.setattr(main, "leave", stay)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_ID", raising=False)  # which mlflow itself sets, for processes it might start


@pytest.fixture
def one_rank():
    """The process group of a plain `python main.py`."""
    device, _ = main.setup_distributed()
    torch.set_num_threads(1)
    yield device
    stay(0)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A function that saves a random model of an architecture, with the tokenizer of tiny/, and returns its folder."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "tiny" / "model")

    def save(architecture: str, **more) -> Path:
        folder = tmp_path_factory.mktemp(architecture)
        model = make_model(architecture, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **more)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save
