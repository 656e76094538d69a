"""What a person sees and what MLflow keeps."""

import json
import os
import pty
import re
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from conftest import DRAW_CURVES, make_config, run_script, start
from processes import ROOT, ranks, run
from test_run import SHORT

import logger
from machinery import text
from machinery.checkpoints import RunFolder
from machinery.settings import flatten


def test_mlflow_gets_settings_metrics_by_step_completions_and_files(tmp_path, monkeypatch):
    import mlflow

    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.chdir(tmp_path)  # artifacts go below the working directory
    where = [f"model.name={ROOT / 'tiny' / 'model'}",
             f"data.dataset={ROOT / 'tiny' / 'countdown.parquet'}", f"run.dir={tmp_path}"]
    assert start([*SHORT, *where, "training.max_steps=2", "run.name=a",
                  "logging.mlflow=true"]) == 0
    client = mlflow.MlflowClient(store)
    run, = client.search_runs([client.get_experiment_by_name("onefile-grpo").experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "a"
    assert (run.data.params["training.seed"] == "0"
            and len(run.data.params) == len(flatten(make_config())))
    entries = [json.loads(line)
               for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    for metric in ("reward", "eval/solved"):
        expected = [(entry["step"], entry[metric]) for entry in entries if metric in entry]
        found = [(point.step, point.value)
                 for point in client.get_metric_history(run.info.run_id, metric)]
        assert (len(found) > 1
                and found == [(step, pytest.approx(value)) for step, value in expected])
    artifacts = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert artifacts >= {"config.yaml", "metrics.jsonl", "samples.jsonl", "curves.png",
                         "summary.json", "samples"}
    table = client.download_artifacts(run.info.run_id, "samples/step-000002.json", str(tmp_path))
    with open(table) as file:
        assert "completion" in json.load(file)["columns"]


def test_without_an_address_mlflow_writes_to_a_local_file_and_the_run_says_how_to_open_it(
        tmp_path, monkeypatch, capsys):
    import mlflow

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    assert start([*SHORT, f"run.dir={tmp_path}", "training.max_steps=0", "run.name=a",
                  "logging.mlflow=true"]) == 0
    assert (tmp_path / "mlflow.db").exists()
    how = f"mlflow ui --backend-store-uri sqlite:///{tmp_path / 'mlflow.db'}"
    said = capsys.readouterr().out
    found = re.search(r"MLflow: http://127.0.0.1:5000/#/experiments/(\d+)/runs/(\w+)", said)
    assert f"{found[0]} after `{how}` shows this run" in said
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    run = client.get_run(found[2])
    assert (run.info.experiment_id, run.info.run_name) == (found[1], "a")
    assert run.info.status == "FINISHED"


@pytest.fixture
def mlflow_server(tmp_path):
    """A real one on loopback, with a SQLite file behind it, as `mlflow ui` starts it too; its
    address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri",
               f"sqlite:///{tmp_path / 'server.db'}", "--port", str(port),
               "--host", "127.0.0.1", "--workers", "1"]
    server = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL, start_new_session=True)
    address, end = f"http://127.0.0.1:{port}", time.time() + 120
    while True:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5)
            break
        except OSError:
            assert server.poll() is None and time.time() < end
            time.sleep(0.2)
    yield address
    os.killpg(server.pid, 15)
    server.wait(timeout=30)


@pytest.mark.soak
def test_a_real_server_gets_everything_and_a_resumed_run_goes_on_in_the_same_mlflow_run(
        tmp_path, monkeypatch, capsys, mlflow_server):
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.3")
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLES_BEFORE_LOGGING", "1")
    arguments = [*SHORT, f"run.dir={tmp_path / 'runs'}", "run.name=a", "logging.mlflow=true"]
    for max_steps in (2, 4):
        assert start([*arguments, f"training.max_steps={max_steps}"]) == 0
    assert start([*arguments, "training.max_steps=4", "run.name=b",
                  f"run.resume={tmp_path / 'runs' / 'a'}"]) == 0
    said = capsys.readouterr().out
    assert "warning: MLflow" not in said
    assert said.count(f"MLflow: {mlflow_server}/#/experiments/") == 3
    client = mlflow.MlflowClient(mlflow_server)
    runs = client.search_runs([client.get_experiment_by_name("onefile-grpo").experiment_id])
    run, branch = sorted(runs, key=lambda run: run.info.run_name)
    assert (run.info.run_name, branch.info.run_name) == ("a", "b")
    assert run.info.status == "FINISHED" and run.data.params["training.k_best_of_n"] == "[4, 4]"
    entries = [json.loads(line)
               for line in (tmp_path / "runs" / "a" / "metrics.jsonl").read_text().splitlines()]
    for metric in ("reward", "solved", "eval/best_of_n"):
        found = [(point.step, pytest.approx(point.value))
                 for point in client.get_metric_history(run.info.run_id, metric)]
        assert found == [(entry["step"], entry[metric]) for entry in entries if metric in entry]
    assert ([point.step for point in client.get_metric_history(run.info.run_id, "reward")]
            == [1, 2, 3, 4])
    assert any(name.startswith("system/") for name in run.data.metrics)
    artifacts = {artifact.path for folder in (None, "samples")
                 for artifact in client.list_artifacts(run.info.run_id, folder)}
    assert artifacts >= {"config.yaml", "curves.png", "summary.json", "samples/step-000002.json",
                         "samples/step-000004.json"}
    page = urllib.request.urlopen(f"{mlflow_server}/", timeout=20).read().decode()
    assert "<title>MLflow</title>" in page


def test_an_mlflow_server_that_is_not_there_costs_one_warning_and_no_training(
        tmp_path, monkeypatch, capsys, nobody_listens):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{nobody_listens}")
    assert start([*SHORT, f"run.dir={tmp_path}", "run.name=a", "logging.mlflow=true"]) == 0
    assert capsys.readouterr().out.count("warning: MLflow failed") == 1
    assert len((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()) == 5


def test_an_mlflow_server_that_goes_away_in_the_middle_costs_one_warning_and_no_training(
        tmp_path, monkeypatch, capsys):
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    log_metrics, calls = mlflow.log_metrics, []

    def gone_after_the_second(*arguments, **named):
        calls.append(arguments)
        if len(calls) > 2:
            raise mlflow.exceptions.MlflowException(
                "API request to http://me:secret@server/ failed")
        log_metrics(*arguments, **named)

    monkeypatch.setattr(mlflow, "log_metrics", gone_after_the_second)
    assert start([*SHORT, f"run.dir={tmp_path}", "run.name=a", "logging.mlflow=true"]) == 0
    said = capsys.readouterr().out
    assert said.count("warning: MLflow") == 1 and "secret" not in said and len(calls) == 3
    assert len((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()) == 5


def test_an_mlflow_server_that_never_answers_does_not_slow_training_down(
        tmp_path, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections and says nothing
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        # whoever waited for it would wait beyond this test's time
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "10000")
        monkeypatch.setitem(logger.SECONDS_TO_END_MLFLOW, "FINISHED", 2)
        assert start([*SHORT, f"run.dir={tmp_path}", "run.name=a", "logging.mlflow=true",
                      "training.max_steps=1"]) == 0
    said = capsys.readouterr().out
    assert said.count("warning: MLflow is slow to answer") == 1 and "step    1 " in said


@pytest.mark.parametrize("error", [ModuleNotFoundError, ValueError, KeyError])
def test_whatever_mlflow_fails_with_costs_one_warning_and_no_training(
        error, tmp_path, monkeypatch, capsys):
    """Also where it cannot be imported."""
    import mlflow

    def fail(*_, **__):
        raise error("of any kind")

    monkeypatch.setattr(mlflow, "start_run", fail)
    if error is ModuleNotFoundError:
        monkeypatch.setitem(sys.modules, "mlflow", None)
    assert start([*SHORT, f"run.dir={tmp_path}", "run.name=a", "logging.mlflow=true",
                  "training.max_steps=1"]) == 0
    assert capsys.readouterr().out.count(f"warning: MLflow failed ({error.__name__}: ") == 1


def make_logger(tmp_path, is_terminal):
    config = make_config(run__dir=str(tmp_path), run__name="a")
    log = logger.Logger(config, RunFolder(config))
    log.is_terminal = is_terminal
    return log


@pytest.mark.parametrize("columns", [20, 60, 80, 200])
def test_progress_is_a_bar_on_a_terminal_and_plain_lines_elsewhere(
        columns, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(text, "SECONDS_BETWEEN_PROGRESS_LINES", 0.25)

    def show(is_terminal):
        log = make_logger(tmp_path, is_terminal)
        capsys.readouterr()
        with log.phase("sample", 100):
            for _ in range(5):
                time.sleep(0.11)
                log.advance(20)
        assert log.seconds["sample"] > 0.5
        return capsys.readouterr().out

    said = show(is_terminal=True)
    assert "sample 40/100" in said and "\n" not in said and said.endswith("\r")
    # no part of it is wider than the terminal, or than one that is made narrower meanwhile
    assert max(map(len, said.split("\r"))) <= min(columns - 1, 59)
    assert said.split("\r")[-2].strip() == ""  # it wipes itself out
    lines = show(is_terminal=False).splitlines()
    assert lines[0].startswith("sample 60/100 [") and len(lines) <= 2
    with monkeypatch.context() as patch:
        patch.setattr(logger, "RANK", 1)
        assert show(is_terminal=True) == ""
    log = make_logger(tmp_path, is_terminal=True)
    with pytest.raises(RuntimeError), log.phase("sample", 100):
        time.sleep(0.25)
        log.advance(40)
        raise RuntimeError("what is said of it must not stand behind the bar")
    assert capsys.readouterr().out.endswith("\r")


def test_a_terminal_that_does_not_know_its_size_has_bars_too(tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("LINES", raising=False)
    reader, writer = pty.openpty()
    assert os.get_terminal_size(writer) == (0, 0)
    with open(writer, "w") as screen, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", screen)
        patch.setattr(sys, "__stdout__", screen)
        log = make_logger(tmp_path, is_terminal=True)
        with log.phase("sample", 100):
            for _ in range(4):
                time.sleep(0.11)
                log.advance(20)
        said = os.read(reader, 100_000).decode()
    os.close(reader)
    assert "sample 40/100 [" in said and max(map(len, said.split("\r"))) <= 59


def test_long_completions_are_shortened_in_the_middle():
    short = text.shortened("a" * 1000 + "b" * 1000, 600)
    assert (590 < len(short) <= 600 and short.startswith("aaa") and short.endswith("bbb")
            and " ... " in short)
    assert text.shortened("short", 600) == "short"


def test_the_end_of_a_run_says_what_rose_where_the_best_model_is_and_how_to_try_it(
        tmp_path, capsys, monkeypatch):
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)  # a run may be started from anywhere
    assert start([*SHORT, "run.dir=my runs", "run.name=a", "validation.every=1"]) == 0
    said = capsys.readouterr().out.splitlines()
    summary = json.loads(said[-1])
    first, last, best = summary["first"], summary["last"], summary["best"]
    end = " ".join(said)
    for name, key in (("solved", "solved"), ("reward", "reward"), ("best of 2", "best_of_n")):
        assert f"{name} {first[f'eval/{key}']:.3f} -> {last[f'eval/{key}']:.3f}" in end
    assert ", in 3 steps and " in end
    assert said[-4] == f"the best model, of step {best['step']}, is in my runs/a/best"
    looked = run("sh", "-c", said[-3].removeprefix("look at it: "), cwd=elsewhere)
    assert looked.returncode == 0 and (elsewhere / "one_run.html").exists(), looked.stderr
    assert ("no evaluation was better than the one before training" in end) == (best["step"] == 0)
    command = said[-2].removeprefix("try it: ")
    tried = run("sh", "-c", command, cwd=elsewhere)
    assert tried.returncode == 0, tried.stderr
    assert "my runs/a/best" in tried.stdout.splitlines() and " of 4 right" in tried.stdout


def test_a_clock_that_is_set_back_changes_no_duration(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1e9 - 60 * time.monotonic())  # again and again
    times = []
    monkeypatch.setattr(logger, "SECONDS_BETWEEN_DRAWINGS", 0)
    monkeypatch.setattr(logger.Logger, "_draw_curves",
                        lambda self: (times.append(len(self.history)), DRAW_CURVES(self)))
    assert start([*SHORT, f"run.dir={tmp_path}", "run.name=a", "training.max_steps=2"]) == 0
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert 0 < summary["seconds"] < 600 and len(times) == 4
    for path in (tmp_path / "a" / "checkpoints").glob("*/state.json"):
        assert 0 < json.loads(path.read_text())["seconds"] <= summary["seconds"] + 0.1


def test_the_best_model_has_a_card_whose_lines_work(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert start([*SHORT, f"run.dir={tmp_path}", "run.name=a", "training.max_steps=1",
                  "sampling.top_p=0.9"]) == 0
    card = (tmp_path / "a" / "best" / "README.md").read_text()
    entries = [json.loads(line)
               for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert (card.startswith("---\nlibrary_name: transformers\ntags:") and "`tiny/model`" in card
            and "base_model" not in card)  # which is for hub ids
    assert (f"| eval/solved | {entries[0]['eval/solved']:.3f}" in card
            and "max_new_gen_tokens: 24" in card)
    assert "temperature=1.0, top_k=0," in card and "top_p=0.9)" in card
    (tmp_path / "use.py").write_text(card.split("```python\n")[1].split("```")[0])
    said = ranks(1, run_script, str(tmp_path / "use.py")).stdout
    assert said.startswith("Combine the numbers")


def test_curves_are_drawn_again_while_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(logger, "SECONDS_BETWEEN_DRAWINGS", 0)
    times = []
    monkeypatch.setattr(logger.Logger, "_draw_curves",
                        lambda self: (times.append(len(self.history)), DRAW_CURVES(self)))
    assert start([*SHORT, f"run.dir={tmp_path}", "run.name=a"]) == 0
    assert times == [1, 2, 3, 4, 5]  # the first evaluation, three steps, the last evaluation
    assert (tmp_path / "a" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_there_is_no_colour_with_no_color_nor_where_nobody_looks(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\033" in text.bold("solved", is_terminal=True)
    assert text.bold("solved", is_terminal=False) == "solved"
    monkeypatch.setenv("NO_COLOR", "1")
    assert text.bold("solved", is_terminal=True) == "solved"
