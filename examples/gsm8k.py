"""GSM8K: grade-school word problems whose answers are numbers.

    .venv/bin/python main.py --config recipes/gsm8k-grpo.yaml
    .venv/bin/python main.py task.name=examples/gsm8k.py data.dataset=examples/gsm8k.jsonl \
        data.num_validation=4      without the hub

The file `gsm8k.jsonl` next to this one has a few rows of the same kind. The top of countdown.py
explains the names below.
"""

import rewards

from countdown import read_rows

# Parts with weight 0.0 are only measured. `task.reward_weights` can choose other parts and weights.
REWARD_WEIGHTS = {
    "accuracy": 1.0,
    "format": 0.2,
    "format_strict": 0.0,
    "tag_count": 0.0,
    "reasoning_steps": 0.0,
    "cosine": 0.0,
    "repetition": 0.0,
}
SOLVED = "accuracy"
SYSTEM_MESSAGE = ("You solve word problems. You first think, step by step, between <think> and "
                  "</think>. Then you give the answer, a number and nothing else, between <answer> "
                  "and </answer>.")
MAX_CHARACTERS = 4000  # The cosine reward ends here, at about a thousand tokens.


def generate_prompt(question: str) -> str:
    return (f"{question.strip()}\nThink inside <think> </think>, then write only the number inside "
            "<answer> </answer>.\n")


def load(dataset: str, max_rows: int | None) -> list[dict]:
    """Returns the rows of `openai/gsm8k`, or of local files with the same columns, question and
    answer. The last line of an answer is #### and the number."""
    rows = read_rows(dataset, max_rows, name="main")
    for number, row in enumerate(rows, start=1):
        has_texts = isinstance(row.get("question"), str) and isinstance(row.get("answer"), str)
        if not has_texts:
            raise ValueError(f"data.dataset: row {number} needs question and answer as strings; it "
                             f"has {sorted(row)}")
        _, mark, final = row["answer"].rpartition("####")
        if not mark or rewards.number(final) is None:
            raise ValueError(f"data.dataset: row {number}: the answer must end in #### and a "
                             f"number, not in {row['answer'][-40:]!r}")
        row["prompt"] = generate_prompt(row["question"])
        row["final"] = final.strip()
    return rows


def reward_function(completion: str, row: dict) -> dict[str, float]:
    accuracy = rewards.accuracy(completion, row["final"])
    return {
        "accuracy": accuracy,
        "format": rewards.format_r1(completion),
        "format_strict": rewards.format_strict(completion),
        "tag_count": rewards.tag_count(completion),
        "reasoning_steps": rewards.reasoning_steps(completion),
        "cosine": rewards.cosine(accuracy == 1.0, len(completion), MAX_CHARACTERS),
        "repetition": rewards.repetition(completion),
    }
