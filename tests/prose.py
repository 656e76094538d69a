"""How plain the English of our pages is, in figures.

    .venv/bin/python tests/prose.py README.md docs/*.md
    .venv/bin/python tests/prose.py --longest 5 README.md

For each page it prints the words per sentence, and the colons and semicolons per 100 words. Only
prose counts. Code, tables, headings and pictures are left out, and a piece of inline code is one
word. CONTRIBUTING.md says what we aim at."""

import argparse
import re
from pathlib import Path

NOT_PROSE = [
    re.compile(r"<!--.*?-->", re.DOTALL),                        # comments
    re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE),        # blocks of code
    re.compile(r"!\[[^]]*\]\([^)]*\)"),                          # pictures
    re.compile(r"^(\||#|\[!\[|---).*$", re.MULTILINE),           # tables, headings, badges, rulers
    re.compile(r"^\[[^]]+\]: \S+$", re.MULTILINE),               # the addresses of links
    re.compile(r"</?\w+[^>]*>"),                                 # HTML
]
LIST_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.) ", re.MULTILINE)
END_OF_SENTENCE = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=[^a-z\s])")


def sentences_of(page: str) -> list[str]:
    for pattern in NOT_PROSE:
        page = pattern.sub("", page)
    page = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", page)  # Of a link its text is read.
    page = re.sub(r"`[^`]*`", "CODE", page)
    page = LIST_ITEM.sub("\n\n", page)                   # An item of a list is a paragraph.
    sentences = []
    for paragraph in re.split(r"\n\s*\n", page):
        text = " ".join(paragraph.split())
        sentences += [each for each in END_OF_SENTENCE.split(text) if re.search(r"\w", each)]
    return sentences


def num_words(sentence: str) -> int:
    return sum(re.search(r"\w", word) is not None for word in sentence.split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", type=Path, nargs="+")
    parser.add_argument("--longest", type=int, default=0, help="show so many sentences of each")
    options = parser.parse_args()
    print("| page | words | words a sentence | longest | colons and semicolons per 100 words |")
    print("| --- | --- | --- | --- | --- |")
    for path in options.pages:
        sentences = sorted(sentences_of(path.read_text(encoding="utf-8")), key=num_words)
        words = sum(map(num_words, sentences))
        marks = sum(sentence.count(":") + sentence.count(";") for sentence in sentences)
        print(f"| {path} | {words} | {words / len(sentences):.1f} | {num_words(sentences[-1])} | "
              f"{100 * marks / words:.2f} |")
        for sentence in sentences[::-1][:options.longest]:
            print(f"    {num_words(sentence)}: {sentence}")


if __name__ == "__main__":
    main()
