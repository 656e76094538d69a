"""This trainer's step by phase, beside what the machine can do.

    .venv/bin/python bench/step.py                                         the default on one rank
    .venv/bin/torchrun --nproc-per-node=2 bench/step.py training.seed=1    any ranks, any keys
    .venv/bin/python bench/step.py --shape qwen2.5-3b --endless \\
        training.num_samples_per_step=32 'training.k_best_of_n=[16,16]' \\
        training.max_new_gen_tokens=1024 training.tokens_per_micro_batch=16384 \\
        model.gradient_checkpointing=true   for a GPU of 80 GB

Sampling is held against its floor: reading the weights once a token and every row's keys and
values, at the bandwidth measured in the same run, or the arithmetic at the matrix rate, whichever
takes longer. Learning is held against the matrix rate. `reduce` is the time that adding up a
gradient over the ranks takes once all have it; where it overlaps with the backward pass, a step
pays less. Memory is the peak of the process on a CPU; on a GPU that of its tensors and, reserved,
of what the allocator took for them, and `alloc_retries` counts how often that found no more and had
to give back what it kept in store."""

import argparse
import time
from collections import defaultdict

import continuous
from harness import (
    DEVICE,
    ceilings,
    dist,
    finish,
    learning_flops,
    main,
    make_run,
    median,
    never_stop,
    peak_memory,
    sampling_floors,
    say,
    synchronise,
    torch,
)
from torch.nn.utils.rnn import pad_sequence

from machinery.policy import ANSWERS_PER_PASS
from machinery.prompts import pad_prompts, position_ids
from machinery.ranks import WORLD_SIZE


def plain_generate(sampler, prompts, settings, max_rows, on_ended):
    """In place of main.generate: every row reads its own prompt, and none leaves before the last
    has ended."""
    sampler.eval()
    completions = []
    for start in range(0, len(prompts), max_rows):
        completions += plain_generate_rows(sampler, prompts[start:start + max_rows], settings)
        on_ended(len(completions) - start)
    return completions


def plain_generate_rows(sampler, prompts, settings):
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts],
                       device=sampler.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts],
                        device=sampler.device)
    new_ids = sampler.generate(ids, attention_mask=mask,
                               generation_config=settings)[:, longest:].tolist()
    stops = [next((i + 1 for i, token in enumerate(row) if token in settings.eos_token_id), None)
             for row in new_ids]
    return [row[:stop] for row, stop in zip(new_ids, stops)]


def plain_forward(self, answers):
    """In place of main.Policy.forward: every row reads its own prompt, and all logits are there at
    once, in float32."""
    prompt_ids, prompt_mask, which = pad_prompts([answer.prompt_ids for answer in answers],
                                                 self.model.device)
    logprobs, entropies = [], []
    for start in range(0, len(answers), ANSWERS_PER_PASS):
        rows = which[start:start + ANSWERS_PER_PASS]
        completions = [torch.tensor(answer.completion_ids, device=rows.device)
                       for answer in answers[start:start + ANSWERS_PER_PASS]]
        completion_ids = pad_sequence(completions, batch_first=True)
        completion_mask = pad_sequence([torch.ones_like(each, dtype=torch.bool)
                                        for each in completions], batch_first=True)
        ids = torch.cat([prompt_ids[rows], completion_ids], 1)
        mask = torch.cat([prompt_mask[rows], completion_mask], 1)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.use_autocast):
            logits = self.model(input_ids=ids, attention_mask=mask,
                                position_ids=position_ids(mask), use_cache=False).logits
        every = (logits[:, -completion_ids.shape[1] - 1:-1].float()
                 / self.temperature).log_softmax(-1)
        logprobs.append(every.gather(-1, completion_ids[..., None])[..., 0][completion_mask])
        entropies.append(-(every.detach().exp() * every.detach()).sum(-1)[completion_mask])
    return torch.cat(logprobs), torch.cat(entropies)


def seconds_to_reduce(run) -> float:
    """One sum of the whole gradient over the ranks, when all are ready for it."""
    gradient = torch.zeros(sum(parameter.numel() for parameter in run.model.parameters()),
                           device=DEVICE, dtype=next(run.model.parameters()).dtype)
    seconds = []
    for _ in range(4):
        synchronise()
        started = time.perf_counter()
        dist.all_reduce(gradient)
        synchronise()
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])


def measure(run, steps: int, warm_up: int = 1) -> dict:
    """Medians over `steps` of what each phase takes, on rank 0, and its share of what the machine
    can do."""
    phases: dict[str, list[float]] = defaultdict(list)
    seen = {}

    def remember(name, key):
        original = getattr(main, name)

        def call(*arguments):
            peak_memory()
            result = original(*arguments)
            for kind, peak in peak_memory().items():
                phases[f"{key}_{kind}"].append(peak)
            seen[key] = arguments[1] if key == "learn" else result
            return result
        setattr(main, name, call)
        return original

    originals = {"sample": remember("sample", "sample"),
                 "policy_gradient": remember("policy_gradient", "learn")}
    floors = {"sample": [], "learn": []}
    flops, bandwidth = ceilings(
        torch.float32 if run.config.model.precision == "float32" else torch.bfloat16)
    for i in range(warm_up + steps):
        synchronise()
        started = time.perf_counter()
        main.training_step(run)
        synchronise()
        if i < warm_up:
            for values in phases.values():
                values.clear()
            continue
        phases["step"].append(time.perf_counter() - started)
        for phase in ("sample", "score", "learn"):
            phases[phase].append(run.log.metrics[f"seconds/{phase}"])
        sampled = [answer for group in seen["sample"] for answer in group]
        read, done = sampling_floors(run.sampler, sampled, run.config.sampling.max_rows)
        floors["sample"].append(max(read / bandwidth, done / flops))
        floors["learn"].append(learning_flops(run.model, seen["learn"]) / flops)
    for name, original in originals.items():
        setattr(main, name, original)
    result = {name: median(values) for name, values in phases.items()}
    result |= {f"{phase}_share_of_ceiling": median(
                   floor / spent for floor, spent in zip(floors[phase], phases[phase]))
               for phase in floors}
    tokens = sum(len(trajectory.completion_ids) for trajectory in sampled)
    if DEVICE.type == "cuda":
        result["alloc_retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
    return {**result, "reduce": seconds_to_reduce(run),
            "tokens_per_second": tokens / result["step"] * WORLD_SIZE,
            "matmul_gflops": flops / 1e9, "bandwidth_gb_per_second": bandwidth / 1e9}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", help="random weights of a published shape, and random rewards")
    parser.add_argument("--endless", action="store_true", help="all answers run to the limit")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--plain", action="store_true",
                         help="the same work with plain generate and all logits at once")
    instead.add_argument("--continuous", action="store_true",
                         help="transformers' continuous batching samples, see bench/continuous.py")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("keys", nargs="*",
                        help="section.key=value, or --config files, as for main.py")
    options, more = parser.parse_known_intermixed_args()
    if options.plain:
        main.generate, main.Policy.forward = plain_generate, plain_forward
    if options.continuous:
        main.generate = continuous.generate
    run = make_run([*more, *options.keys], options.shape)
    if options.endless:
        never_stop(run)
    result = measure(run, options.steps)
    for phase in ("sample", "learn"):
        reserved = result.get(f"{phase}_reserved_gb")
        say(f"{phase:<8} {result[phase]:8.3f} s   "
            f"{result[f'{phase}_share_of_ceiling']:6.1%} of the ceiling   "
            f"peak {result[f'{phase}_memory_gb']:6.2f} GB"
            + (f", reserved {reserved:6.2f} GB" if reserved else ""))
    say(f"score    {result['score']:8.3f} s")
    say(f"reduce   {result['reduce']:8.3f} s   {result['reduce'] / result['step']:6.1%} of a step "
        "if nothing overlapped")
    say(f"step     {result['step']:8.3f} s   {result['tokens_per_second']:8,.0f} completion "
        f"tokens/s on {WORLD_SIZE} ranks   machine: {result['matmul_gflops']:,.0f} GFLOP/s, "
        f"{result['bandwidth_gb_per_second']:,.0f} GB/s a rank")
    finish({"ranks": WORLD_SIZE, "plain": options.plain, "continuous": options.continuous,
            "shape": options.shape, **{key: round(value, 4) for key, value in result.items()}})
