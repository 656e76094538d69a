"""The card of a saved model: what it came from, how well it does, and how to use it."""

import json
from pathlib import Path
from typing import Any

import yaml

from machinery.disk import beside_main
from machinery.model import where_it_is
from machinery.settings import Section
from machinery.text import with_interval

# It is read at the start, because another version may replace it while a run goes on.
TEMPLATE = Path(__file__).with_name("card.md").read_text(encoding="utf-8")


def model_card(run: Any, before: dict[str, float] | None, now: dict[str, float]) -> str:
    """Returns the text of README.md. `before` is the evaluation before training, if there was one,
    and `now` is the evaluation of this model."""
    config = run.config
    base_model = ""
    if not Path(beside_main(config.model.name)).exists():  # An id on the Hugging Face hub.
        base_model = f"base_model: {config.model.name}\n"
    results = []
    for name in ("eval/solved", "eval/best_of_n"):
        results.append(f"| {name} | {with_interval(before, name)} | {with_interval(now, name)} |")
    prompt = run.tokenizer.decode(run.validation_questions[0].prompt_ids)
    return TEMPLATE.format(
        base_model=base_model,
        name=run.folder.path.name,
        step=run.step,
        results="\n".join(results),
        prompt=json.dumps(prompt),
        loading=loading_lines(config.model),
        folder=run.folder.path / "best",
        settings=yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False),
        **dict(config),
    )


def loading_lines(settings: Section) -> str:
    """Returns the lines of Python that load the saved model, whose path is in `folder`."""
    name = beside_main(settings.name)
    if not (settings.lora_rank and name.endswith(".gguf")):
        return "model = AutoModelForCausalLM.from_pretrained(folder)"
    # The library finds the model that adapters belong to by itself, but not in a GGUF file.
    return f"""from transformers import GgufConfig
model = AutoModelForCausalLM.from_pretrained(
    **{where_it_is(name)},
    quantization_config=GgufConfig(dequantize=True))
model.load_adapter(folder)"""
