"""Refilling groups that teach nothing: what it costs and brings, with the embedded model.

    .venv/bin/python bench/refill.py --data bench/refill.json

Each with `training.refill` 0 and 3 and three seeds: the default; `hard`, those of its questions
that the model before training never solves in eight answers, also in groups of two; and `terse`,
the same with 0.2 more for brevity, right or wrong (docs/tasks.md), with advantages as they are and
over the group's deviation. A run is one process that takes the questions of two ranks. --data holds
what each evaluation said, with the answers sampled and the seconds until then (evaluations aside);
what it holds is not run again."""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
import one_step
from kept import run_missing

import main
from machinery.ranks import join, random_stream

N, G = 16, 8
TERSE = "```python\n# terse.py\n"


def make_hard_questions(path: Path, tried: int) -> None:
    """Those among the first so many that the model before training never solves in G answers."""
    join()
    run = one_step.prepare(main.load_config([f"data.max_rows={tried}"]))
    questions, hard = run.training_questions, []
    torch.manual_seed(random_stream(0, 0, "hard").getrandbits(63))
    for start in range(0, len(questions), 64):
        groups = main.sample(run, questions[start:start + 64], G)
        main.score(run, groups)
        hard += [group[0].question.row for group in groups
                 if not any(answer.reward_parts["answer"] for answer in group)]
    table = pyarrow.Table.from_pylist(
        [{"nums": row["nums"], "target": row["target"]} for row in hard])
    pyarrow.parquet.write_table(table, path)
    print(f"{len(hard)} of {len(questions)} questions are never solved in {G} answers", flush=True)


def curve_of(keys: list[str], options: argparse.Namespace) -> list[dict]:
    command = [sys.executable, "main.py", f"training.num_samples_per_step={N}",
               f"training.max_steps={options.steps}", "validation.best_of_n=2", *keys,
               *options.keys, f"run.dir={options.out}"]
    ended = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True,
                           env=os.environ | {"OMP_NUM_THREADS": "1"})
    folder = ROOT / json.loads(ended.stdout.splitlines()[-1])["folder"]
    curve, sampled, seconds, none_solved = [], 0, 0.0, []
    for entry in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        if "reward" in entry:
            sampled += N * G * (1 + entry["refilled"])
            seconds += sum(value for key, value in entry.items() if key.startswith("seconds/"))
            none_solved.append(entry["groups_none_solved"])
        else:
            curve.append({"step": entry["step"], "solved": round(entry["eval/solved"], 4),
                          "form": round(entry["eval/format"], 4),
                          "tokens": round(entry["eval/completion_length"], 1),
                          "sampled": round(sampled), "seconds": round(seconds, 1),
                          "none_solved": round(statistics.fmean(none_solved or [0]), 3)})
            none_solved = []
    return curve


def command() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=ROOT / "runs" / "refill.json")
    parser.add_argument("--out", default="runs/refill", help="folder of the runs")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tried", type=int, default=3000, help="questions, to find hard ones")
    parser.add_argument("keys", nargs="*", help="section.key=value, for every run")
    options = parser.parse_intermixed_args()
    (ROOT / options.out).mkdir(parents=True, exist_ok=True)
    hard, terse = (ROOT / options.out / name for name in ("hard.parquet", "terse.py"))
    if not hard.exists():
        make_hard_questions(hard, options.tried)
    page = (ROOT / "docs" / "tasks.md").read_text()
    terse.write_text(f"import sys\nsys.path.append({str(ROOT)!r})\n"
                     + page.split(TERSE)[1].split("```")[0])

    on_hard = [f"data.dataset={hard}", "data.num_validation=128"]
    settings = {"default": [], "hard": on_hard,
                "hard, G = 2": [*on_hard, f"training.num_samples_per_step={N * G // 2}",
                                "training.k_best_of_n=[2,2]"],
                "terse": [*on_hard, f"task.name={terse}"],
                "terse, over the deviation": [*on_hard, f"task.name={terse}",
                                              "training.scale_rewards=group"]}
    wanted = {f"{name}, refill {rounds}, seed {seed}":
              [*keys, f"training.refill={rounds}", f"training.seed={seed}"]
              for seed, (name, keys), rounds in itertools.product(
                  options.seeds, settings.items(), (0, 3))}
    known = run_missing(options.data, wanted, lambda keys: curve_of(keys, options), 2,
                        lambda curve: curve[-1])

    print("| setting | refill | solved by step | form | tokens | answers sampled | seconds |\n"
          "| --- | --- | --- | --- | --- | --- | --- |")
    for name, rounds in itertools.product(settings, (0, 3)):
        runs = [known[f"{name}, refill {rounds}, seed {seed}"] for seed in options.seeds]
        runs = [[entry for entry in run if entry["step"] <= options.steps] for run in runs]
        solved = " ".join(f"{statistics.fmean(entry['solved'] for entry in at):.2f}"
                          for at in zip(*runs))
        last = {key: statistics.fmean(run[-1][key] for run in runs) for key in runs[0][-1]}
        print(f"| {name} | {rounds} | {solved} | {last['form']:.2f} | {last['tokens']:.0f} "
              f"| {last['sampled']:,.0f} | {last['seconds']:.0f} |")
    print(json.dumps({"runs": len(known)}))


if __name__ == "__main__":
    command()
