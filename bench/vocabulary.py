"""Peak memory of one update with a large vocabulary: chunks of the projection, recomputed in \
backward, against logits for all tokens.

    .venv/bin/python bench/vocabulary.py
        8 rows of 1,024 completion tokens; the full side wants 20 GB

Each side runs in a process of its own. The peak is that of the whole process, weights, gradients
and AdamW's moments included; what the update adds to them is shown beside it."""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIDES = {"full": "logits for all tokens, all rows at once", "chunked": "chunks, all rows at once",
         "pairs": "chunks, two rows at a time", "frugal": "chunks, one row, gradient checkpointing"}
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--shape", default="qwen2.5-head")
parser.add_argument("--rows", type=int, default=8)
parser.add_argument("--tokens", type=int, default=1024)
parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
parser.add_argument("--gradient", help=argparse.SUPPRESS)
options = parser.parse_args()


def update() -> None:
    from harness import end_process, main, make_run, random, torch

    rows_at_once = {"pairs": 2, "frugal": 1}.get(options.side, options.rows)
    run = make_run(
        ["model.precision=float32", f"model.gradient_checkpointing={options.side == 'frugal'}",
         f"training.num_samples_per_step={options.rows}", "training.k_best_of_n=[2,2]",
         f"training.max_new_gen_tokens={options.tokens}", "training.max_grad_norm=null",
         f"training.tokens_per_micro_batch={rows_at_once * (16 + options.tokens)}"],
        options.shape)
    stream = random.Random(0)
    vocabulary = run.model.config.vocab_size

    def row():
        prompt_ids, completion_ids = ([stream.randrange(vocabulary) for _ in range(length)]
                                      for length in (16, options.tokens))
        question = main.Question({}, prompt_ids)
        return main.Trajectory(question, completion_ids, "", True,
                               advantage=stream.uniform(-1, 1))

    trajectories = [row() for _ in range(options.rows)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    if options.side != "full":
        main.policy_gradient(run, trajectories)
    else:
        ids = torch.tensor([t.prompt_ids + t.completion_ids for t in trajectories])
        logprobs = run.model(input_ids=ids).logits.float().log_softmax(-1)[:, 15:-1].gather(
            -1, ids[:, 16:, None])[..., 0]
        advantages = torch.tensor([t.advantage for t in trajectories])[:, None]
        (-(advantages * logprobs).sum() / (options.rows * options.tokens)).backward()
    seconds, peak = (time.perf_counter() - started,
                     resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    torch.save([parameter.grad for parameter in run.model.parameters()], options.gradient)
    print(json.dumps({"peak_gb": peak * 1024 / 1e9, "before_gb": before * 1024 / 1e9,
                      "seconds": seconds}), flush=True)
    end_process(0)


def compare() -> None:
    import torch

    results, gradients = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for side, description in SIDES.items():
            command = [sys.executable, __file__, *sys.argv[1:], "--side", side,
                       "--gradient", str(Path(folder) / side)]
            lines = subprocess.run(command, check=True, stdout=subprocess.PIPE,
                                   text=True).stdout.splitlines()
            results[side] = json.loads(lines[-1])
            gradients[side] = torch.cat([gradient.flatten()
                                         for gradient in torch.load(Path(folder) / side)])
            error = float((gradients[side] - gradients["full"]).norm() / gradients["full"].norm())
            update = {name: each["peak_gb"] - each["before_gb"] for name, each in results.items()}
            results[side] |= {
                "ratio_of_peaks": results[side]["peak_gb"] / results["full"]["peak_gb"],
                "ratio_of_updates": update[side] / update["full"], "gradient_error": error}
            print(f"{description:<42} peak {results[side]['peak_gb']:6.2f} GB, "
                  f"{results[side]['ratio_of_peaks']:.3f} of full; "
                  f"the update alone {update[side]:6.2f} GB, "
                  f"{results[side]['ratio_of_updates']:.3f}; gradient off by {error:.1e}; "
                  f"{results[side]['seconds']:6.1f} s", flush=True)
    print(json.dumps({"rows": options.rows, "tokens": options.tokens, **results}))


update() if options.side else compare()
