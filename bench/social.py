"""The picture that a shared link to the project shows. Upload it in the settings of the repository.

    .venv/bin/python bench/social.py
"""

import json
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
RUNS = [f"tiny model, default seed {seed}" for seed in range(3)]
INK, SOFT, ACCENT = "#1c1917", "#57534e", "#c2410c"
WORDS = ("Reinforcement learning of\nlanguage models, from\nquestion to update.\n\n"
         "Read it in one sitting.\nRun it on a laptop.")

TITLE = "share of puzzles that a small\nmodel solves, three seeds"


def main() -> None:
    known = json.loads((ROOT / "docs" / "experiments.json").read_text())
    figure = Figure(figsize=(12.8, 6.4), facecolor="white")
    figure.text(0.05, 0.80, "GRPO in one file", fontsize=46, weight="bold", color=INK)
    figure.text(0.05, 0.33, WORDS, fontsize=22, color=SOFT, linespacing=1.5)
    figure.text(0.05, 0.12, "onefile-grpo", fontsize=22, color=ACCENT, family="monospace")
    axes = figure.add_axes((0.60, 0.18, 0.35, 0.56))
    for run in RUNS:
        curve = known[run]["curve"]
        axes.plot([point["step"] for point in curve], [point["solved"] for point in curve],
                  color=ACCENT, linewidth=3)
    axes.set_ylim(0, 1)
    axes.set_title(TITLE, fontsize=18, color=SOFT)
    axes.set_xlabel("training step", fontsize=16, color=SOFT)
    axes.tick_params(labelsize=14, colors=SOFT)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs" / "social.png", dpi=100)


if __name__ == "__main__":
    main()
