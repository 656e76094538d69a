"""The parts of gpu.py, each in a process of its own: `gpu_parts.py A2 [--small]`.

A part prints what it finds as it finds it, one JSON object a line, so that what is known stays
known if it is ended; and it fails where an assertion about its figures does. `--small` changes
sizes alone. What there is not on a CPU (cuDNN, nccl, the allocator's retries, kernels) is null
there, and all the rest is run and asserted."""

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
from statistics import fmean, median
from types import SimpleNamespace

import continuous
import harness
from harness import (
    DEVICE,
    ROOT,
    end_process,
    load_config,
    main,
    make_run,
    never_stop,
    peak_memory,
    random_rewards,
    synchronise,
    torch,
    transformers,
)
from step import plain_generate
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import logger
from machinery import checkpoints, disk, ranks, sampling
from machinery.errors import SharedError, UserError, describe
from machinery.metrics import sampler_metrics

CUDA = DEVICE.type == "cuda"
FEW_ROWS = ["data.max_rows=1000"]  # which are read in no time
ENDS = time.monotonic() + float(os.environ.get("SECONDS_FOR_THIS_PART", "600"))


# ---------------------------------------------------------------- what parts share

def child(*arguments, **environment) -> subprocess.Popen:
    """This file again, in a process of its own, with all it says in one pipe."""
    return subprocess.Popen([sys.executable, __file__, *map(str, arguments)], text=True,
                            env={**os.environ, **environment}, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT)


def objects(text: str) -> list[dict]:
    """The lines of a process that are JSON objects."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def join() -> None:
    """Once in a process, for all the runs that it makes."""
    ranks.join()
    harness.join = lambda: None


def limit_memory(gb: float) -> None:
    """As if the card had no more."""
    if CUDA:
        total = torch.cuda.get_device_properties(DEVICE).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gb * 1e9 / total))


def shaped_run(small: bool, shape: str, gb: float, keys: list[str]):
    """A run of random weights in mixed precision, on a card of so many GB, whose answers all go to
    the limit; and its settings, to change some later."""
    join()
    limit_memory(gb)
    keys = ["model.precision=mixed", *FEW_ROWS, *keys]
    run = make_run(keys, "small" if small else shape)
    never_stop(run)
    return run, keys


def batch(N: int, G: int, L: int) -> list[str]:
    return [f"training.num_samples_per_step={N}", f"training.k_best_of_n=[{G},{G}]",
            f"training.max_new_gen_tokens={L}"]


def sampled(run, N: int, G: int) -> list:
    """G answers to each of the first N questions, with random rewards."""
    groups = main.sample(run, run.training_questions[:N], G)
    random_rewards(run, groups)
    answers = []
    for group in groups:
        answers += main.compute_advantages(group, run.config.training, None)
    return answers


def completions_of(run, generate, prompts: list[list[int]], length: int) -> list[list[int]]:
    """What `generate`, or another function in its place, makes of prompts."""
    config = run.config.sampling
    settings = transformers.GenerationConfig(
        do_sample=True, temperature=config.temperature, top_p=config.top_p, top_k=config.top_k,
        max_new_tokens=length, eos_token_id=run.stop_ids, pad_token_id=run.stop_ids[0])
    return generate(run.sampler, prompts, settings, len(prompts), run.log.advance)


def timed(work, *arguments):
    """What it returns, and its seconds."""
    synchronise()
    started = time.perf_counter()
    result = work(*arguments)
    synchronise()
    return result, time.perf_counter() - started


def set_everywhere(name: str, value) -> None:
    """A constant of the trainer, in each of its modules that has it by name."""
    modules = [module for key, module in sys.modules.items()
               if (key == "main" or key.startswith("machinery.")) and hasattr(module, name)]
    assert modules, name
    for module in modules:
        setattr(module, name, value)


# ---------------------------------------------------------------- the machine

def machine(small):
    driver = shutil.which("nvidia-smi") and subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], text=True,
        capture_output=True, check=False).stdout.strip()
    card = torch.cuda.get_device_properties(DEVICE) if CUDA else None
    yield {"python": platform.python_version(), "torch": torch.__version__,
           "transformers": transformers.__version__, "cuda": torch.version.cuda,
           "cudnn": torch.backends.cudnn.version(), "driver": driver,
           "nccl": ".".join(map(str, torch.cuda.nccl.version())) if CUDA else None,
           "gpu": card.name if CUDA else None, "gpu_gb": card.total_memory / 1e9 if CUDA else None,
           "cpus": os.cpu_count(), "disk_gb": shutil.disk_usage(tempfile.gettempdir()).free / 1e9}
    assert CUDA or small, "there is no GPU here; --small rehearses on a CPU"


# ---------------------------------------------------------------- A: is it right

def meet() -> None:
    """What a rank sees of the others. Begins and ends as main.py does."""
    def look(_):
        try:
            with ranks.errors_on_all_ranks():
                raise UserError("of one is of all")
        except SharedError as error:
            print(json.dumps({
                "error": str(error), "sum": ranks.sum_over_ranks({"one": 1.0, "two": 2.0}),
                "backend": str(torch.distributed.get_backend_config()),
                "cudnn": torch.backends.cudnn.version(),
                "cudnn_attention": torch.backends.cuda.cudnn_sdp_enabled() and CUDA}))
    main.launch(look, [])


def a1_join(small):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                "--nproc-per-node=1", __file__, "meet"]
    processes = {"alone": child("meet"), "torchrun": subprocess.Popen(
        torchrun, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)}
    for name, process in processes.items():
        output, _ = process.communicate()
        assert process.returncode == 0, output
        figures, = objects(output)
        yield {name: figures}
        assert figures["error"] == "of one is of all"
        assert figures["sum"] == {"one": 1.0, "two": 2.0}
        assert ("nccl" in figures["backend"]) == CUDA and "gloo" in figures["backend"]
        assert not figures["cudnn_attention"]  # see `ranks.join`


def attend(query, key, value, mask):
    """As models of transformers call it."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward  # which takes long

    module = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True)
    return sdpa_attention_forward(module, query, key, value, mask)[0]


def attention_error(T: int, rows: int, heads: int, width: int, kernel) -> dict:
    """Of outputs and gradients in bfloat16, against the plain formula in float32; padded on the
    left, so that the first queries of a row see nothing."""
    torch.manual_seed(T)
    ends = [torch.randn(rows, number, T, width, device=DEVICE) for number in (heads, 2, 2)]
    # In every other row scores are about -100: a logsumexp below -88 is what NaN has come from.
    scale = (100 / math.sqrt(width)) ** 0.5
    ends[0][::2] += scale
    ends[1][::2] -= scale
    padding = torch.arange(rows, device=DEVICE) * T // (2 * rows)  # (rows,)
    place = torch.arange(T, device=DEVICE)
    real = place >= padding[:, None]  # (rows, T)
    mask = (place[:, None] >= place) & real[:, None, None]  # (rows, 1, queries, keys)
    weight = torch.randn(rows, T, heads, width, device=DEVICE) * real[..., None, None]
    found = []
    for dtype, how in ((torch.float32, sdpa_kernel(SDPBackend.MATH)), (torch.bfloat16, kernel)):
        inputs = [end.bfloat16().to(dtype).requires_grad_() for end in ends]
        with how:
            output = attend(*inputs, mask)
            (output.float() * weight).sum().backward()
        found.append([output.detach().float(), *(each.grad.float() for each in inputs)])
    (expected, *gradients), (output, *ours) = found

    def off(pairs):
        return math.sqrt(sum(float((a - b).norm()) ** 2 for a, b in pairs)
                         / sum(float(b.norm()) ** 2 for _, b in pairs))
    return {"finite": all(bool(each.isfinite().all()) for each in (output, *ours)),
            "output_off": off([(output[real], expected[real])]),
            "gradient_off": off(list(zip(ours, gradients)))}


def decoding(rows: int, heads: int, width: int, times: range) -> dict:
    """Milliseconds to attend with one query a row, the first time with so many keys, and again."""
    query = torch.randn(rows, heads, 1, width, device=DEVICE, dtype=torch.bfloat16)
    roomy = torch.randn(2, rows, 2, times[-1], width, device=DEVICE, dtype=torch.bfloat16)
    milliseconds = {"first_ms": [], "again_ms": []}
    with torch.inference_mode():
        for T in times:
            mask = torch.ones(rows, 1, 1, T, dtype=torch.bool, device=DEVICE)
            mask[::2, ..., :5] = False
            for taken in milliseconds.values():
                _, seconds = timed(attend, query, *roomy[..., :T, :], mask)
                taken.append(seconds * 1e3)
    return {name: median(taken) for name, taken in milliseconds.items()}


def a2_attention(small):
    join()
    # rows, heads, width; those of decoding; and lengths
    sizes, rows, lengths = (((4, 4, 32), (4, 4, 32), (31, 64, 192)) if small else
                            ((16, 16, 128), (256, 16, 128), (127, 192, 704, 1088)))
    times = range(500, 532)
    kernels = {"as left": nullcontext}  # as `join` has left it
    kernels |= ({"efficient": lambda: sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)} if CUDA else
                {"math": lambda: sdpa_kernel(SDPBackend.MATH)})  # of which CPUs have none
    found = {f"T {T} {name}": attention_error(T, *sizes, kernel())
             for T in lengths for name, kernel in kernels.items()}
    yield found
    yield {"decoding as left": decoding(*rows, times)}
    for each in found.values():
        assert each["finite"] and each["output_off"] < 0.02 and each["gradient_off"] < 0.03, found
    # Last, as its errors may take the process along; what it does is a figure, not asked for.
    torch.backends.cuda.enable_cudnn_sdp(True)
    for T in lengths:
        try:
            yield {f"T {T} cudnn": attention_error(
                T, *sizes, sdpa_kernel(SDPBackend.CUDNN_ATTENTION)) if CUDA else None}
        except RuntimeError as error:
            yield {f"T {T} cudnn": describe(error)}
    yield {"decoding cudnn": decoding(*rows, times) if CUDA else None}


def learning(cudnn: bool, num_steps: int, keys: list[str]) -> dict:
    """Of some steps of the default in mixed precision."""
    run = make_run(["model.precision=mixed", *keys])
    torch.backends.cuda.enable_cudnn_sdp(cudnn)

    def solved():
        return fmean(answer.reward_parts[run.task.SOLVED] for group in main.evaluate(run)
                     for answer in group)

    before, seen = solved(), []
    for _ in range(num_steps):
        main.training_step(run)
        seen.append(run.log.metrics)
    return {"solved_before": before, "solved_after": solved(),
            "solved_in_the_last_steps": fmean(each["solved"] for each in seen[-5:]),
            "non_finite": sum(each["non_finite"] for each in seen),
            "seconds_a_step": fmean(each["seconds/sample"] + each["seconds/learn"]
                                    for each in seen[1:]),
            **{name: seen[0][name] for name in ("change_as_meant", "sampler_gap",
                                                "sampler_distance")}}


def set_half_precision(half: torch.dtype) -> None:
    """What mixed precision computes in, and samples from, in place of bfloat16."""
    set_everywhere("HALF_PRECISION", half)


def a3_learning(small):
    join()
    num_steps = 2 if small else 20
    keys = ["data.num_validation=64"]
    if small:  # and so large a step that rounding does not hide it
        keys = ["data.num_validation=8", *batch(4, 4, 64), *FEW_ROWS,
                "training.learning_rate=0.01"]
    found = learning(False, num_steps, keys)
    yield {"cudnn off": found}
    for half in (torch.bfloat16, torch.float16):
        set_half_precision(half)
        run = make_run(["model.precision=mixed", *keys])
        run.step = 1
        groups = main.sample(run, main.questions(run), run.config.training.group_size)
        measured = sampler_metrics(run, [answer for group in groups for answer in group])
        yield {str(half): measured}
        assert measured["sampler_gap"] < 0.005 and 0 < measured["sampler_distance"] < 0.05
    set_half_precision(torch.bfloat16)
    yield {"cudnn on": learning(True, num_steps, keys) if CUDA else None}
    assert found["non_finite"] == 0 and found["sampler_gap"] < 0.005, found
    # The first step of the default is so small that in mixed precision rounding moves tokens more.
    assert (found["change_as_meant"] > 0.5 if small else
            found["solved_after"] > found["solved_before"]), found


def a4_gradient(small):
    """Not clipped, of one batch."""
    join()
    keys = ["training.max_grad_norm=null", *FEW_ROWS, *batch(4, 8, 192), *(batch(2, 4, 48) * small)]
    run = make_run(["model.precision=float32", *keys])
    answers = sampled(run, *(2, 4) if small else (4, 8))

    def gradient(precision: str, device) -> torch.Tensor:
        config = load_config([f"model.precision={precision}", *keys])
        model = copy.deepcopy(run.model).to(device)
        policy = torch.nn.parallel.DistributedDataParallel(main.Policy(model, config))
        main.policy_gradient(
            SimpleNamespace(policy=policy, config=config, reference=None, log=run.log), answers)
        return torch.cat([each.grad.flatten().double().cpu() for each in policy.parameters()])

    reference = gradient("float32", "cpu")
    for precision, cosine, off in (("float32", 0.99999, 1e-3), ("mixed", 0.99, 0.1)):
        found = gradient(precision, DEVICE)
        figures = {"cosine": float(torch.cosine_similarity(found, reference, dim=0)),
                   "off": float((found - reference).norm() / reference.norm())}
        yield {precision: figures}
        assert figures["cosine"] > cosine and figures["off"] < off, precision


def train(*arguments) -> None:
    """main.py, without curves: drawing them needs a library that a bare machine lacks."""
    logger.Logger._draw_curves = lambda log: None
    main.launch(main.main, list(arguments))


def until(process: subprocess.Popen, beginning: str) -> None:
    """Reads what it says up to such a line."""
    said_before = []
    for line in process.stdout:
        if line.startswith(beginning):
            return
        said_before.append(line)
    raise AssertionError(f"it ended without {beginning!r}: {''.join(said_before[-5:])}")


def metrics_of(folder: Path) -> list[dict]:
    """All but times and memory."""
    return [{name: value for name, value in entry.items()
             if not name.startswith(("seconds/", "tokens_per_second", "memory_"))}
            for entry in objects((folder / "metrics.jsonl").read_text())]


def a5_resuming(small):
    last = 6 if small else 10
    with tempfile.TemporaryDirectory() as folder:
        fewer = [*batch(2, 4, 32), *FEW_ROWS, "data.num_validation=4"]
        keys = ["data.num_validation=32", f"training.max_steps={last}", "validation.every=3",
                f"run.dir={folder}", *fewer * small]

        def start(name):
            return child("train", *keys, f"run.name={name}")

        whole, struck = start("whole"), start("struck")
        until(struck, "step    4 ")
        struck.kill()
        struck.wait()
        again = start("struck")
        for process in (whole, again):
            process.said, _ = process.communicate()
        codes = [process.returncode for process in (whole, struck, again)]
        assert codes == [0, -signal.SIGKILL, 0], (codes, again.said)
        one, other = (metrics_of(Path(folder, name)) for name in ("whole", "struck"))
        pairs = [(a[name], b[name]) for a, b in zip(one, other) for name in a
                 if a[name] is not None and b.get(name) is not None]
        off = max(abs(a - b) / max(abs(a), abs(b), 1e-9) for a, b in pairs)
        rewards = [next(entry["reward"] for entry in each if entry["step"] == 5 and
                        "reward" in entry) for each in (one, other)]
        resumed = again.said.count("resuming from")
        yield {"exit_codes": codes, "resuming_from": resumed, "the_same": one == other,
               "largest_relative_difference": off, "reward_of_step_5": rewards}
        assert [entry["step"] for entry in one] == [entry["step"] for entry in other]
        assert resumed == 1
        # On a GPU sums are in no fixed order, so after some tokens answers go other ways.
        assert abs(rewards[0] - rewards[1]) < 0.25 if CUDA else one == other


# ---------------------------------------------------------------- B: does 3 B fit, how fast

def kernels(work, *arguments) -> tuple[int, float]:
    """How many a GPU runs and for how many seconds; on a CPU PyTorch's operators in their place."""
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * CUDA]
    with profile(activities=activities) as profiler:
        timed(work, *arguments)
    events = [event for event in profiler.events()
              if ("CUDA" in str(event.device_type) if CUDA else event.name.startswith("aten::"))]
    return len(events), sum(event.time_range.elapsed_us() for event in events) / 1e6


def b6_decoding(small):
    N, G, L = (2, 2, 48) if small else (8, 16, 256)
    run, _ = shaped_run(small, "qwen2.5-3b", 80, batch(N, G, L))
    prompts = [answer.prompt_ids for answer in sampled(run, N, G)]

    def draw(length):
        return completions_of(run, main.generate, prompts, length)

    peak_memory()
    completions, seconds = timed(draw, L)
    ms_a_token = seconds / L * 1e3
    yield {"tokens_per_second": N * G * L / seconds, "ms_a_token": ms_a_token,
           **peak_memory()}
    assert [len(ids) for ids in completions] == [L] * N * G
    # A slice by itself, without reading the prompts: what two take, less what one takes.
    length = sampling.TOKENS_PER_SLICE
    slice_seconds = timed(draw, 2 * length)[1] - timed(draw, length)[1]
    (one, busy_one), (two, busy_two) = (kernels(draw, of * length) for of in (1, 2))
    launches, busy = (two - one) / length, (busy_two - busy_one) / slice_seconds
    yield {"launches_a_token" if CUDA else "operators_a_token": launches,
           "gpu_busy_share": busy if CUDA else None}
    assert launches > 10 and (not CUDA or 0 < busy < 1.1)


RECIPE = ["--config", str(ROOT / "recipes" / "qwen2.5-3b-grpo.yaml"),
          f"data.dataset={ROOT / 'tiny' / 'countdown.parquet'}"]


def recipe_step(small):
    """A step of the recipe's geometry; before it one of shorter answers, which also warms up."""
    (N, G), lengths = ((2, 2), (8, 16)) if small else ((32, 16), (256, 1024))
    with nullcontext() if CUDA else harness.LiveBytes():
        run, keys = shaped_run(small, "qwen2.5-3b", 80, [
            *RECIPE, *(["sampling.max_rows=2"] * small), *batch(N, G, lengths[-1])])
        run.step = 1  # past the first step, which is measured more
        for L in lengths:
            run.config = load_config([*keys, *batch(N, G, L), *harness.NEVER_EVALUATE])
            peak_memory()
            main.training_step(run)
            metrics = run.log.metrics
            yield {f"L {L}": {
                "sample_seconds": metrics["seconds/sample"],
                "learn_seconds": metrics["seconds/learn"],
                "tokens_per_second": metrics["tokens_per_second"], **peak_memory(),
                "alloc_retries": (torch.cuda.memory_stats()["num_alloc_retries"] if CUDA
                                  else None)}}
            assert metrics["updated"] == 1 and metrics["completion_length"] == L, metrics


def b7_recipe(small):
    forecast = subprocess.Popen(
        [sys.executable, ROOT / "bench" / "memory.py", "--prompt", "49",  # as the longest has
         "--shape", "small" if small else "qwen2.5-3b", *RECIPE, "model.precision=mixed",
         *(["sampling.max_rows=2", *batch(2, 2, 16)] * small)],
        text=True, stdout=subprocess.PIPE, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    for segments in ("True", "False"):
        process = child("recipe step", *["--small"] * small,
                        PYTORCH_ALLOC_CONF=f"expandable_segments:{segments}")
        try:
            output, _ = process.communicate(timeout=max(1.0, ENDS - time.monotonic() - 10))
        except subprocess.TimeoutExpired:
            process.kill()
            output = process.communicate()[0] + "no time was left for it"
        found = {name: each for line in objects(output) for name, each in line.items()}
        yield {f"expandable_segments:{segments} {name}": each for name, each in found.items()}
        last = "L 16" if small else "L 1024"
        if segments == "True":  # as it is unless someone sets it
            parts = objects(forecast.communicate()[0])[-1]
            most = {kind: max(parts[key][phase] for phase in ("sampling", "learning"))
                    for kind, key in (("memory_gb", "forecast_gb"),
                                      ("reserved_gb", "forecast_reserved_gb"))}
            yield {"forecast": most}
            assert last in found, output
            assert 0.7 < found[last]["memory_gb"] / most["memory_gb"] < 1.15, (found, most)
        elif last not in found:
            yield {f"expandable_segments:{segments}": output.strip().splitlines()[-1][:200]}


def b8_sizes(small):
    N, G, L = (2, 2, 16) if small else (8, 16, 256)
    run, keys = shaped_run(small, "qwen2.5-3b", 80, [
        *batch(N, G, L), "model.gradient_checkpointing=true", "sampling.max_rows=256"])
    answers, chunks = sampled(run, N, G), [2**16, 2**18] if small else [2**25, 2**27]
    few, many = (128, 256) if small else (8192, 16_384)

    def learn(chunk, budget):
        set_everywhere("LOGITS_PER_CHUNK", chunk)
        run.config = load_config([*keys, f"training.tokens_per_micro_batch={budget}"])
        peak_memory()
        metrics, seconds = timed(main.policy_gradient, run, answers)
        norms.append(metrics["grad_norm"])
        return {"learn_seconds": seconds, **peak_memory()}

    norms = []
    learn(chunks[0], few)  # to warm up
    for chunk, budget in ((chunks[0], few), (chunks[1], few), (chunks[0], many)):
        yield {f"chunks of 2**{chunk.bit_length() - 1}, {budget} tokens": learn(chunk, budget)}
    for rows in (2, 4) if small else (256, 512):
        run.config = load_config([*keys, f"sampling.max_rows={rows}"])
        peak_memory()
        drawn, seconds = timed(sampled, run, 4 * N, G)
        yield {f"{rows} rows": {"sample_seconds": seconds, **peak_memory()}}
        assert all(len(answer.completion_ids) == L for answer in drawn)
    # How much is done at once changes the gradient by rounding alone.
    assert all(math.isclose(norm, norms[0], rel_tol=0.02) for norm in norms), norms


def b9_samplers(small):
    N, G, L = (2, 2, 16) if small else (8, 16, 256)
    run, _ = shaped_run(small, "qwen2.5-3b", 80, batch(N, G, L))
    prompts = [answer.prompt_ids for answer in sampled(run, N, G)]

    def give_up(*_):
        raise TimeoutError("it took more than a minute")

    signal.signal(signal.SIGALRM, give_up)
    for name, generate in (("main.generate", main.generate), ("plain generate", plain_generate),
                           ("continuous batching", continuous.generate)):
        try:
            signal.alarm(60)
            completions_of(run, generate, prompts, 16)
            completions, seconds = timed(completions_of, run, generate, prompts, L)
            assert [len(ids) for ids in completions] == [L] * N * G
        except Exception as error:  # whatever a library says that may be unfit here
            if generate is not continuous.generate:
                raise
            yield {name: {"error": f"{type(error).__name__}: {describe(error)}"}}
        else:
            yield {name: {"tokens_per_second": N * G * L / seconds}}
        finally:
            signal.alarm(0)


# ---------------------------------------------------------------- C: the rest

def c10_saving(small):
    # Whatever fits: weights and two moments in float32, beside which the disk keeps a tenth.
    free = shutil.disk_usage(tempfile.gettempdir()).free
    shape = next(name for name, gb in (("qwen2.5-3b", 41), ("qwen2.5-1.5b", 21),
                                       ("qwen2.5-0.5b", 0)) if free > gb * 1e9)
    with tempfile.TemporaryDirectory() as folder:
        run, _ = shaped_run(small, shape, 141, [f"run.dir={folder}", "run.name=a"])
        tensors, spent = checkpoints.state_tensors(run.model, run.optimizer), {}
        for name, tensor in tensors.items():
            if "/" in name:  # the moments, which are still 0
                tensor.uniform_()
        run.step = 7

        def sums():  # of all bits, exactly
            return [int(tensor.view(torch.int32).sum(dtype=torch.int64))
                    for tensor in tensors.values()]

        def clocked(name, original):
            def work(*arguments):
                spent.setdefault("copy", time.perf_counter() - started)  # all that came before
                result, seconds = timed(original, *arguments)
                spent[name] = spent.get(name, 0.0) + seconds
                return result
            return work

        checkpoints.save_file = clocked("write", checkpoints.save_file)
        disk.sync_to_disk = clocked("sync", disk.sync_to_disk)
        before, gb = sums(), sum(tensor.nbytes for tensor in tensors.values()) / 1e9
        with checkpoints.RunFolder(run.config) as own:
            own.restore(run)  # there is none yet
            started = time.perf_counter()
            own.save(run)
        yield {"shape": "small" if small else shape, "gb": gb,
               **{f"{name}_seconds": seconds for name, seconds in spent.items()}}
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.zero_()
        run.step = 0
        with checkpoints.RunFolder(run.config) as own:
            _, seconds = timed(own.restore, run)
        yield {"restore_seconds": seconds}  # from the page cache, as it was just written
        assert run.step == 7 and sums() == before and len(set(before)) > 10


def c11_adapters(small):
    N, G, L = (2, 2, 16) if small else (8, 8, 256)
    run, _ = shaped_run(small, "qwen2.5-1.5b", 24, [
        *batch(N, G, L), "model.lora_rank=32", "model.gradient_checkpointing=true"])
    adapters = [each for each in run.model.parameters() if each.requires_grad]
    assert 0 < sum(each.numel() for each in adapters) < 0.5 * sum(
        each.numel() for each in run.model.parameters())
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            if "lora_B" in name:  # which begin as 0
                parameter.normal_(0, 0.01)
    main.refresh_sampler(run.sampler, run.model)
    sampled(run, N, G)  # to warm up
    peak_memory()
    answers, seconds = timed(sampled, run, N, G)
    yield {"sampling": {"ms_a_token": seconds / L * 1e3, **peak_memory()}}
    metrics, seconds = timed(main.policy_gradient, run, answers)
    yield {"learning": {"seconds": seconds, **peak_memory()}}

    @torch.no_grad()
    def logits():
        return run.sampler(torch.tensor([answers[0].prompt_ids], device=DEVICE)).logits.float()

    expected = logits()
    for module in run.sampler.modules():
        # Of peft's layers. The sampler shares them with the learner, which is done with them here.
        if hasattr(module, "lora_A") and hasattr(module, "merge"):
            module.merge()
    off = float((logits() - expected).norm() / expected.norm())
    _, seconds = timed(sampled, run, N, G)
    yield {"ms_a_token_merged": seconds / L * 1e3, "merging_changes_logits_by": off}
    assert metrics["updated"] == 1 and metrics["grad_norm"] > 0 and 0 < off < 0.05


def short_of_memory(phase: str, *arguments) -> None:
    """main.py, which has next to no memory left from where a step comes to that phase."""
    name = {"sample": "questions", "learn": "batches_in_step"}[phase]
    original = getattr(main, name)

    def with_little_memory(*given):
        result = original(*given)
        if CUDA:
            torch.cuda.empty_cache()
            limit_memory((torch.cuda.memory_reserved() + 2_000_000) / 1e9)
        else:
            used = int(Path("/proc/self/statm").read_text().split()[0])
            most = used * os.sysconf("SC_PAGE_SIZE") + 60_000_000
            resource.setrlimit(resource.RLIMIT_AS, (most, -1))
        return result

    setattr(main, name, with_little_memory)
    train(*arguments)


def c12_out_of_memory(small):
    with tempfile.TemporaryDirectory() as folder:
        keys = ["sampling.max_rows=1024", "training.tokens_per_micro_batch=100000",
                *FEW_ROWS, "data.num_validation=4", "validation.best_of_n=1", f"run.dir={folder}"]
        processes = {phase: child("short of memory", phase, *keys, *batch(N, 16, 64),
                                  f"run.name={phase}")
                     for phase, N in (("sample", 64), ("learn", 16))}
        lower = {"sample": "sampling.max_rows (1024)",
                 "learn": "training.tokens_per_micro_batch (100000)"}
        for phase, process in processes.items():
            output, _ = process.communicate()
            *_, last = output.strip().splitlines()
            yield {phase: last, f"{phase}_exit_code": process.returncode}
            assert last.startswith(f"error: out of memory in phase {phase}: lower {lower[phase]}")
            assert process.returncode == 2 and "Traceback" not in output, output


PARTS = {"machine": machine, "A1": a1_join, "A2": a2_attention, "A3": a3_learning,
         "A4": a4_gradient, "A5": a5_resuming, "B6": b6_decoding, "B7": b7_recipe, "B8": b8_sizes,
         "B9": b9_samplers, "C10": c10_saving, "C11": c11_adapters, "C12": c12_out_of_memory,
         "recipe step": recipe_step}
ALONE = {"meet": meet, "train": train, "short of memory": short_of_memory}


def plain(value):
    """Four digits of a number, which tell all; null for what is none."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    if name in ALONE:
        ALONE[name](*arguments)
    code = 1
    try:
        for figures in PARTS[name]("--small" in arguments):
            print(json.dumps(plain(figures)), flush=True)
        code = 0
    finally:  # leaves as `launch` does, for its reasons
        if code:
            traceback.print_exc()
        end_process(code)
