"""Runs of the tiny and the lab model, claims about the algorithm, and what came of them.

    .venv/bin/python bench/experiments.py
        the tables and the pictures of README.md and docs/, from docs/runs.json and
        docs/costs.json, in seconds. bench/runs.py makes the runs

A claim says which of two runs has more of something at the last evaluation. Its effect is the
difference between the means over all seeds. The verdict uses the wider of two 95 % intervals, one
between seeds and one between questions. Each run is one process, which takes the questions of two
ranks."""

import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import kept
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import t, ttest_ind

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from machinery.code import MAIN, digest_of

DATA = ROOT / "docs" / "runs.json"
PLAN = json.loads((ROOT / "bench" / "plan.json").read_text())  # the protocol, and what we expected
MOST_SEEDS = 9

PROGRAM, CONFIG = "program", "config"
QUESTIONS, GROUP = "training.num_samples_per_step", "training.k_best_of_n"
TEACHER = "training.teacher"

# ---------------------------------------------------------------- runs

DEFAULT, TINY = "Dr. GRPO, G = 8", "tiny model, default"
STANDARD_DEVIATION = "divided by the standard deviation"
ANSWER_LENGTH = "divided by the answer length"
MEAN = "divided by the mean (MaxRL)"
SIL = "SIL, 2 best of 8"
BOTH = "divided by both, as in GRPO"
PUBLISHED = "GRPO as published"
LAB_TEACHER = "Dr. GRPO, 120 steps"
DISTILLED = "distilled"
TEACHERS_ANSWERS = "fine-tuned on the teacher's answers"
MASKED = "truncated answers masked"
# A second name after it says what else differs from the default.
ANSWER_PAYS = "only the answer pays"

USUAL = {PROGRAM: ["main.py"], CONFIG: "recipes/lab.yaml", QUESTIONS: 16}
ON_TINY = {CONFIG: "config.yaml", "training.max_steps": 100}
FOUR_UPDATES = {"training.updates_per_batch": 4, "training.learning_rate": "1.0e-4",
                "training.max_steps": 30}
# A part with weight 0.0 earns nothing, but is measured. A part that's left out isn't measured.
NO_FORMAT = {"task.reward_weights": "{answer: 1.0, format: 0.0}"}

# `record_of` fills in where the teacher is.
DISTILL = {"training.learning_type": "distill", TEACHER: LAB_TEACHER}

# {run: its keys, for all ranks together, which override the usual ones}
RUNS: dict[str, dict] = {
    DEFAULT: {},
    "G = 2": {QUESTIONS: 64, GROUP: "[2,2]"},
    "G = 32": {QUESTIONS: 4, GROUP: "[32,32]"},
    STANDARD_DEVIATION: {"training.scale_rewards": "group"},
    ANSWER_LENGTH: {"training.loss_normalizer": "sequence"},
    BOTH: {"training.scale_rewards": "group", "training.loss_normalizer": "sequence"},
    PUBLISHED: {"training.scale_rewards": "group", "training.loss_normalizer": "sequence",
                "training.kl_beta": 0.04, "training.kl_in": "loss"},
    MEAN: {PROGRAM: ["bench/changed.py", "maxrl"], "task.reward_weights": "null"},
    SIL: {"training.learning_type": "sil", GROUP: "[2,8]"},
    ANSWER_PAYS: NO_FORMAT,
}
for run in (STANDARD_DEVIATION, PUBLISHED, MEAN, SIL):
    RUNS[f"{ANSWER_PAYS}, {run}"] = RUNS[run] | NO_FORMAT
RUNS |= {
    MASKED: {PROGRAM: ["bench/changed.py", "overlong-filter"]},
    "only positive advantages": {PROGRAM: ["bench/changed.py", "mistakes/rewarded"]},
    "only negative advantages": {PROGRAM: ["bench/changed.py", "mistakes/punished"]},
    "four updates": FOUR_UPDATES,
    "four updates, clipped": FOUR_UPDATES | {"training.clip": "[0.2,0.2]"},
    "KL 0.02 in the reward": {"training.kl_beta": 0.02},
    TINY: ON_TINY,
    "ten times the learning rate": ON_TINY | {"training.learning_rate": "3.0e-4"},
    "a hundred times the learning rate": ON_TINY | {"training.learning_rate": "3.0e-3"},
    "shuffled rewards": ON_TINY | {"task.name": "examples/shuffled_reward.py"},
    LAB_TEACHER: {"training.max_steps": 120},
    DISTILLED: DISTILL,
    f"{DISTILLED}, groups of one": DISTILL | {QUESTIONS: 128, GROUP: "[1,1]"},
    f"{DISTILLED}, three times the learning rate": DISTILL | {"training.learning_rate": "1.5e-4"},
    TEACHERS_ANSWERS: DISTILL | {PROGRAM: ["bench/changed.py", "mistakes/teachers-answers"]},
    "only the format pays": ON_TINY | {"task.reward_weights": "{answer: 0.0, format: 1.0}"},
}
CHANGES = sorted({path.stem for path in (ROOT / "changes").glob("*.diff")} - {*PLAN["not made"]})
RUNS |= {name: {PROGRAM: ["bench/changed.py", name]} for name in CHANGES}
# With 256 tokens, two turns would be longer than the lab model can read.
RUNS["two-turns"] |= {"training.max_new_gen_tokens": 192}
TINY_CHANGED = "tiny model, weak positives"
RUNS[TINY_CHANGED] = ON_TINY | RUNS["weak-positives"]

# ---------------------------------------------------------------- claims

SOLVED, HARDEST = "solved", "solved of the hardest"
WRONG, ENTROPY = "characters of wrong answers", "entropy"
# The ones that an evaluation measures, and what it calls them.
METRICS = {"step": "step", SOLVED: "eval/solved", "answer length": "eval/completion_length",
           "truncated": "eval/truncated", "format": "eval/reward/format"}


@dataclass(frozen=True)
class Claim:
    says: str
    paper: str  # that makes the claim, or gives the reason for it
    metric: str
    more: str  # which run has more of the metric, if the claim is right
    less: str


CLAIMS = [
    Claim("groups of 2 fall behind", "", SOLVED, DEFAULT, "G = 2"),
    Claim("groups of 32 lift the hardest questions more than groups of 2", "", HARDEST,
          "G = 32", "G = 2"),
    Claim("dividing by the standard deviation falls behind", "", SOLVED,
          DEFAULT, STANDARD_DEVIATION),
    Claim("dividing by the standard deviation falls behind, where only the answer pays",
          "2503.20783", SOLVED, ANSWER_PAYS, f"{ANSWER_PAYS}, {STANDARD_DEVIATION}"),
    Claim("dividing by the answer length makes wrong answers longer", "2503.20783", WRONG,
          ANSWER_LENGTH, DEFAULT),
    Claim("dividing by both falls behind", "", SOLVED, DEFAULT, BOTH),
    Claim("GRPO as published falls behind", "2503.20783", SOLVED, DEFAULT, PUBLISHED),
    Claim("GRPO as published falls behind, where only the answer pays", "2503.20783", SOLVED,
          ANSWER_PAYS, f"{ANSWER_PAYS}, {PUBLISHED}"),
    Claim("the KL term of GRPO as published holds it back", "2503.20783", SOLVED, BOTH, PUBLISHED),
    Claim("masking truncated answers helps", "2503.14476", SOLVED, MASKED, DEFAULT),
    Claim("dividing by the mean falls behind", "", SOLVED, DEFAULT, MEAN),
    Claim("dividing by the mean falls behind, where only the answer pays", "", SOLVED,
          ANSWER_PAYS, f"{ANSWER_PAYS}, {MEAN}"),
    Claim("dividing by the mean lifts the hardest questions", "", HARDEST, MEAN, DEFAULT),
    Claim("dividing by the mean lifts the hardest questions, where only the answer pays",
          "2602.02710", HARDEST, f"{ANSWER_PAYS}, {MEAN}", ANSWER_PAYS),
    Claim("self-imitation falls behind", "", SOLVED, DEFAULT, SIL),
    Claim("self-imitation falls behind, where only the answer pays", "", SOLVED,
          ANSWER_PAYS, f"{ANSWER_PAYS}, {SIL}"),
    Claim("a small reward for the format helps", "", SOLVED, DEFAULT, ANSWER_PAYS),
    Claim("only positive advantages lower the entropy", "2506.01347", ENTROPY,
          DEFAULT, "only positive advantages"),
    Claim("only negative advantages raise the entropy", "2506.01347", ENTROPY,
          "only negative advantages", DEFAULT),
    Claim("negative advantages alone teach less than positive ones", "", SOLVED,
          "only positive advantages", "only negative advantages"),
    Claim("a KL term holds back", "2503.14476", SOLVED, DEFAULT, "KL 0.02 in the reward"),
    Claim("several updates need clipping", "1707.06347", SOLVED, "four updates, clipped",
          "four updates"),
    Claim("ten times the learning rate ends lower", "", SOLVED,
          TINY, "ten times the learning rate"),
    Claim("a hundred times the learning rate ends lower", "", SOLVED,
          TINY, "a hundred times the learning rate"),
    Claim("shuffled rewards teach too", "2506.10947", SOLVED, "shuffled rewards",
          "only the format pays"),
    Claim("a reward that every answer earns teaches less", "", SOLVED,
          TINY, "only the format pays"),
]

# ---------------------------------------------------------------- one run


def record_of(run: str, seed: int, out: str, own_keys: dict | None = None) -> dict:
    """Returns what the run's evaluations measured. Its folder is in `out`, where an interrupted run
    resumes."""
    keys = USUAL | (own_keys or RUNS[run])
    if TEACHER in keys:  # The keys name its run, which learned with seed 0.
        keys[TEACHER] = f"{out}/{folder_of(keys[TEACHER], 0)}/best"
    words = [*keys.pop(PROGRAM), "--config", keys.pop(CONFIG)]
    words += [f"{key}={value}" for key, value in keys.items()]
    words.append(f"training.seed={seed}")
    place = [f"run.dir={out}", f"run.name={folder_of(run, seed)}"]
    ended = subprocess.run([sys.executable, *words, *place], cwd=ROOT, check=True, text=True,
                           stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
    summary = json.loads(ended.stdout.splitlines()[-1])
    folder = ROOT / summary["folder"]
    samples = samples_of(folder)
    curve = []
    entropies = []
    for entry in kept.read_lines(folder / "metrics.jsonl"):
        if "reward" not in entry:
            curve.append(of_evaluation(entry, samples[entry["step"]], entropies))
            entropies = []
        elif entry["updated"]:  # A step that learns nothing has no entropy.
            entropies.append(entry["entropy"])
    return {
        "commit": commit(),
        "code": digest_of({MAIN: (folder / MAIN).read_text()}),
        "settings": shlex.join(words).replace(f"{ROOT}/", ""),
        "arithmetic": torch.backends.cpu.get_cpu_capability().lower(),
        "minutes": round(summary["seconds"] / 60, 1),
        "answers": len(samples[0][0]),
        "curve": curve,
    }


def commit() -> str:
    """Returns the commit of what runs."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, check=True, text=True,
                          stdout=subprocess.PIPE).stdout.strip()


def folder_of(run: str, seed: int) -> str:
    return f"{''.join(filter(str.isalnum, run))}-{seed}"


def samples_of(folder: Path) -> dict[int, dict[int, list[dict]]]:
    """Returns {step: {question: its answers}}."""
    samples: dict[int, dict[int, list[dict]]] = {}
    for sample in kept.read_lines(folder / "samples.jsonl"):
        of_step = samples.setdefault(sample["step"], {})
        of_step.setdefault(sample["question"], []).append(sample)
    return samples


def of_evaluation(entry: dict, samples: dict[int, list[dict]], entropies: list[float]) -> dict:
    """Returns its metrics, the mean entropy of the steps before it, the mean number of characters
    in wrong answers, and a digit for each question: the number of its right answers."""
    wrong = []
    right = ""
    for answers in samples.values():
        wrong += [len(answer["completion"]) for answer in answers if not answer["solved"]]
        right += str(int(sum(answer["solved"] for answer in answers)))
    found = {name: round(entry[key], 4) for name, key in METRICS.items()}
    found[ENTROPY] = round(statistics.fmean(entropies), 4) if entropies else None
    found[WRONG] = round(statistics.fmean(wrong or [0]), 1)
    found["right"] = right
    return found


def shares_of(record: dict) -> list[float]:
    """Returns the final share of right answers to each question."""
    return [int(right) / record["answers"] for right in record["curve"][-1]["right"]]


def hardest_of(record: dict) -> list[int]:
    """Returns the places of the questions that had no right answer before training."""
    return [i for i, right in enumerate(record["curve"][0]["right"]) if right == "0"]


def end_of(record: dict, metric: str) -> float:
    """Returns the metric at the last evaluation."""
    if metric != HARDEST:
        return record["curve"][-1][metric]
    shares = shares_of(record)
    return statistics.fmean(shares[i] for i in hardest_of(record))


# ---------------------------------------------------------------- effects and verdicts

NORMAL = 1.96  # half the width of a 95 % interval, in standard deviations of a normal distribution


@dataclass(frozen=True)
class Effect:
    more: float  # mean over seeds
    less: float
    seeds: float             # half of the 95 % interval between seeds
    questions: float | None  # and of the one between questions

    @property
    def difference(self) -> float:
        return self.more - self.less

    @property
    def half_width(self) -> float:
        return max(self.seeds, self.questions or 0.0)

    @property
    def verdict(self) -> str:
        if abs(self.difference) <= self.half_width:
            return "could be chance"
        return "holds" if self.difference > 0 else "the opposite"


def records_of(run: str, known: dict) -> list[dict]:
    """Returns the records of all its seeds."""
    titles = [f"{run} seed {seed}" for seed in range(MOST_SEEDS)]
    return [known[title] for title in titles if title in known]


def effect_of(claim: Claim, known: dict) -> Effect:
    """Returns what came of the claim."""
    more = records_of(claim.more, known)
    less = records_of(claim.less, known)
    ends_of_more = [end_of(record, claim.metric) for record in more]
    ends_of_less = [end_of(record, claim.metric) for record in less]
    questions = None
    if claim.metric in (SOLVED, HARDEST):
        questions = between_questions(more, less, claim.metric)
    return Effect(statistics.fmean(ends_of_more), statistics.fmean(ends_of_less),
                  between_seeds(ends_of_more, ends_of_less), questions)


def between_seeds(more: list[float], less: list[float]) -> float:
    """Returns half the width of Welch's 95 % interval of the difference of means."""
    interval = ttest_ind(more, less, equal_var=False).confidence_interval(0.95)
    return float(interval.high - interval.low) / 2


def between_questions(more: list[dict], less: list[dict], metric: str) -> float:
    """Returns half the width of the interval between questions. All seeds have the same held-out
    questions, so each question gives one difference, of its mean shares over the seeds. For the
    hardest ones it's approximate, because which ones count differs a little from seed to seed."""
    shares_of_more = mean_shares(more, metric)
    shares_of_less = mean_shares(less, metric)
    differences = []
    for question in shares_of_more.keys() & shares_of_less.keys():
        differences.append(shares_of_more[question] - shares_of_less[question])
    return NORMAL * statistics.stdev(differences) / math.sqrt(len(differences))


def mean_shares(records: list[dict], metric: str) -> dict[int, float]:
    """Returns each question's mean share of right answers, over the runs in which it counts."""
    shares: dict[int, list[float]] = {}
    for record in records:
        of_record = shares_of(record)
        questions = range(len(of_record))
        if metric == HARDEST:
            questions = hardest_of(record)
        for question in questions:
            shares.setdefault(question, []).append(of_record[question])
    return {question: statistics.fmean(values) for question, values in shares.items()}


# ---------------------------------------------------------------- tables

UNITS = {SOLVED: "", HARDEST: " of the hardest", WRONG: " characters", ENTROPY: " nats"}


def table(columns: Sequence[str], rows: list[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table_of_claims(known: dict) -> str:
    """Returns the effect and the verdict of each claim."""
    rows = []
    for claim in CLAIMS:
        says = f"{claim.says} ([{claim.paper}])" if claim.paper else claim.says
        effect = effect_of(claim, known)
        digits = 0 if claim.metric == WRONG else 3
        unit = UNITS[claim.metric]
        rows.append([says, f"{claim.more}: {effect.more:.{digits}f}{unit}",
                     f"{claim.less}: {effect.less:.{digits}f}{unit}",
                     difference_of(effect, digits), effect.verdict])
    return table(["claim", "should have more", "should have less", "difference", "verdict"], rows)


def difference_of(effect: Effect, digits: int = 3) -> str:
    return f"{effect.difference:+.{digits}f} ± {effect.half_width:.{digits}f}"


def mean_curve(run: str, known: dict) -> list[float]:
    """Returns what was solved at each evaluation, as the mean over seeds."""
    curves = []
    for record in records_of(run, known):
        curves.append([entry[SOLVED] for entry in record["curve"]])
    return [statistics.fmean(values) for values in zip(*curves, strict=True)]


METHODS = {"Dr. GRPO": DEFAULT, "with A divided by the standard deviation": STANDARD_DEVIATION,
           "GRPO as published": PUBLISHED, "SIL": SIL}


def table_of_methods(known: dict) -> str:
    """Returns what four methods solve in the end, with and without a reward for the format."""
    both = ["a right answer (1.0) and the right format (0.1)"]
    alone = ["only a right answer"]
    for run in METHODS.values():
        both.append(f"{mean_curve(run, known)[-1]:.2f}")
        run_alone = ANSWER_PAYS if run == DEFAULT else f"{ANSWER_PAYS}, {run}"
        alone.append(f"{mean_curve(run_alone, known)[-1]:.2f}")
    return table(["what earns a reward", *METHODS], [both, alone])


def table_of_losses(known: dict) -> str:
    """Returns how much less than Dr. GRPO each method solves, with and without a reward for the
    format, and the difference of these two losses with the wider of its two intervals."""
    rows = []
    for run in (STANDARD_DEVIATION, SIL, MEAN, PUBLISHED):
        runs = [DEFAULT, run, ANSWER_PAYS, f"{ANSWER_PAYS}, {run}"]
        records = [records_of(each, known) for each in runs]
        ends = [[end_of(record, SOLVED) for record in each] for each in records]
        means = [statistics.fmean(values) for values in ends]
        losses = [means[0] - means[1], means[2] - means[3]]
        # Welch's interval, for four means instead of two
        parts = [statistics.variance(values) / len(values) for values in ends]
        freedom = sum(parts)**2 / sum(part**2 / (len(values) - 1)
                                      for part, values in zip(parts, ends, strict=True))
        seeds = t.ppf(0.975, freedom) * math.sqrt(sum(parts))
        shares = [mean_shares(each, SOLVED) for each in records]
        differences = []
        for question in shares[0]:
            of_run = [share[question] for share in shares]
            differences.append(of_run[0] - of_run[1] - of_run[2] + of_run[3])
        questions = NORMAL * statistics.stdev(differences) / math.sqrt(len(differences))
        rows.append([run, f"{losses[0]:+.3f}", f"{losses[1]:+.3f}",
                     f"{losses[0] - losses[1]:+.3f} ± {max(seeds, questions):.3f}"])
    return table(["method", "with a reward for the format", "without", "difference"], rows)


def noise_of_evaluation(known: dict) -> str:
    """Returns the deviation between the default's seeds, and what sampling alone would cause."""
    records = records_of(DEFAULT, known)
    between = statistics.stdev(end_of(record, SOLVED) for record in records)
    variances = []
    for record in records:
        shares = shares_of(record)
        # That of a mean of n answers, estimated from these n.
        of_questions = [share * (1 - share) / (record["answers"] - 1) for share in shares]
        variances.append(sum(of_questions) / len(shares)**2)
    alone = math.sqrt(statistics.fmean(variances))
    return (f"The default's nine seeds have a standard deviation of {between:.4f}. Sampling four "
            f"answers to each of {len(shares)} questions causes {alone:.4f}, even if all nine "
            "models are equally good.")


# What a verdict means if the claim is that a change ends higher.
HIGHER = {"holds": "higher", "the opposite": "lower"}


def table_of_changes(known: dict) -> str:
    """Returns where the changes of changes/ end, beside the default."""
    rows = [["the default", curve_of(DEFAULT, known), "", ""]]
    for name in CHANGES:
        cells = ["", "the default's answers"]
        if name not in PLAN["one seed"]:
            effect = effect_of(higher_than_default(name), known)
            cells = [difference_of(effect), HIGHER.get(effect.verdict, effect.verdict)]
        rows.append([name, curve_of(name, known), *cells])
    return table(["change", "solved at steps 0, 20, 40 and 60", "difference", "ends higher?"], rows)


def higher_than_default(change: str) -> Claim:
    return Claim(f"{change} ends higher than the default", "", SOLVED, change, DEFAULT)


def curve_of(run: str, known: dict) -> str:
    """Returns what was solved at each evaluation, as one cell."""
    return " ".join(f"{value:.3f}" for value in mean_curve(run, known))


STUDENTS = [run for run, keys in RUNS.items() if TEACHER in keys]


def table_of_teachers(known: dict) -> str:
    """Returns what the lab model solves after each step, without and with a teacher."""
    steps = [entry["step"] for entry in records_of(LAB_TEACHER, known)[0]["curve"]]
    rows = []
    for run in (DEFAULT, LAB_TEACHER, *STUDENTS, SIL):
        means = [f"{value:.3f}" for value in mean_curve(run, known)]
        empty = [""] * (len(steps) - len(means))
        rows.append([run, str(len(records_of(run, known))), *means, *empty])
    return table(["lab model, solved at step", "seeds", *map(str, steps)], rows)


# What an evaluation measures besides `solved`, and how we print it.
OTHERS = {"answer length": ".0f", "truncated": ".2f", "format": ".2f", ENTROPY: ".2f"}


def table_of_runs(known: dict) -> str:
    """Returns the means over the seeds of each run."""
    rows = []
    for run in RUNS:
        records = records_of(run, known)
        solved = " ".join(f"{value:.2f}" for value in mean_curve(run, known))
        cells = [run, str(len(records)), solved]
        for name, digits in OTHERS.items():
            values = [record["curve"][-1][name] for record in records]
            measured = [value for value in values if value is not None]
            cells.append(format(statistics.fmean(measured), digits) if measured else "")
        rows.append(cells)
    return table(["run", "seeds", "solved at each evaluation", *OTHERS], rows)


# {what differs from the lab model's default: its run}
SETTINGS = {
    "learning rate 1e-6 instead of 5e-5": "slow",
    "weights in bfloat16": "bfloat16",
    "`scale_rewards=group`, with a reward for the format": STANDARD_DEVIATION,
    "`learning_type=sil`, with a reward for the format": SIL,
    "four updates per batch at twice the rate, without `clip`": "four updates",
    "four updates per batch at twice the rate, with `clip`": "four updates, clipped",
    "sampling and learning at temperature 0.6, top-p 0.95 and top-k 20": "hot",
    "all keys of GRPO as published, with a reward for the format": PUBLISHED,
    "groups of 2": "G = 2",
    "groups of 32": "G = 32",
    "`kl_beta=0.02`": "KL 0.02 in the reward",
    "`loss_normalizer=sequence`": ANSWER_LENGTH,
    "no reward for the format": ANSWER_PAYS,
}


def table_of_settings(known: dict) -> str:
    """Returns what one setting changes at the end, the largest effect first."""
    effects = {}
    for setting, run in SETTINGS.items():
        effects[setting] = effect_of(Claim("", "", SOLVED, run, DEFAULT), known)
    rows = []
    for setting in sorted(effects, key=lambda each: -abs(effects[each].difference)):
        effect = effects[setting]
        note = "could be chance" if effect.verdict == "could be chance" else ""
        rows.append([setting, f"{effect.more:.3f}", difference_of(effect), note])
    return table(["what differs", "solved", "difference from the default", ""], rows)


COSTS = ROOT / "docs" / "costs.json"
# What the page calls the runs with these titles.
COSTED = {"tiny": "the tiny model, puzzles with three numbers",
          "lab": "the lab model, harder puzzles",
          "smollm2": "SmolLM2-135M-Instruct, sums of two numbers",
          "qwen2.5-coder": "Qwen2.5-Coder-0.5B-Instruct with LoRA, sums of three numbers"}


def table_of_costs(known: dict) -> str:
    """Returns what it took until half and nine in ten answers were right: for each figure, the
    middle one of the seeds."""
    costs = json.loads(COSTS.read_text())
    rows = []
    for name, kind in COSTED.items():
        curves = [record["curve"] for record in records_of(name, costs)]
        first, last = [statistics.fmean(curve[place][SOLVED] for curve in curves)
                       for place in (0, -1)]
        row = [kind, f"{first:.2f} → {last:.2f}"]
        for share in (0.5, 0.9):
            reached = [reaching(share, curve) for curve in curves]
            row.append(cost_in_words([each for each in reached if each], len(curves)))
        rows.append(row)
    return table(["model and task", "solved", "half are right after", "nine in ten after"], rows)


def reaching(share: float, curve: list[dict]) -> dict | None:
    """Returns the first evaluation that solves this share, if any does."""
    return next((entry for entry in curve if entry[SOLVED] >= share), None)


def cost_in_words(reached: list[dict], seeds: int) -> str:
    if 2 * len(reached) < seeds:
        return "not reached"
    answers, tokens, seconds = [statistics.median(entry[name] for entry in reached)
                                for name in ("answers", "tokens", "seconds")]
    words = f"{answers:,.0f} answers, {tokens / 1e6:.2f} M tokens, {seconds / 60:.1f} min"
    return words if len(reached) == seeds else f"{words} ({len(reached)} of {seeds} seeds)"


# {page: what it has of the results}
TABLES = {
    "README.md": [table_of_methods],
    "docs/read.md": [table_of_costs, table_of_settings],
    "docs/evidence.md": [noise_of_evaluation, table_of_claims, table_of_losses, table_of_teachers,
                         table_of_changes],
}

# ---------------------------------------------------------------- pictures

# Of the first run of a panel, the second, and so on.
COLOURS = ["#525252", "#d55e00", "#0072b2", "#009e73", "#cc79a7"]
# {picture: {title of a panel: its runs}}
PICTURES = {
    "experiments.png": {
        "The answer pays 1.0, and the format 0.1": [
            DEFAULT, MEAN, SIL, STANDARD_DEVIATION, PUBLISHED],
        "Only the answer pays": [
            ANSWER_PAYS,
            *[f"{ANSWER_PAYS}, {run}" for run in (MEAN, SIL, STANDARD_DEVIATION, PUBLISHED)]],
        "One half of the advantages": [
            DEFAULT, "only positive advantages", "only negative advantages"],
        "Four updates, twice the learning rate": [
            DEFAULT, "four updates, clipped", "four updates"],
        "The tiny model (up to 1.0, and 100 steps)": [
            TINY, "shuffled rewards", "a hundred times the learning rate"],
    },
    "teachers.png": {"Who teaches": [LAB_TEACHER, SIL, DISTILLED, TEACHERS_ANSWERS]},
    "changing.png": {"One change: right answers weigh a tenth": [TINY, TINY_CHANGED]},
}


def draw(path: Path, panels: dict[str, list[str]], known: dict) -> None:
    """Draws the share solved by the runs, in one panel for each entry."""
    figure = Figure(figsize=(6, 2 * len(panels) + 0.4), layout="constrained")
    all_axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, (title, runs) in zip(all_axes, panels.items()):
        axes.set_title(title, fontsize=13, fontweight="bold", loc="left")
        axes.set_ylim(0, 1 if TINY in runs else 0.5)
        axes.grid(alpha=0.3)
        draw_runs(axes, runs, known)
    figure.supxlabel("training step, of 128 answers (thin: one seed, thick: their mean)",
                     fontsize=12)
    figure.supylabel("share solved (lab model, unless stated)" if len(panels) > 1 else "solved",
                     fontsize=12)
    figure.savefig(path, dpi=160)


def draw_runs(axes: Axes, runs: list[str], known: dict) -> None:
    """Draws each seed of the runs thin and their mean thick. The legend has the mean's end."""
    for run, colour in zip(runs, COLOURS):
        for record in records_of(run, known):
            steps = [entry["step"] for entry in record["curve"]]
            solved = [entry[SOLVED] for entry in record["curve"]]
            axes.plot(steps, solved, color=colour, linewidth=0.8, alpha=0.6)
        means = mean_curve(run, known)
        name = DEFAULT if run == ANSWER_PAYS else run.removeprefix(f"{ANSWER_PAYS}, ")
        label = textwrap.fill(f"{means[-1]:.2f}, {name}", width=24)
        axes.plot(steps, means, color=colour, linewidth=2.5, label=label)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1.08), fontsize=12, frameon=False,
                handlelength=1, labelspacing=0.3)


# ---------------------------------------------------------------- the command

def main(words: list[str]) -> None:
    if words:
        sys.exit(__doc__)
    known = kept.read(DATA)
    for page, tables in TABLES.items():
        for each in tables:
            print(f"{page}\n\n{each(known)}\n")
    print(f"All runs\n\n{table_of_runs(known)}")
    for name, panels in PICTURES.items():
        draw(DATA.parent / name, panels, known)


if __name__ == "__main__":
    main(sys.argv[1:])
