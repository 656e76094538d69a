"""What the tests share: a time limit for each, small random models of several architectures,
made-up trajectories."""

import contextlib
import functools
import json
import math
import os
import random
import re
import runpy
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

# Before torch, transformers and pyarrow are imported, here and in the processes that tests start:
# models this small lose by sharing their work, and more so beside other processes
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
# pyarrow's own thread: what forks must have only one
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"

import pytest
import torch
import transformers
from processes import ROOT, run

sys.path.insert(0, str(ROOT))

import logger
import main
from machinery import launch, ranks

torch.set_num_threads(1)
# for one test: what only a hang takes, on a slow and busy machine too
SECONDS, SECONDS_OF_SOAKING = 600, 1500
VOCABULARY = 24
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
         "max_position_embeddings": 256, "eos_token_id": 0, "bos_token_id": 1, "pad_token_id": 0}
ARCHITECTURES = {
    "gpt2": lambda **more: transformers.GPT2Config(
        **{"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256,
           "eos_token_id": 0, "bos_token_id": 1, "resid_pdrop": 0, "embd_pdrop": 0,
           "attn_pdrop": 0, **more}),
    "llama": lambda **more: transformers.LlamaConfig(**{**SIZES, **more}),
    "qwen2": lambda **more: transformers.Qwen2Config(**{**SIZES, **more}),
    # caps low enough to matter, and a window shorter than the sequences
    "gemma2": lambda **more: transformers.Gemma2Config(
        **{**SIZES, "final_logit_softcapping": 4.0, "attn_logit_softcapping": 1.0,
           "sliding_window": 8, **more}),
}


def make_model(architecture: str = "qwen2", dtype: torch.dtype = torch.float32,
               spread: float = 0.08, **more):
    """Random weights. The usual initialisation gives nearly equal logits, which hide mistakes.
    These differ as much as they can without rounding in float32 growing from layer to layer; with a
    larger `spread` some tokens are by far the likeliest."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(ARCHITECTURES[architecture](**more),
                                                          dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, spread)
    # drawn in float32 whatever the type, so that all types mean the same model
    return model.to(dtype).eval()


def make_config(**overrides):
    """config.yaml with keys changed; dots written as two underscores: training__seed=1."""
    return load_config(*(f"{key.replace('__', '.')}={json.dumps(value)}"
                         for key, value in overrides.items()))


@functools.cache  # reading YAML takes longer than most of what is tested
def load_config(*overrides):
    return main.load_config(list(overrides))


# In place of a Logger: it shows nothing.
SILENT_LOG = SimpleNamespace(
    advance=lambda count: None, phase=lambda name, total=0: contextlib.nullcontext(), seconds={})


def make_policy(model, config, **how):
    """What `policy_gradient` uses of a run: the model wrapped as in `prepare`."""
    wrapped = torch.nn.parallel.DistributedDataParallel(main.Policy(model, config), **how)
    return SimpleNamespace(policy=wrapped, config=config, reference=None, log=SILENT_LOG)


def make_trajectories(count: int, seed: int = 0, longest: int = 12) -> list:
    """Random token ids of ragged lengths, some cut off. Advantages are positive, negative and 0, as
    after `compute_advantages`."""
    stream = random.Random(seed)
    trajectories = []
    for i in range(count):
        prompt_ids = [stream.randrange(VOCABULARY) for _ in range(stream.randint(2, 9))]
        completion_ids = [stream.randrange(VOCABULARY) for _ in range(stream.randint(1, longest))]
        advantage = 0.0 if i % 4 == 3 else stream.uniform(-1, 1)
        question = main.Question({}, prompt_ids)
        trajectories.append(
            main.Trajectory(question, completion_ids, "", i % 5 == 2, advantage=advantage))
    return trajectories


def plain_loss(model, trajectories: list, B: int, L: int, temperature: float, *,
               normalizer: str = "max_length", clip=None, ratio: str = "token",
               old: list[list[float]] | None = None, beta: float = 0.0, kl_in: str = "reward",
               reference: list[list[float]] | None = None,
               mask_truncated: bool = False) -> torch.Tensor:
    """The loss as the papers write it, in plain loops, one unpadded sequence at a time. `old`,
    `reference`: log-probabilities of each token."""
    total = torch.zeros((), dtype=model.dtype)
    num_tokens = sum(len(trajectory.completion_ids) for trajectory in trajectories)
    for i, (trajectory, logprobs) in enumerate(
            zip(trajectories, plain_logprobs(model, trajectories, temperature))):
        if mask_truncated and trajectory.is_truncated:
            continue
        for t, logprob in enumerate(logprobs):
            A = trajectory.advantage
            if beta and kl_in == "reward":
                A += beta * (reference[i][t] - logprob.item())
            if old is None:
                gain = A * logprob
            else:
                if ratio == "sequence":  # the whole answer's, to the power of one over its length
                    rho = torch.ones((), dtype=model.dtype)
                    for before, now in zip(old[i], logprobs):
                        rho = rho * torch.exp((now - before) / len(logprobs))
                else:
                    rho = torch.exp(logprob - old[i][t])
                gain = A * rho
                if clip is not None:
                    low, high = clip
                    if A > 0 and rho > 1 + high:
                        gain = A * torch.tensor(1 + high, dtype=model.dtype)
                    if A < 0 and rho < 1 - low:
                        gain = A * torch.tensor(1 - low, dtype=model.dtype)
                if ratio == "cispo":
                    gain = min(rho.item(), math.inf if clip is None else 1 + clip[1]) * A * logprob
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


def gradient(module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters()])


def clear_choices(logits: torch.Tensor) -> list[int]:
    """The likeliest token at each position, (time, vocabulary), so much likelier than the next that
    no rounding can choose that."""
    first, second = logits.topk(2).values.unbind(-1)
    assert (first - second).min() > 1e-4
    return logits.argmax(-1).tolist()


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return float((value.double() - reference.double()).norm() / reference.double().norm())


def start(arguments: list[str]) -> int:
    """`python main.py`, in this process: returns the exit code, see `stay`."""
    return launch.launch(main.main, arguments)


def run_main(*arguments: str):
    """For `ranks`: does not return, as `launch` ends the process."""
    launch.launch(main.main, list(arguments))


def run_script(path: str, *arguments: str):
    """For `ranks`: a script as if Python had been called with it."""
    sys.path.insert(0, str(Path(path).resolve().parent))
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def shown_file(name: str) -> str:
    """What docs/ shows of it: the block that begins with its name."""
    pages = "\n".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    return re.search(rf"```(?:python|yaml)\n(# {re.escape(name)}.*?)```", pages, re.DOTALL)[1]


def write_own_task(folder: Path) -> None:
    """mytask.py of docs/tasks.md, and mine.jsonl as the command there makes it."""
    (folder / "mytask.py").write_text(shown_file("mytask.py"))
    page = (ROOT / "docs" / "tasks.md").read_text()
    makes_data = re.search(r"```bash\n(.*?> mine\.jsonl\n)", page, re.DOTALL)[1]
    assert run("bash", "-c", makes_data, cwd=folder).returncode == 0


def pytest_addoption(parser):
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in another order")


def pytest_collection_modifyitems(config, items):
    if (seed := config.getoption("--shuffle")) is not None:
        random.Random(seed).shuffle(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """A test that takes too long fails by its name, with the stack of every process that it has
    started: see `stacks_on_the_way_out`. (Where even this cannot interrupt it,
    `faulthandler_timeout` of pyproject.toml does.)"""
    seconds = SECONDS_OF_SOAKING if item.get_closest_marker("soak") else SECONDS

    def end(*_):
        # which no `except Exception` takes for its own
        raise pytest.fail.Exception(f"this test has not ended after {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds, 60)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


KEPT = []


def stay(code: int) -> int:
    """In place of `end_process`: what `launch` was called from goes on, with a group that is never
    freed, see there."""
    if torch.distributed.is_initialized():
        KEPT.append(torch.distributed.group.WORLD)
        torch.distributed.destroy_process_group()
    return code


DRAW_CURVES = logger.Logger._draw_curves


def draw_nothing(log) -> None:
    """In place of curves that no one will look at, and that take longer to draw than all the rest
    of a small run."""
    (log.path / "curves.png").touch()


@pytest.fixture(autouse=True)
def staying(monkeypatch):
    monkeypatch.setattr(launch, "end_process", stay)
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(logger.Logger, "_draw_curves", draw_nothing)
    # which mlflow itself sets, for processes it might start
    monkeypatch.delenv("MLFLOW_EXPERIMENT_ID", raising=False)
    yield
    signal.signal(signal.SIGINT, on_ctrl_c)  # A run has a handler of its own.


@pytest.fixture(autouse=True)
def forgetting_tasks(monkeypatch):
    """Tasks of one name from different folders can be loaded in one process."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        path = getattr(sys.modules[name], "__file__", None) or ""
        if "pytest-" in path:  # of a temporary folder
            del sys.modules[name]


@pytest.fixture
def nobody_listens():
    """An address that refuses every connection, and that nobody else can take meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def one_rank():
    """The process group of a plain `python main.py`."""
    ranks.join()
    torch.set_num_threads(1)
    yield
    stay(0)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A function that saves a random model of an architecture, with the tokenizer of tiny/, and
    returns its folder."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "tiny" / "model")

    def save(architecture: str, **more) -> Path:
        folder = tmp_path_factory.mktemp(architecture)
        model = make_model(architecture, vocab_size=len(tokenizer),
                           eos_token_id=tokenizer.eos_token_id, **more)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save
