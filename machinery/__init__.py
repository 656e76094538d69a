"""What a reader of the algorithm may believe without reading it. Each file's first line says what.
Imports point downwards, and nothing in here learns: tests/test_house.py."""

import os
from pathlib import Path

from dotenv import load_dotenv

# Before transformers and datasets are imported: they read HF_HUB_OFFLINE and the like then.
load_dotenv(Path(__file__).resolve().parent.parent / ".env")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # silences a warning about forks
