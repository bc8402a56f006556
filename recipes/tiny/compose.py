"""Composes training pairs: sprites on plain, gradient and photographic backgrounds, with captions that say so.

`Composer` draws what goes where, vectorised in numpy and without touching a pixel; `Painter` keeps every picture on the
device at the few sizes in use and puts them together there. Sprites stand on multiples of the tokenizer's cell, mostly
centred and at one size: that way a sprite is cut into the same patches every time, and a model has one sequence of
codes to learn for it instead of thousands.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.tiny.data import DEFAULT_STYLE, Pack, Split, caption, pair_caption
from underdraw.errors import ConfigError

PALETTE: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255), "light gray": (226, 229, 233), "gray": (140, 146, 154), "black": (20, 20, 24),
    "sky blue": (142, 202, 240), "blue": (48, 108, 214), "navy blue": (26, 38, 90), "teal": (42, 150, 148),
    "mint green": (180, 232, 208), "green": (72, 158, 92), "yellow": (252, 216, 88), "orange": (246, 152, 66),
    "red": (208, 54, 58), "pink": (250, 188, 206), "purple": (124, 88, 192), "lavender": (214, 206, 246),
    "beige": (238, 225, 202), "brown": (122, 84, 62),
}  # fmt: skip
COLOURS = tuple(PALETTE)
WHITE = COLOURS.index("white")


def _article(name: str) -> str:
    return ("an " if name[0] in "aeiou" else "a ") + name


def plain_phrase(colour: str) -> str:
    """'on a sky blue background'."""
    return f"on {_article(colour)} background"


def gradient_phrase(top: str, bottom: str) -> str:
    """'on a navy blue to purple gradient background', from top to bottom."""
    return f"on {_article(top)} to {bottom} gradient background"


BACKGROUND_PHRASES = tuple(plain_phrase(colour) for colour in COLOURS)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How often what is drawn. Chances of one level add up to at most one; the rest are single sprites on a colour."""

    photo: float = 0.04
    landscape: float = 0.05
    pair: float = 0.09
    white: float = 0.28  # backgrounds of sprites: these three, else a plain colour
    gradient: float = 0.16
    scenery: float = 0.14
    small: float = 0.15  # of single sprites on a plain background; on scenery half are small
    style_implied: float = 0.3  # of the default style's pictures
    flip: float = 0.0
    zoom: float = (
        1.4  # photographs are shown at up to this scale, so that no two look alike and none is learnt by heart
    )
    soft: float = 0.7  # of sceneries behind a sprite: out of focus
    people_weight: float = 0.5
    portrait_weight: float = 0.4
    style_weights: dict[str, float] = field(default_factory=lambda: {DEFAULT_STYLE: 2.0, "fluent-3d-anim": 0.3})

    def __post_init__(self) -> None:
        for names in (("photo", "landscape", "pair"), ("white", "gradient", "scenery")):
            total = sum(getattr(self, name) for name in names)
            if total > 1:
                raise ConfigError(f"the chances of {', '.join(names)} add up to {total:.2f}; they may not exceed 1")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sides in pixels a sprite may have on a canvas, all multiples of a cell."""

    canvas: int
    main: int
    small: int
    pair: int
    cell: int = 8

    @classmethod
    def of(cls, canvas: int, cell: int = 8) -> Sizes:
        """The sizes for a canvas; 160, 128 and 88 of 192 pixels."""
        if canvas % cell:
            raise ConfigError(f"a canvas of {canvas} px is not a multiple of the cell of {cell} px")
        main, small, pair = (int(canvas * share / cell) * cell for share in (5 / 6, 2 / 3, 0.47))
        return cls(canvas, main, small, pair, cell)

    def snap(self, position: float) -> int:
        """The multiple of a cell at or before a position."""
        return int(position // self.cell) * self.cell


@dataclass(frozen=True, slots=True)
class Scenes:
    """A batch of pictures to paint. Rows are rows of the pack, -1 where there is none."""

    top: np.ndarray  # (B,) colour at the top; equal to `bottom` on a plain background
    bottom: np.ndarray  # (B,)
    backdrop: np.ndarray  # (B,) row of a photograph behind everything
    backdrop_flip: np.ndarray  # (B,) bool
    backdrop_view: np.ndarray  # (B, 3) scale of the photograph, and which part of it is seen, from 0 to 1 along x and y
    backdrop_soft: np.ndarray  # (B,) bool, out of focus
    rows: np.ndarray  # (B, 2) sprites; the second one only in pairs
    sizes: np.ndarray  # (B, 2) pixels
    x: np.ndarray  # (B, 2)
    y: np.ndarray  # (B, 2)
    flips: np.ndarray  # (B, 2) bool
    style_implied: np.ndarray  # (B,) bool
    white_implied: np.ndarray  # (B,) bool

    def __len__(self) -> int:
        return len(self.top)


_SOFT = 16  # patches along a side that a scenery out of focus is averaged over


class _Chooser:
    """Draws rows in proportion to their weights."""

    def __init__(self, rows: np.ndarray, weights: np.ndarray) -> None:
        self.rows = rows
        self._bounds = np.cumsum(weights) / weights.sum() if len(rows) else weights

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        return self.rows[np.searchsorted(self._bounds, rng.random(count), side="right").clip(max=len(self.rows) - 1)]


class Composer:
    """Draws scenes from one split of a pack and writes their captions."""

    def __init__(self, pack: Pack, split: Split = "train", recipe: Recipe | None = None, cell: int = 8) -> None:
        self.pack = pack
        self.recipe = recipe or Recipe()
        self.sizes = Sizes.of(pack.px, cell)
        self._photos = pack.indices(split, "photo")
        self._landscapes = pack.indices(split, "landscape")
        # A held-out split may be too small to hold a landscape; its sprites still need something to stand before.
        self._scenery = self._landscapes if len(self._landscapes) else pack.indices("all", "landscape")
        sprites = np.concatenate([pack.indices(split, "sprite"), pack.indices(split, "portrait")])
        if not len(sprites):
            raise ConfigError(f"the {split} split of {pack.path} has no sprites; use a larger pack or another split")
        self._sprites = _Chooser(sprites, np.array([self._weight(row) for row in sprites]))
        self._by_style: dict[str, np.ndarray] = {}
        for row in pack.indices(split, "sprite"):
            style = pack.pictures[row].style
            self._by_style[style] = np.append(self._by_style.get(style, np.empty(0, np.int64)), row)
        paired = np.array([row for rows in self._by_style.values() if len(rows) > 1 for row in rows], dtype=np.int64)
        self._paired = _Chooser(paired, np.array([self._weight(row) for row in paired]))
        self._styles = np.array([picture.style for picture in pack.pictures])
        self._portrait = np.array([picture.kind == "portrait" for picture in pack.pictures])
        self._flippable = np.array([picture.flippable for picture in pack.pictures])

    def _weight(self, row: int) -> float:
        picture, recipe = self.pack.pictures[row], self.recipe
        weight = recipe.style_weights.get(picture.style, 1.0)
        if picture.kind == "portrait":
            return weight * recipe.portrait_weight
        return weight * (recipe.people_weight if picture.group == "people" else 1.0)

    def draw(self, count: int, rng: np.random.Generator) -> Scenes:
        """`count` scenes."""
        recipe = self.recipe
        what = rng.random(count)
        photo = (what < recipe.photo) & (len(self._photos) > 0)
        landscape = ~photo & (what < recipe.photo + recipe.landscape) & (len(self._landscapes) > 0)
        alone = photo | landscape
        pair = ~alone & (what > 1 - recipe.pair) & (len(self._paired.rows) > 1)

        rows = np.full((count, 2), -1)
        rows[:, 0] = np.where(pair, self._paired.draw(count, rng), self._sprites.draw(count, rng)) if pair.any() else (
            self._sprites.draw(count, rng)
        )  # fmt: skip
        rows[pair, 1] = self._partners(rows[pair, 0], rng)
        rows[alone] = -1

        where = rng.random(count)
        white = where < recipe.white
        gradient = ~white & (where < recipe.white + recipe.gradient)
        scenery = (where > 1 - recipe.scenery) & (len(self._scenery) > 0)
        top = np.where(white, WHITE, rng.integers(1, len(COLOURS), count))
        bottom = np.where(gradient, (top + rng.integers(1, len(COLOURS), count)) % len(COLOURS), top)
        backdrop = np.full(count, -1)
        for mask, choices in ((scenery, self._scenery), (photo, self._photos), (landscape, self._landscapes)):
            if mask.any():
                backdrop[mask] = rng.choice(choices, mask.sum())

        sizes, x, y = self._place(rows, backdrop >= 0, rng)
        flips = (rng.random((count, 2)) < recipe.flip) & self._flippable[rows] & (rows >= 0)
        return Scenes(
            top=top,
            bottom=bottom,
            backdrop=backdrop,
            backdrop_flip=rng.random(count) < recipe.flip,
            backdrop_view=np.stack([rng.uniform(1, recipe.zoom, count), *rng.random((2, count))], axis=1),
            backdrop_soft=~alone & (rng.random(count) < recipe.soft),
            rows=rows,
            sizes=sizes,
            x=x,
            y=y,
            flips=flips,
            style_implied=(rng.random(count) < recipe.style_implied)
            & (self._styles[rows[:, 0]] == DEFAULT_STYLE)
            & ~pair,
            white_implied=rng.random(count) < 0.5,
        )

    def _partners(self, first: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """For every row another one of the same style."""
        partners = first.copy()
        for style in np.unique(self._styles[first]):
            mask = self._styles[first] == style
            choices = self._by_style[str(style)]
            place = np.searchsorted(choices, first[mask])
            partners[mask] = choices[(place + rng.integers(1, len(choices), mask.sum())) % len(choices)]
        return partners

    def _place(self, rows: np.ndarray, scenery: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        """Sides and top-left corners of all sprites."""  # three arrays (B, 2)
        s, count = self.sizes, len(rows)
        portrait = self._portrait[rows[:, 0]]
        pair = rows[:, 1] >= 0
        small = rng.random(count) < np.where(scenery, 0.5, self.recipe.small)
        size = np.where(pair, s.pair, np.where(portrait, s.canvas, np.where(small, s.small, s.main)))
        x = (s.canvas - size) // 2 // s.cell * s.cell
        y = x.copy()
        # Small ones stand anywhere from left to right, and lower in a landscape, where the ground is.
        small_only = small & ~pair & ~portrait
        aside = small_only & (rng.random(count) < 0.5)
        margin = s.canvas - s.small
        x = np.where(aside, rng.integers(0, margin // s.cell + 1, count) * s.cell, x)
        y = np.where(small_only & scenery, s.snap(margin * 0.9), y)
        left = s.snap((s.canvas / 2 - s.pair) / 2)
        x = np.stack([np.where(pair, left, x), np.full(count, s.canvas - s.pair - left)], 1)
        y = np.stack([np.where(pair, s.snap((s.canvas - s.pair) / 2 + s.cell / 2), y)] * 2, 1)
        return np.stack([size, np.full(count, s.pair)], 1), x, y

    def captions(self, scenes: Scenes) -> list[str]:
        """The captions of a batch."""
        return [self._caption(scenes, place) for place in range(len(scenes))]

    def _caption(self, scenes: Scenes, place: int) -> str:
        pictures = self.pack.pictures
        first, second = scenes.rows[place].tolist()
        backdrop, top, bottom = int(scenes.backdrop[place]), int(scenes.top[place]), int(scenes.bottom[place])
        if first < 0:
            return caption(pictures[backdrop])
        if backdrop >= 0:
            background = f"in front of {pictures[backdrop].phrase}"
        elif top != bottom:
            background = gradient_phrase(COLOURS[top], COLOURS[bottom])
        elif top == WHITE and second < 0 and scenes.white_implied[place]:
            background = ""
        else:
            background = plain_phrase(COLOURS[top])
        if second >= 0:
            return pair_caption(pictures[first], pictures[second], background)
        return caption(pictures[first], background, style="implied" if scenes.style_implied[place] else "named")


class Painter:
    """Paints scenes on a device. Holds every picture it may need there as 8-bit RGBA with premultiplied alpha."""

    def __init__(self, pack: Pack, device: torch.device | str, rows: np.ndarray | None = None, cell: int = 8) -> None:
        self.device = torch.device(device)
        self.sizes = Sizes.of(pack.px, cell)
        palette = torch.tensor([PALETTE[name] for name in COLOURS], device=self.device)
        self._palette = palette.float() / 255  # (colours, 3)
        rows = pack.indices("all") if rows is None else rows
        pixels = pack.pixels(rows)  # (N, px, px, 4) uint8
        sprite = np.array([pack.pictures[row].kind == "sprite" for row in rows], dtype=bool)
        wanted = {self.sizes.canvas: ~sprite}
        for size in (self.sizes.main, self.sizes.small, self.sizes.pair):
            wanted[size] = sprite
        self._banks: dict[int, Tensor] = {}  # size -> (n, size, size, 4) uint8
        self._places: dict[int, np.ndarray] = {}  # size -> (rows of the pack,) place in the bank
        for size, mask in wanted.items():
            self._places[size] = np.full(len(pack), -1)
            self._places[size][rows[mask]] = np.arange(mask.sum())
            self._banks[size] = self._bank(pixels[mask], size)

    def _bank(self, pixels: np.ndarray, size: int) -> Tensor:
        bank = torch.empty(len(pixels), size, size, 4, dtype=torch.uint8, device=self.device)
        for start in range(0, len(pixels), 256):
            part = torch.from_numpy(pixels[start : start + 256]).to(self.device).float()  # (n, px, px, 4)
            colour, alpha = part[..., :3], part[..., 3:]
            part = torch.cat([colour * alpha / 255, alpha], -1).movedim(-1, 1)
            if size != part.shape[-1]:
                part = F.interpolate(part, size=(size, size), mode="bilinear", antialias=True)
            bank[start : start + 256] = part.movedim(1, -1).round().clamp(0, 255).to(torch.uint8)
        return bank

    def paint(self, scenes: Scenes) -> Tensor:
        """Pixels of a batch in [-1, 1], channels last in memory."""  # (B, 3, px, px)
        px = self.sizes.canvas
        top, bottom = (self._palette[self._to(colours)][:, None, None] for colours in (scenes.top, scenes.bottom))
        ramp = torch.linspace(0, 1, px, device=self.device)[:, None, None]
        canvas = (top + (bottom - top) * ramp).expand(-1, px, px, 3).contiguous()  # (B, px, px, 3)
        self._hang(canvas, scenes)
        for slot in (0, 1):
            for size in np.unique(scenes.sizes[scenes.rows[:, slot] >= 0, slot]):
                which = np.flatnonzero((scenes.rows[:, slot] >= 0) & (scenes.sizes[:, slot] == size))
                corner = scenes.x[which, slot], scenes.y[which, slot]
                self._paste(canvas, which, scenes.rows[:, slot], scenes.flips[:, slot], int(size), corner)
        return canvas.mul_(2).sub_(1).movedim(-1, 1)

    def _hang(self, canvas: Tensor, scenes: Scenes) -> None:
        """Photographs over whole canvases: a part of each, flipped or not, in focus or not."""
        which = np.flatnonzero(scenes.backdrop >= 0)
        if not len(which):
            return
        px = self.sizes.canvas
        pictures = self._banks[px][self._to(self._found(px, scenes.backdrop[which]))][..., :3] / 255.0
        scale, left, top = self._to(scenes.backdrop_view[which].astype(np.float32)).T
        flip = torch.where(self._to(scenes.backdrop_flip[which]), -1.0, 1.0)
        nought = torch.zeros_like(scale)
        spare = 1 - 1 / scale  # what lies outside the part that is seen, on both sides together
        across = torch.stack([flip / scale, nought, spare * (2 * left - 1)], dim=1)
        down = torch.stack([nought, 1 / scale, spare * (2 * top - 1)], dim=1)
        seen = F.affine_grid(torch.stack([across, down], dim=1), [len(which), 3, px, px], align_corners=False)
        shown = F.grid_sample(pictures.movedim(-1, 1), seen, padding_mode="border", align_corners=False)
        soft = F.interpolate(F.avg_pool2d(shown, px // _SOFT), size=(px, px), mode="bilinear")
        shown = torch.where(self._to(scenes.backdrop_soft[which])[:, None, None, None], soft, shown)
        canvas[self._to(which)] = shown.movedim(1, -1)

    def _found(self, size: int, rows: np.ndarray) -> np.ndarray:
        """Places of rows of the pack in the bank of a size."""
        places = self._places[size][rows]
        if (places < 0).any():
            missing = int(rows[places < 0][0])
            raise ConfigError(f"row {missing} of the pack is not on the device at {size} px; give the painter its row")
        return places

    def _paste(
        self,
        canvas: Tensor,
        which: np.ndarray,
        rows: np.ndarray,
        flips: np.ndarray,
        size: int,
        corner: tuple[np.ndarray, np.ndarray],
    ) -> None:
        """Lay pictures of one size over the canvases `which`, each at a corner of its own."""
        if not len(which):
            return
        px = self.sizes.canvas
        places = self._found(size, rows[which])
        x, y = corner
        along = torch.arange(px, device=self.device)
        across, down = along - self._to(x)[:, None], along - self._to(y)[:, None]  # (n, px)
        inside = ((down >= 0) & (down < size))[:, :, None] & ((across >= 0) & (across < size))[:, None]  # (n, px, px)
        across = torch.where(self._to(flips[which])[:, None], size - 1 - across, across).clamp(0, size - 1)
        down = down.clamp(0, size - 1)
        picture = self._banks[size][self._to(places)[:, None, None], down[:, :, None], across[:, None]]
        picture = picture * (inside[..., None] / 255.0)  # (n, px, px, 4)
        index = self._to(which)
        canvas[index] = canvas[index] * (1 - picture[..., 3:]) + picture[..., :3]

    def _to(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)
