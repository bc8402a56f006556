"""The grammar of hostile command lines: the options of commands, and values given by mistake or on purpose."""

from __future__ import annotations

import random

Grammar = dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]]
"""Command -> words that every line has, and the values of its options; an option in capitals is an argument."""
NUMBERS = (
    "nan", "inf", "-inf", "-1", "0", "1", "2", "0.5", "1e39", "1e308", "1e400", "-0.0", "1e-9", "99999999999999999999",
    "4611686018427387903", "4611686018427387904", "1000000000000", "0x10", "1_0", "٣", "", "abc", "1,5", " 1", "True",
)  # fmt: skip
PATHS = (
    "", ".", "..", "/dev/null", "/dev/full", "/dev/zero", "/dev/stdin", "/proc/self/environ", "~nosuchuser/x", "loop",
    "fifo", "fifo.txt", "dangling.png", "folder", "photo.png", "photo.jpg", "notes.txt", "prompts.txt", "notes.txt/x",
    "no/such/folder/x.png", "x.png", "x.jpg", "x.json", "new", "new/", "folder/x.png", "n" * 300, "n" * 300 + ".png",
    "ü" * 130 + ".png", "a b\n.png", "\udcff.png", "-", "--", "*", "a\u2028b.png", "run", "run/00000.png", "model",
    "binary.txt", "deep.json", "huge.txt", "prompts.tsv",
)  # fmt: skip
SPECS = (
    "", ":", "auto", "none", "chain", "chain:depth=0", "chain:depth=-1", "chain:depth=1e9", "chain:depth=999999999",
    "adjacency:init=both,nodes=12", "adjacency:beta=nan", "adjacency:nodes=", "confidence:top_k=0", "cost:node=nan",
    "cost:plain=inf", "static:shape=deep.json", "static:shape=fifo", "static:shape=prompts.txt", "static", "trunk",
    "trunk:nodes=2", "trunk:base=inf", "lantern:k=0", "lantern:k=99999999", "lantern", "rejection", "exact", "jacobi",
    "jacobi-tree", "jacobi:window=0", "neighbour", "forced", "model/drafter", "model/decoder", "owner/na me", "💥",
    "a" * 999,
)  # fmt: skip
WORDS = (
    "fox",
    "red fox",
    "",
    " ",
    "\n",
    "fox " * 50,
    "\0x"[1:],
    "\udcff",
    "💥" * 30,
    "--",
    "-x",
    "a\u2028b",
    "x" * 5000,
)
DEVICES = ("cpu", "auto", "cuda:99", "cuda:-1", "meta", "gpu", "", "mps", "cpu:0", "cpu:7")
DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "float64", "")
MODELS = (
    "model",
    "model/decoder",
    "model/config.json",
    "",
    "/dev/null",
    "fifo",
    "loop",
    "nowhere",
    "~nosuchuser/m",
    "..",
)
SAMPLING = {
    "--seed": NUMBERS, "--guidance": NUMBERS, "--temperature": NUMBERS, "--top-k": NUMBERS, "--top-p": NUMBERS,
}  # fmt: skip
PARTS = {
    "--tree": SPECS,
    "--verifier": SPECS,
    "--drafter": SPECS,
    "--device": DEVICES,
    "--dtype": DTYPES,
    "--model": MODELS,
}
COMMANDS: Grammar = {
    "generate": (
        ("fox", "-m", "model", "--tree", "none"),
        {
            **SAMPLING, **PARTS, "-o": PATHS, "--heatmap": PATHS, "--trace": PATHS, "--compare-image": PATHS,
            "--height": NUMBERS, "--width": NUMBERS, "--negative": WORDS, "--n": ("1", "2", "0", "-3", "1000000000"),
            "--sheet": PATHS, "--batch": NUMBERS,
        },
    ),
    "generate --prompts": (
        ("-m", "model", "--tree", "none", "--limit", "2"),
        {
            **SAMPLING, **PARTS, "--prompts": PATHS, "-o": PATHS, "--sheet": PATHS, "--limit": NUMBERS,
            "--batch": NUMBERS, "--data": PATHS,
        },
    ),
    "bench": (
        ("-m", "model", "--limit", "1", "--tree", "chain:depth=2", "--seed", "1"),
        {
            **SAMPLING, **PARTS, "--prompts": PATHS, "--out": PATHS, "--repeats": ("0", "-1", "abc", "1000000000000"),
            "--proposal": ("auto", "topk", "x", ""), "--preset": ("nope", ""), "--overlong": ("skip", "x"),
        },
    ),
    "train samples": (
        ("-m", "model", "--batch", "2", "--count", "2"),
        {
            "--prompts": PATHS, "--images": PATHS, "--out": PATHS, "--seed": NUMBERS, "--temperature": NUMBERS,
            "--count": ("0", "-1", "abc", "1000000000", "inf", "2"), "--batch": ("0", "-1", "abc", "99999999999", "1"),
            "--device": DEVICES, "--dtype": DTYPES, "--model": MODELS,
        },
    ),
    "train drafter": (
        ("-m", "model", "--pause", "0.02", "--held-out", "1", "--batch", "1"),
        {
            "--samples": PATHS, "--out": PATHS, "--seconds": NUMBERS, "--learning-rate": NUMBERS,
            "--report-every": NUMBERS,
            "--layers": ("0", "-1", "abc", "1000000000", "1"), "--depth": ("0", "-1", "100000", "2"),
            "--ffn": ("-1", "1000000000", "8"), "--kv-heads": ("-1", "3", "100000000"), "--seed": NUMBERS,
            "--kind": ("eagle", "block", "x"), "--held-out": ("0", "-5", "99999", "1"), "--device": DEVICES,
        },
    ),
    "evaluate": ((), {"FOLDER": PATHS, "--against": PATHS, "--metrics": ("exact", "test", "fid", "x", "", ",")}),
    "evaluate statistics": (
        ("-m", "model", "--limit", "1", "--temperature", "0"),
        {**PARTS, "--prompts": PATHS, "--out": PATHS, "--temperature": NUMBERS, "--seed": NUMBERS, "--limit": NUMBERS},
    ),
    "models inspect": ((), {"PATH": (*PATHS, *MODELS)}),
    "models": ((), {"MODEL": MODELS, "--words": ("",), "--jsno": ("",)}),
    "plot": ((), {"FOLDER": PATHS, "--page": PATHS}),
}  # fmt: skip
REQUIRED = {"--prompts": "prompts.txt", "--out": "new", "--samples": "samples", "FOLDER": "run", "PATH": "model"}
FLAGS = ("--force", "--json", "--quiet", "--compare", "--words", "--nope", "-h")
COUNTS = (
    "0",
    "-1",
    "1",
    "2",
    "3",
    "7",
    "129",
    "1000",
    "100000",
    "1000000000000",
    "1.5",
    "nan",
    "abc",
    "",
    "1_0",
    "٣",
    "0x2",
)
RUNS = ("pictures", "tar", "table", "cut", "folder", "run", "model", "prompts.txt", "nowhere", "loop", "fifo", "", "..")
WEIGHTS = ("auto", "full", "int8", "fp8", "int4", "int3", "INT8", "", "nan")
PROMPT_FILES = (
    "prompts.txt", "rows.jsonl", "rows.csv", "rows.parquet", "seeds.jsonl", "same.jsonl", "paths.jsonl", "nested.jsonl",
    "wide.csv", "cut.csv", "cut.parquet", "binary.txt", "empty.jsonl", "fifo.txt", "loop", "deep.json",
)  # fmt: skip
COMPILE = {"--compile": ("auto", "on", "off", "capture", "x"), "--numerics": ("row-invariant", "fastest", "x")}
NEWER: Grammar = {
    "serve": (
        ("-m", "model", "--tree", "none", "--port", "0", "--quiet"),
        {
            **PARTS, **COMPILE, "--weights": WEIGHTS, "--timeout": NUMBERS, "--slots": COUNTS, "--queue": COUNTS,
            "--port": ("0", "-1", "65536", "1000000", "abc", "", "1.5"),
            "--api-key": ("", "short", "longenough", "ü" * 9),
            "--host": ("", "127.0.0.1", "::1", "x.invalid", "256.1.1.1", "x" * 300, "a..b", "\udcff", "ü.invalid", " "),
        },
    ),
    "verify": (
        ("--sample", "1"),
        {"RUN": RUNS, "--sample": COUNTS, "--seed": NUMBERS, "--batch": COUNTS, "--model": MODELS, "--device": DEVICES},
    ),
    "plan": (
        (),
        {
            "--model": ("random:anole-7b", "random:", "tiny", "", "nope"), "--pictures": NUMBERS, "--gpus": COUNTS,
            "--tokens-per-pass": NUMBERS, "--nodes": COUNTS, "--batch": COUNTS, "--price": NUMBERS, "--costs": PATHS,
        },
    ),
    "generate --format": (
        ("-m", "model", "--tree", "none", "--limit", "2", "--out", "new", "--prompts", "rows.jsonl"),
        {
            "--prompts": PROMPT_FILES, "--format": ("folder", "webdataset", "parquet", "zip", ""),
            "--shard-size": COUNTS, "--batch": COUNTS, "--out": (*RUNS, "new"), "--weights": WEIGHTS,
            "--seed": NUMBERS, "--n": COUNTS[:4],
            "--sheet": PATHS, "--overlong": ("skip", "refuse", "x"),
        },
    ),
    "generate --workers": (
        ("-m", "model", "--tree", "none", "--limit", "2", "--out", "new", "--prompts", "rows.jsonl"),
        {
            "--workers": ("0", "-1", "abc", "1000", "1000000000", "1.5", ""),
            "--ray": ("", "x.invalid:1", "127.0.0.1:1", "ray://x", "auto:", "[::1]:1", "ray://127.0.0.1:1"),
            "--actors": ("", "0", "1:", ":1", "2:1", "1:1000000", "٣", "abc", "1:2:3"), "--gpus-per-actor": NUMBERS,
            "--batch": COUNTS, "--model": MODELS, "--prompts": PROMPT_FILES, "--out": RUNS,
        },
    ),
    "bench agreement": (
        ("-m", "model", "--nodes", "3", "--batch", "1", "--temperature", "0", "--pictures", "1", "--tokens", "2"),
        {
            **COMPILE, "--model": (*MODELS, "random:", "random:nope", "random:toy"), "--nodes": COUNTS,
            "--batch": COUNTS[:7], "--temperature": NUMBERS, "--pictures": ("0", "-1", "2", "abc"),
            "--tokens": COUNTS, "--device": DEVICES,
            "--dtype": DTYPES, "--weights": WEIGHTS, "--out": PATHS,
        },
    ),
    "bench engine": (
        ("-m", "random:toy", "--passes", "1", "--no-transformers", "--dtype", "int8"),  # refused last: it takes long
        {
            **COMPILE, "--model": ("random:", "random:nope", "model", "tiny", ""), "--replay": PATHS,
            "--replay-drafter": ("eagle", "block", "jacobi", "x", ""), "--batch": COUNTS,
            "--passes": ("0", "-1", "1000000000"), "--attention": ("auto", "sdpa", "x"),
            "--temperature": NUMBERS, "--device": DEVICES, "--weights": WEIGHTS,
            "--out": PATHS,
        },
    ),
    "models": (("--words",), {"MODEL": (*MODELS, *PATHS, "tiny", "inspect")}),
    "env": (
        ("-m", "model", "--measure"),
        {"--batch": COUNTS, "--model": MODELS, "--drafter": SPECS, "--device": DEVICES, "--dtype": DTYPES, **COMPILE},
    ),
    "evaluate": (
        (),
        {
            "FOLDER": (*RUNS, "photo.png", "empty.png", "00000.png"), "--against": (*RUNS, "empty.png", "bomb.png"),
            "--metrics": ("exact", "test", "exact,test", "fid", "is", "pr", "clip", "hps", "aesthetic", "x"),
            "--weights": (*RUNS, "weights"),
        },
    ),
    "train samples": (
        ("-m", "model", "--batch", "2"),
        {"--images": RUNS, "--out": ("new", *RUNS), "--workers": ("0", "-1", "abc"), "--batch": COUNTS[:4]},
    ),
}  # fmt: skip
NEWER_FLAGS = {
    "serve": ("--no-page", "--log-prompts", "-h"), "env": ("--json",), "models": ("--json",),
    "generate --format": ("--force", "--json"), "generate --workers": ("--force", "--json"),
    "verify": ("--plain", "--json", "--quiet"), "train samples": ("--nope", "-h"),
}  # fmt: skip
NEWER_REQUIRED = {
    "RUN": "tar",
    "FOLDER": "table",
    "--against": "pictures",
    "--images": "tar",
    "--out": "new",
    "MODEL": "model",
}


def make_line(rng: random.Random, command: str, commands: Grammar = COMMANDS) -> list[str]:
    """A command with some options of its grammar."""
    base, grammar = commands[command]
    is_newer = commands is NEWER
    required, flags = (
        (NEWER_REQUIRED, NEWER_FLAGS.get(command, ("--force", "--json"))) if is_newer else (REQUIRED, FLAGS)
    )
    words = [*command.partition(" --")[0].split(), *base]
    count = rng.randint(1, 2) if is_newer else rng.randint(2, 4)  # hostile options hide each other
    options = dict.fromkeys(rng.sample(sorted(grammar), min(len(grammar), count)))
    options |= {name: None for name in grammar if name in required and name not in options and rng.random() < 0.8}
    for name in options:
        value = rng.choice(grammar[name]) if rng.random() < 0.8 else required.get(name, rng.choice(grammar[name]))
        words += [value] if name.isupper() else [name, value]
    if rng.random() < 0.3:
        words.append(rng.choice(flags))
    return [word for word in words if "\0" not in word]
