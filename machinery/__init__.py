"""What a reader of the algorithm may believe without reading it. Each file's first line says what.
Imports point downwards, and nothing in here learns: tests/test_house.py."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from dotenv import load_dotenv

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
while os.open(os.devnull, os.O_RDWR) < 3:  # a stream that is closed: the next file would be it
    pass
if Path(sys.argv[0]).name in ("main.py", "ask.py", "one_step.py"):
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the process: see `stop_signals`
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError, ValueError):
            print("importing PyTorch and transformers, 5 to 20 seconds ...", flush=True)
env = Path(__file__).resolve().parent.parent / ".env"
try:  # before transformers and datasets are imported: they read HF_HUB_OFFLINE and the like then
    load_dotenv(env)
except (OSError, UnicodeError) as error:
    sys.exit(f"error: {env} cannot be read as UTF-8 text ({error})")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # silences a warning about forks
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its former name, which would win
    # Each slice of sampling asks for a little more than was freed after the one before it.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
