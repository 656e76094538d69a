"""What a person sees and what MLflow keeps."""

import json
import socket
import time

import pytest
from conftest import ROOT, make_config
from test_run import SHORT

import logger
import main


def test_mlflow_gets_settings_metrics_by_step_completions_and_files(tmp_path, monkeypatch):
    import mlflow

    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.chdir(tmp_path)  # artifacts go below the working directory
    where = [f"model.name={ROOT / 'tiny' / 'model'}", f"data.dataset={ROOT / 'tiny' / 'countdown.parquet'}", f"run.dir={tmp_path}"]
    assert main.main([*SHORT, *where, "training.max_steps=2", "run.name=a", "logging.mlflow=true"]) == 0
    client = mlflow.MlflowClient(store)
    run, = client.search_runs([client.get_experiment_by_name("onefile-grpo").experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "a"
    assert run.data.params["training.seed"] == "0" and len(run.data.params) == len(main.flatten(make_config()))
    entries = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    for metric in ("reward", "eval/solved"):
        expected = [(entry["step"], entry[metric]) for entry in entries if metric in entry]
        found = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, metric)]
        assert len(found) > 1 and found == [(step, pytest.approx(value)) for step, value in expected]
    artifacts = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert artifacts >= {"config.yaml", "metrics.jsonl", "samples.jsonl", "curves.png", "summary.json", "samples"}
    table = client.download_artifacts(run.info.run_id, "samples/step-000002.json", str(tmp_path))
    with open(table) as file:
        assert "completion" in json.load(file)["columns"]


def test_an_mlflow_server_that_is_not_there_costs_one_warning_and_no_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nobody listens on the discard port
    assert main.main([*SHORT, f"run.dir={tmp_path}", "run.name=a", "logging.mlflow=true"]) == 0
    assert capsys.readouterr().out.count("warning: MLflow failed") == 1
    assert len((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()) == 5


def test_an_mlflow_server_that_goes_away_in_the_middle_costs_one_warning_and_no_training(tmp_path, monkeypatch, capsys):
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    log_metrics, calls = mlflow.log_metrics, []

    def gone_after_the_second(*arguments, **named):
        calls.append(arguments)
        if len(calls) > 2:
            raise mlflow.exceptions.MlflowException("API request to http://me:secret@server/ failed")
        log_metrics(*arguments, **named)

    monkeypatch.setattr(mlflow, "log_metrics", gone_after_the_second)
    assert main.main([*SHORT, f"run.dir={tmp_path}", "run.name=a", "logging.mlflow=true"]) == 0
    said = capsys.readouterr().out
    assert said.count("warning: MLflow") == 1 and "secret" not in said and len(calls) == 3
    assert len((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()) == 5


def test_an_mlflow_server_that_never_answers_does_not_slow_training_down(tmp_path, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections and says nothing
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setitem(logger.SECONDS_TO_END_MLFLOW, "FINISHED", 2)
        assert main.main([*SHORT, f"run.dir={tmp_path}", "run.name=a", "logging.mlflow=true", "training.max_steps=1"]) == 0
        seconds = time.time() - (tmp_path / "a" / "summary.json").stat().st_mtime
    said = capsys.readouterr().out
    assert seconds < 4 and said.count("warning: MLflow is slow to answer") == 1 and "step     1 " in said


def make_logger(tmp_path, is_terminal, active=True):
    log = logger.Logger(make_config(run__dir=str(tmp_path), run__name="a"), active)
    log.is_terminal = is_terminal
    return log


def test_progress_is_a_bar_on_a_terminal_and_rare_plain_lines_elsewhere(tmp_path, capsys, monkeypatch):
    clock = iter(range(0, 10_000, 10))  # ten seconds between any two looks at it
    monkeypatch.setattr(logger.time, "time", lambda: next(clock))

    def show(**how):
        with make_logger(tmp_path, **how).progress("sampling") as progress:
            for done in (20, 40, 60, 80, 100):
                progress(done, 100)
        return capsys.readouterr().out

    bar = show(is_terminal=True)
    assert "[########            ] sampling 40/100, 2.0/s, 30 s left" in bar and "\n" not in bar
    assert bar.rpartition("\r")[2] == "" and bar.split("\r")[-2].strip() == ""  # it wipes itself out
    assert show(is_terminal=False) == "sampling 60/100, 2.0/s, 20 s left\n"
    assert show(is_terminal=True, active=False) == ""


def test_long_completions_are_shortened_in_the_middle():
    shortened = logger._shorten("a" * 1000 + "b" * 1000)
    assert len(shortened) < 650 and shortened.startswith("aaa") and shortened.endswith("bbb") and " ... " in shortened
    assert logger._shorten("short") == "short"
