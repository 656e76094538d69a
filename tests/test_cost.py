"""What a step costs, in tokens that the model processes and in logits at a time. This is counted,
so it is the same on any computer. And the measurements of bench/ run."""

import json
import re
import runpy
import sys
from pathlib import Path

import experiments
import mistakes
import pytest
import runs
from conftest import (
    PROMPTS,
    VOCABULARY,
    learning_config,
    make_model,
    make_policy,
    make_trajectories,
    sample,
)
from processes import ranks

import main
from machinery import prompts, sampling
from machinery.tasks import Question


def shapes_processed(model) -> list[tuple[int, int]]:
    """The shapes, (rows, time), of what the model processes from now on."""
    shapes = []
    model.get_input_embeddings().register_forward_hook(
        lambda module, arguments, output: shapes.append(tuple(arguments[0].shape)))
    return shapes


def num_tokens(shapes: list[tuple[int, int]]) -> int:
    return sum(rows * time for rows, time in shapes)


PREFILL = (len(PROMPTS), max(map(len, PROMPTS)) - 1)  # each prompt once, without its last token


def test_sampling_processes_each_prompt_once_and_finished_answers_no_further(monkeypatch):
    monkeypatch.setattr(sampling, "TOKENS_PER_SLICE", 4)
    model = make_model()
    shapes = shapes_processed(model)

    answers = sample(model, PROMPTS, 16, training__max_new_gen_tokens=40)

    lengths = [answer.num_tokens for answer in answers]
    assert len(set(lengths)) > 5
    assert shapes[0] == PREFILL
    assert all(time == 1 for _, time in shapes[1:])
    # An answer stays to the end of its slice.
    assert sum(lengths) <= num_tokens(shapes[1:]) < sum(lengths) + 4 * len(lengths)


@pytest.mark.parametrize("beginning", [[], list(range(2, 18))], ids=["", "a shared beginning"])
def test_learning_processes_what_is_shared_once_a_micro_batch(beginning, one_rank):
    answers = make_trajectories(48, longest=40)
    for i, answer in enumerate(answers):
        answer.question = Question({}, beginning + PROMPTS[i // 16])
        answer.advantage = 1.0
    model = make_model()
    shapes = shapes_processed(model)

    main.learn(
        make_policy(model, learning_config(training__tokens_per_micro_batch=10_000)), answers)

    rows = {(*answer.prompt_ids, *answer.completion_ids[:-1]) for answer in answers}
    assert len(rows) == 47  # Two short answers to one question are alike but for their last token.
    read_once = [(1, len(beginning))] if beginning else []
    assert shapes == [*read_once, PREFILL, (47, max(answer.num_tokens for answer in answers))]


@pytest.mark.parametrize("most, times", [(40, 2), (10**6, 1)])
def test_no_more_logits_than_allowed_exist_together(most, times, one_rank, monkeypatch):
    """If there are more, they are computed in pieces, and again in the backward pass, so that none
    is kept."""
    pieces = []
    output_logits = prompts.output_logits

    def counted(model, states):
        pieces.append(len(states))
        return output_logits(model, states)

    monkeypatch.setattr(prompts, "output_logits", counted)
    monkeypatch.setattr(prompts, "MOST_LOGITS", most * VOCABULARY)
    answers = make_trajectories(32, longest=60)
    num_learned = sum(answer.num_tokens for answer in answers if answer.advantage)

    main.learn(make_policy(
        make_model(), learning_config(training__tokens_per_micro_batch=10**6)), answers)

    assert max(pieces) == min(most, num_learned) and sum(pieces) == times * num_learned


def run_script(path: str, *arguments: str):
    """For `ranks`: a script as if Python had been called with it."""
    sys.path.insert(0, str(Path(path).resolve().parent))
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


FEW = ["training.max_steps=1", "training.num_samples_per_step=2", "data.num_validation=4",
       "training.max_new_gen_tokens=16", "training.k_best_of_n=[4,4]", "validation.best_of_n=2"]


@pytest.mark.parametrize("command", [
    ["step.py", "--steps", "1", "--endless", "--shape", "small", *FEW],
    ["where.py", "run.dir={}", *FEW],
    pytest.param(["changed.py", "mistakes/punished", "run.dir={}", *FEW], marks=pytest.mark.soak),
], ids=lambda command: command[0])
def test_each_measurement_runs_and_ends_with_one_json_line(command, tmp_path):
    script, *arguments = [word.format(tmp_path) for word in command]

    result = ranks(1, run_script, f"bench/{script}", *arguments)

    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])


@pytest.mark.soak
def test_runs_of_the_small_models_are_made_again_and_compared(monkeypatch, tmp_path, capsys):
    few = dict(each.split("=") for each in FEW)
    monkeypatch.setattr(experiments, "USUAL", experiments.USUAL | few)
    monkeypatch.setattr(mistakes, "STEPS", 1)

    runs.main(["--out", str(tmp_path), "no-mean seed 1", "Dr. GRPO, G = 8 seed 1"])

    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" solved ")[0] for line in lines] == [
        "no-mean seed 1", "ours", "Dr. GRPO, G = 8 seed 1", "ours"]
    for line in lines[::2]:  # What comes after the last step isn't part of the curve.
        assert re.fullmatch(r".* solved \{0: [\d.]+, 1: [\d.]+\}", line)
