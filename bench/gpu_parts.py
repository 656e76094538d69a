"""The parts of gpu.py, each in a process of its own: `gpu_parts.py A2 [--small]`.

A part prints its figures as it finds them, one JSON object a line. So they stay known if the part
is ended. A part fails where an assertion about its figures fails. `--small` changes sizes alone.
Figures that a CPU does not have, like those of cuDNN, are null there."""

import copy
import json
import math
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import harness
from harness import DEVICE, ROOT, load_config, main, make_run, peak_memory, torch, transformers
from step import plain_generate
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import logger
from machinery import checkpoints, disk, ranks, sampling
from machinery.errors import SharedError, UserError
from machinery.launch import end_process
from machinery.metrics import sampler_metrics

CUDA = DEVICE.type == "cuda"
FEW_ROWS = ["data.max_rows=1000"]  # They are read in no time.


# ---------------------------------------------------------------- what parts share

def child(*arguments, **environment) -> subprocess.Popen:
    """Runs Python in a process of its own. All that it prints comes through one pipe."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)], text=True, env={**os.environ, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def objects(text: str) -> list[dict]:
    """Returns the lines that are JSON objects."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def limit_memory(gb: float) -> None:
    """Pretends that the GPU has no more memory."""
    if CUDA:
        total = torch.cuda.get_device_properties(DEVICE).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gb * 1e9 / total))


def shaped_run(small: bool, shape: str, gb: float, keys: list[str]) -> tuple[main.Run, list[str]]:
    """Returns a run of random weights in mixed precision on a GPU of so many GB, and its settings.
    All answers reach the length limit."""
    limit_memory(gb)
    keys = ["model.precision=mixed", *FEW_ROWS, *keys]
    run = make_run(keys, "small" if small else shape)
    harness.never_stop(run)
    return run, keys


def batch(N: int, G: int, L: int) -> list[str]:
    return [f"training.num_samples_per_step={N}", f"training.k_best_of_n=[{G},{G}]",
            f"training.max_new_gen_tokens={L}"]


def sampled(run: main.Run, N: int, G: int) -> list[main.Trajectory]:
    """Samples G answers to each of the first N questions. Their rewards are random."""
    groups = main.sample(run, run.training_questions[:N], G)
    harness.random_rewards(run, groups)
    answers = []
    for group in groups:
        answers += main.compute_advantages(group, run.config.training, None)
    return answers


def timed(work, *arguments) -> tuple:
    """Returns the result and the seconds."""
    harness.synchronise()
    started = time.perf_counter()
    result = work(*arguments)
    harness.synchronise()
    return result, time.perf_counter() - started


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def set_everywhere(name: str, value: object) -> None:
    """Changes a constant of the trainer in each module that has it."""
    for key, module in list(sys.modules.items()):
        if (key == "main" or key.startswith("machinery.")) and hasattr(module, name):
            setattr(module, name, value)


# ---------------------------------------------------------------- the machine

def machine(small):
    versions = {"python": platform.python_version(), "torch": torch.__version__,
                "transformers": transformers.__version__, "cpus": os.cpu_count(),
                "disk_gb": shutil.disk_usage(tempfile.gettempdir()).free / 1e9}
    if CUDA:
        card = torch.cuda.get_device_properties(DEVICE)
        versions |= {"gpu": card.name, "gpu_gb": card.total_memory / 1e9,
                     "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
                     "nccl": str(torch.cuda.nccl.version())}
    yield versions
    assert CUDA or small, "there is no GPU here; --small rehearses on a CPU"


# ---------------------------------------------------------------- A: is it right

def meet() -> None:
    """Joins and leaves as main.py does, and prints what a rank sees of the others."""
    def look(_):
        try:
            with ranks.errors_on_all_ranks():
                raise UserError("of one is of all")
        except SharedError as error:
            print(json.dumps({
                "error": str(error), "sum": ranks.sum_over_ranks({"one": 1.0, "two": 2.0}),
                "backend": str(torch.distributed.get_backend_config()),
                "cudnn_attention": CUDA and torch.backends.cuda.cudnn_sdp_enabled()}))
    main.launch(look, [])


def a1_join(small):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    for name, before in (("alone", []), ("torchrun", torchrun)):
        process = child(*before, __file__, "meet")
        output, _ = process.communicate()
        assert process.returncode == 0, output
        figures, = objects(output)
        yield {name: figures}
        assert figures["error"] == "of one is of all"
        assert figures["sum"] == {"one": 1.0, "two": 2.0}
        assert ("nccl" in figures["backend"]) == CUDA and "gloo" in figures["backend"]
        assert not figures["cudnn_attention"]  # `ranks.join` says why.


def attend(query, key, value, mask) -> torch.Tensor:
    """Calls attention as models of transformers do."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True)
    return sdpa_attention_forward(module, query, key, value, mask)[0]


def attention_error(T: int, rows: int, heads: int, width: int, kernel) -> dict:
    """Compares output and gradients in bfloat16 with the plain formula in float32. Rows are padded
    on the left, so their first queries see nothing."""
    torch.manual_seed(T)
    inputs = [torch.randn(rows, number, T, width, device=DEVICE) for number in (heads, 2, 2)]
    # In every other row scores are about -100. A logsumexp below -88 is what NaN has come from.
    scale = (100 / math.sqrt(width)) ** 0.5
    inputs[0][::2] += scale
    inputs[1][::2] -= scale
    padding = torch.arange(rows, device=DEVICE) * T // (2 * rows)  # (rows,)
    place = torch.arange(T, device=DEVICE)
    real = place >= padding[:, None]  # (rows, T)
    mask = (place[:, None] >= place) & real[:, None, None]  # (rows, 1, queries, keys)
    weight = torch.randn(rows, T, heads, width, device=DEVICE) * real[..., None, None]

    def output_and_gradients(dtype, kernel) -> list[torch.Tensor]:
        own = [each.bfloat16().to(dtype).requires_grad_() for each in inputs]
        with kernel:
            output = attend(*own, mask)
            (output.float() * weight).sum().backward()
        gradients = torch.cat([each.grad.float().flatten() for each in own])
        return [output.detach().float(), gradients]  # (rows, T, heads, width), (numbers,)

    expected, expected_gradients = output_and_gradients(
        torch.float32, sdpa_kernel(SDPBackend.MATH))
    found, gradients = output_and_gradients(torch.bfloat16, kernel)
    return {"finite": bool(found.isfinite().all() and gradients.isfinite().all()),
            "output_off": off(found[real], expected[real]),
            "gradient_off": off(gradients, expected_gradients)}


def a2_attention(small):
    sizes = (4, 4, 32) if small else (16, 16, 128)  # rows, heads, width
    lengths = (31, 64, 192) if small else (127, 192, 704, 1088)
    kernel = SDPBackend.EFFICIENT_ATTENTION if CUDA else SDPBackend.MATH
    for T in lengths:
        found = {"as joined": attention_error(T, *sizes, nullcontext()),
                 kernel.name: attention_error(T, *sizes, sdpa_kernel(kernel))}
        yield {f"T {T}": found}
        for each in found.values():
            assert each["finite"] and each["output_off"] < 0.02 and each["gradient_off"] < 0.03


def learning(cudnn: bool, num_steps: int, keys: list[str]) -> dict:
    """Returns what some steps of the default are like in mixed precision."""
    run = make_run(["model.precision=mixed", *keys])
    torch.backends.cuda.enable_cudnn_sdp(cudnn)

    def solved() -> float:
        answers = [answer for group in main.evaluate(run) for answer in group]
        return fmean(answer.reward_parts[run.task.SOLVED] for answer in answers)

    found = {"solved_before": solved(), "non_finite": 0, "seconds": 0.0}
    for step in range(num_steps):
        _, seconds = timed(main.training_step, run)
        found["seconds"] += seconds
        found["non_finite"] += run.log.metrics["non_finite"]
        if step == 0:
            for name in ("change_as_meant", "sampler_gap", "sampler_distance"):
                found[name] = run.log.metrics[name]
    return found | {"solved_after": solved()}


def a3_learning(small):
    num_steps = 2 if small else 20
    keys = ["data.num_validation=64"]
    if small:  # The step is so large that rounding does not hide it.
        keys = ["data.num_validation=8", *batch(4, 4, 64), *FEW_ROWS,
                "training.learning_rate=0.01"]
    found = learning(False, num_steps, keys)
    yield {"cudnn off": found}
    for half in (torch.bfloat16, torch.float16):
        set_everywhere("HALF_PRECISION", half)
        run = make_run(["model.precision=mixed", *keys])
        run.step = 1
        groups = main.sample(run, main.questions(run), run.config.training.group_size)
        measured = sampler_metrics(run, [answer for group in groups for answer in group])
        yield {str(half): measured}
        assert measured["sampler_gap"] < 0.005 and 0 < measured["sampler_distance"] < 0.05
    if CUDA:
        set_everywhere("HALF_PRECISION", torch.bfloat16)
        yield {"cudnn on": learning(True, num_steps, keys)}
    assert found["non_finite"] == 0 and found["sampler_gap"] < 0.005
    # The first step of the default is so small that rounding moves tokens more.
    assert (found["change_as_meant"] > 0.5 if small else
            found["solved_after"] > found["solved_before"])


def a4_gradient(small):
    N, G, L = (2, 4, 48) if small else (4, 8, 192)
    keys = ["training.max_grad_norm=null", *FEW_ROWS, *batch(N, G, L)]
    run = make_run(["model.precision=float32", *keys])
    answers = sampled(run, N, G)

    def gradient(precision: str, device) -> torch.Tensor:
        config = load_config([f"model.precision={precision}", *keys])
        model = copy.deepcopy(run.model).to(device)
        policy = torch.nn.parallel.DistributedDataParallel(main.Policy(model, config))
        main.policy_gradient(
            SimpleNamespace(policy=policy, config=config, reference=None, log=run.log), answers)
        return torch.cat([each.grad.flatten().double().cpu() for each in policy.parameters()])

    reference = gradient("float32", "cpu")
    for precision, bound in (("float32", 1e-3), ("mixed", 0.1)):
        error = off(gradient(precision, DEVICE), reference)
        yield {precision: {"off": error}}
        assert error < bound, precision


def train(*arguments) -> None:
    """Runs main.py without curves. Drawing them needs a library that a bare machine lacks."""
    logger.Logger._draw_curves = lambda log: None
    main.launch(main.main, list(arguments))


def rewards_of(folder: Path) -> dict[int, float]:
    entries = objects((folder / "metrics.jsonl").read_text())
    return {entry["step"]: entry["reward"] for entry in entries if "reward" in entry}


def a5_resuming(small):
    with tempfile.TemporaryDirectory() as folder:
        keys = ["training.max_steps=10", "data.num_validation=32", "validation.every=3",
                f"run.dir={folder}"]
        if small:
            keys += [*batch(2, 4, 32), *FEW_ROWS, "data.num_validation=4", "training.max_steps=6"]
        whole = child(__file__, "train", *keys, "run.name=whole")
        struck = child(__file__, "train", *keys, "run.name=struck")
        for line in struck.stdout:
            if line.startswith("step    4 "):
                struck.kill()
        struck.wait()
        again = child(__file__, "train", *keys, "run.name=struck")
        output, _ = again.communicate()
        whole.communicate()
        codes = [whole.returncode, struck.returncode, again.returncode]
        assert codes == [0, -signal.SIGKILL, 0], (codes, output)
        assert output.count("resuming from") == 1
        expected = rewards_of(Path(folder, "whole"))
        found = rewards_of(Path(folder, "struck"))
    yield {"the_same": found == expected, "expected": expected[5], "found": found[5]}
    assert list(found) == list(expected)
    # On a GPU sums are in no fixed order, so after some tokens answers take other ways.
    assert abs(found[5] - expected[5]) < 0.25 if CUDA else found == expected


# ---------------------------------------------------------------- B: does 3 B fit, how fast

def kernels(work, *arguments) -> tuple[int, float]:
    """Returns how many kernels a GPU runs, and for how many seconds. On a CPU it counts PyTorch's
    operators."""
    activities = [ProfilerActivity.CUDA] if CUDA else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        timed(work, *arguments)
    seconds = []
    for event in profiler.events():
        if "CUDA" in str(event.device_type) or event.name.startswith("aten::"):
            seconds.append(event.time_range.elapsed_us() / 1e6)
    return len(seconds), sum(seconds)


def b6_decoding(small):
    N, G, L = (2, 2, 48) if small else (8, 16, 256)
    run, keys = shaped_run(small, "qwen2.5-3b", 80, batch(N, G, L))
    sampled(run, N, G)  # It warms up.
    peak_memory()
    answers, seconds = timed(sampled, run, N, G)
    yield {"tokens_per_second": N * G * L / seconds, "ms_a_token": seconds / L * 1e3,
           **peak_memory()}
    assert all(answer.num_tokens == L for answer in answers)
    run.config = load_config([*keys, *batch(N, G, sampling.TOKENS_PER_SLICE)])
    _, seconds = timed(sampled, run, N, G)
    launches, busy = kernels(sampled, run, N, G)
    launches /= 1 + sampling.TOKENS_PER_SLICE  # The prompts take a pass of their own.
    yield {"launches_a_token": launches, "gpu_busy_share": busy / seconds if CUDA else None}
    assert launches > 10 and (not CUDA or 0 < busy / seconds < 1.1)


def b9_samplers(small):
    N, G, L = (2, 2, 16) if small else (8, 16, 256)
    run, _ = shaped_run(small, "qwen2.5-3b", 80, batch(N, G, L))
    for name, generate in (("ours", main.generate), ("plain", plain_generate)):
        main.generate = generate
        sampled(run, N, G)  # It warms up.
        peak_memory()
        answers, seconds = timed(sampled, run, N, G)
        yield {name: {"tokens_per_second": N * G * L / seconds, **peak_memory()}}
        assert all(answer.num_tokens == L for answer in answers)


RECIPE = ["--config", str(ROOT / "recipes" / "qwen2.5-3b-grpo.yaml"),
          f"data.dataset={ROOT / 'tiny' / 'countdown.parquet'}"]


def b7_recipe(small):
    """To compare, set PYTORCH_ALLOC_CONF=expandable_segments:False."""
    keys = ["model.precision=mixed", *FEW_ROWS]
    if small:
        keys += ["sampling.max_rows=2", *batch(2, 2, 16)]
    process = child(ROOT / "bench" / "memory.py", "--measure", *RECIPE, *keys,
                    "--prompt", 49,  # as the longest prompt has
                    "--shape", "small" if small else "qwen2.5-3b")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    figures = objects(output)[-1]
    del figures["parts_gb"]
    yield figures
    for phase, measured in figures["measured_gb"].items():
        assert 0.7 < measured / figures["estimate_gb"][phase] < 1.15, phase
    assert not CUDA or figures["measured"]["learn_reserved_gb"] < 80


def b8_sizes(small):
    N, G, L = (2, 2, 16) if small else (8, 16, 256)
    run, keys = shaped_run(small, "qwen2.5-3b", 80, [
        *batch(N, G, L), "model.gradient_checkpointing=true", "sampling.max_rows=256"])
    answers = sampled(run, N, G)
    chunk, larger_chunk = (2**16, 2**18) if small else (2**25, 2**27)
    few, many = (128, 256) if small else (8192, 16_384)
    norms = []
    # The first one warms up.
    for size, tokens in ((chunk, few), (chunk, few), (larger_chunk, few), (chunk, many)):
        set_everywhere("LOGITS_PER_CHUNK", size)
        run.config = load_config([*keys, f"training.tokens_per_micro_batch={tokens}"])
        peak_memory()
        metrics, seconds = timed(main.policy_gradient, run, answers)
        norms.append(metrics["grad_norm"])
        yield {f"chunks of {size}, {tokens} tokens": {"learn_seconds": seconds, **peak_memory()}}
    # How much is done together changes the gradient by rounding alone.
    assert all(math.isclose(norm, norms[0], rel_tol=0.02) for norm in norms), norms
    for rows in (2, 4) if small else (256, 512):
        run.config = load_config([*keys, f"sampling.max_rows={rows}"])
        peak_memory()
        _, seconds = timed(sampled, run, 4 * N, G)
        yield {f"{rows} rows": {"sample_seconds": seconds, **peak_memory()}}


# ---------------------------------------------------------------- C: the rest

def measure_function(module, name: str, seconds: dict[str, float]) -> None:
    """Adds up in `seconds` what all calls of a function take."""
    original = getattr(module, name)
    seconds[name] = 0.0

    def call(*arguments):
        result, spent = timed(original, *arguments)
        seconds[name] += spent
        return result

    setattr(module, name, call)


def c10_saving(small):
    with tempfile.TemporaryDirectory() as folder:
        run, _ = shaped_run(small, "qwen2.5-3b", 80, [f"run.dir={folder}", "run.name=a"])
        tensors = checkpoints.state_tensors(run.model, run.optimizer)
        for name, tensor in tensors.items():
            if "/" in name:  # AdamW's moments, which are still 0
                tensor.uniform_()
        run.step = 7

        def sums_of_bits() -> list[int]:
            return [int(each.view(torch.int32).sum(dtype=torch.int64)) for each in tensors.values()]

        spent = {}
        measure_function(checkpoints, "save_file", spent)
        measure_function(disk, "sync_to_disk", spent)
        before = sums_of_bits()
        with checkpoints.RunFolder(run.config) as own:
            own.restore(run)  # There is none yet.
            _, seconds = timed(own.save, run)
        yield {"seconds": seconds, **spent}
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.zero_()
        with checkpoints.RunFolder(run.config) as own:
            _, seconds = timed(own.restore, run)
        yield {"restore_seconds": seconds}  # The file was just written, so it is in the page cache.
        assert run.step == 7 and sums_of_bits() == before and len(set(before)) > 10


def c11_adapters(small):
    N, G, L = (2, 2, 16) if small else (8, 8, 256)
    run, _ = shaped_run(small, "qwen2.5-1.5b", 24, [
        *batch(N, G, L), "model.lora_rank=32", "model.gradient_checkpointing=true"])
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            if "lora_B" in name:  # These begin as 0.
                parameter.normal_(0, 0.01)
    main.refresh_sampler(run.sampler, run.model)
    sampled(run, N, G)  # It warms up.
    peak_memory()
    answers, seconds = timed(sampled, run, N, G)
    yield {"sampling": {"ms_a_token": seconds / L * 1e3, **peak_memory()}}
    metrics, seconds = timed(main.policy_gradient, run, answers)
    yield {"learning": {"seconds": seconds, **peak_memory()}}
    assert metrics["updated"] == 1 and metrics["grad_norm"] > 0
    # The sampler shares these layers with the policy, and nothing is learned after this.
    for module in run.sampler.modules():
        if hasattr(module, "lora_A") and hasattr(module, "merge"):
            module.merge()
    _, seconds = timed(sampled, run, N, G)
    yield {"ms_a_token_merged": seconds / L * 1e3}


def short_of_memory(phase: str, *arguments) -> None:
    """Runs main.py, which has next to no memory left from where a step comes to that phase."""
    name = {"sample": "questions", "learn": "batches_in_step"}[phase]
    original = getattr(main, name)

    def with_little_memory(*given):
        result = original(*given)
        if CUDA:
            torch.cuda.empty_cache()
            limit_memory((torch.cuda.memory_reserved() + 2_000_000) / 1e9)
        else:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * os.sysconf("SC_PAGE_SIZE") + 60_000_000
            resource.setrlimit(resource.RLIMIT_AS, (most, -1))
        return result

    setattr(main, name, with_little_memory)
    train(*arguments)


def c12_out_of_memory(small):
    for phase, N, key in (("sample", 64, "sampling.max_rows (1024)"),
                          ("learn", 16, "training.tokens_per_micro_batch (100000)")):
        with tempfile.TemporaryDirectory() as folder:
            process = child(
                __file__, "short of memory", phase, "sampling.max_rows=1024",
                "training.tokens_per_micro_batch=100000", *FEW_ROWS, "data.num_validation=4",
                "validation.best_of_n=1", f"run.dir={folder}", *batch(N, 16, 64))
            output, _ = process.communicate()
        last = output.strip().splitlines()[-1]
        yield {phase: last, f"{phase}_exit_code": process.returncode}
        assert last.startswith(f"error: out of memory in phase {phase}: lower {key}")
        assert process.returncode == 2 and "Traceback" not in output, output


PARTS = {"machine": machine, "A1": a1_join, "A2": a2_attention, "A3": a3_learning,
         "A4": a4_gradient, "A5": a5_resuming, "B6": b6_decoding, "B7": b7_recipe, "B8": b8_sizes,
         "B9": b9_samplers, "C10": c10_saving, "C11": c11_adapters, "C12": c12_out_of_memory}
HELPERS = {"meet": meet, "train": train, "short of memory": short_of_memory}


def plain(value: object) -> object:
    """Rounds numbers to four digits. What is not finite becomes null, as JSON has no NaN."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    if name in HELPERS:
        HELPERS[name](*arguments)
    code = 1
    try:
        ranks.join()
        harness.join = lambda: None  # Once is enough for all the runs of a part.
        for figures in PARTS[name]("--small" in arguments):
            print(json.dumps(plain(figures)), flush=True)
        code = 0
    finally:
        if code:
            traceback.print_exc()
        end_process(code)  # as `launch` does
