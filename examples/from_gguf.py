"""Turns a GGUF file into an ordinary model folder, which you can set `model.name` to.

    .venv/bin/python examples/from_gguf.py models/smollm2.gguf models/smollm2

The weights in such a file were rounded to a few bits each. Training begins at these values and
saves its own unrounded. To read the file you need the package gguf, which requirements.txt has.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(file: Path, folder: Path) -> None:
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    # The library could keep the weights packed in a few bits, but then they couldn't learn.
    unpack = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=unpack, dtype=torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    convert(options.file, options.folder)
    print(f"set model.name={options.folder}")
