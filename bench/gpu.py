"""Measures on the first GPU what we most need to know: is it right, and does 3 B fit?

    .venv/bin/python bench/gpu.py                  all parts, the most informative ones first
    .venv/bin/python bench/gpu.py attention fits   these parts
    .venv/bin/python bench/gpu.py --small          a rehearsal of all parts on a CPU

Each part is a separate process with a time limit. So a part that fails, hangs or breaks CUDA
doesn't stop the next one. It prints its figures as it finds them, one JSON object per line, and
fails if an assertion about them fails."""

import argparse
import contextlib
import copy
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import harness
from harness import (
    DEVICE,
    ROOT,
    SilentLog,
    load_config,
    main,
    make_run,
    median,
    torch,
    transformers,
)
from step import measure, seconds_of_a_step
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from machinery.metrics import LARGE_GAP, evaluation_metrics

CUDA = DEVICE.type == "cuda"
FEW_ROWS = "data.max_rows=1000"  # They are read in no time.
ROWS, HEADS, WIDTH = 4, 4, 128  # of attention


# ---------------------------------------------------------------- what parts share

def report(**figures: float | str | None) -> None:
    print(json.dumps(figures), flush=True)


def batch(N: int, G: int, L: int) -> list[str]:
    return [f"training.num_samples_per_step={N}", f"training.k_best_of_n=[{G},{G}]",
            f"training.max_new_gen_tokens={L}"]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def start(*arguments: str) -> subprocess.Popen:
    """Runs Python in a separate process. Everything it prints comes through one pipe."""
    return subprocess.Popen([sys.executable, *arguments], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def limit_memory(num_bytes: int) -> None:
    """Allows this process no more of the GPU's memory than this."""
    if CUDA:
        total = torch.cuda.get_device_properties(DEVICE).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total))


# ---------------------------------------------------------------- is it right

def machine(small: bool) -> None:
    report(torch=torch.__version__, transformers=transformers.__version__, cpus=os.cpu_count())
    if CUDA:
        card = torch.cuda.get_device_properties(DEVICE)
        report(
            gpu=card.name, gpu_gb=card.total_memory / 1e9, cuda=torch.version.cuda,
            cudnn=torch.backends.cudnn.version(), nccl=str(torch.cuda.nccl.version()))
        assert not torch.backends.cuda.cudnn_sdp_enabled()  # `ranks.join` says why.


def attention(small: bool) -> None:
    """Compares attention in bfloat16 with the plain formula in float32."""
    for T in (31, 192, 704, 1088):
        torch.manual_seed(T)
        inputs, mask, is_real = inputs_of_attention(T)
        weight = torch.randn(ROWS, T, HEADS, WIDTH, device=DEVICE) * is_real[..., None, None]
        with sdpa_kernel(SDPBackend.MATH):
            expected, expected_gradient = attend(inputs, mask, weight, torch.float32)
        found, gradient = attend(inputs, mask, weight, torch.bfloat16)
        output_error = relative_error(found[is_real], expected[is_real])
        gradient_error = relative_error(gradient, expected_gradient)
        report(T=T, output_error=output_error, gradient_error=gradient_error)
        assert found.isfinite().all()
        assert output_error < 0.02 and gradient_error < 0.03  # A nan isn't below.


def inputs_of_attention(T: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Returns query, key and value, (rows, heads, T, width), the mask, (rows, 1, queries, keys),
    and which places aren't padding, (rows, T). Rows are padded on the left, as prompts are, so
    their first queries see nothing."""
    inputs = []
    for heads in (HEADS, 2, 2):
        inputs.append(torch.randn(ROWS, heads, T, WIDTH, device=DEVICE).bfloat16())
    # In every other row scores are about -100. A logsumexp below -88 is where nan came from.
    scale = (100 / math.sqrt(WIDTH)) ** 0.5
    inputs[0][::2] += scale
    inputs[1][::2] -= scale
    padding = torch.arange(ROWS, device=DEVICE) * T // (2 * ROWS)  # (rows,)
    place = torch.arange(T, device=DEVICE)
    is_real = place >= padding[:, None]  # (rows, T)
    is_causal = place[:, None] >= place  # (queries, keys)
    return inputs, is_causal & is_real[:, None, None], is_real


def attend(
    inputs: list[torch.Tensor], mask: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls attention the way transformers models do. Returns its output, (rows, T, heads, width),
    and the gradient of its inputs."""
    query, key, value = [tensor.to(dtype, copy=True).requires_grad_() for tensor in inputs]
    module = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True)
    output, _ = sdpa_attention_forward(module, query, key, value, mask)
    (output.float() * weight).sum().backward()
    gradients = [tensor.grad.float().flatten() for tensor in (query, key, value)]
    return output.detach().float(), torch.cat(gradients)


def gradient(small: bool) -> None:
    """Compares the gradient of one batch with the CPU's in float32."""
    N, G, L = (2, 4, 48) if small else (4, 8, 192)
    keys = ["training.max_grad_norm=null", FEW_ROWS, *batch(N, G, L)]
    run = make_run(["model.precision=float32", *keys])
    answers = []
    for group in main.sample(run, main.questions(run), G, run.config.sampling):
        answers += group
    for answer in answers:
        answer.advantage = 1.0
    expected = gradient_of(run.model, answers, "float32", torch.device("cpu"), keys)
    for precision, bound in (("float32", 1e-3), ("mixed", 0.1)):
        error = relative_error(gradient_of(run.model, answers, precision, DEVICE, keys), expected)
        report(precision=precision, error=error)
        assert error < bound, precision


def gradient_of(
    model, answers: list, precision: str, device: torch.device, keys: list[str]
) -> torch.Tensor:
    config = load_config([f"model.precision={precision}", *keys])
    policy = DistributedDataParallel(main.Policy(copy.deepcopy(model).to(device), config))
    run = SimpleNamespace(policy=policy, config=config, log=SilentLog())
    num_tokens = sum(answer.num_tokens for answer in answers)
    main.policy_gradient(run, answers, {"answers": len(answers), "tokens": num_tokens})
    gradients = [parameter.grad.flatten() for parameter in policy.parameters()]
    return torch.cat(gradients).double().cpu()


def learning(small: bool) -> None:
    """Takes a few steps of the default, in mixed precision."""
    num_steps = 2 if small else 20
    keys = ["model.precision=mixed", "data.num_validation=64"]
    if small:
        keys += ["data.num_validation=8", *batch(4, 4, 64), FEW_ROWS]
    run = make_run(keys)
    before = evaluation_metrics(main.evaluate(run), run.task)["eval/solved"]
    steps = []
    seconds = []
    for _ in range(num_steps):
        seconds.append(seconds_of_a_step(run))
        steps.append(run.log.metrics)
    after = evaluation_metrics(main.evaluate(run), run.task)["eval/solved"]
    sampler_gap = steps[0]["sampler_gap"]
    report(sampler_gap=sampler_gap, solved_before=before, solved_after=after,
           seconds_a_step=median(seconds[1:]))
    assert not any(metrics["non_finite"] for metrics in steps)
    assert sampler_gap < LARGE_GAP["mixed"]
    assert small or after > before


def resuming(small: bool) -> None:
    """Kills a run after step 4 and resumes it. It ends like one that was never killed and ran under
    torchrun."""
    keys = ["training.max_steps=10", "data.num_validation=32", "validation.every=3"]
    if small:
        keys += [*batch(2, 4, 32), FEW_ROWS, "data.num_validation=4", "training.max_steps=6"]
    with tempfile.TemporaryDirectory() as folder:
        keys.append(f"run.dir={folder}")
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
        whole = start(*torchrun, "main.py", *keys, "run.name=whole")
        struck = start("main.py", *keys, "run.name=struck")
        for line in struck.stdout:
            if line.startswith("step    4 "):
                struck.kill()
        again = start("main.py", *keys, "run.name=struck")
        output, _ = again.communicate()
        output_of_whole, _ = whole.communicate()
    assert struck.wait() == -signal.SIGKILL
    assert "resuming from" in output, output
    # The last line of a run is its summary. It has the metrics of the last evaluation.
    found = json.loads(output.splitlines()[-1])["last"]
    expected = json.loads(output_of_whole.splitlines()[-1])["last"]
    report(reward=found["eval/reward"], reward_of_whole=expected["eval/reward"])
    # On a GPU, sums are in no fixed order, so after some tokens answers diverge.
    is_near = abs(found["eval/reward"] - expected["eval/reward"]) < 0.25
    assert is_near if CUDA else found == expected


# ---------------------------------------------------------------- memory

def shortage(small: bool) -> None:
    """Runs out of memory while sampling and while learning. Each run ends in one line."""
    for phase, N, remedy in (("sample", 64, "lower sampling.max_rows"),
                             ("learn", 16, "lower training.tokens_per_micro_batch")):
        with tempfile.TemporaryDirectory() as folder:
            process = start(
                __file__, "--starve", phase, *batch(N, 16, 64), "sampling.max_rows=1024",
                "training.tokens_per_micro_batch=100000", FEW_ROWS, "data.num_validation=4",
                "validation.best_of_n=1", f"run.dir={folder}", f"run.name={phase}")
            output, _ = process.communicate()
        last_line = output.strip().splitlines()[-1]
        report(**{phase: last_line})
        assert last_line.startswith(f"error: out of memory in phase {phase}: {remedy}"), output
        assert process.returncode == 2 and "Traceback" not in output, output


def starve(phase: str, keys: list[str]) -> None:
    """Runs main.py with next to no memory left once a step reaches that phase."""
    name = "questions" if phase == "sample" else "split_into_micro_batches"
    original = getattr(main, name)

    def with_little_memory(*arguments):
        result = original(*arguments)
        if CUDA:
            torch.cuda.empty_cache()
            limit_memory(torch.cuda.memory_reserved() + 2_000_000)
        else:
            num_pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = num_pages * resource.getpagesize() + 60_000_000
            resource.setrlimit(resource.RLIMIT_AS, (most, -1))
        return result

    setattr(main, name, with_little_memory)
    main.launch(main.main, keys)


def fits(small: bool) -> None:
    """Takes a step of recipes/qwen2.5-3b-grpo.yaml with random weights of that shape. All answers
    reach the length limit, which is the most memory that a step can take."""
    limit_memory(80 * 2**30)  # as on an "80 GB" GPU
    keys = ["model.precision=mixed", "data.dataset=tiny/countdown.parquet", FEW_ROWS]
    if small:
        keys += ["model.device=null", "sampling.max_rows=2", *batch(2, 2, 16)]
    recipe = ROOT / "recipes" / "qwen2.5-3b-grpo.yaml"
    run = make_run(["--config", str(recipe), *keys], "small" if small else "qwen2.5-3b")
    harness.never_stop(run)
    report(**measure(run, steps=1, warm_up=0))
    assert run.log.metrics["updated"] == 1 and run.log.metrics["truncated"] == 1


# ---------------------------------------------------------------- a call

PARTS = {part.__name__: part for part in (
    machine, attention, gradient, learning, resuming, shortage, fits)}
SECONDS = {"learning": 120, "resuming": 120, "shortage": 120, "fits": 400}  # The others have 60.


def run_part(name: str, seconds: float, command: list[str]) -> bool:
    """Runs a part in a separate process. Returns whether it passed."""
    started = time.monotonic()
    process = subprocess.Popen(command, start_new_session=True)
    passed = False
    try:
        passed = process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        pass
    finally:
        # It may have started other processes, which belong to the same group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    verdict = "passed" if passed else "FAILED"
    print(f"{name}: {verdict} after {time.monotonic() - started:.1f} s", flush=True)
    return passed


def call(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all, if you name none")
    parser.add_argument("--small", action="store_true", help="tiny sizes that a CPU can manage")
    options = parser.parse_args(arguments)
    if not (CUDA or options.small):
        parser.error("there is no GPU here; add --small for a rehearsal on a CPU")
    # Otherwise a call that is told to stop would leave its part running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["HF_HUB_OFFLINE"] = "1"
    if options.small:
        os.environ["OMP_NUM_THREADS"] = "1"  # Threads don't help models this small.
    failed = []
    for name in options.parts or PARTS:
        command = [sys.executable, __file__, "--part", name, *["--small"] * options.small]
        if not run_part(name, SECONDS.get(name, 60), command):
            failed.append(name)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    # This script starts itself with these words.
    if sys.argv[1:2] == ["--part"]:
        part = PARTS[sys.argv[2]]
        main.launch(lambda arguments: part("--small" in arguments))
    elif sys.argv[1:2] == ["--starve"]:
        starve(sys.argv[2], sys.argv[3:])
    else:
        call(sys.argv[1:])
