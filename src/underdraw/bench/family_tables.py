"""Tables of docs/models.md and docs/integrations.md: memory and speed of families, `custom_generate`. No torch."""

from __future__ import annotations

from underdraw.bench.sections import Cell, Record, Section, Table, machine_label, percent

GIB = 2**30


def families_sections(record: Record) -> list[Section]:
    """One table per family: a row for each of its sizes, of what benchmarks/families.py computed and measured."""
    names = list(dict.fromkeys(model["family"] for model in record["models"]))
    measured = [model for model in record["models"] if "speed" in model]
    text = (
        "Download: the decoder's share of the files. Memory: of the decoder, by dtype or `--weights` (embeddings are "
        "not quantised), and the KV cache of one image in bfloat16 with all rows of guidance. "
    )
    if measured:
        text += (
            f"Speed: random weights, {record['dtype']}, guidance as by default, {record['context']} tokens in the KV "
            f"cache, {machine_label(record['machine'])}; the bound is the time to read all weights once."
        )
    else:
        text += "No speed was measured."
    return [Section(text=text), *(_family(record, name) for name in names)]


def _family(record: Record, family: str) -> Section:
    models = [model for model in record["models"] if model["family"] == family]
    columns: dict[str, Cell] = {
        "model": "`{checkpoint}`",
        "parameters": lambda model: f"{model['parameters'] / 1e9:.2f} B",
        "download": lambda model: f"{model['file_bytes'] / 1e9:.1f} GB",
    }
    for name in models[0]["memory"]:
        columns[name] = lambda model, name=name: f"{model['memory'][name]['weights'] / GIB:.1f} GiB"  # type: ignore[misc]
    columns["KV cache"] = lambda model: f"{model['memory']['bfloat16']['cache'] / GIB:.2f} GiB"
    columns["tokens"] = "{tokens}"
    if any("speed" in model for model in models):
        columns["plain, ms per token (bound)"] = lambda model: _time(model, "{plain_ms:.2f} ({floor_ms:.2f})")
        columns[f"pass over {record['nodes']} nodes, ms"] = lambda model: _time(model, "{tree_ms:.2f}")
    command = f'underdraw generate "a red fox" --model {models[0]["checkpoint"]} --weights int8 -o {family}.png'
    return Section(f"Family `{family}`", table=Table.of(models, columns), note=f"`{command}`")


def _time(model: Record, text: str) -> str:
    """A time, with its commit if another one than the record's was measured."""
    if "speed" not in model:
        return "-"
    commit = model["speed"].get("commit")
    return text.format_map(model["speed"]) + (f", at {commit[:12]}" if commit else "")


def custom_generate_sections(record: Record) -> list[Section]:
    """Both loops side by side, by model and by the share of choices that follow the rule of the grids."""
    entries = [
        {**model, **level, "tree": tree, **result}
        for model in record["models"]
        for level in model["levels"]
        for tree, result in level["trees"].items()
    ]
    columns: dict[str, Cell] = {
        "model": "{family}",
        "tokens": "{tokens}",
        "predictable cells": lambda entry: percent(entry["accuracy"]),
        "tree": "`{tree}`",
        "tokens per pass": "{tokens_per_pass:.2f}",
        "transformers, s": "{transformers_seconds:.2f}",
        "custom_generate, s": "{seconds:.2f}",
        "times as fast": "{speedup:.2f}",
        "equal codes": _equal_codes,
    }
    text = (
        f"Sizes `{record['size']}`, greedy, {_guidance(record)}, {record['dtype']}, transformers "
        f"{record['transformers']}, {machine_label(record['machine'])}:"
    )
    return [Section(text=text, table=Table.of(entries, columns))]


def _equal_codes(entry: Record) -> str:
    first = entry["first_difference"]
    return "all" if first is None else f"the first {first}"


def _guidance(record: Record) -> str:
    scales = [f"{model['family']} {model['guidance']:g}" for model in record["models"] if model["guidance"] != 1]
    return f"guidance {', '.join(scales)}" if scales else "no guidance"
