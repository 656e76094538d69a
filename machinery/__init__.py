"""What a reader of the algorithm can take on trust. Each file's first line says what it's about.

This package is imported before everything else: it reads .env, and says what's taking so long."""

import linecache
import os
import signal
import sys
from pathlib import Path

from dotenv import load_dotenv

if sys.platform == "win32":
    sys.exit("error: Windows lacks what this uses to share work and to lock files. Run it in WSL")

IS_FIRST_RANK = os.environ.get("RANK", "0") == "0"
IS_A_COMMAND = Path(sys.argv[0]).name in ("main.py", "ask.py", "one_step.py")


def keep_source(file: str) -> None:
    """Lets `inspect` see the source that Python has just read, even if the file is edited while
    the imports are running. An entry without a time is never read again."""
    lines = linecache.getlines(file)
    linecache.cache[file] = (len(lines), None, lines, file)


def on_ctrl_c() -> None:
    """From now on Ctrl-C prints one line and exits with code 130. There's nothing to tidy up,
    because a run resumes from its newest checkpoint."""
    line = b"\nstopped by Ctrl-C"
    if Path(sys.argv[0]).name == "main.py":
        line += b"; run the same command again to resume from the newest checkpoint"

    def end(number: int, frame: object) -> None:
        os.write(2, line + b"\n")  # Not `print`, which this may have interrupted.
        os._exit(130)

    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # nohup wants it ignored.
        # Python's handlers wait for C code to return, so ranks that say nothing have none.
        signal.signal(signal.SIGINT, end if IS_FIRST_RANK else signal.SIG_DFL)


if getattr(sys.modules["__main__"], "__file__", "").endswith(".py"):
    keep_source(sys.modules["__main__"].__file__)
if IS_A_COMMAND:
    on_ctrl_c()
    if IS_FIRST_RANK:
        print("importing PyTorch and transformers (takes 5 to 20 seconds) ...", flush=True)
# Before transformers and datasets are imported: only then do they read HF_HUB_OFFLINE and the like.
load_dotenv(Path(__file__).resolve().parent.parent / ".env")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # This silences a warning about forks.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the old name of the same setting
    # Each slice of sampling asks for a little more memory than the one before it has freed.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
