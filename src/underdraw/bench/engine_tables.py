"""Passes of the engine against the aims of the project, and what quantised weights cost, as sections. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from underdraw.bench.sections import Cell, Record, Section, Table, percent

SEVEN_B = "random:anole-7b"
MAX_OVER_BOUND = {SEVEN_B: 1.42, "random:llamagen-xl": 3.0}  # a plain pass over the bandwidth bound
MAX_64_NODES, MAX_HOST_SHARE = 1.25, 0.05  # of a 7B: 64 nodes over 1, and the host's share of a pass
MAX_QUANTIZED = {"int8": 0.65, "fp8": 0.65}  # plain pass over that of full weights
Row = tuple[str, str, str]
KERNEL_GROUPS = {
    "GEMMs": ("gemm", "nvjet", "cutlass", "splitKreduce", "_fused_linear"),
    "attention": ("_sums", "_tail_and_join", "_join", "flash", "fmha"),
    "norms, RoPE, gates": ("_add_rms_norm", "_qkv_to_cache", "_gate_up"),
}


def model_label(record: Record) -> str:
    """The model, its dtype or quantised format, and other numerics than the default."""
    weights = record.get("weights", "full")
    label = f"{record['model']}, {record['dtype'] if weights == 'full' else weights}"
    return label if record.get("numerics") == "row-invariant" else f"{label}, `fastest`"


def pass_table(records: Sequence[Record]) -> Table:
    """Milliseconds of a pass by its number of nodes, a row per model and format of weights."""
    sizes = sorted({int(size) for record in records for size in record["verify_ms"]})

    def cell(record: Record, size: int) -> str:
        spent = record["verify_ms"].get(str(size))
        return "" if spent is None else f"{spent:.2f}"

    columns: dict[str, Cell] = {
        "model": model_label,
        "bandwidth bound": "{floor_ms:.2f}",
        "1 node over the bound": lambda record: f"{record['verify_ms']['1'] / record['floor_ms']:.2f}",
        **{f"{size} node{'s' * (size > 1)}": partial(cell, size=size) for size in sizes},
        "64 nodes over 1": lambda record: f"{record['verify_ms']['64'] / record['verify_ms']['1']:.2f}",
    }
    return Table.of(records, columns)


def aims_sections(records: Sequence[Record]) -> list[Section]:
    """What was aimed at and measured with row-invariant numerics, then the passes of all these records."""
    records = [record for record in records if record.get("numerics") == "row-invariant"]
    records = [record for record in records if {"1", "64"} <= record.get("verify_ms", {}).keys()]
    if not records:
        return []
    machine = records[0]["machine"]
    commits = sorted({record["machine"]["commit"][:7] for record in records})
    text = (
        f"{machine['device']}, torch {machine['torch']}, Python {machine['python']}, commit {' and '.join(commits)}. "
        "Measured values that miss their aim are bold."
    )
    rows = [row for record in records if record["weights"] == "full" for row in _full_rows(record)]
    return [
        Section(text=text, table=Table(("what", "aim", "measured"), [*rows, *_quantized_rows(records)])),
        Section(
            text="Milliseconds of a captured pass in the decode loop, the copy to the host included, by its number of "
            f"nodes, {records[0].get('context', 0)} tokens after the prompt:",
            table=pass_table(records),
        ),
        *_kernel_sections(records),
    ]


def _kernel_sections(records: Sequence[Record]) -> list[Section]:
    """Milliseconds of groups of kernels in the profiled passes."""
    rows = []
    for record in records:
        for size, kernels in sorted(record.get("profiles", {}).items(), key=lambda item: int(item[0])):
            spent = dict.fromkeys([*KERNEL_GROUPS, "others"], 0.0)
            for kernel in kernels:
                spent[_kernel_group(kernel["kernel"])] += kernel["ms"]
            cells = [f"{value:.2f}" for value in (*spent.values(), sum(spent.values()), record["verify_ms"][size])]
            count = f"{sum(kernel['count'] for kernel in kernels):.0f}"
            rows.append([f"{model_label(record)}, {size} node{'s' * (size != '1')}", count, *cells])
    columns = ("pass", "kernels", *KERNEL_GROUPS, "others", "all kernels", "whole pass")
    text = "Where the milliseconds of a pass go, by the profiles at the end of this page:"
    return [Section(text=text, table=Table(columns, rows))] if rows else []


def _kernel_group(kernel: str) -> str:
    groups = (name for name, parts in KERNEL_GROUPS.items() if any(part in kernel for part in parts))
    return next(groups, "others")


def _row(what: str, value: float, limit: float | None, form: str = "{:.3f}") -> Row:
    measured = form.format(value)
    is_missed = limit is not None and float(f"{value:.3g}") > limit
    aim = "" if limit is None else f"{limit:.0%}" if "%" in form else f"{limit:.2f}"
    return what, aim, f"**{measured}**" if is_missed else measured


def _full_rows(record: Record) -> Iterator[Row]:
    """The rows of one model with full weights."""
    name, verify, floor, plain = record["model"], record["verify_ms"], record["floor_ms"], record.get("plain")
    yield _row(f"{name}: plain pass over the bandwidth bound", verify["1"] / floor, MAX_OVER_BOUND.get(name))
    if plain is not None:
        yield _row(f"{name}: plain images, a token over the bound", plain["over_floor"], None)
    is_large = name == SEVEN_B
    limit = MAX_64_NODES if is_large else None
    yield _row(f"{name}: pass over 64 nodes over a pass over 1", verify["64"] / verify["1"], limit)
    if plain is not None and plain["host_share"] is not None:
        limit = MAX_HOST_SHARE if is_large else None
        yield _row(f"{name}: host share of a pass", plain["host_share"], limit, "{:.1%}")
    if plain is not None and "transformers" in record:
        other = record["transformers"]
        speed = other["ms_per_token"] / plain["ms_per_token"]
        yield _row(f"{name}: times as fast as transformers {other['version']}, plain", speed, None, "{:.1f}")


def _quantized_rows(records: Sequence[Record]) -> Iterator[Row]:
    """Plain passes of quantised weights over those of the same model's full ones."""
    full = {record["model"]: record["verify_ms"]["1"] for record in records if record["weights"] == "full"}
    for record in records:
        name, weights = record["model"], record["weights"]
        if weights != "full" and name in full:
            ratio = record["verify_ms"]["1"] / full[name]
            yield _row(f"{name}: `{weights}` over {record['dtype']}, plain pass", ratio, MAX_QUANTIZED.get(weights))


def quality_sections(record: Record) -> list[Section]:
    """What `benchmarks/weights_quality.py` measured."""
    machine = record.get("machine", {"device": "?", "torch": "?", "commit": "?"})
    where = f"{machine['device']}, torch {machine['torch']}, {record.get('dtype', '?')}, commit {machine['commit'][:7]}"
    forced: dict[str, Cell] = {
        "weights": "`{weights}`",
        "images": "{pictures}",
        "tokens": "{tokens}",
        "equal greedy choices": lambda row: percent(row["greedy_equal"], 1),
        "KL, nats per token": "{kl_nats:.4f}",
    }
    tested: dict[str, Cell] = {
        "weights": "{weights}",
        "images": "{pictures}",
        "equal codes": lambda row: percent(row["equal_codes"], 1),
        "MMD": "{mmd:.4f}",
        "p-value": "{p:.2f}",
    }
    along = f"Along images that the full weights draw (guidance {record.get('guidance', '?')}; {where}):"
    whole = f"Whole images of the same prompts against those of the full weights ({where}):"
    parts = ((along, record["forced"], forced), (whole, record["test"], tested))
    return [Section(text=text, table=Table.of(rows, columns)) for text, rows, columns in parts if rows]
