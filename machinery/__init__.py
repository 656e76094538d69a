"""What a reader of the algorithm may believe without reading it. Each file's first line says what.

Importing this package comes before everything else. It reads .env, and says what takes so long."""

import linecache
import os
import signal
import sys
from pathlib import Path

from dotenv import load_dotenv

IS_FIRST_RANK = os.environ.get("RANK", "0") == "0"
IS_A_COMMAND = Path(sys.argv[0]).name in ("main.py", "ask.py", "one_step.py")


def keep_source(file: str) -> None:
    """Lets `inspect` see the text that Python has just read, also if the file is edited while the
    imports take their time. An entry without a time is never read again."""
    lines = linecache.getlines(file)
    linecache.cache[file] = (len(lines), None, lines, file)


def on_ctrl_c() -> None:
    """From now on Ctrl-C prints one line and ends the process with 130. There is nothing to tidy
    up, because a run resumes from its newest checkpoint."""
    line = b"\nstopped by Ctrl-C"
    if Path(sys.argv[0]).name == "main.py":
        line += b"; the same command resumes what was saved"

    def end(number: int, frame: object) -> None:
        os.write(2, line + b"\n")  # Not `print`, which this may have interrupted.
        os._exit(130)

    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # With nohup it is to be ignored.
        # Python's handlers wait for the end of C code, so ranks that say nothing have none.
        signal.signal(signal.SIGINT, end if IS_FIRST_RANK else signal.SIG_DFL)


if getattr(sys.modules["__main__"], "__file__", "").endswith(".py"):
    keep_source(sys.modules["__main__"].__file__)
if IS_A_COMMAND:
    on_ctrl_c()
    if IS_FIRST_RANK:
        print("importing PyTorch and transformers, 5 to 20 seconds ...", flush=True)
# Before transformers and datasets are imported, which read HF_HUB_OFFLINE and the like only then.
load_dotenv(Path(__file__).resolve().parent.parent / ".env")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # This silences a warning about forks.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # The former name of the same setting.
    # Each slice of sampling asks for a little more memory than the slice before it has freed.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
