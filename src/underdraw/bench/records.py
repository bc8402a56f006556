"""JSON result files (`kind`: one of RENDERERS, such as statistics or targets) as sections. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from underdraw.bench.engine_tables import model_label, pass_table, quality_sections
from underdraw.bench.family_tables import custom_generate_sections, families_sections
from underdraw.bench.kinds import neighbourhood_sections, replay_sections, sweep_sections
from underdraw.bench.presets import PLAIN
from underdraw.bench.sections import Cell, Record, Section, Table, describe_settings, figure_sections, percent
from underdraw.errors import ConfigError
from underdraw.io import read_json, read_json_object


def record_sections(record: Record) -> list[Section]:
    """The sections of one result."""
    return RENDERERS[record["kind"]](record)


def read_record(path: Path) -> dict[str, Any]:
    """A result file, checked to be one."""
    record = read_json_object(path, "a result")
    if record.get("kind") not in RENDERERS:
        raise ConfigError(f"{path} has the unknown kind {record.get('kind')!r}; allowed: {', '.join(RENDERERS)}.")
    return record


def engine_records(folder: Path) -> list[dict[str, Any]]:
    """The engine and agreement results of a folder, agreement last."""
    records = [read_json(path, "a result") for path in sorted(folder.glob("*.json"))]
    kinds = ("engine", "agreement")
    records = [record for record in records if isinstance(record, dict) and record.get("kind") in kinds]
    return sorted(records, key=lambda record: kinds.index(record["kind"]))


def engine_folder_sections(folder: Path) -> list[Section]:
    """The figure and all records of a folder of `bench engine` results, after a table of the passes of all."""
    records = engine_records(folder)
    timed = [record for record in records if {"1", "64"} <= record.get("verify_ms", {}).keys()]
    return [
        *([Section(table=pass_table(timed))] if timed else []),
        *figure_sections(folder),
        *(section for record in records for section in record_sections(record)),
    ]


# ------------------------------------------------------------------------------------------------- engine, agreement


def engine_rows(record: Record) -> Iterator[tuple[str, str]]:
    """Name and value of everything that was measured; a stopped run has measured less."""
    plain, verify = record.get("plain"), record.get("verify_ms", {})
    yield "copy bandwidth", f"{record['bandwidth_bytes_per_second'] / 1e12:.2f} TB/s"
    yield "weights read per pass", f"{record['bytes_a_pass'] / 1e9:.2f} GB"
    yield "bandwidth bound of a pass", f"{record['floor_ms']:.2f} ms"
    for name, times in record.get("variants_ms", {}).items():
        text = times.get("error") or ", ".join(f"{spent:.2f} ms" for spent in times.values())
        yield f"pass over 1 and 64 nodes, {name}", text
    if plain is not None:
        yield "plain decoding, per token", f"{plain['ms_per_token']:.2f} ms, {plain['over_floor']:.2f} x the bound"
        yield "first picture, with compilation and capture", f"{plain['first_picture_seconds']:.1f} s"
        if plain["host_share"] is not None:
            yield "host share of a pass", percent(plain["host_share"], 1)
    for size, spent in verify.items():
        ratio = f", {spent / verify['1']:.2f} x one node" if "1" in verify else ""
        yield f"pass over {size} nodes", f"{spent:.2f} ms{ratio}"
    for drafter, widths in record.get("level_ms", {}).items():
        for width, spent in widths.items():
            yield f"one draft level, drafter {drafter}, {width} nodes", f"{spent:.3f} ms"
    if "transformers" in record:
        other = record["transformers"]
        ratio = "" if plain is None else f", {other['ms_per_token'] / plain['ms_per_token']:.1f} x plain decoding"
        yield f"transformers {other['version']} ({other['class']})", f"{other['ms_per_token']:.2f} ms per token{ratio}"
    for replay in record.get("replays", []):
        name = f"replayed, drafter {replay['drafter']}, {replay['tokens_per_pass']:.2f} tokens/pass (forced)"
        speed = f"{replay['over_plain']:.2f} x the speed of plain decoding"
        yield name, f"{replay['ms_per_token']:.2f} ms per token, {speed}"


def _engine(record: Record) -> list[Section]:
    machine = record["machine"]
    text = (
        f"{machine['device']}, torch {machine['torch']}, Python {machine['python']}, commit {machine['commit']}; "
        f"guidance {record['guidance']}, temperature {record['temperature']}, top-k {record['top_k']}, "
        f"{record['tokens']} tokens, numerics {record.get('numerics', 'fastest')}, passes: {record['compiled']}, "
        f"attention: {record['attention']}."
    )
    rows = [list(row) for row in engine_rows(record)]
    notes = dict.fromkeys(replay["note"] for replay in record.get("replays", []))
    heading = f"{model_label(record)}, batch {record['batch']}"
    note = " ".join(f"Replayed: {note}." for note in notes)
    sections = [Section(heading, text, Table(("measured", "value"), rows), note)]
    for size, kernels in record.get("profiles", {}).items():
        columns = {f"kernel of a pass over {size} nodes": "`{kernel}`", "launches": "{count:.0f}", "ms": "{ms:.3f}"}
        if kernels:
            sections.append(Section(table=Table.of(kernels, columns)))
    return sections


def _agreement(record: Record) -> list[Section]:
    machine = record["machine"]
    text = (
        f"Drafter jacobi (chains of {record['nodes']} nodes). {machine['device']}, torch {machine['torch']}, commit "
        f"{machine['commit']}; guidance {record['guidance']}, temperature {record['temperature']}."
    )
    columns: dict[str, Cell] = {
        "plain passes run over": "{name}",
        "equal tokens, forced context": lambda shares: percent(shares["tokens_equal"], 2),
        "identical images, end to end": lambda shares: percent(shares["pictures_equal"]),
    }
    rows = [{"name": name, **shares} for name, shares in record["shapes"].items()]
    heading = f"Agreement of plain and tree passes: {record['model']}, {record['dtype']}, {record['pictures']} images"
    return [Section(heading, text, Table.of(rows, columns))]


def _matrix_table(rows: Sequence[Record]) -> Table:
    """Identical images of those drawn at all temperatures: a row per tree, a column per dtype and batch."""
    trees = {(row["kind"], row["nodes"]) for row in rows}
    dtypes = list({row["dtype"]: None for row in rows})
    columns = sorted({(row["dtype"], row["batch"]) for row in rows}, key=lambda key: (dtypes.index(key[0]), key[1]))
    cells = [
        [
            "plain" if tree[0] == "plain" else "{} of {}".format(*tree),
            *(_equal_images([r for r in rows if (r["kind"], r["nodes"], r["dtype"], r["batch"]) == (*tree, *column)])
              for column in columns),
        ]
        for tree in sorted(trees, key=lambda tree: (tree[0] != "plain", *tree))
    ]  # fmt: skip
    return Table(("tree", *("{}, batch {}".format(*column) for column in columns)), cells)


def _equal_images(rows: Sequence[Record]) -> str:
    drawn, equal = (sum(row[key] for row in rows) for key in ("pictures", "pictures_equal"))
    return f"{equal} of {drawn}" if drawn else ""


def _matrix(record: Record) -> list[Section]:
    machine = record["machine"]
    part = "whole images" if record["tokens"] is None else f"the first {record['tokens']} tokens of every image"
    layers = f", {record['layers']} layers" if record.get("layers") else ""
    text = (
        f"{machine['device']}, torch {machine['torch']}, commit {machine['commit']}; guidance {record['guidance']}, "
        f"{record['weights']} weights, numerics {record['numerics']}, {part}, drafters jacobi (chains) and jacobi-tree."
    )
    measured = record["rows"]
    tokens, equal = (sum(row[key] for row in measured) for key in ("tokens", "tokens_equal"))
    by_temperature = [
        f"T={t:g}: {_equal_images([row for row in measured if row['temperature'] == t])}"
        for t in sorted({row["temperature"] for row in measured})
    ]
    note = f"Identical images, {'; '.join(by_temperature)}. Tokens before the first difference: {equal} of {tokens}."
    heading = f"Tokens of plain decoding: {record['model']}{layers}"
    sections = [Section(heading, text, _matrix_table(measured), note)]
    if record.get("quality"):
        columns: dict[str, Cell] = {
            "dtype": "{dtype}",
            "images": "{pictures}",
            "equal greedy choices": lambda row: percent(row["greedy_equal"], 2),
            "KL, nats per token": "{kl_nats:.5f}",
            "identical images": "{pictures_identical}",
        }
        rows = [{"dtype": dtype, **quality} for dtype, quality in record["quality"].items()]
        text = f"{record['weights']} weights against full ones, along the images that full weights draw."
        sections.append(Section(text=text, table=Table.of(rows, columns)))
    return sections


# --------------------------------------------------------------------------------------------------- statistics

NEIGHBOURS = ("left", "above", "above-right")


def _statistics(record: Record) -> list[Section]:
    settings = record["settings"]
    text = (
        f"{record['prompts']} prompts, seeds from {record['seed']}, tree {settings['tree']}. "
        f"{describe_settings(settings, record['machine'])}"
    )
    sections = [Section(text=text)]
    if record["loss"]:
        columns = {
            "subjects": "{split}",
            "pictures": "{pictures}",
            "loss, nats per code": "{loss:.3f}",
            "without the caption": "{without_caption:.3f}",
        }
        losses = [{"split": split, **loss} for split, loss in record["loss"].items()]
        sections.append(Section(table=Table.of(losses, columns)))
    rows = [row for entry in record["entries"] for row in _correlations(entry)]
    titles = ("T", "entropy, nats per code", "top-1 probability", "tokens/pass", "correlation of", *NEIGHBOURS)
    sections.append(Section(table=Table(titles, rows)))
    sections.append(_acceptance(record["entries"]))
    return sections


def _correlations(entry: Record) -> Iterator[list[str]]:
    for label, key in (("accepted tokens of passes", "length_correlation"), ("first child", "first_child")):
        if key in entry:
            values = ["-" if entry[key][name] is None else f"{entry[key][name]:.2f}" for name in NEIGHBOURS]
            numbers = [f"{entry['entropy']:.2f}", percent(entry["top1"]), f"{entry['tokens_per_pass']:.2f}"]
            yield [f"{entry['temperature']:g}", *numbers, label, *values]


def _acceptance(entries: list[dict[str, Any]]) -> Section:
    """By depth and rank where the drafter has levels that can be probed, else by length."""
    probed = [entry for entry in entries if "accepted" in entry]
    if probed:
        columns = ["depth", *(f"T={entry['temperature']:g}: {count}" for entry in probed for count in (1, 2, 4, 8))]
        depth = min(len(entry["accepted"]) for entry in probed)
        rows = [
            [str(level + 1), *(f"{share:.2f}" for entry in probed for share in entry["accepted"][level])]
            for level in range(depth)
        ]
        text = "Probability that the target's token is among the best k children, given that its parents were accepted:"
        return Section(text=text, table=Table(columns, rows))
    columns = ["T", "0", "1", "2 to 3", "4 to 7", "8 to 15", "16 and more"]
    rows = [[f"{entry['temperature']:g}", *_length_shares(entry["lengths"])] for entry in entries]
    return Section(text="Share of passes by the number of accepted tokens:", table=Table(columns, rows))


def _length_shares(counts: list[int]) -> list[str]:
    bounds, total = (0, 1, 2, 4, 8, 16, len(counts) + 16), sum(counts)
    return [percent(sum(counts[low:high]) / total) for low, high in pairwise(bounds)]


# --------------------------------------------------------------------------------- results of recipes/tiny

SUBJECT_SETS = {
    "training": "training subjects",
    "held-out": "held-out subjects",
    "new style": "training subjects in a new style",
    "new pair": "new pairs, each half",
}
SUBJECT_SOURCES = {"drawn": "generated", "true": "true pictures", "coded": "true pictures after the tokenizer"}


def _with_settings(record: Record, text: str, table: Table) -> list[Section]:
    """One section: the text, what was used (model settings and machine), and the table."""
    return [Section(text=f"{text} {describe_settings(record['settings'], record['machine'])}", table=table)]


def _subjects(record: Record) -> list[Section]:
    text = (
        f"Rank of the requested subject among {record['candidates']} "
        f"({record['held_out_candidates']} of them held out) by the nearest of {record['gallery']} true pictures in "
        f"the features of {record['network']}; temperature {record['settings']['temperature']:g}, seed "
        f"{record['seed']}."
    )
    columns: dict[str, Cell] = {
        "pictures": "{name}",
        "count": "{ranked}",
        "top-1": lambda row: percent(row["top1"]),
        "top-5": lambda row: percent(row["top5"]),
        "median rank": "{median_rank:g}",
        "top-1, other styles": lambda row: percent(row["other_top1"]),
        "top-5, other styles": lambda row: percent(row["other_top5"]),
        "correct background colour": lambda row: percent(row["colour"]),
    }
    guess = record["chance"]
    others = {"other_top1": guess["top1"], "other_top5": guess["top5"]}
    rows = [{"name": "random guess", "ranked": "", **guess, **others}]
    rows += [
        {"name": f"{SUBJECT_SETS[subjects['set']]}: {name}", **subjects[source]}
        for subjects in record["sets"]
        for source, name in SUBJECT_SOURCES.items()
        if source in subjects
    ]
    return _with_settings(record, text, Table.of(rows, columns))


def _targets(record: Record) -> list[Section]:
    text = f"{record['prompts']} prompts, {record['repeats']} turns, against plain {PLAIN} in the same turn."
    columns: dict[str, Cell] = {
        "T": "{temperature}",
        "target": "{what}",
        "wanted": "{wanted}",
        "measured": "{measured}",
        "reached": lambda check: "yes" if check["reached"] else "no",
    }
    return _with_settings(record, text, Table.of(record["checks"], columns))


def _variety(record: Record) -> list[Section]:
    text = f"{record['seeds']} seeds of each prompt at temperature {record['temperature']:g}."
    columns: dict[str, Cell] = {
        "kind": "{name}",
        "prompts": "{prompts}",
        "equal codes between seeds": lambda entry: percent(entry["equal_codes"]),
        "entropy, nats per code": "{entropy:.2f}",
        "top-1 probability": lambda entry: percent(entry["top1"]),
    }
    return _with_settings(record, text, Table.of(record["kinds"], columns))


def _colours(record: Record) -> list[Section]:
    graded = record["prompts"]
    text = (
        f"{record['obeyed']} of {len(graded)} subjects have mostly the requested colour, measured on the pixels; "
        f"temperature {record['settings']['temperature']:g}, seeds from {record['seed']}."
    )
    rows = []
    for colour in dict.fromkeys(entry["requested"] for entry in graded):
        entries = [entry for entry in graded if entry["requested"] == colour]
        obeyed = sum(entry["obeyed"] for entry in entries)
        missed = [entry for entry in entries if not entry["obeyed"]]
        others = ", ".join(f"{entry['prompt'].split(',')[0]} ({entry['seen']})" for entry in missed)
        rows.append([colour, f"{obeyed} of {len(entries)}", others])
    return _with_settings(record, text, Table(("colour", "obeyed", "others (colour seen)"), rows))


RENDERERS: dict[str, Callable[[Record], list[Section]]] = {
    "engine": _engine,
    "agreement": _agreement,
    "matrix": _matrix,
    "weights": quality_sections,
    "statistics": _statistics,
    "subjects": _subjects,
    "targets": _targets,
    "variety": _variety,
    "colours": _colours,
    "replay": replay_sections,
    "families": families_sections,
    "custom-generate": custom_generate_sections,
    "sweep": sweep_sections,
    "neighbourhoods": neighbourhood_sections,
}
