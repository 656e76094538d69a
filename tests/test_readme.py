"""README and docs/ keep their word: what they name exists, what they tell to run does what they
say, and the step that the README goes through is the first one of the default."""

import json
import re
import shlex
import sys
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
import yaml
from conftest import make_config, shown_file, write_own_task
from processes import ROOT, ranks
from test_resume import run_without_curves
from torch.distributed.run import parse_args

import main
from machinery.settings import flatten, load_config

sys.path.extend([str(ROOT / "bench"), str(ROOT / "examples")])
import estimators
import experiments
import one_step

README = (ROOT / "README.md").read_text()
PAGES = "\n".join([README, *(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))])
EXPERIMENTS_PAGE = (ROOT / "docs" / "experiments.md").read_text()
PROSE = re.sub(r"```.*?```", "", PAGES, flags=re.DOTALL)
# the names of others
PROSE = re.sub(r"\| (TRL|verl) \| here \|\n(\|.*\n)+",
               lambda table: re.sub(r"^\|.*?\|", "|", table[0], flags=re.MULTILINE), PROSE)


def bash_of(page: str) -> list[str]:
    return [line for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
            for line in re.sub(r"\\\n\s*", "", block).splitlines() if line.strip()]


BASH = bash_of(PAGES)
SOURCES = "\n".join(
    path.read_text() for pattern in ("*.py", "machinery/*.py", "*.yaml", "*.txt", ".env.example",
                                     "examples/*.py", "recipes/*", "bench/*.py", ".ci/*")
    for path in ROOT.glob(pattern))
# What a run leaves, names of other projects and tools, and words of shells and mathematics.
ELSEWHERE = {"runs/<name>/", "checkpoints/step-NNNNNN/", "best/", "tokenizers", "no_sync", "uv",
             "mine.jsonl", "terse.py", "spawn", "forkserver", "my.yaml", "mytask.py", "exercise/",
             "exercise/main.py",
             "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
             "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "sqlite:///mlflow.db", "from_pretrained"}
SMALL = ["training.max_steps=1", "training.max_new_gen_tokens=8", "training.num_samples_per_step=2",
         "data.num_validation=4", "validation.best_of_n=2", "run.name=a"]


TRAINING = [line for line in BASH if "main.py" in line] + re.findall(
    r"`(\.venv/bin/(?:python|torchrun --nproc-per-node=\d) main\.py)` \|", PAGES)


def ranks_and_arguments(line: str) -> tuple[int, tuple[str, ...]]:
    """Two ranks are enough for any command of torchrun's, which reads its own options here."""
    program, *words = shlex.split(line.rpartition("&&")[2])
    if program.endswith("torchrun"):
        options = parse_args(words)
        assert options.training_script == "main.py"
        return 2, tuple(options.training_script_args)
    assert program.endswith("python") and words[0] == "main.py"
    return 1, tuple(words[1:])


@pytest.mark.parametrize(("num_ranks", "arguments"),
                         sorted(set(map(ranks_and_arguments,
                                        set(TRAINING) - set(bash_of(EXPERIMENTS_PAGE))))), ids=str)
def test_every_command_that_trains_does_so_with_the_keys_it_shows(num_ranks, arguments, tmp_path):
    """In a small form, on ranks as torchrun starts them; a real one does in test_run.py."""
    shown, small = (dict(word.split("=", 1) for word in arguments if "=" in word),
                    [*SMALL, f"run.dir={tmp_path}"])
    if own := "my.yaml" in arguments or shown.get("task.name") == "mytask.py":
        write_own_task(tmp_path)
        (tmp_path / "my.yaml").write_text(shown_file("my.yaml"))
        (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    if "--config" in arguments:
        small += ["model.name=tiny/model"]
        small += ["data.dataset=tiny/countdown.parquet"] if not own else []
    if "task.name" not in shown:
        small += ["data.max_rows=200"]
    if "training.learning_type" not in shown:
        small += ["training.k_best_of_n=[2,2]"]
    result = ranks(num_ranks, run_without_curves, *arguments, *small,
                   # it writes there, or finds its files there
                   cwd=tmp_path if own or "logging.mlflow" in shown else ROOT,
                   MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["steps"] == 1
    settings = flatten(load_config(["--config", str(tmp_path / "a" / "config.yaml")]))
    replaced = {override.partition("=")[0] for override in small}
    assert {key: settings[key] for key in shown if key not in replaced} == {
        key: yaml.safe_load(value) for key, value in shown.items() if key not in replaced}
    assert (tmp_path / "mlflow.db").exists() == ("logging.mlflow" in shown)


def test_the_page_on_estimators_shows_what_its_script_has_found(capsys):
    found = json.loads((ROOT / "docs" / "estimators.json").read_text())
    estimators.show("step 0", found["step 0"])
    _, table = capsys.readouterr().out.split("\n\n")
    assert table in (ROOT / "docs" / "estimators.md").read_text()
    on_the_first = json.loads((ROOT / "docs" / "estimators-first.json").read_text())
    for base in (found, on_the_first):
        before, *after = (list(each["estimators"]) for each in base.values())
        assert all(each == [*estimators.ESTIMATORS, *estimators.LATER] for each in after) and after
        assert before == [name for name in after[0] if not name.startswith("KL")]  # not before


def test_the_page_on_experiments_shows_what_its_script_runs_and_makes_of_the_runs(capsys):
    known = json.loads((ROOT / "docs" / "experiments.json").read_text())
    run = [run for run in experiments.RUNS if f"{run} seed 2" in known]
    told = [claim for claim in experiments.CLAIMS if {claim.more, claim.less} <= {*run}]
    options = SimpleNamespace(keys=[], seeds=[0, 1, 2])
    experiments.show_runs(run, known, options)
    experiments.show_claims(told, known, options)
    for table in capsys.readouterr().out.split("\n\n"):
        assert table in EXPERIMENTS_PAGE and table

    def command(run):  # for two ranks, in the order of the chapters
        keys = experiments.USUAL | experiments.RUNS[run]
        keys[experiments.QUESTIONS] //= 2
        program, config = keys.pop(experiments.PROGRAM), keys.pop(experiments.CONFIG)
        if config == "config.yaml":  # whose runs shown go on for longer
            keys.pop("training.max_steps")
        return [*program, *["--config", config] * (config != "config.yaml"),
                *(f"{key}={value}" for key, value in keys.items() if key in experiments.RUNS[run])]

    shown = [parse_args(shlex.split(line)[1:]) for line in bash_of(EXPERIMENTS_PAGE)
             if "torchrun" in line]
    assert [[each.training_script, *each.training_script_args] for each in shown] == [
        command(each) for each in run if each != experiments.FIRST]
    for each in shown:
        load_config(each.training_script_args[each.training_script != "main.py":])


def test_the_configuration_for_who_comes_from_trl_is_one(tmp_path):
    page = (ROOT / "docs" / "coming-from.md").read_text()
    (tmp_path / "it.yaml").write_text(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    training = load_config(["--config", str(tmp_path / "it.yaml")]).training
    theirs = {key: float(value) for key, value in re.findall(r"(\w+)=([\d.e-]+)[,)]", page)}
    _, G = training.k_best_of_n
    assert G == theirs["num_generations"] and training.num_samples_per_step * G == (
        theirs["per_device_train_batch_size"] * theirs["gradient_accumulation_steps"])
    assert training.updates_per_batch == theirs["num_iterations"]
    assert training.max_steps * training.updates_per_batch == theirs["max_steps"]
    assert (training.max_new_gen_tokens, training.learning_rate, training.kl_beta) == (
        theirs["max_completion_length"], theirs["learning_rate"], theirs["beta"])


def test_every_other_command_is_run_somewhere():
    """By the test named here, or as the line that .ci/run is made of."""
    tested = {"pytest": "", ".ci/run": "", "examples/ask.py": "test_ask.py",
              "examples/one_step.py": "test_one_step.py",
              "examples/one_run.py": "test_one_run.py",
              "examples/exercise.py": "test_exercise.py",
              "bench/memory.py": "test_cost.py", "bench/experiments.py": "test_cost.py",
              "bench/estimators.py": "test_cost.py", "bench/pass_at_k.py": "test_cost.py",
              "bench/variants.py": "test_cost.py", "bench/sharding.py": "test_cost.py",
              "mlflow ui": "test_logger.py", "> mine.jsonl": "test_examples.py"}
    for line in BASH:
        if line not in TRAINING:
            found, = {name for name in tested if name in line}
            assert not tested[found] or found.split()[0].removeprefix("bench/") in (
                ROOT / "tests" / tested[found]).read_text()


def test_what_this_is_is_said_in_one_sentence_everywhere():
    sentence = main.__doc__.splitlines()[0]
    assert sentence.endswith("reason.")
    for name in ("README.md", "pyproject.toml", "machinery/card.md"):
        text = " ".join((ROOT / name).read_text().split())
        assert sentence.removesuffix(".") in text, name


def test_every_name_and_path_in_the_pages_exists():
    for span in set(re.findall(r"`([^`\n]+)`", PROSE)) - ELSEWHERE:
        if (re.fullmatch(r"[\w./-]+\.(py|md|yaml|sh|png|jsonl|json|txt|toml|parquet)"
                         r"|[\w./-]+/", span)
                and not span.startswith("runs/")):
            left_by_a_run = span in logger_files()
            assert left_by_a_run or (ROOT / span).exists(), span
        elif (re.fullmatch(r"[a-z]+\.[a-z_]+([=:].*)?", span)
              and span.split(".")[0] in ("training", "model", "data", "sampling", "run",
                                         "checkpoint", "validation", "logging", "task")):
            assert re.split("[=:]", span)[0] in flatten(make_config()), span
        elif re.fullmatch(r"[A-Za-z_]\w*(/(<part>|<group>))?|eval/\w+|seconds/\w+", span):
            assert re.split("[/<]", span)[-1 if "<" not in span else 0] in SOURCES, span


def logger_files():
    import logger

    return set(re.findall(r"runs/<name>/([\w.]+)", logger.__doc__))


# ---------------------------------------------------------------- one question, one step

def the_first_step(out, *arguments):
    """What becomes of the groups of this rank, beside the run."""
    groups, compare = [], main.compute_advantages

    def compare_and_tell(group, *others):
        chosen = compare(group, *others)
        groups.append([[answer.question.row["prompt"], answer.completion, answer.num_tokens,
                        answer.reward, answer.advantage, answer.is_truncated] for answer in group])
        Path(f"{out}/groups-{main.RANK}.json").write_text(json.dumps(groups))
        return chosen

    main.compute_advantages = compare_and_tell
    run_without_curves(*arguments)


@pytest.fixture(scope="module")
def first_step(tmp_path_factory):
    """Of the default, on two ranks: the groups of each, and the metrics before, of and after it.
    With fewer answers to evaluate, which changes nothing of it."""
    folder = tmp_path_factory.mktemp("first step")
    result = ranks(2, the_first_step, str(folder), "training.max_steps=1",
                   "validation.best_of_n=1", f"run.dir={folder}", "run.name=a")
    assert result.returncode == 0, result.stderr
    return (*(json.loads((folder / f"groups-{rank}.json").read_text()) for rank in (0, 1)),
            [json.loads(line) for line in (folder / "a" / "metrics.jsonl").open()])


def test_each_metric_has_its_meaning_and_no_other_has(first_step):
    page = (ROOT / "docs" / "numbers.md").read_text()
    chapter = page.split("## Every metric\n")[1].split("\n## ")[0]
    told = {name for line in re.findall(r"^- (`.*?):[ \n]", f"{chapter}\n", re.MULTILINE)
            for name in re.findall("`(.*?)`", line)} | {"loss", "learning_rate"}
    measured = {re.sub(r"(?<=reward/)(format|answer)|(?<=^eval/)(format|answer)", "<part>",
                       re.sub("eval/solved/3", "eval/solved/<group>",
                              re.sub(r"pass_at_\d+", "pass_at_<k>", key)))
                for metrics in first_step[2] for key in metrics}
    assert {name for name in measured if not name.endswith(("_low", "_high"))} - told == {"step"}
    assert told - measured == {"kl", "clipped"}  # of other relatives, tests/test_family.py


@pytest.mark.mathematics
def test_the_step_that_the_readme_goes_through_is_the_first_of_the_default(first_step):
    groups, others, (_, metrics, _) = first_step
    walk = README.split("## One question, one step\n")[1].split("\n## ")[0]

    first, (prompt, *_) = groups[0], groups[0][0]
    shown, = re.findall(r"```\n(Combine.*?)\n```", walk, re.DOTALL)
    assert shown.split() == prompt.split() and prompt.endswith("\n<think>")
    table = dict(enumerate(first, start=1))
    for line in re.findall(r"^\| ([\d, ]+) \| (.*) \| `(.*)` \| (\d+) \| (.*) \| (.*) \|$", walk,
                           re.MULTILINE):
        numbers, thinking, expression, length, reward, advantage = line
        for number in map(int, numbers.split(", ")):
            _, completion, *figures, _ = table.pop(number)
            tries = "\n".join(re.findall("`(.*?)`", thinking))
            assert completion == f"{tries}\n</think>\n<answer>{expression}</answer>"
            assert figures == pytest.approx([int(length), float(reward), float(advantage)])
    assert table == {}
    assert not any(answer[-1] for group in groups + others for answer in group)

    rewards = [round(answer[3], 6) for answer in first]
    right, wrong = rewards.count(1.1), rewards.count(0.1)
    assert f"({right} x 1.1 + {wrong} x 0.1) / 8 = {fmean(rewards):.2f}" in walk
    B, L = sum(map(len, groups + others)), 192
    assert f"B = {B} counts" in walk
    weights = {number: f"{first[number - 1][4] / (B * L):.1e}".replace("e-0", "e-")
               for number in (4, 6)}
    assert f"{first[5][4]:.2f} / (128 x 192) = {weights[6]}, each of the 31 of" in walk
    assert f"of answer 4 {weights[4]}." in walk

    def group_of(numbers):
        assert f"`{numbers}`" in walk
        asked, target = numbers.split(" = ")
        start = f"Combine the numbers {asked} into an expression that equals {target}."
        group, = [group for group in groups if group[0][0].startswith(start)]
        return group
    assert {(round(reward, 6), advantage) for *_, reward, advantage, _ in group_of(
        "7, 21, 30 = 10")} == {(0.1, 0)}
    wrong = [answer[2] for answer in group_of("29, 29, 16 = 17") if round(answer[4], 6) == -0.25]
    assert {121, 33} <= set(wrong) and "One has 121 tokens, the other 33." in walk
    assert f"{121 / 33:.1f} times less" in walk.replace("\n", " ")

    assert f"over L: {metrics['loss']:.4f} in step 1." in walk
    no_signal = sum(len({answer[4] for answer in group}) == 1 for group in groups + others)
    assert f"{no_signal} of 16 groups: `no signal {metrics['groups_without_signal']:.2f}`" in walk
    assert (f"step    1  reward {metrics['reward']:.3f}  solved {metrics['solved']:.3f}  "
            f"length {metrics['completion_length']:3.0f} ") in README


@pytest.mark.mathematics
def test_the_update_that_the_readme_shows_is_what_one_step_makes_of_it(one_rank):
    run = one_step.prepare(load_config([]))
    answers, chosen, _ = next(one_step.groups_with_signal(run, None))
    numbers = one_step.one_step(run, answers, chosen)

    def token(number, text, then):
        """The token in that answer with which `text` goes on so."""
        answer = answers[number - 1]
        texts = one_step.texts_of_tokens(run.tokenizer, answer.completion_ids)
        place = next(i for i in range(len(texts)) if "".join(texts[:i]) == text)
        assert texts[place] == then
        return float(answer.before[place].exp()), float(answer.after[place].exp())

    was, now = token(4, "56+29=85, 30*3=90 no\n", "</think>")
    assert f"in answer 4 falls from {was:.2f} to {now:.2f}" in README
    was, now = token(2, "56+30=86, 29*3=87 no\n", "5")
    assert now > was + 0.01
    was, now = token(2, "56+3", "0")
    assert now < was - 0.01
    was, now = token(1, "56+3", "=")
    assert now > was + 0.01
    assert numbers["change_as_meant"] > 0.5
