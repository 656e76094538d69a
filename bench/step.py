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
from torch.nn.utils.rnn import pad_sequence

from machinery.policy import ANSWERS_PER_PASS
from machinery.prompts import pad_prompts, position_ids
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
    prompt_ids, prompt_mask, which = pad_prompts(
        [answer.prompt_ids for answer in answers], self.model.device)
    log_probs = []
    entropies = []
    for start in range(0, len(answers), ANSWERS_PER_PASS):
        rows = which[start:start + ANSWERS_PER_PASS]
        completions = [torch.tensor(answer.completion_ids, device=rows.device)
                       for answer in answers[start:start + ANSWERS_PER_PASS]]
        completion_ids = pad_sequence(completions, batch_first=True)  # (rows, time)
        completion_mask = pad_sequence(
            [torch.ones_like(each, dtype=torch.bool) for each in completions], batch_first=True)
        ids = torch.cat([prompt_ids[rows], completion_ids], 1)
        mask = torch.cat([prompt_mask[rows], completion_mask], 1)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.use_autocast):
            logits = self.model(input_ids=ids, attention_mask=mask,
                                position_ids=position_ids(mask), use_cache=False).logits
        logits = logits[:, -completion_ids.shape[1] - 1:-1].float()  # (rows, time, vocabulary)
        every = (logits / self.temperature).log_softmax(-1)
        of_tokens = every.gather(-1, completion_ids[..., None])[..., 0]  # (rows, time)
        log_probs.append(of_tokens[completion_mask])
        every = every.detach()
        entropies.append(-(every.exp() * every).sum(-1)[completion_mask])
    return torch.cat(log_probs), torch.cat(entropies)


# ---------------------------------------------------------------- measuring

def measure(run, steps: int, warm_up: int = 1) -> dict:
    """Returns medians over the steps of what each phase takes on rank 0, and its share of what the
    computer can do."""
    found: dict[str, list[float]] = defaultdict(list)
    dtype = torch.float32 if run.config.model.precision == "float32" else torch.bfloat16
    flops, bandwidth = harness.ceilings(dtype)
    last = {}

    def sample(*arguments):
        peak_memory()
        groups = original_sample(*arguments)
        last["sample"] = [answer for group in groups for answer in group]
        last["sample peak"] = peak_memory()
        return groups

    def policy_gradient(run, answers):
        peak_memory()
        metrics = original_gradient(run, answers)
        last["learn"] = answers
        last["learn peak"] = peak_memory()
        return metrics

    original_sample, main.sample = main.sample, sample
    original_gradient, main.policy_gradient = main.policy_gradient, policy_gradient
    for step in range(warm_up + steps):
        harness.synchronise()
        started = time.perf_counter()
        main.training_step(run)
        harness.synchronise()
        if step < warm_up:
            continue
        found["step"].append(time.perf_counter() - started)
        metrics = run.log.metrics
        read, done = harness.sampling_floors(
            run.sampler, last["sample"], run.config.sampling.max_rows)
        floors = {"sample": max(read / bandwidth, done / flops),
                  "learn": harness.learning_flops(run.model, last["learn"]) / flops}
        for phase, floor in floors.items():
            found[f"{phase}_share_of_ceiling"].append(floor / metrics[f"seconds/{phase}"])
            for kind, peak in last[f"{phase} peak"].items():
                found[f"{phase}_{kind}"].append(peak)
        for phase in ("sample", "score", "learn"):
            found[phase].append(metrics[f"seconds/{phase}"])
    main.sample, main.policy_gradient = original_sample, original_gradient
    result = {name: median(values) for name, values in found.items()}
    tokens = sum(answer.num_tokens for answer in last["sample"])
    result["tokens_per_second"] = tokens / result["step"] * WORLD_SIZE
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
    for phase in ("sample", "learn"):
        share = result[f"{phase}_share_of_ceiling"]
        memory = result[f"{phase}_memory_gb"]
        say(f"{phase:<8} {result[phase]:8.3f} s   {share:6.1%} of ceiling   {memory:6.2f} GB")
    say(f"step     {result['step']:8.3f} s   {result['tokens_per_second']:8,.0f} tokens/s")
    harness.finish({"ranks": WORLD_SIZE, "plain": options.plain, "shape": options.shape,
                    **{key: round(value, 4) for key, value in result.items()}})
