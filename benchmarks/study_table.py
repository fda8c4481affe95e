"""The study's rows as a table for each number of tokens: python -m benchmarks.study_table rows.jsonl ... [--sort]"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

COLUMNS = ("variant", "min", "ppl", "KL", "top-1", "recall", "needle", "state")


def percents(row: dict[str, Any], task: str, who: str) -> str:
    """Accuracies at each length, in percent: `98 91 40 7`."""
    return " ".join(f"{100 * one[who]['accuracy']:.0f}" for one in row[task])


def size(row: dict[str, Any], who: str) -> str:
    """KiB at each length."""
    return " ".join(f"{one[who] / 1024:,.0f}" for one in row["state"])


def cells(row: dict[str, Any]) -> list[str]:
    name = " ".join(word for word in row["variant"].split() if not word.startswith("tokens="))
    ratio, agreement = f"{row['ppl_ratio']:.4f}", f"{100 * row['top1_agreement']:.1f}"
    measures = [percents(row, "recall", "student"), percents(row, "needle", "student"), size(row, "student")]
    return [name, f"{row['minutes']:.1f}", ratio, f"{row['kl']:.4f}", agreement, *measures]


def write(rows: list[dict[str, Any]]) -> None:
    """The table of rows that learned from equally many tokens."""
    first = rows[0]
    own = [percents(first, task, "teacher") for task in ("recall", "needle")]
    print(f"\n{first['tokens'] / 1e6:.1f} M tokens\n")
    print("|", " | ".join(COLUMNS), "|")
    print("|", " | ".join("---" for _ in COLUMNS), "|")
    print("|", " | ".join(["teacher", "", "1", "0", "100", *own, size(first, "teacher")]), "|")
    for row in rows:
        print("|", " | ".join(cells(row)), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--sort", action="store_true", help="by perplexity")
    arguments = parser.parse_args()
    rows = [json.loads(line) for file in arguments.files for line in file.read_text().splitlines()]
    teachers = {row["teacher_sha256"] for row in rows}
    if arguments.sort:
        rows.sort(key=lambda row: row["ppl_ratio"])
    first = rows[0]
    print(f"teacher {', '.join(sorted(teachers))}, perplexity {first['teacher_ppl']:.3f}, {first['hardware']}")
    print(f"lengths {' '.join(str(one['length']) for one in first['recall'])}; state in KiB")
    for tokens in sorted({row["tokens"] for row in rows}, reverse=True):
        write([row for row in rows if row["tokens"] == tokens])


if __name__ == "__main__":
    main()
