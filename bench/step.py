"""Measures each phase of a training step, beside what the computer can do.

    .venv/bin/python bench/step.py                                         the default on one rank
    .venv/bin/torchrun --nproc-per-node=2 bench/step.py training.seed=1    any ranks, any keys
    .venv/bin/python bench/step.py --shape qwen2.5-3b --endless \\
        training.num_samples_per_step=32 'training.k_best_of_n=[16,16]' \\
        training.max_new_gen_tokens=1024 training.tokens_per_micro_batch=16384 \\
        model.gradient_checkpointing=true   for a GPU of 80 GB

The ceiling is measured in the same run. Sampling has to read the weights and the KV cache once for
each token, or to do the arithmetic, whichever takes longer. Learning has to do the arithmetic. On a
CPU the memory is that of the process. On a GPU it is what tensors hold, and what the allocator
reserved for them. The allocator had to give back memory so often as `alloc_retries` says."""

import argparse
import time
from collections import defaultdict

import harness
from harness import DEVICE, main, median, peak_memory, say, torch

from machinery.passes import pad_right
from machinery.prompts import ROWS_PER_PASS, pad_prompts, position_ids
from machinery.ranks import WORLD_SIZE
from machinery.sampling import up_to_stop

# ---------------------------------------------------------------- the same work in the plain way

def plain_generate(sampler, prompts, settings, max_rows, on_ended) -> list[list[int]]:
    """Takes the place of main.generate. Every row processes its own prompt, and none leaves before
    the last has ended."""
    sampler.eval()
    completions = []
    for start in range(0, len(prompts), max_rows):
        ids, mask, which = pad_prompts(prompts[start:start + max_rows], sampler.device)
        sequences = sampler.generate(
            ids[which], attention_mask=mask[which], generation_config=settings)
        for row in sequences[:, ids.shape[1]:].tolist():
            completions.append(up_to_stop(row, set(settings.eos_token_id)))
        on_ended(len(which))
    return completions


def plain_forward(self, answers) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes the place of main.Policy.forward. Every row processes its own prompt, and all logits
    are there together, in float32."""
    device = self.model.device
    prompt_ids, prompt_mask, which = pad_prompts([answer.prompt_ids for answer in answers], device)
    log_probs = []
    entropies = []
    for start in range(0, len(answers), ROWS_PER_PASS):
        few = slice(start, start + ROWS_PER_PASS)
        prompts = which[few]
        rows = [answer.completion_ids for answer in answers[few]]
        completions, is_token = pad_right(rows, device)  # (rows, time)
        ids = torch.cat([prompt_ids[prompts], completions], 1)  # (rows, prompt + time)
        mask = torch.cat([prompt_mask[prompts], is_token], 1)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.use_autocast):
            output = self.model(
                input_ids=ids, attention_mask=mask, position_ids=position_ids(mask),
                use_cache=False)
        logits = output.logits[:, -completions.shape[1] - 1:-1].float()  # (rows, time, vocabulary)
        of_all = (logits / self.temperature).log_softmax(-1)
        of_tokens = of_all.gather(-1, completions[..., None])[..., 0]  # (rows, time)
        log_probs.append(of_tokens[is_token])
        of_all = of_all.detach()
        entropies.append(-(of_all.exp() * of_all).sum(-1)[is_token])
    return torch.cat(log_probs), torch.cat(entropies)


# ---------------------------------------------------------------- measuring

class Watch:
    """Notes the answers of the last step, and the memory at the peak of each phase."""

    def __init__(self):
        self.answers = {}  # {phase: those that it has sampled, or learned from}
        self.peaks = {}
        self.own_sample = main.sample
        self.own_gradient = main.policy_gradient

    def __enter__(self):
        main.sample = self.sample
        main.policy_gradient = self.policy_gradient
        return self

    def __exit__(self, *error):
        main.sample = self.own_sample
        main.policy_gradient = self.own_gradient

    def sample(self, *arguments):
        peak_memory()
        groups = self.own_sample(*arguments)
        self.answers["sample"] = [answer for group in groups for answer in group]
        self.peaks["sample"] = peak_memory()
        return groups

    def policy_gradient(self, run, learned, totals):
        peak_memory()
        update = self.own_gradient(run, learned, totals)
        self.answers["learn"] = learned
        self.peaks["learn"] = peak_memory()
        return update


def seconds_of_a_step(run) -> float:
    harness.synchronise()
    started = time.perf_counter()
    main.training_step(run)
    harness.synchronise()
    return time.perf_counter() - started


def measure(run, steps: int, warm_up: int = 1) -> dict:
    """Returns medians over the steps of what each phase takes on rank 0, and its share of what the
    computer can do."""
    dtype = torch.float32 if run.config.model.precision == "float32" else torch.bfloat16
    flops, bandwidth = harness.ceilings(dtype)
    found: dict[str, list[float]] = defaultdict(list)
    with Watch() as watch:
        for _ in range(warm_up):
            seconds_of_a_step(run)
        for _ in range(steps):
            found["step"].append(seconds_of_a_step(run))
            read, done = harness.sampling_floors(
                run.sampler, watch.answers["sample"], run.config.sampling.max_rows)
            floors = {
                "sample": max(read / bandwidth, done / flops),
                "learn": harness.learning_flops(run.model, watch.answers["learn"]) / flops,
            }
            for phase in ("sample", "score", "learn"):
                found[phase].append(run.log.metrics[f"seconds/{phase}"])
            for phase, floor in floors.items():
                found[f"{phase}_share_of_ceiling"].append(floor / found[phase][-1])
                for kind, peak in watch.peaks[phase].items():
                    found[f"{phase}_{kind}"].append(peak)
    result = {name: median(values) for name, values in found.items()}
    num_tokens = sum(answer.num_tokens for answer in watch.answers["sample"])
    result["tokens_per_second"] = num_tokens / result["step"] * WORLD_SIZE
    result["gflops"] = flops / 1e9
    result["bandwidth_gb_per_second"] = bandwidth / 1e9
    if DEVICE.type == "cuda":
        result["alloc_retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", help="random weights of a published shape, and random rewards")
    parser.add_argument("--endless", action="store_true", help="all answers reach the length limit")
    parser.add_argument("--plain", action="store_true",
                        help="the same work with plain generate and all logits together")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("keys", nargs="*",
                        help="section.key=value, or --config files, as for main.py")
    options, more = parser.parse_known_intermixed_args()
    if options.plain:
        main.generate = plain_generate
        main.Policy.forward = plain_forward
    run = harness.make_run([*more, *options.keys], options.shape)
    if options.endless:
        harness.never_stop(run)
    result = measure(run, options.steps)
    rounded = {name: round(value, 4) for name, value in result.items()}
    for phase in ("sample", "learn"):
        share = result[f"{phase}_share_of_ceiling"]
        memory = result[f"{phase}_memory_gb"]
        say(f"{phase:<8} {result[phase]:8.3f} s   {share:6.1%} of ceiling   {memory:6.2f} GB")
    say(f"step     {result['step']:8.3f} s   {result['tokens_per_second']:8,.0f} tokens/s")
    harness.finish({"ranks": WORLD_SIZE, "plain": options.plain, "shape": options.shape, **rounded})
