"""The figures of the documents, computed anew from the records of the benchmarks."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PERFORMANCE = (ROOT / "docs/performance.md").read_text(encoding="utf-8")

Record = dict[str, Any]

FRESH = "collectives-fresh-2026-11-27.jsonl"
SIZES = {"4 B": 4, "1 KiB": 1 << 10, "16 KiB": 16 << 10, "64 KiB": 64 << 10, "256 KiB": 256 << 10}
SIZES |= {"1 MiB": 1 << 20, "4 MiB": 4 << 20, "64 MiB": 64 << 20}


# What a document says


def in_one_line(text: str) -> str:
    return " ".join(text.split())


def tables_of(document: str) -> list[tuple[str, list[list[str]]]]:
    """Find each table: the record that the text before it names last, and its rows of cells."""
    tables = re.finditer(r"(?:^\|.*\|\n)+", document, re.MULTILINE)
    found = []
    for table in tables:
        named = re.findall(r"results/([\w-]+\.jsonl)", document[: table.start()])
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[0].splitlines()]
        found.append((named[-1] if named else "", [rows[0], *rows[2:]]))
    return found


def tables_over_sizes(document: str) -> list[tuple[str, list[list[str]]]]:
    found = [(name, rows) for name, rows in tables_of(document) if SIZES.keys() & rows[0]]
    assert found, "no table is over sizes"
    return found


def operations_of(rows: list[list[str]]) -> list[str]:
    return [row[0].replace("`", "").replace(" with ", "_") for row in rows]


# What a record says


@functools.cache
def load(name: str) -> list[Record]:
    text = (ROOT / "benchmarks/results" / name).read_text(encoding="utf-8")
    # Decimal: 5.35 is to round as it is written, not as the float below it.
    return [json.loads(line, parse_float=Decimal) for line in text.splitlines()]


def is_mpi(record: Record) -> bool:
    return record["system"] in ("openmpi", "mpich")


def is_tuned(record: Record) -> bool:
    return bool(record["configuration"] != "untuned")


def is_ours(record: Record, memory: str) -> bool:
    return (record["system"], record["memory"]) == ("ferro_dist", memory)


def fastest_us(records: Iterable[Record], is_meant: Callable[[Record], bool]) -> Decimal:
    """Find the smallest median; each is over all turns, wherever the cores were."""
    return min(Decimal(record["p50_us"]) for record in records if is_meant(record))


def speed(name: str, collective: str, size: int, memory: str) -> Decimal:
    """Compute how many times as fast as the best MPI we are; all are tuned."""
    case = (collective, size)
    records = [r for r in load(name) if (r["collective"], r["size"]) == case and is_tuned(r)]
    return fastest_us(records, is_mpi) / fastest_us(records, lambda r: is_ours(r, memory))


def cell(name: str, collective: str, size: int) -> str:
    """Write the speed with any array, and that with symmetric ones if it rounds otherwise."""
    figures = [f"{speed(name, collective, size, memory):.1f}" for memory in ("plain", "symmetric")]
    return ", ".join(dict.fromkeys(figures))


def rounded(time: Decimal) -> str:
    """Write a time with two digits, from 100 on with three."""
    kept = Decimal(f"{time:.{2 if time < 100 else 3}g}")
    return f"{kept:,.0f}" if kept >= 10 else f"{kept:f}"


# Tables


def test_speeds_of_all_operations_are_those_of_the_records() -> None:
    for name, (header, *rows) in tables_over_sizes(PERFORMANCE):
        operations = operations_of(rows)
        expected = [[cell(name, each, SIZES[size]) for size in header[1:]] for each in operations]
        assert [row[1:] for row in rows] == expected
        collectives = {record["collective"] for record in load(name)} - {"barrier"}
        assert sorted(operations) == sorted(collectives)


def test_times_of_allreduce_are_those_of_the_record() -> None:
    meant: dict[str, Callable[[Record], bool]] = {
        "ferro_dist, any array": lambda r: is_tuned(r) and is_ours(r, "plain"),
        "ferro_dist, symmetric": lambda r: is_tuned(r) and is_ours(r, "symmetric"),
        "best of Open MPI and MPICH": lambda r: is_tuned(r) and is_mpi(r),
        "torch.distributed on Gloo": lambda r: is_tuned(r) and r["system"] == "gloo",
        "*untuned:* ferro_dist, any array": lambda r: not is_tuned(r) and is_ours(r, "plain"),
        "*untuned:* best of Open MPI and MPICH": lambda r: not is_tuned(r) and is_mpi(r),
    }
    for name, (header, *rows) in tables_over_sizes(README):
        records = [each for each in load(name) if each["collective"] == "allreduce"]
        by_size = [[each for each in records if each["size"] == SIZES[size]] for size in header[1:]]
        expected = [
            [label, *(rounded(fastest_us(each, is_meant)) for each in by_size)]
            for label, is_meant in meant.items()
        ]
        assert sorted(rows) == sorted(expected)


def test_training_and_faults_are_those_of_the_records() -> None:
    (rows,) = (rows for _, rows in tables_of(README) if rows[0][1:] == ["ferro_dist", ""])
    expected = {
        "`ncclAllReduce`": nccl_call(),
        "MLP of 10.5 M parameters": added_by_ddp("mlp"),
        "GPT of 3.7 M": added_by_ddp("gpt"),
        "300 tensors of 4 KiB": added_by_ddp("300x4KiB"),
        "stages that sleep": pipelines("sleep"),
        "real compute": pipelines("compute"),
        "hear of a killed one": [told_of_a_death(), ""],
        "reduced again": [recovered(), ""],
    }
    # Of theirs, without the words that say what it is.
    figures = [(label, [ours, theirs.rpartition(": ")[-1]]) for label, ours, theirs in rows[1:]]
    found = {words: [each for label, each in figures if words in label] for words in expected}
    assert found == {words: [each] for words, each in expected.items()}
    assert len(figures) == len(expected)


def nccl_call() -> list[str]:
    p50_ns = {each["name"]: each["p50_ns"] for each in load("nccl-overhead-2026-11-27.jsonl")}
    ours, theirs = p50_ns["NCCL: ferro_dist, order and lifetime"], p50_ns["NCCL: nccl4py, torch"]
    return [f"{ours:.0f} ns", f"{theirs:,.0f} ns"]


def added_by_ddp(model: str) -> list[str]:
    records = [each for each in load("ddp-2-ranks-2026-11-27.jsonl") if each["model"] == model]
    added_ms = {each["system"]: each["added_ms"] for each in records}
    ours = added_ms.pop("ferro_dist/host")
    assert len(added_ms) == 4
    return [f"{rounded(ours)} ms", f"{rounded(min(added_ms.values()))} ms"]


def pipelines(kind: str) -> list[str]:
    records = [each for each in load("pipeline-2026-11-27.jsonl") if each.get("kind") == kind]
    cells = []
    for system in ("ferro_dist", "torch"):
        ratios = [each[system]["ratio"] for each in records]
        figures = dict.fromkeys(f"{ratio:.2f}" for ratio in (min(ratios), max(ratios)))
        cells.append(f"{' to '.join(figures)} ×")
    return cells


def told_of_a_death() -> str:
    (record,) = load("faults-2026-11-28.jsonl")
    return f"{record['median_ms']:.1f} ms (p99 {record['p99_ms']:.0f} ms)"


def recovered() -> str:
    records = load("recovery-2026-11-28.jsonl")
    p50_ms = {(each["transport"], each["world_size"]): each["reduced_p50_ms"] for each in records}
    return f"{p50_ms['host', 4]:.0f} ms (of two ranks: {p50_ms['host', 2]:.0f} ms)"


# Sentences


def figures_in(document: str, anchor: str) -> list[list[str]]:
    """Find the numbers that follow these words, of each sentence that has them."""
    sentences = re.findall(rf"{re.escape(anchor)}(.*?)\.(?:\s|$)", in_one_line(document))
    return [re.findall(r"\d[\d.,]*\d|\d", sentence) for sentence in sentences]


def test_the_range_of_the_other_operations_is_that_of_the_record() -> None:
    (name, (header, *rows)) = tables_over_sizes(PERFORMANCE)[0]
    low_high = []
    for memory in ("plain", "symmetric"):
        speeds = [
            speed(name, operation, SIZES[size], memory)
            for operation in operations_of(rows)
            for size in header[1:]
        ]
        low_high += [f"{min(speeds):.1f}", f"{max(speeds):.1f}"]
    barrier = f"{speed(name, 'barrier', 0, 'plain'):.1f}"
    assert figures_in(README, "The other operations reach") == [[*low_high, barrier]]


def test_times_of_a_barrier_are_those_of_the_records() -> None:
    expected = []
    for name, _ in tables_over_sizes(PERFORMANCE):
        records = [
            each for each in load(name) if each["collective"] == "barrier" and is_tuned(each)
        ]
        if not records:
            continue
        ours = fastest_us(records, lambda record: is_ours(record, "plain"))
        theirs = fastest_us(records, lambda record: record["system"] == "openmpi")
        assert theirs == fastest_us(records, is_mpi)
        expected.append([f"{ours:.2f}", f"{theirs:.2f}"])
    assert figures_in(PERFORMANCE, "`barrier` takes") == expected


def test_speeds_with_fresh_inputs_are_those_of_the_record() -> None:
    plain, symmetric = (
        [f"{speed(FRESH, 'send_recv', size << 10, memory):.1f}" for size in (16, 64, 256, 4096)]
        for memory in ("plain", "symmetric")
    )
    allreduce = cell(FRESH, "allreduce", 256 << 10).split(", ")
    messages = [min(plain), max(plain), "16", symmetric[0], "16", symmetric[-1], "4"]
    said = figures_in(PERFORMANCE, "Where each rank has just written what it sends,")
    assert said == [[*messages, "256", *allreduce]]
    assert figures_in(README, "an allreduce of 256 KiB reaches") == [allreduce]


def test_times_of_one_call_are_those_of_the_records() -> None:
    fast, slow = (
        {
            each["name"]: f"{each['p50_ns']:.0f}"
            for each in load(f"call-overhead-2026-11-{day}.jsonl")
        }
        for day in (27, 23)
    )
    calls = ("ferro_dist, NumPy", "ferro_dist, NumPy, new result", "ferro_dist, torch")
    expected = [times[call] for call in calls for times in (fast, slow)]
    assert figures_in(PERFORMANCE, "A call costs") == [expected]
