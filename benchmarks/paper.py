"""What a paper claims of speed and memory, beside the same measurement here: claim, measurement, and their ratio.

python -m benchmarks.paper gsa --save gsa.json      (or la, mhla, saga, sla; --tiny tries every row on a CPU)

A claim is reproduced within 5 percent of the published number. Where a paper prints no number, the table has our
reading of it (at least ...).

The folder `papers` is the registry: the claims of the paper of `gsa` are CLAIMS of `papers/gsa.py`, the most telling
first. A claim is data: where it stands, what is compared with what, and the published number. What needs data sets is
listed and not measured.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.measured import Measurement, forget
from linearize.bench.kernels import attempt
from linearize.bench.timing import here, machine
from linearize.checkpoint.atomic import check_result, write_result
from linearize.errors import Exit, LinearizeError, absent, did_you_mean
from linearize.terminal.arguments import path
from linearize.terminal.output import finite, print_json, say, say_error, show
from linearize.terminal.progress import progress

# What is as published: so near to the number.
NEAR = 0.05
Quantity = Literal["", "speed", "memory", "rate", "tokens/s"]
LATE = "not reached: --seconds was over"


class Claim(NamedTuple):
    """A number of a paper: larger is better in all of them.

    `quantity` is what is computed of the measurement `of` and, where there is one, of its peer `over`: `speed` (time of
    the peer / time), `memory` (peak of the peer / peak), `rate` (tokens or images per second / those of the peer), or
    `tokens/s`. Where the paper draws or says something without a number, `at_least` is our reading of it. A claim with
    `needs` is not measured.
    """

    name: str
    where: str
    about: str
    quantity: Quantity = ""
    of: Measurement | None = None
    over: Measurement | None = None
    published: float | None = None
    at_least: float | None = None
    needs: str = ""

    def claimed(self) -> str:
        """The number as the tables have it."""
        if self.published is not None:
            return _number(self.published)
        return f"at least {_number(self.at_least)}" if self.at_least is not None else ""

    def status(self, value: float) -> str:
        """reproduced, beaten or missed, and by how much."""
        wanted = self.published if self.published is not None else self.at_least
        assert wanted is not None, self.name
        share = value / wanted
        if self.published is None:
            return "reproduced" if share >= 1 else f"missed by {1 - share:.1%}"  # 0.1 % below a bound is below it
        if abs(share - 1) <= NEAR:
            return "reproduced"
        return f"beaten by {share - 1:.0%}" if share > 1 else f"missed by {1 - share:.0%}"


def paper_names() -> list[str]:
    """Files of the folder `papers`."""
    return sorted(path.stem for path in (Path(__file__).parent / "papers").glob("[!_]*.py"))


def load_claims(name: str) -> tuple[Claim, ...]:
    """The claims of a paper. Raises LinearizeError (exit 2) for an unknown one."""
    known = paper_names()
    if name not in known:
        raise LinearizeError(f"{name}: no paper of that name.{did_you_mean(name, known)} Choose {', '.join(known)}")
    claims: tuple[Claim, ...] = importlib.import_module(f"benchmarks.papers.{name}").CLAIMS
    return claims


def bench_paper(
    name: str,
    claims: str = "",
    *,
    seconds: float | None = None,
    tiny: bool = False,
    tell: Callable[[str, dict[str, Any]], None] = lambda *_: None,
) -> dict[str, Any]:
    """Measure the claims of a paper, or those named (`speed,memory`), in the order of its table.

    No measurement begins later than `seconds` after the start. `tiny` measures small sizes, whose numbers are not
    compared. Returns plain data: `paper`, `machine`, `tiny`, and `rows` with `claim`, `where`, `about`, `claimed`,
    `value` and `device` (the value by the device's time alone), `share` of the published number, `status`, and the
    measurements `of` and `over`. `tell` gets each row as a line of text when it is there, and the result so far. Raises
    LinearizeError: 2 for an unknown paper or claim, 4 for full sizes without a GPU.
    """
    chosen = choose(name, claims)
    if not tiny and here() == "cpu" and any(claim.of for claim in chosen):
        raise LinearizeError(
            f"{name}: the paper's sizes need a GPU, and there is none. --tiny tries every row on a CPU",
            Exit.RESOURCE,
        )
    result: dict[str, Any] = {"paper": name, "machine": machine(), "tiny": tiny, "rows": []}
    tell("; ".join(f"{key} {value}" for key, value in result["machine"].items()), result)
    ends = time.monotonic() + seconds if seconds is not None else None
    found: dict[Measurement, dict[str, Any]] = {}

    def measure(what: Measurement | None) -> dict[str, Any] | None:
        if what is None:
            return None
        what = what.tiny() if tiny else what
        if what not in found:
            if ends is not None and time.monotonic() > ends:
                return {"what": what.about(), "failed": LATE}
            found[what] = {"what": what.about(), **attempt(what.measure)}
        return found[what]

    with progress("paper", sum((c.of is not None) + (c.over is not None) for c in chosen)) as advance:
        for claim in chosen:
            of = measure(claim.of)
            advance(claim.of is not None)
            over = measure(claim.over)
            advance(claim.over is not None)
            row = judged(claim, of, over, tiny)
            result["rows"].append(row)
            tell(line(row), result)
    forget()
    return result


def choose(name: str, claims: str) -> list[Claim]:
    """The claims of a paper that are asked for. Raises LinearizeError (exit 2) for an unknown name."""
    known = {claim.name: claim for claim in load_claims(name)}
    wanted = [one.strip() for one in claims.split(",") if one.strip()]
    for one in wanted:
        if one not in known:
            hint = did_you_mean(one, known)
            raise LinearizeError(f"--claims {one}: the paper {name} has no such claim.{hint} Known: {', '.join(known)}")
    return [claim for claim in known.values() if not wanted or claim.name in wanted]


def judged(claim: Claim, of: dict[str, Any] | None, over: dict[str, Any] | None, tiny: bool) -> dict[str, Any]:
    """A row: the claim, what was measured, and how both compare."""
    row: dict[str, Any] = {
        "claim": claim.name, "where": claim.where, "about": claim.about, "claimed": claim.claimed(), "value": None,
        "device": None, "share": None, "of": of, "over": over,
    }  # fmt: skip
    if of is None:
        return row | {"status": f"needs {claim.needs}"}
    failed = [one["failed"] for one in (of, over) if one is not None and "failed" in one]
    if failed:
        return row | {"status": f"not measured: {failed[0]}"}
    row["value"] = value = computed(claim.quantity, of, over, "ms")
    if claim.quantity != "memory":
        row["device"] = computed(claim.quantity, of, over, "device_ms")
    if value is None:
        return row | {"status": "not measured: memory is counted on a GPU"}
    if tiny:
        return row | {"status": "tried"}
    wanted = claim.published if claim.published is not None else claim.at_least
    return row | {"share": value / wanted if wanted else None, "status": claim.status(value)}


def computed(quantity: str, of: dict[str, Any], over: dict[str, Any] | None, clock: str) -> float | None:
    """The number of a claim by one clock: `ms`, or `device_ms`; None where that was not measured."""

    def rate(one: dict[str, Any]) -> float | None:
        rate = one.get("tokens_s", one.get("images_s"))
        took: float | None = one.get(clock)
        return None if rate is None or not took else rate * one["ms"] / took

    def get(one: dict[str, Any]) -> float | None:
        if quantity == "memory":
            return one.get("peak_mib")
        return one.get(clock) if quantity == "speed" else rate(one)

    ours = get(of)
    if over is None or not ours:
        return ours or None
    other = get(over)
    if not other:
        return None
    return ours / other if quantity == "rate" else other / ours


def failures(result: dict[str, Any]) -> list[str]:
    """What of ours failed, one line each; a peer may, and time may be over."""
    rows = [row for row in result["rows"] if row["of"] is not None and row["of"].get("failed", LATE) != LATE]
    return [f"{row['claim']}, {row['of']['what']}: {row['of']['failed']}" for row in rows]


# ---------------------------------------------------------------- the report

COLUMNS = ("claim", "where", "what", "published", "here", "here, device alone", "here / published", "status")


def markdown(result: dict[str, Any]) -> str:
    """The result as the tables of docs/papers.md."""
    lines = ["; ".join(f"{key} {value}" for key, value in result["machine"].items()), ""]
    if result["tiny"]:
        lines += ["Tiny sizes: the numbers say that the rows run, and nothing of speed.", ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join(cells(row))} |" for row in result["rows"]]
    return "\n".join(lines)


def cells(row: dict[str, Any]) -> list[str]:
    numbers = [_number(row[key]) if row[key] is not None else "" for key in ("value", "device", "share")]
    return [f"`{row['claim']}`", row["where"], row["about"], row["claimed"], *numbers, row["status"]]


def line(row: dict[str, Any]) -> str:
    """One row as a line of text, for a person who waits."""
    parts = [f"{row['claim']} ({row['where']}): {row['about']}"]
    parts += [f"published {row['claimed']}"] * bool(row["claimed"])
    parts += [f"here {_number(row['value'])}"] if row["value"] is not None else []
    parts += [f"device alone {_number(row['device'])}"] if row["device"] is not None else []
    return "; ".join([*parts, row["status"]])


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


# ---------------------------------------------------------------- the command


def run(arguments: argparse.Namespace) -> None:
    """Each row is printed on stderr when it is measured and written to `--save`, the table on stdout at the end. Raises
    LinearizeError, 6 for a measurement of ours that failed."""
    save: Path | None = arguments.save

    def tell(row: str, result: dict[str, Any]) -> None:
        say(row)
        if save is not None:
            write_result(save, json.dumps(finite(result)))

    if save is not None:
        if not save.absolute().parent.is_dir():
            raise absent(save.absolute().parent, "no such folder")
        check_result(save, '{"paper": ', "benchmarks.paper")
    limits = {"seconds": arguments.seconds, "tiny": arguments.tiny}
    result = bench_paper(arguments.paper, arguments.claims, **limits, tell=tell)
    if arguments.json:
        print_json(result)
    else:
        show(markdown(result))
    if failed := failures(result):
        raise LinearizeError("; ".join(failed), Exit.CHECK_FAILED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paper", help=", ".join(paper_names()))
    parser.add_argument("--claims", default="", help="these rows of its table, for example speed,memory; default: all")
    parser.add_argument("--seconds", type=float, help="start no measurement after this many; rows left out say so")
    parser.add_argument("--save", type=path, help="JSON file for the results, written after every row")
    parser.add_argument("--tiny", action="store_true", help="small sizes, whose numbers are not compared")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    try:
        run(parser.parse_args())
    except LinearizeError as error:
        say_error("", error.message)
        sys.exit(int(error.code))


if __name__ == "__main__":
    main()
