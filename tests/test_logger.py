"""What a person sees of a run, what its folder keeps of it, and what MLflow gets."""

import json
import socket
import sys
import threading
import time
from unittest.mock import MagicMock

import pytest
from conftest import SMALL, make_config, read_jsonl, run_folder, run_main, start
from processes import ranks

import logger
import main
from machinery.settings import flatten

DRAW_CURVES = logger.Logger._draw_curves  # Each test begins without it.


def make_logger(folder, capsys, **keys) -> logger.Logger:
    config = make_config(run__dir=str(folder), run__name="a", **keys)
    log = logger.Logger(config, run_folder(config))
    log.path.mkdir()
    capsys.readouterr()
    return log


# ---------------------------------------------------------------- MLflow

WITH_MLFLOW = [*SMALL, "logging.mlflow=true", "training.max_steps=1"]


def test_mlflow_gets_settings_metrics_and_files_of_a_resumed_run_in_one_run(tmp_path, monkeypatch):
    """Started from a folder with a space. Only the first start looks at the first step."""
    import mlflow

    monkeypatch.chdir(tmp_path)  # The database and the files lie below it.
    often = {"MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": "0.1",
             "MLFLOW_SYSTEM_METRICS_SAMPLES_BEFORE_LOGGING": "1"}
    for max_steps in (1, 3):
        result = ranks(1, run_main, *WITH_MLFLOW, f"training.max_steps={max_steps}",
                       "run.dir=my runs", cwd=tmp_path, **often)
        assert result.returncode == 0, result.stderr
        assert ("sampler and policy differ" in result.stdout) == (max_steps == 1)

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("onefile-grpo")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "a"
    assert f"MLflow: run {run.info.run_id} at {uri}\n" in result.stdout
    assert len(run.data.params) == len(flatten(make_config()))
    assert run.data.params["training.k_best_of_n"] == "[4, 4]"
    entries = read_jsonl(tmp_path / "my runs" / "a" / "metrics.jsonl")
    for metric in ("reward", "eval/best_of_n"):
        points = client.get_metric_history(run.info.run_id, metric)
        expected = [(entry["step"], entry[metric]) for entry in entries if metric in entry]
        assert [(point.step, pytest.approx(point.value)) for point in points] == expected
    assert any(name.startswith("system/") for name in run.data.metrics)
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert files == set(logger.FILES)


def test_a_failed_run_has_failed_in_mlflow_too(tmp_path, monkeypatch, capsys):
    def fail(run):
        raise RuntimeError("in the first step")

    mlflow = MagicMock()  # It notes what it is asked.
    mlflow.start_run.return_value.info.run_id = "7"
    mlflow.get_tracking_uri.return_value = "http://server"
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setattr(main, "training_step", fail)

    assert start([*WITH_MLFLOW, f"run.dir={tmp_path}"]) == 1

    mlflow.end_run.assert_called_once_with("FAILED")


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
        "entropy": 0.75, "updated": 1, "non_finite": 0, "tokens": 500.0}
SECONDS = {"sample": 1.25, "score": 0.0, "learn": 0.5, "measure": 0.25, "save": 0.5}
NO_UPDATE = {"updated": 0, "entropy": None}


@pytest.mark.parametrize(("more", "says"), [
    ({}, "no signal 0.50"),
    (NO_UPDATE, "nothing to learn from"),
    (NO_UPDATE | {"non_finite": 1}, "gradient not finite")])
def test_a_step_is_one_line_on_the_console_and_one_in_the_log(
        more, says, tmp_path, capsys):
    log = make_logger(tmp_path, capsys)
    log.seconds = dict(SECONDS)

    log.step(7, STEP | more)

    assert capsys.readouterr().out == (
        f"step    7  reward 0.250  solved 0.125  length  31   2.5 s  {says}\n")
    seconds = {f"seconds/{name}": value for name, value in SECONDS.items()}
    expected = {"step": 7, **STEP, **more, **seconds, "tokens_per_second": 200.0}
    assert read_jsonl(log.path / "metrics.jsonl") == [expected]
    assert not log.seconds  # The next step begins at 0.


def test_the_curves_leave_out_what_was_not_finite(tmp_path, capsys):
    log = make_logger(tmp_path, capsys, training__learning_type="distill",
                      training__teacher="tiny/model")
    log.history = [{"step": 1, "kl": None}, {"step": 2, "kl": 0.5}]

    DRAW_CURVES(log)

    assert (log.path / "curves.png").exists()


def test_two_rollouts_in_a_step_add_up(tmp_path, capsys):
    log = make_logger(tmp_path, capsys)
    started = time.perf_counter()
    for _ in range(2):
        with log.phase("sample"):
            time.sleep(0.05)
    log.step(7, STEP)
    stopwatch = time.perf_counter() - started

    [entry] = read_jsonl(log.path / "metrics.jsonl")
    assert 0.1 <= entry["seconds/sample"] <= stopwatch


def test_the_seconds_of_an_evaluation_belong_to_no_step(tmp_path, capsys):
    log = make_logger(tmp_path, capsys)
    metrics = {"eval/solved": 0.5, "eval/solved_low": 0.25, "eval/solved_high": 0.75,
               "eval/best_of_n": 0.5, "eval/completion_length": 9.0}
    log.seconds = {"evaluate": 50.0, "score": 40.0}  # Its answers are scored, too.
    log.evaluation(6, metrics, [])
    log.seconds["sample"] = 1.0
    log.step(7, STEP)

    *_, step = read_jsonl(log.path / "metrics.jsonl")
    assert step["seconds/score"] == 0.0 and step["tokens_per_second"] == 500.0


@pytest.mark.parametrize(("hours_so_far", "says"), [
    (0.5, "  about 0 h 50 min left\n"), (3, "  about 5 h 0 min left\n"), (0.01, "")])
def test_a_long_run_says_how_much_time_is_left(
        hours_so_far, says, tmp_path, capsys, monkeypatch):
    log = make_logger(tmp_path, capsys, training__max_steps=50)
    with monkeypatch.context() as patch:
        patch.setattr(logger, "LONG", -1)
        for step in (18, 19, 20):
            log.seconds = dict(SECONDS)
            log.step(step, STEP)
            # The first step of a start doesn't count, and only the second one tells.
            assert (" left" in capsys.readouterr().out) == (step == 19)
    log.first_step_ended = time.monotonic() - 3600 * hours_so_far
    log.steps_done = 30  # Twelve steps have been timed, and 20 are left.

    log._tell_of_time_left()

    assert capsys.readouterr().out == says


def evaluation(step: int, solved: float) -> dict:
    return {"step": step, "eval/solved": solved, "eval/best_of_n": solved + 0.25,
            "eval/reward": solved + 0.5}


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
    assert f"the best model, from step {best_step}, is in {log.path}/best" in said
