"""Emoji of several styles as raw images: which emoji, their names, and where each style stores them.

Labels are Unicode's CLDR names from emojibase. Left out are symbols, flags, clock faces and emoji that are mostly
writing, which a small model cannot draw, and Unicode's families, which the openly licensed sets lack. Of the variants
of a person (man, woman, person, six skin tones) every style contributes one, picked by a stable hash: so all of them
occur across styles, and people do not outnumber everything else.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.tiny.data import Picture, stable_hash
from recipes.tiny.raw import Form, RawPicture
from recipes.tiny.sources import fetch, tar_members

GROUPS = {
    0: "smileys",
    1: "people",
    3: "animals-nature",
    4: "food-drink",
    5: "travel-places",
    6: "activities",
    7: "objects",
}
_LEFT_OUT_SUBGROUPS = {30, 31, 58}  # families, person symbols, clocks and watches
_WRITING = re.compile(
    r"zzz|anger symbol|hundred points|bubble|speech balloon|thought balloon|stop sign|bus stop|map\b|banknote|\bchart\b"
    r"|calendar|newspaper|receipt|\btickets?\b|mahjong|8 ball|joker|place medal|suit$|identification|credit card"
    r"|^label$|placard|^page |bookmark|clipboard|^memo$|card index|e-mail|envelope with arrow|phone with arrow"
    r"|middle finger|facing right|dotted line|musical score|speaker|with slash|^x-ray$|abacus|roll of paper",
    re.IGNORECASE,
)
_ONE_SIDED = re.compile(
    r"left|right|office|store|hotel|hospital|\bbank\b|book|television|computer|keyboard|thermometer|police|taxi|fire"
    r"|ambulance|flag|school|machine|note|disk|dvd|video|radio|scroll|battery|ruler|quarter|crescent|gibbous|globe"
    r"|stadium|station|liberty|clapper|ledger|newspaper|cassette|memo|okay|ok\b|construction|control|canned|box|pager",
    re.IGNORECASE,
)
_GENDER = re.compile(r"^(man|woman|person|men|women|people)[ :]+")
_PLURAL_EXCEPTIONS = ("ss", "us", "is", "os")
_NO_ARTICLE = re.compile(
    r"^((clapping|two|folded|raising|open|crossed|pinched|heart) (hands|hearts|fingers|swords)|palms up.*"
    r"|santa.*|mrs.*|mx.*"
    r"|(people|men|women) .*|mount fuji|bacon|broccoli|bread|butter|(cooked|curry) rice|garlic|ice|(shaved|soft) ice.*"
    r"|salt|sushi|spaghetti|popcorn|sake|fire|fog|oden|custard|mate|dna|yarn|thread|wood|dango|ping pong|bowling"
    r"|badminton|tennis|soap|money with wings|ice hockey|field hockey|lacrosse|breast-feeding|canned food)$",
    re.IGNORECASE,
)
_PLAIN_NAMES = {  # everyday words for Unicode's names
    "automobile": "car", "oncoming automobile": "oncoming car", "sport utility vehicle": "blue car",
    "dizzy": "dizzy star", "jack-o-lantern": "pumpkin",
    "deciduous tree": "tree", "lady beetle": "ladybug", "flying saucer": "ufo", "gem stone": "diamond",
    "wrapped gift": "gift", "doughnut": "donut", "honeybee": "bee", "locked": "padlock", "unlocked": "open padlock",
    "locked with key": "padlock with key", "locked with pen": "padlock with pen", "high voltage": "lightning bolt",
    "collision": "explosion", "dashing away": "puff of air", "foggy": "foggy city", "cooking": "fried egg in a pan",
    "camping": "camping tent", "rolling on the floor laughing": "laughing face rolling on the floor",
    "headphone": "headphones", "sauropod": "long-necked dinosaur", "T-Rex": "t-rex dinosaur", "moai": "moai statue",
    "star-struck": "star-struck face", "ringed planet": "planet with rings", "nail polish": "hand with nail polish",
    "luggage": "suitcase", "wedding": "wedding church", "construction": "construction barrier", "seat": "airplane seat",
    "rosette": "rosette flower", "coral": "coral reef", "link": "chain link", "tennis": "tennis racket",
    "metro": "metro train",
    "horse racing": "jockey on a horse", "american football": "football", "goal net": "soccer goal",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Emoji:
    """One emoji of the table, without its variants."""

    hexcode: str
    label: str
    group: str

    @property
    def subject(self) -> str:
        """The key of the held-out split, the same for all styles, genders and skin tones of an emoji."""
        return _GENDER.sub("", self.label).casefold() or self.label.casefold()


@dataclass(frozen=True, slots=True)
class Variant:
    """An emoji with the skin tone in its label, if any."""

    emoji: Emoji
    label: str


def noun_phrase(label: str) -> str:
    """A CLDR name with its article: 'man: dark skin tone, beard' -> 'a man with dark skin tone and a beard'."""
    head, _, detail = label.replace("\u2019", "'").replace("\u201c", "").replace("\u201d", "").partition(": ")
    head = _PLAIN_NAMES.get(head, head)
    details = detail.split(", ") if detail else []
    if "bald" in details:
        details.remove("bald")
        head = f"bald {head}"
    details = ["a beard" if part == "beard" else part for part in details]
    text = head + (" with " + " and ".join(details) if details else "")
    noun = re.split(r" (?:with|of|in|on|over|under|holding|showing|lifting|behind) ", head)[0].split()[-1]
    plural = noun.endswith("s") and not noun.endswith(_PLURAL_EXCEPTIONS)
    if plural or _NO_ARTICLE.match(head):
        return text
    vowel = re.match(r"[aeio]|u(?!ni)|hour", head.casefold())
    return ("an " if vowel else "a ") + text


def _squash(name: str) -> str:
    """Letters and digits only, so that 'man-judge', 'Man SubjectGrader' and 'man judge' are one key."""
    ascii_name = unicodedata.normalize("NFKD", name.casefold()).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9]+", "", ascii_name)


def _code(hexcode: str) -> str:
    """A code point sequence without variation selectors, which some file names have and others lack."""
    return "-".join(part for part in re.split("[-_]", hexcode.lower()) if part != "fe0f")


class EmojiTable:
    """The emoji in use, by code point sequence and by all of their names."""

    def __init__(self, cache: Path) -> None:
        files = dict(
            tar_members(
                fetch("emojibase", cache),
                lambda name: (
                    name.endswith("/en/data.json") or re.search(r"/en/shortcodes/[a-z-]+\.json$", name) is not None
                ),
            )
        )
        entries = json.loads(next(raw for name, raw in files.items() if name.endswith("/en/data.json")))
        self.emoji: list[Emoji] = []
        self.by_name: dict[str, Variant] = {}
        self.by_code: dict[str, Variant] = {}
        glyphs: dict[str, Emoji] = {}
        for entry in entries:
            if entry.get("group") in GROUPS and entry["subgroup"] not in _LEFT_OUT_SUBGROUPS:
                self._add(entry, glyphs)
        for glyph, emoji in glyphs.items():
            name = unicodedata.name(glyph, "") if len(glyph) == 1 else ""
            if name:
                self.by_name.setdefault(_squash(name), Variant(emoji, emoji.label))
        by_hexcode = {emoji.hexcode: emoji for emoji in self.emoji}
        for name in sorted(files):
            if "/en/shortcodes/" in name:
                self._add_shortcodes(json.loads(files[name]), by_hexcode)

    def _add(self, entry: dict[str, Any], glyphs: dict[str, Emoji]) -> None:
        if _WRITING.search(entry["label"]):
            return
        emoji = Emoji(entry["hexcode"], entry["label"], GROUPS[entry["group"]])
        self.emoji.append(emoji)
        glyphs[entry["emoji"].replace("\ufe0f", "")] = emoji
        one_tone = [skin for skin in entry.get("skins", []) if isinstance(skin.get("tone"), int)]
        for form in [entry, *one_tone]:
            variant = Variant(emoji, form["label"])
            self.by_name.setdefault(_squash(form["label"]), variant)
            self.by_code[_code(form["hexcode"])] = variant

    def _add_shortcodes(self, shortcodes: dict[str, str | list[str]], by_hexcode: dict[str, Emoji]) -> None:
        for hexcode, names in shortcodes.items():
            for name in [names] if isinstance(names, str) else names:
                if emoji := by_hexcode.get(hexcode):
                    self.by_name.setdefault(_squash(name), Variant(emoji, emoji.label))


@dataclass(frozen=True, slots=True)
class Drawing:
    """One variant with the bytes of its image."""

    variant: Variant
    payload: bytes


def emoji_pictures(style: str, cache: Path, table: EmojiTable) -> Iterator[RawPicture]:
    """All images of one emoji style, with one variant of each person."""
    drawings: dict[str, list[Drawing]] = defaultdict(list)
    for drawing in _DRAWINGS[style](style, cache, table):
        emoji = drawing.variant.emoji
        # Of a role that exists as man, woman and person, each style contributes one.
        drawings[emoji.subject if emoji.group == "people" else emoji.hexcode].append(drawing)
    form: Form = "raster" if style == "fluent-3d" else "svg"
    for key, choices in drawings.items():
        choices.sort(key=lambda drawing: drawing.variant.label)
        chosen = choices[stable_hash(f"{style} {key}") % len(choices)]
        emoji = chosen.variant.emoji
        picture = Picture(
            key=f"{style}/{_code(emoji.hexcode)}",
            kind="sprite",
            style=style,
            group=emoji.group,
            phrase=noun_phrase(chosen.variant.label),
            subject=f"emoji {emoji.subject}",
            flippable=not _ONE_SIDED.search(emoji.label),
        )
        yield RawPicture(picture, form, chosen.payload)


def _files_by_code(package: str, extension: str, cache: Path, table: EmojiTable) -> Iterator[Drawing]:
    for name, raw in tar_members(fetch(package, cache), lambda name: name.endswith(extension)):
        variant = table.by_code.get(_code(Path(name).name.removesuffix(extension).rstrip(".")))
        if variant:
            yield Drawing(variant, raw)


def _fluent(style: str, cache: Path, table: EmojiTable) -> Iterator[Drawing]:
    return _files_by_code(style, "webp" if style == "fluent-3d" else "svg", cache, table)


def _iconify(style: str, cache: Path, table: EmojiTable) -> Iterator[Drawing]:
    raw = next(raw for _, raw in tar_members(fetch(style, cache), lambda name: name.endswith("/icons.json")))
    collection = json.loads(raw)
    height = collection.get("height", 16)
    width = collection.get("width", height)
    for name, icon in sorted(collection["icons"].items()):
        variant = table.by_name.get(_squash(name)) or table.by_name.get(_squash(re.sub(r"-\d$", "", name)))
        if variant and not icon.get("hidden"):
            w, h = icon.get("width", width), icon.get("height", height)
            svg = (
                '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
                f'width="{w}" height="{h}" viewBox="{icon.get("left", 0)} {icon.get("top", 0)} {w} {h}">'
                f"{icon['body']}</svg>"
            )
            yield Drawing(variant, svg.encode())


_DRAWINGS = {
    "fluent-3d": _fluent,
    "fluent-color": _fluent,
    "fluent-flat": _fluent,
    "noto": _iconify,
    "noto-v1": _iconify,
    "twemoji": _iconify,
}
EMOJI_STYLES = tuple(_DRAWINGS)
