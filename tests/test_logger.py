"""What a person sees of a run, what its folder keeps of it, and what MLflow gets."""

import json
import re
import shlex
import socket
import sys
import threading
import time
from types import SimpleNamespace
from unittest.mock import MagicMock

import ask
import one_run
import pytest
from conftest import DRAW_CURVES, SMALL, make_config, read_jsonl, run_main, start
from processes import ROOT, ranks

import logger
import main
from machinery.runs import RunFolder
from machinery.settings import flatten


def make_logger(folder, capsys) -> logger.Logger:
    config = make_config(run__dir=str(folder), run__name="a")
    log = logger.Logger(config, RunFolder(config))
    log.path.mkdir()
    capsys.readouterr()
    return log


# ---------------------------------------------------------------- a run and its resumption

def run_and_draw_often(*arguments: str):
    """For `ranks`: it says when curves are drawn."""
    def draw(log):
        print(f"drawn after {len(log.history)} lines")
        DRAW_CURVES(log)

    logger.SECONDS_BETWEEN_DRAWINGS = 0
    logger.Logger._draw_curves = draw
    run_main(*arguments)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """A run of two steps, started from elsewhere. A second start takes two more steps, and finds
    lines in the log that were written after the checkpoint."""
    cwd = tmp_path_factory.mktemp("elsewhere")
    folder = cwd / "my runs" / "a"
    often = {"MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": "0.1",
             "MLFLOW_SYSTEM_METRICS_SAMPLES_BEFORE_LOGGING": "1"}
    for max_steps in (2, 4):
        result = ranks(1, run_and_draw_often, *SMALL, f"training.max_steps={max_steps}",
                       "run.dir=my runs", "validation.every=2", "sampling.top_p=0.9",
                       "logging.mlflow=true", cwd=cwd, **often)
        assert result.returncode == 0, result.stderr
        if max_steps == 2:
            for name in ("metrics.jsonl", "samples.jsonl"):
                with open(folder / name, "a") as file:
                    file.write('{"step": 3}\n{"step": 4, "rew')
    return SimpleNamespace(cwd=cwd, folder=folder, lines=result.stdout.splitlines(),
                           metrics=read_jsonl(folder / "metrics.jsonl"))


@pytest.fixture
def mlflow_run(resumed):
    """A client of MLflow's local file, and the only run in it."""
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{resumed.cwd / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("onefile-grpo")
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


def test_the_log_has_each_step_and_evaluation_once_also_of_a_resumed_run(resumed):
    evaluations = [entry["step"] for entry in resumed.metrics if "eval/solved" in entry]
    steps = [entry["step"] for entry in resumed.metrics if "reward" in entry]
    samples = [sample["step"] for sample in read_jsonl(resumed.folder / "samples.jsonl")]

    assert steps == [1, 2, 3, 4] and evaluations == [0, 2, 4]
    assert [entry["step"] for entry in resumed.metrics] == [0, 1, 2, 2, 3, 4, 4]
    assert samples == 12 * [0] + 12 * [2] + 12 * [4]


def test_curves_are_drawn_again_while_the_run_continues(resumed):
    drawn = [line for line in resumed.lines if line.startswith("drawn")]

    assert drawn == [f"drawn after {count} lines" for count in (5, 6, 7)]
    assert (resumed.folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_mlflow_gets_settings_and_metrics_of_a_resumed_run_in_one_run(resumed, mlflow_run):
    client, run = mlflow_run

    assert run.info.status == "FINISHED" and run.info.run_name == "a"
    assert len(run.data.params) == len(flatten(make_config()))
    assert run.data.params["training.k_best_of_n"] == "[4, 4]"
    for metric in ("reward", "solved", "eval/best_of_n"):
        points = client.get_metric_history(run.info.run_id, metric)
        expected = [entry for entry in resumed.metrics if metric in entry]
        assert [point.step for point in points] == [entry["step"] for entry in expected]
        values = [entry[metric] for entry in expected]
        assert [point.value for point in points] == pytest.approx(values)
    assert any(name.startswith("system/") for name in run.data.metrics)


def test_mlflow_gets_the_files_and_the_run_says_where_to_find_it(resumed, mlflow_run, monkeypatch):
    client, run = mlflow_run
    monkeypatch.chdir(resumed.cwd)  # The files lie below it.
    files = {file.path for file in client.list_artifacts(run.info.run_id)}

    assert files == set(logger.FILES)
    uri = f"sqlite:///{resumed.cwd / 'mlflow.db'}"
    assert f"MLflow: run {run.info.run_id} at {uri}" in resumed.lines


def test_the_commands_at_the_end_show_the_run_and_ask_its_best_model(
        resumed, monkeypatch, capsys):
    monkeypatch.chdir(resumed.cwd)
    look, asking = [shlex.split(line.partition(": ")[2]) for line in resumed.lines[-3:-1]]

    assert look[0] == asking[0] == sys.executable
    assert (resumed.cwd / look[1]).samefile(ROOT / "examples" / "one_run.py")
    assert (resumed.cwd / asking[1]).samefile(ROOT / "examples" / "ask.py")
    assert one_run.main(look[2:]) == 0 and (resumed.cwd / "one_run.html").exists()
    assert ask.ask(asking[2:]) == 0
    assert "my runs/a/best" in capsys.readouterr().out.splitlines()


# ---------------------------------------------------------------- MLflow fails

WITH_MLFLOW = [*SMALL, "logging.mlflow=true", "training.max_steps=1"]


@pytest.fixture
def mlflow(monkeypatch):
    """In place of the library: it notes what it is asked."""
    mlflow = MagicMock()
    mlflow.start_run.return_value.info.run_id = "7"
    mlflow.get_tracking_uri.return_value = "http://me:secret@server"
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    return mlflow


def test_a_failed_run_has_failed_in_mlflow_too(mlflow, tmp_path, monkeypatch, capsys):
    def fail(run):
        raise RuntimeError("in the first step")

    monkeypatch.setattr(main, "training_step", fail)

    assert start([*WITH_MLFLOW, f"run.dir={tmp_path}"]) == 1

    mlflow.end_run.assert_called_once_with("FAILED")


def test_a_server_that_goes_away_costs_one_warning_and_no_training(mlflow, tmp_path, capsys):
    mlflow.log_metrics.side_effect = [None, OSError("no answer of http://me:secret@server/")]

    assert start([*WITH_MLFLOW, f"run.dir={tmp_path}"]) == 0

    said = capsys.readouterr().out
    assert said.count("warning: MLflow failed (OSError") == 1 and "secret" not in said
    assert "MLflow: run 7 at http://server\n" in said
    assert mlflow.log_metrics.call_count == 2
    assert [entry["step"] for entry in read_jsonl(tmp_path / "a" / "metrics.jsonl")] == [0, 1, 1]


def test_a_server_that_never_answers_does_not_hold_training_up(tmp_path, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:  # It takes connections, in silence.
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        # Waiting for it would take longer than a test may take.
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "10000")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        monkeypatch.setitem(logger.SECONDS_TO_END_MLFLOW, "FINISHED", 1)

        assert start([*WITH_MLFLOW, f"run.dir={tmp_path}"]) == 0

    # Now that the server has gone, the thread says so. This must not happen in another test.
    for thread in threading.enumerate():
        if "_serve_mlflow" in thread.name:
            thread.join()
    said = capsys.readouterr().out
    assert said.count("warning: MLflow is slow to answer") == 1 and "step    1 " in said
    assert said.count("warning: MLflow failed") == 1


# ---------------------------------------------------------------- what is shown and kept

STEP = {"reward": 0.25, "solved": 0.125, "completion_length": 31.0, "groups_without_signal": 0.5,
        "entropy": 0.75, "updated": 1, "non_finite": 0, "seconds/sample": 2.0, "seconds/learn": 0.5}
NO_UPDATE = {"updated": 0, "entropy": None}


def evaluation(step: int, solved: float) -> dict:
    return {"step": step, "eval/solved": solved, "eval/solved_low": solved - 0.1,
            "eval/solved_high": solved + 0.2, "eval/best_of_n": solved + 0.25,
            "eval/reward": solved + 0.5, "eval/completion_length": 31.0}


@pytest.mark.parametrize(("more", "says"), [
    ({}, "no signal 0.50"),
    (NO_UPDATE, "nothing to learn from"),
    (NO_UPDATE | {"non_finite": 1}, "skipped: not finite")])
def test_a_step_is_one_line_on_the_console_and_one_in_the_log(
        more, says, tmp_path, capsys):
    log = make_logger(tmp_path, capsys)

    log.step(7, STEP | more)

    assert capsys.readouterr().out == (
        f"step    7  reward 0.250  solved 0.125  length  31   2.5 s  {says}\n")
    assert read_jsonl(log.path / "metrics.jsonl") == [{"step": 7, **STEP, **more}]


def test_an_evaluation_is_a_line_and_some_answers_and_all_answers_are_kept(
        tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    log = make_logger(tmp_path, capsys)
    log.solved = "answer"
    groups = []
    for i in range(2):
        question = main.Question({"prompt": f"What is {i}?"}, [1, 2])
        groups.append([main.Trajectory(question, [3] * (i + j + 1), f"it is {j}", j == 1,
                                       {"format": 1.0, "answer": float(i == j)}, 0.5 * i + j)
                       for j in range(2)])

    metrics = evaluation(0, 0.5)
    log.evaluation(metrics.pop("step"), metrics, groups)

    said = capsys.readouterr().out
    assert "evaluation at step 0:  solved 0.500 (0.400–0.700)  best of 4 0.750  length 31" in said
    assert "a question:\n  What is 0?\n" in said
    assert "-> reward 0.50 (format 1.00, answer 0.00)" in said
    samples = read_jsonl(log.path / "samples.jsonl")
    assert [sample["question"] for sample in samples] == [0, 0, 1, 1]
    assert samples[3] == {
        "step": 0, "question": 1, "prompt": "What is 1?", "completion": "it is 1", "solved": 1.0,
        "reward": 1.5, "reward_parts": {"format": 1.0, "answer": 1.0}, "truncated": True,
        "completion_length": 3}


@pytest.mark.parametrize(("at_step_2", "best_step"), [(0.25, 0), (0.5, 2)])
def test_the_summary_tells_the_first_the_last_and_the_best_evaluation(
        at_step_2, best_step, tmp_path, capsys):
    log = make_logger(tmp_path, capsys)
    log.history = [evaluation(0, 0.25), {"step": 1, **STEP}, {"step": 2, **STEP},
                   evaluation(2, at_step_2), {"step": 3, **STEP}, evaluation(3, 0.125)]
    (log.path / "best").mkdir()

    log.finish()

    lines = capsys.readouterr().out.splitlines()
    summary = json.loads(lines[-1])
    assert summary == json.loads((log.path / "summary.json").read_text())
    assert summary["steps"] == 3 and summary["run"] == "a"
    assert summary["first"] == log.history[0] and summary["last"] == log.history[-1]
    assert summary["best"] == evaluation(best_step, max(0.25, at_step_2))
    said = " ".join(lines)
    for gain in ("solved 0.250 -> 0.125", "reward 0.750 -> 0.625", "best of 4 0.500 -> 0.375"):
        assert gain in said
    assert ("no evaluation was better" in said) == (best_step == 0)
    assert f"the best model, of step {best_step}, is in {log.path}/best" in said


# ---------------------------------------------------------------- bars

def show_progress(log):
    with log.phase("sample"):
        for _ in log.progress(range(5)):
            time.sleep(0.11)


@pytest.mark.parametrize("columns", [20, 80])
def test_a_bar_of_rank_0_fits_the_terminal_and_wipes_itself_out(
        columns, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    log = make_logger(tmp_path, capsys)
    show_progress(log)
    assert capsys.readouterr().out == ""  # This is no terminal.
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    show_progress(log)

    said = capsys.readouterr().out
    assert re.search(r"sample [1-4]/5 \[", said)
    assert "\n" not in said and said.endswith("\r")
    # A terminal may be made narrower meanwhile.
    assert max(len(part) for part in said.split("\r")) <= min(columns - 1, 59)
    assert said.split("\r")[-2].strip() == ""
    assert 0.5 < log.seconds["sample"] < 60

    monkeypatch.setattr(logger, "RANK", 1)
    show_progress(log)
    assert capsys.readouterr().out == ""
