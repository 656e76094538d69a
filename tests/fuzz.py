"""main.py, fed at random: odd settings, damaged folders, bad tasks, signals, poor alphabets.
Whatever it gets, a start must end soon, with a summary or in one line that says why, or where the
task is the user's with Python's own error: see `judge`.

A case is a pure function of (seed, number), as long as config.yaml has the same keys:
`python tests/fuzz.py --seed 7 --case 123` repeats one and shows all of it.
`python tests/fuzz.py --seed 7 --seconds 3600 --workers 2` goes through cases until the time is up,
prints a line for each that is wrong and at the end one of JSON. What wrong cases have left is kept,
but for weights."""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

# As in conftest.py, which only ranks may import: it imports main.py, and that reads RANK.
os.environ |= {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}

import yaml
from processes import ROOT, ranks

SECONDS, LONGEST, TRACEBACK = 60, 620, "Traceback (most recent call last)"
CONTROL = re.compile(r".{,30}[\x00-\x09\x0b\x0c\x0e-\x1f\x7f-\x9f].{,9}")
DEFAULTS = {f"{section}.{key}": value for section, keys in yaml.safe_load(
    (ROOT / "config.yaml").read_text()).items() for key, value in keys.items()}


def split(text: str) -> list[str]:
    return [each.strip() for each in text.split(" | ")]


def pairs(text: str) -> dict[str, str]:
    return dict(each.split("=", 1) for each in text.split())


# ---------------------------------------------------------------- what cases are made of

SMALL = pairs("""training.max_new_gen_tokens=40 training.num_samples_per_step=2 data.max_rows=200
    training.k_best_of_n=[4,4] data.num_validation=6 validation.best_of_n=2 training.seed=1
    training.learning_rate=0.001 training.max_steps=2 run.name=a""")
SIL = pairs("training.learning_type=sil training.k_best_of_n=[2,4]")
# A large legal one would make a run long, not wrong.
COUNTS = split("training.max_steps | training.num_samples_per_step | training.updates_per_batch "
               "| training.refill | training.k_best_of_n | validation.best_of_n")
NUMBERS = split("1e-40 | 1.0e-40 | 1e-30 | 1e-8 | 0.5 | 1 | 2 | 1e10 | 1e30 | 1e300 | 1.0e+300")
LEGAL = {bool: ["true", "false"], int: list("1235"), float: NUMBERS} | {
    key: text.split("|") for key, text in pairs("""model.precision=mixed|bfloat16|float32
    model.attention=eager|sdpa|x model.lora_targets=[q_proj]|[lm_head]|[norm]|[]
    training.learning_type=sil|grpo training.scale_rewards=group|mean training.kl_in=loss
    training.clip=[1e30,1e30]|[.2,.2] training.ratio=sequence|cispo
    training.loss_normalizer=tokens|sequence training.k_best_of_n=[2,2]|[3,3]|[1,2]
    training.adam_betas=[0,0]|[1e-40,1e-40]|[0.9999,0.9999999999999999] data.prompt_style=chat
    task.reward_weights={"answer":1}|{"answer":1e308}|{"format":-1e308} run.name=b|auto""").items()}
PLACES = split("""tiny/modle | "" | . | .. | tiny | tiny/model/config.json | main.py | README.md | ~
     | countdown.py | examples/gsm8k.py | examples/gsm8k.jsonl | /dev/null | /etc/passwd | gpt2
     | a/b | empty.jsonl | numbers.jsonl | folder.py | dangling | x y""")
TEXTS = ["", " ", "a", ".", "..", "-", "\U0001f99c", "\u05e9\u202eabc", "Z\u0334a\u035d", "\0",
         "\ud800", "a\nb", "a\rb", "\x1b[31mred", "\x07\x08\x7f", "\x85\u2028", "x" * 100_000,
         "\u00e9" * 200, "%s {0} {} \\", "'; \" `", "\U0001f99c" * 50_000, "error: a\nerror: b"]
ODD = [*split("""true | null |  | [] | [1] | [[1, [2]]] | {} | {a: 1} | {a: {b: [c]}} | '7' | -1
     | '1e-3' | 0 | 0.5 | 7 | 1e308 | -1e308 | .nan | .inf | -.inf | 2024 | on | 2024-01-01 | 1:30
     | 2024-01-01 10:00:00 | 0x10 | 017 | 1_000 | = | << | {<<: 1} | !!python/object:os.system {}
     | !!binary aGk= | !!binary x | !!set {a, b} | !!int x | !!timestamp x | &a [*a] | &a {x: *a}
     | *a | &a | ? [a] | {? [a] : 1} | [a | { | a: b: c | @a | `a` | %a | ! | [1, 2] | [1e30, 1e30]
     | [true, 1] | [1, 2, 3] | # a | [[2], [2]] | ['2', '2'] | {answer: .nan} | [null, null]"""),
       "- a\n- b", "--- 1\n--- 2", "\t1", "\udcff", "9" * 31, "9" * 400, "9" * 5000,
       "[" * 3000 + "]" * 3000, "[" + ", ".join(f"&{b} [{', '.join([a] * 10)}]" for a, b in zip(
           ("x", "*a", "*b", "*c"), "abcd")) + "]"]
STRAY = [*split("""training.learning_rat=1 | =1 | .=1 | training=1 | training.=1 | .seed=1 |  | --=1
     | training.seed | --config | --config= | --confg=x | -x | -- | training.seed.x=1 | a=b=c | []=1
     | TRAINING.SEED=1 | @x | --config=."""), " ", " training.seed = 3", "\U0001f99c.\u05e9=1",
         "\n=1", "\udcff=1", "x" * 100_000, "x" * 100_000 + "=1", "\x1b[31m=1"]
FILES = [b"\xff\xfe\0", b"\t", "training: {seed: 1}".encode("utf-16"), b"{" * 3000, b"a: {b: \xe9}",
         b"training: {seed: 1}\0", b"\xef\xbb\xbftraining: {seed: 1}", b"run: {name: '\xc2\x85'}",
         b"training: {%s: 1}" % (b"x" * 100_000), *(each.replace("\\n", "\n").encode() for each in
         split(r""" | - 1 | 1 | training: 1 | training: | ? [a] : {b: 1} | 1: {2: 3} | {} | # a
             | training: {? [a] : 1} | null: {null: 1} | a: &a {x: *a} | a.b: 1 | training: {}
             | training:\n  seed: 1\n  seed: 2 | training: {seed: 1}\ntraining: {seed: 2}"""))]
TASK = r"""import asyncio, faulthandler, fractions, math, numpy, os, signal, sys, torch
class Mute(Exception): __str__ = None
def forever(): return forever()
calls = []
def load(dataset, max_rows):
    rows = [{"prompt": f"Count to {i}.", "number": i, "deep": [[]]} for i in range(40)]
    @load
    return rows
def reward_function(completion, row):
    calls.append(completion)
    good = dict.fromkeys(REWARD_WEIGHTS, len(completion) % 3 / 2)
    @reward
    return good
REWARD_WEIGHTS = @weights
SOLVED = @solved
@chat
@top
"""
PARTS = {slot: split(text) for slot, text in {  # the first of each is good
    "top": " | LEAVE | LEAVE | LEAVE | def | \0 | load = VALUE | reward_function = VALUE",
    "load": """ | LEAVE | LEAVE | LEAVE | return VALUE | return iter(rows) | return rows[:1]
     | rows[7] = VALUE | rows[7]['prompt'] = VALUE | for row in rows: row['prompt'] = VALUE
     | del rows[7]['prompt'] | rows[7]['problem'] = VALUE | for row in rows: row['group'] = VALUE
     | for row in rows: row['problem'] = VALUE | for row in rows: row['more'] = VALUE""",
    "reward": """ | LEAVE | if WHEN: LEAVE | if WHEN: LEAVE | if WHEN: LEAVE | return VALUE
     | row['deep'][0].append(1); good['answer'] = float(len(row['deep'][0]))
     | good = {name: 2 * value - 1 for name, value in good.items()}
     | return dict.fromkeys(good, VALUE) | if len(calls) % 2: return dict.fromkeys(good, VALUE)
     | if WHEN: return dict.fromkeys(good, VALUE) | good[VALUE] = 1.0 | good['form'] = VALUE
     | good.popitem() | row.clear() | row['prompt'] = VALUE | if WHEN: return VALUE""",
    "weights": """{'answer': 1.0, 'form': 0.5} | VALUE | {VALUE: 1.0} | {'answer': VALUE}
     | {'answer': 1e308, 'form': 1e308} | {'answer': 1.0, VALUE: 0.5} | {NAME: 1.0}""",
    "solved": "next(iter(REWARD_WEIGHTS or ['answer'])) | VALUE | NAME | 3; del SOLVED",
    "chat": " | SYSTEM_MESSAGE = VALUE | REPLY_START = VALUE"}.items()}
WORDS = {word: split(text) for word, text in {
    "LEAVE": r"""raise ValueError("x" * 100_000) | raise ValueError("line\n" * 50) | raise Mute
     | raise ValueError("\x1b[31mred\x07") | raise ValueError("\ud800") | forever() | raise KeyError
     | raise BaseException("end") | raise KeyboardInterrupt | raise GeneratorExit | input()
     | raise MemoryError | raise RecursionError | raise SystemExit | sys.exit(0) | sys.exit(3)
     | sys.exit("text") | sys.exit("line\n" * 50) | os.abort()
     | faulthandler._sigsegv() | os.kill(os.getpid(), signal.SIGTERM) | print("x\n" * 100_000)
     | print("\ud800") | raise asyncio.CancelledError | assert 0
     | raise ExceptionGroup("many", [ValueError("a")]) | raise OSError(28, "gloo") | import aaa""",
    "VALUE": r"""None | "" | "text" | "\ud800" | "x" * 100_000 | "\x1b[2J\x07" | "a\nb" | b"x" | 3
     | [] | [1] | {} | lambda: 0 | object() | math.nan | math.inf | 1e308 | -1e308 | 1e-320 | "1.0"
     | 10 ** 400 | 1j | numpy.float32(1) | torch.tensor(1.0) | torch.ones(2) | fractions.Fraction(1)
     | (each for each in "ab") | "nan" | Mute() | sys | True""",
    "NAME": r"""'reward' | 'solved' | 'step' | 'prompt' | 'a/b' | '\U0001f99c' | 'loss' | 'updated'
     | 'answer_std' | 'seconds/sample'""",
    "WHEN": """len(calls) > 20 | len(calls) > 3 and os.environ['RANK'] == '0'
     | len(calls) > 9 and os.environ['RANK'] == '1'"""}.items()}
STREAMS = {  # what a shell, or PYTHONIOENCODING, can make of stdout
    "a terminal": lambda: (pty := os.openpty(), subprocess.Popen(
        ["cat"], stdin=pty[0], stderr=subprocess.DEVNULL), os.dup2(pty[1], 1),
        setattr(sys, "stdout", os.fdopen(1, "w", closefd=False))),
    "ascii": lambda: sys.stdout.reconfigure(encoding="ascii", errors="strict"),
    "latin-1": lambda: sys.stdout.reconfigure(encoding="latin-1", errors="strict")}


def value(draw, key: str, here: Path) -> str:
    """YAML for a key; more often than not it is legal, or a path."""
    kind, original = draw.random(), ROOT / str(DEFAULTS[key])
    if kind < 0.2 and key in ("model.name", "data.dataset"):
        copy = here / f"own_{original.name}"
        (shutil.copytree if original.is_dir() else shutil.copyfile)(original, copy)
        damage(copy, draw)
        return copy.name
    if kind < 0.4 and key in ("model.name", "data.dataset", "task.name", "run.dir", "run.resume"):
        return draw.choice(PLACES)
    legal = LEGAL.get(key) or LEGAL.get(type(DEFAULTS[key]), ["1", "3", "100", "1e-40"])
    text = draw.choice(legal if kind < 0.75 else ODD)
    if kind > 0.88:
        text = json.dumps(draw.choice(TEXTS), ensure_ascii=draw.random() < 0.3)
    too_many = key in COUNTS and re.search(r"\d\d|[4-9]", text)
    return value(draw, key, here) if too_many else text


def damage(path: Path, draw) -> str:
    """One kind of damage to a file or folder somewhere inside, or to `path` itself: what it was."""
    while path.is_dir() and not path.is_symlink() and (inside := sorted(path.iterdir())):
        path = draw.choice(inside)
        if draw.random() < 0.2:
            break
    if path.is_file() and draw.random() < 0.6:
        way = draw.randrange(9)
        data, other = path.read_bytes(), draw.choice([b"{}", b"[]", b"null", b"3", b"\xff", b'"'])
        # not by `randrange`: its draws depend on the size, and that on how long things took
        at, lines = int(draw.random() * (len(data) + 1)), data.splitlines(keepends=True) or [b""]
        line = int(draw.random() * len(lines))
        before, after = b"".join(lines[:line]), b"".join(lines[line + 1:])
        path.write_bytes([
            b"", data[:at], data[at:], draw.randbytes(999), data[:at] + b"8" + data[at + 1:],
            data + b"\0" * 99, before + after, before + other + b"\n" + after, other][way])
        return f"{path.name}: other contents, the {way}th way; "
    way = draw.choice(["nothing", "a folder", "a file", "a dangling link", "unfinished"])
    if way == "unfinished":  # as a process leaves it that is killed while it saves
        path = path.with_name(way)
    elif path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if way == "a dangling link":
        path.symlink_to("nowhere")
    elif way == "a file":
        path.touch()
    elif way != "nothing" and not os.path.lexists(path):
        (path / "more").mkdir(parents=True)
    return f"{path.name}: {way} in its place; "


# ---------------------------------------------------------------- the kinds of cases

def settings(case) -> None:
    draw, here, more = case.draw, case.here, []
    (here / "folder.py").mkdir()
    (here / "dangling").symlink_to("nowhere")
    for name, content in (("empty.jsonl", b""), ("numbers.jsonl", b"1\n2\n"),
                          ("file.yaml", draw.choice(FILES))):
        (here / name).write_bytes(content)
    keys = SMALL | draw.choice([{}, {}, SIL])
    chosen = draw.sample([*DEFAULTS], draw.choice([1, 1, 2, 3]))
    new = {key: value(draw, key, here) for key in chosen}
    case.about = f"{new}"
    if draw.random() < 0.3:
        lines = ["{}:\n  {}: {}\n".format(*key.split("."), text) for key, text in new.items()]
        (here / "more.yaml").write_bytes("".join(lines).encode(errors="surrogatepass"))
        keys = {key: text for key, text in keys.items() if key not in new}
        new, more = {}, ["--config", "more.yaml"]
    more += draw.choices([[], ["--config", "file.yaml"], [draw.choice(STRAY)]], [12, 1, 1])[0]
    case.about += f" {more}"
    case.start(keys | new, *more)


def damaged(case) -> None:
    draw, keys, steps = case.draw, SMALL | case.draw.choice([{}, SIL]), case.draw.choice([2, 3])
    case.start(keys | {"training.max_steps": steps}, has_to_end=True)
    for _ in range(draw.randint(1, 3)):
        case.about += damage(case.here / "runs" / "a" / draw.choice([".", "checkpoints"]), draw)
    case.start(keys | {"training.max_steps": steps + draw.choice([0, 1, 1, 2])})


def task(case) -> None:
    draw, parts = case.draw, {slot: choices[0] for slot, choices in PARTS.items()}
    for slot in draw.sample([*PARTS], draw.choice([0, 1, 1, 1, 2])):
        parts[slot] = draw.choice(PARTS[slot][1:])
        for word, choices in WORDS.items():
            parts[slot] = parts[slot].replace(word, draw.choice(choices))
        case.about += f"{slot}: {parts[slot]}; "
    (case.here / "mine.py").write_text(re.sub("@([a-z]+)", lambda slot: parts[slot[1]], TASK))
    style = "chat" if parts["chat"] else "base"
    case.start(SMALL | {"data.prompt_style": style, "task.name": "mine.py"}, may_die=True)


def changed(case) -> None:
    """What a run stands on, before it goes on."""
    draw, here = case.draw, case.here
    shutil.copytree(ROOT / "tiny" / "model", here / "model")
    shutil.copyfile(ROOT / "examples" / "gsm8k.jsonl", here / "rows.jsonl")
    shutil.copyfile(ROOT / "examples" / "gsm8k.py", here / "mine.py")
    shutil.copyfile(ROOT / "examples" / "rewards.py", here / "rewards.py")
    keys = SMALL | {"model.name": "model", "data.dataset": "rows.jsonl", "task.name": "mine.py",
                    "data.num_validation": "3"} | draw.choice([{}, {"model.lora_rank": "2"}])
    case.start(keys, has_to_end=True)
    file = here / draw.choice(["model", "rows.jsonl", "mine.py"])
    case.about = damage(file, draw)
    case.start(keys | {"training.max_steps": "3"}, may_die=file.name != "model")


def signals(case) -> None:
    draw, keys = case.draw, SMALL | {"training.max_steps": "3"}
    kinds = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL]
    for _ in range(draw.randint(1, 2)):
        strikes = [(draw.randrange(case.num_ranks), draw.uniform(0, 1.5), draw.choice(kinds))
                   for _ in range(draw.randint(1, 2))]
        case.about += f"{strikes} "
        case.start(keys, strikes=strikes, may_die=True)
    case.start(keys, has_to_end=True)
    lines = (case.here / "runs" / "a" / "metrics.jsonl").read_text().splitlines()
    steps = [entry["step"] for entry in map(json.loads, lines) if "reward" in entry]
    if steps != [1, 2, 3]:
        case.wrong.append(f"metrics.jsonl has the steps {steps}")


def streams(case) -> None:
    case.about = stream = case.draw.choice([*STREAMS])
    name = case.draw.choice(["a", "\u05e9", "\u00e9"])
    case.start(SMALL | {"run.name": name}, stream=stream, has_to_end=True)


KINDS = {settings: 4, task: 4, damaged: 2, changed: 2, signals: 2, streams: 1}  # how often


# ---------------------------------------------------------------- a case, and many

def work(stream: str | None, strikes: list, draws: bool, arguments: list[str]) -> None:
    """For `ranks`: `python main.py`, struck by signals. Does not return."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.argv = ["main.py"]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal
    if stream:
        STREAMS[stream]()
    from conftest import draw_nothing, run_main  # and not before

    import logger

    if not draws:
        logger.Logger._draw_curves = draw_nothing
    for rank, seconds, number in strikes:
        if rank == int(os.environ["RANK"]):
            strike = threading.Timer(seconds, os.kill, (os.getpid(), number))
            strike.daemon = True
            strike.start()
    run_main(*arguments)


class Case:
    def __init__(self, seed: int, number: int, kept: Path):
        self.draw, self.about = random.Random(f"{seed} {number}"), ""
        self.kind, = self.draw.choices([*KINDS], [*KINDS.values()])
        several = self.draw.random() < 0.1 and self.kind in (settings, task, signals)
        self.num_ranks = 2 if several else 1
        self.folder, self.wrong, self.codes = kept / f"case-{number}", [], []
        self.here = self.folder / "here"  # what is written to `..` is inside the folder too
        self.here.mkdir(parents=True)

    def start(self, keys: dict, *more: str, stream=None, strikes=(), may_die=False,
              has_to_end=False) -> None:
        for old in self.folder.rglob("summary.json"):
            with contextlib.suppress(OSError):
                os.utime(old, (0, 0))  # so that a new one is known
        arguments = [*(f"{key}={text}" for key, text in keys.items()), *more]
        result = ranks(self.num_ranks, work, stream, strikes, self.draw.random() < 0.1, arguments,
                       cwd=self.here)
        self.codes.append(result.returncode)
        said = f"--- stdout\n{result.stdout}\n--- stderr\n{result.stderr}"
        (self.folder / f"start-{len(self.codes)}.txt").write_text(
            f"{arguments!a}\nexit codes {result.codes}\n{said}")
        self.wrong += judge(result, self.folder, may_die)
        if has_to_end and result.returncode:
            raise AssertionError(f"exit code {result.returncode} where all was legal")


def judge(result, folder: Path, may_die: bool) -> list[str]:
    """What is wrong with how a start has ended."""
    screen, wrong, code = result.stdout + result.stderr, [], result.returncode
    is_pythons = TRACEBACK in screen
    if is_pythons and not may_die and "Fatal Python error" not in screen:
        after = screen.rpartition(TRACEBACK)[2]
        frames = re.findall(rf'File "{ROOT}/(?!tests)(\S+", line \d+)', after)
        error = re.findall(r"\n(\S.{,150})", after)[:1]
        wrong.append(f"Traceback: {error} {frames[-1:]}")
    errors = [line for line in screen.split("\n") if line.startswith("error: ")]
    wrong += [f"a line of {len(line)} characters: {line[:150]}" for line in errors
              if len(line) > LONGEST]
    if len(errors) > 1:
        wrong.append(f"{len(errors)} lines of errors")
    control = CONTROL.search(screen.replace("\033[1m", "").replace("\033[0m", ""))
    if control and not is_pythons:
        wrong.append(f"a control character: {control[0]!r}")
    if code < 0 and not may_die:
        wrong.append(f"it died of {signal.Signals(-code).name}")
    told = is_pythons or re.search("^(error: |stopped by)", screen, re.MULTILINE)
    if code > 0 and not told and not (may_die and min(result.codes) < 0):
        wrong.append(f"exit code {code}, and no line says why: {screen[-150:]!r}")
    if code == 0 and not any(map(is_new_and_complete, folder.rglob("summary.json"))):
        wrong.append("exit code 0, and no new and complete summary.json")
    return wrong


def is_new_and_complete(summary: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        config = yaml.safe_load(summary.with_name("config.yaml").read_text())
        steps = json.loads(summary.read_text())["steps"]
        return summary.stat().st_mtime > 0 and steps == config["training"]["max_steps"]
    return False


def too_long(*_):
    raise TimeoutError(f"not ended after {SECONDS} s")


def run(number: int, seed: int, kept: Path, end: float | None) -> dict | None:
    """A case, unless it is too late for one. Without an end its folder is kept."""
    if end and time.time() > end:
        return None
    case, started = Case(seed, number, kept), time.time()
    signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:  # what is printed: see `stacks_on_the_way_out`
        with open(case.folder / "stacks.txt", "w") as file, contextlib.redirect_stdout(file):
            case.kind(case)
            signal.setitimer(signal.ITIMER_REAL, 0)
    except (AssertionError, OSError, ValueError) as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        case.wrong.append(str(error))
    for weights in case.folder.rglob("*.safetensors"):
        if weights.is_file():
            weights.unlink()
    if end and not case.wrong:
        shutil.rmtree(case.folder)
    return {"case": number, "kind": case.kind.__name__, "ranks": case.num_ranks,
            "codes": case.codes, "seconds": round(time.time() - started, 1),
            "about": case.about[:300], "wrong": case.wrong, "folder": str(case.folder)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("seed", 0), ("case", None), ("cases", 20_000), ("seconds", 10**9),
                          ("workers", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    seed, one, kept = options.seed, options.case, Path(tempfile.mkdtemp(prefix="fuzz-"))
    os.environ["HF_HOME"] = str(kept / "hub")  # nothing downloaded before is in there
    numbers, end = ([one], None) if one is not None else (
        range(options.cases), time.time() + options.seconds)
    records = []
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
        for record in filter(None, pool.map(partial(run, seed=seed, kept=kept, end=end), numbers)):
            records.append(record)
            if record["wrong"]:
                print(*(f"{key} {text!r}" for key, text in {"seed": seed, **record}.items()),
                      sep=", ", flush=True)
    for path in [] if end else sorted(kept.glob("case-*/*.txt")):
        print(f"---------- {path}\n{path.read_text()}")
    if end and not any(record["wrong"] for record in records):
        shutil.rmtree(kept)
    print(json.dumps({
        "seed": seed, "cases": Counter(record["kind"] for record in records),
        "exit codes": Counter(f"{record['kind']} {code}" for record in records
                              for code in record["codes"]),
        "slowest": max(records, key=lambda record: record["seconds"], default=None),
        "wrong": [record["case"] for record in records if record["wrong"]]}))
    return any(record["wrong"] for record in records)


if __name__ == "__main__":
    sys.exit(main())
