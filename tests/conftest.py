"""What the tests share: small random models, made-up answers, the losses in plain loops, short
runs, and the fixtures. How processes are started is in processes.py."""

import dataclasses
import functools
import hashlib
import json
import random
import signal
import sys
from pathlib import Path

from processes import ROOT, Result, ranks  # isort: skip  It sets the environment.

import pytest
import torch
import transformers

sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "examples")]

from silent import SilentLog

import logger
import main
from machinery import settings
from machinery.model import find_stop_ids, make_reference, make_sampler
from machinery.ranks import join, launch
from machinery.runs import RunFolder, step_of
from machinery.tasks import Question

torch.set_num_threads(1)

# ---------------------------------------------------------------- models

VOCABULARY = 24
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
         "max_position_embeddings": 256, "eos_token_id": 0, "bos_token_id": 1, "pad_token_id": 0}
ARCHITECTURES = {
    "gpt2": lambda **more: transformers.GPT2Config(
        **{"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256,
           "eos_token_id": 0, "bos_token_id": 1, "resid_pdrop": 0, "embd_pdrop": 0,
           "attn_pdrop": 0, **more}),
    "qwen2": lambda **more: transformers.Qwen2Config(**{**SIZES, **more}),
    # Caps low enough to matter, and a window shorter than the sequences.
    "gemma2": lambda **more: transformers.Gemma2Config(
        **{**SIZES, "final_logit_softcapping": 4.0, "attn_logit_softcapping": 1.0,
           "sliding_window": 8, **more}),
}


def make_model(architecture: str = "qwen2", dtype: torch.dtype = torch.float32,
               spread: float = 0.08, **more):
    """Random weights. The usual initialisation gives nearly equal logits, which hide mistakes.
    These differ as much as they can without rounding in float32 growing from layer to layer. With
    a larger `spread` some tokens are by far the likeliest."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(ARCHITECTURES[architecture](**more),
                                                          dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, spread)
    # Sampled in float32 whatever the type, so that all types mean the same model.
    return model.to(dtype).eval()


def make_config(**overrides):
    """config.yaml with keys changed. Dots are written as two underscores: training__seed=1."""
    return load_config(*(f"{key.replace('__', '.')}={json.dumps(value)}"
                         for key, value in overrides.items()))


@functools.cache  # Reading YAML takes longer than most of what is tested.
def load_config(*overrides):
    return settings.load_config(list(overrides))


def made_up_run(**attributes) -> main.Run:
    """A run with nothing but these attributes. Those that you add to Run have their default, or
    None."""
    empty = {attribute.name: None for attribute in dataclasses.fields(main.Run)
             if attribute.default is attribute.default_factory is dataclasses.MISSING}
    return main.Run(**{**empty, "log": SilentLog(), "own_state": {}, **attributes})


# ---------------------------------------------------------------- learning

# Where a test makes the teacher itself, its name is never read.
DISTILL = {"training__learning_type": "distill", "training__teacher": "made up"}
# The batch that most tests of the gradient learn from.
QUESTIONS, GROUP = 6, 2
TEMPERATURE, L = 0.7, 12
SGD_RATE = 0.06
# The formulas are computed in float64. Rounding then comes to 1e-14 in float64 and to 1e-6 in
# float32, more or less on another processor. A wrong formula changes it by 1e-2 or more.
BOUND = {torch.float32: 1e-5, torch.float64: 1e-11}
ARCHITECTURE = {torch.float64: "gpt2", torch.float32: "qwen2"}


def make_trajectories(count: int = QUESTIONS * GROUP, seed: int = 0, longest: int = L) -> list:
    """Random token ids of ragged lengths, some truncated. Advantages are positive, negative and 0,
    as after `compute_advantages`."""
    stream = random.Random(seed)
    trajectories = []
    for i in range(count):
        prompt_ids = [stream.randrange(VOCABULARY) for _ in range(stream.randint(2, 9))]
        completion_ids = [stream.randrange(VOCABULARY) for _ in range(stream.randint(1, longest))]
        advantage = 0.0 if i % 4 == 3 else stream.uniform(-1, 1)
        question = Question({}, prompt_ids)
        trajectories.append(main.Trajectory(
            question, completion_ids, "", i % 5 == 2, advantage=advantage,
            sampler_log_probs=torch.zeros(len(completion_ids))))
    return trajectories


def learning_config(**overrides):
    return make_config(**{
        "training__max_new_gen_tokens": L, "training__max_grad_norm": None,
        "training__learning_rate": SGD_RATE, "training__warmup_steps": 0,
        "sampling__temperature": TEMPERATURE, "model__precision": "float32", **overrides})


def make_policy(model, config, **how):
    """What `learn` uses of a run: the model wrapped as in `prepare`. SGD takes AdamW's place. Its
    steps are large enough for ratios to leave the clipping range."""
    wrapped = torch.nn.parallel.DistributedDataParallel(main.Policy(model, config), **how)
    return made_up_run(policy=wrapped, model=model, sampler=model, config=config,
                       optimizer=torch.optim.SGD(model.parameters()), step=1)


def reference_of(model):
    """What `model` shall have been before it learned: the same architecture, other weights."""
    reference = make_model(model.config.model_type, model.dtype)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(0.97)
    return reference


def learn(model, trajectories, **overrides):
    """All updates on one batch, as a run of these settings makes them. Returns the last update's
    metrics. Its gradient stays in `model`."""
    config = learning_config(**overrides)
    run = make_policy(model, config, gradient_as_bucket_view=True)
    if config.training.has_reference:
        run.reference = main.Policy(make_reference(reference_of(model), config), config)
    return main.learn(run, as_sampled_from(model, trajectories))[-1]


def as_sampled_from(model, trajectories: list) -> list:
    """Copies of these answers, with their log-probabilities while the model sampled them."""
    answers = [dataclasses.replace(trajectory) for trajectory in trajectories]
    sampled_with = as_numbers(plain_logprobs(model, answers, TEMPERATURE))
    for answer, log_probs in zip(answers, sampled_with, strict=True):
        answer.sampler_log_probs = torch.tensor(log_probs, dtype=torch.float64)
    return answers


def learn_in_plain_loops(trajectories, architecture, dtype=torch.float64, **overrides):
    """The same as `learn`, by `plain_loss`: loss and gradient of the last update."""
    training = make_config(**overrides).training
    model, old, reference = make_model(architecture, dtype), None, None
    # A teacher is a KL penalty with the weight 1.
    beta = 1.0 if training.learning_type == "distill" else training.kl_beta
    if training.updates_per_batch > 1:
        old = as_numbers(plain_logprobs(model, trajectories, TEMPERATURE))
    if beta:
        reference = as_numbers(plain_logprobs(reference_of(model), trajectories, TEMPERATURE))
    for update in range(training.updates_per_batch):
        if update > 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(SGD_RATE * parameter.grad)
        model.zero_grad()
        loss = plain_loss(model, trajectories, QUESTIONS * GROUP, L, TEMPERATURE,
                          normalizer=training.loss_normalizer, clip=training.clip, old=old,
                          beta=beta, kl_in=training.kl_in, reference=reference)
        loss.backward()
    return loss.item(), gradient(model)


def plain_loss(model, trajectories: list, B: int, L: int, temperature: float, *,
               normalizer: str = "max_length", clip=None,
               old: list[list[float]] | None = None, beta: float = 0.0, kl_in: str = "reward",
               reference: list[list[float]] | None = None) -> torch.Tensor:
    """The loss as the papers write it, in plain loops, one unpadded sequence at a time. `old` and
    `reference` are log-probabilities of each token."""
    total = torch.zeros((), dtype=model.dtype)
    num_tokens = sum(len(trajectory.completion_ids) for trajectory in trajectories)
    all_logprobs = plain_logprobs(model, trajectories, temperature)
    for i, (trajectory, logprobs) in enumerate(zip(trajectories, all_logprobs)):
        for t, logprob in enumerate(logprobs):
            A = trajectory.advantage
            if beta and kl_in == "reward":
                # A reward doesn't change when the policy does, so later updates keep it.
                A += beta * (reference[i][t] - (logprob.item() if old is None else old[i][t]))
            if old is None:
                gain = A * logprob
            else:
                rho = torch.exp(logprob - old[i][t])
                gain = A * rho
                if clip is not None:
                    low, high = clip
                    if A > 0 and rho > 1 + high:
                        gain = A * torch.tensor(1 + high, dtype=model.dtype)
                    if A < 0 and rho < 1 - low:
                        gain = A * torch.tensor(1 - low, dtype=model.dtype)
            if beta and kl_in == "loss":
                against = torch.exp(reference[i][t] - logprob)
                gain = gain - beta * (against - torch.log(against) - 1)
            total = total + gain / {"max_length": B * L, "tokens": num_tokens,
                                    "sequence": B * len(logprobs)}[normalizer]
    return -total


def plain_logprobs(model, trajectories: list, temperature: float) -> list[list[torch.Tensor]]:
    """log pi(a_i[t] | q_i, a_i[<t]) from the model's own logits."""
    all_logprobs = []
    for trajectory in trajectories:
        prompt_ids = trajectory.prompt_ids
        logits = model(torch.tensor([prompt_ids + trajectory.completion_ids])).logits[0]
        all_logprobs.append(
            [torch.log(torch.softmax(logits[len(prompt_ids) + t - 1] / temperature, dim=-1)[token])
             for t, token in enumerate(trajectory.completion_ids)])
    return all_logprobs


def as_numbers(logprobs: list[list[torch.Tensor]]) -> list[list[float]]:
    return [[value.item() for value in row] for row in logprobs]


def gradient(module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters()])


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return float((value.double() - reference.double()).norm() / reference.double().norm())


# ---------------------------------------------------------------- sampling

# Ragged, so that two of them are padded.
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [3, 4], [2, 9, 2, 9, 2]]


class Tokenizer:
    """As much of a tokenizer as sampling uses, over the random models' vocabulary."""

    def __init__(self, eos: int):
        self.eos_token_id = eos

    def decode(self, ids, **_):
        return " ".join(map(str, ids))


def sampling_run(model, eos=0, **overrides):
    """What `sample` uses of a run."""
    config = make_config(**{"model__precision": "float32", **overrides})
    tokenizer = Tokenizer(eos)
    return made_up_run(config=config, tokenizer=tokenizer,
                       stop_ids=find_stop_ids(model, tokenizer),
                       sampler=make_sampler(model, config))


def sample_from(run, prompts, group_size) -> list:
    """`group_size` answers to each of these prompts, in one list."""
    asked = [Question({}, prompt) for prompt in prompts]
    return [answer for group in main.sample(run, asked, group_size, run.config.sampling)
            for answer in group]


def sample(model, prompts, group_size, **how) -> list:
    return sample_from(sampling_run(model, **how), prompts, group_size)


def clear_choices(logits: torch.Tensor) -> list[int]:
    """The likeliest token at each position of (time, vocabulary) logits. It must be so much
    likelier than the next one that no rounding can choose that one."""
    first, second = logits.topk(2).values.unbind(-1)
    assert (first - second).min() > 1e-4
    return logits.argmax(-1).tolist()


# ---------------------------------------------------------------- runs

# A run of three short steps, with an evaluation at its start and its end.
SMALL = ["training.max_steps=3", "training.max_new_gen_tokens=48", "training.learning_rate=0.001",
         "training.num_samples_per_step=2", "training.k_best_of_n=[4,4]", "data.num_validation=6",
         "data.max_rows=200", "validation.best_of_n=2", "run.name=a"]
EVERY_STEP = ["checkpoint.every=1", "validation.every=2"]
SIL = ["training.learning_type=sil", "training.k_best_of_n=[2,4]"]
# The metrics that depend on the clock or on the machine.
TIMES = {"tokens_per_second", "seconds/sample", "seconds/score", "seconds/learn",
         "seconds/measure", "seconds/save", "memory_gb"}
# These are measured in the first step, and in each step that is evaluated.
CHANGE = {"moved", "change_size", "change_as_meant", "change_rewarded", "change_punished"}


def run_folder(config) -> RunFolder:
    return RunFolder(config, main.code_of(main.main, config))


def start(arguments: list[str]) -> int:
    """`python main.py` in this process. Returns the exit code, see `stay`."""
    return launch(main.main, arguments)


def run_main(*arguments: str):
    """For `ranks`: does not return, as `launch` ends the process."""
    launch(main.main, list(arguments))


def run_without_curves(*arguments: str):
    """As `run_main`, without what takes longer than all the rest of a small run."""
    logger.Logger._draw_curves = draw_nothing
    run_main(*arguments)


def uninterrupted(num_ranks: int, folder: Path, *settings: str) -> dict:
    """The outcome of a small run."""
    result = ranks(num_ranks, run_without_curves, *SMALL, *settings, f"run.dir={folder}")
    assert result.returncode == 0, result.stderr
    return outcome(folder / "a")


def interrupted(num_ranks: int, strike: dict, folder: Path, *settings: str) -> Result:
    """One start of a small run, which `strike` may end: see interrupted_worker.py."""
    from interrupted_worker import run_and_be_struck

    folder.mkdir(exist_ok=True)
    return ranks(num_ranks, run_and_be_struck, strike, str(folder),
                 [*SMALL, *settings, f"run.dir={folder}"])


def outcome(folder: Path) -> dict:
    """All that a run has come to, times aside."""
    checkpoint = max((folder / "checkpoints").glob("step-*"))
    state = json.loads((checkpoint / "state.json").read_text())
    files = [*folder.iterdir(), *(folder / "checkpoints").iterdir()]
    return {"metrics": [without_times(entry) for entry in read_jsonl(folder / "metrics.jsonl")],
            "samples": read_jsonl(folder / "samples.jsonl"),
            "step": checkpoint.name,
            "state": [state[key] for key in ("step", "best", "last_evaluation", "own_state")],
            "tensors": digest(checkpoint / "tensors-1.safetensors"),
            "models": [digest(folder / name / "model.safetensors") for name in ("best", "last")],
            "steps": [step_of(folder / name) for name in ("best", "last")],
            "code": [state["code"], (folder / "main.py").read_text()],
            "files": sorted(path.name for path in files)}


def without_times(entry: dict) -> dict:
    return {key: value for key, value in entry.items() if key not in TIMES}


def training_steps(folder: Path) -> list[dict]:
    """The training part of metrics.jsonl, without what depends on the clock."""
    return [without_times(entry) for entry in read_jsonl(folder / "metrics.jsonl")
            if "reward" in entry]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ---------------------------------------------------------------- fixtures

KEPT_GROUPS = []


def stay(code: int) -> int:
    """In place of `end_process`: what called `launch` continues. The process group is kept, because
    freeing it would end its threads under other tests."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Its handler holds the folder of the run.
    if torch.distributed.is_initialized():
        KEPT_GROUPS.append(torch.distributed.group.WORLD)
        torch.distributed.destroy_process_group()
    return code


def draw_nothing(log) -> None:
    """In place of curves that no one will look at."""
    (log.path / "curves.png").touch()


@pytest.fixture(autouse=True)
def as_in_a_fresh_process(monkeypatch):
    """Each test begins with the same random numbers. Runs end without ending the process, draw no
    curves, and leave nothing behind: no handler, no module of a task, no variable of MLflow."""
    torch.manual_seed(0)
    monkeypatch.setattr("machinery.ranks.end_process", stay)
    monkeypatch.setattr(logger.Logger, "_draw_curves", draw_nothing)
    monkeypatch.setattr(sys, "path", list(sys.path))
    # MLflow itself sets it, for processes it might start.
    monkeypatch.delenv("MLFLOW_EXPERIMENT_ID", raising=False)
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    known = set(sys.modules)
    yield
    signal.signal(signal.SIGINT, on_ctrl_c)
    for name in set(sys.modules) - known:
        path = getattr(sys.modules[name], "__file__", None) or ""
        if "pytest-" in path:  # a task in a temporary folder
            del sys.modules[name]


@pytest.fixture
def one_rank():
    """The process group of a plain `python main.py`."""
    join()
    torch.set_num_threads(1)
    yield
    stay(0)
