"""Composes training images: sprites on plain, gradient and photographic backgrounds, with captions that say so.

`Composer` draws random scenes in numpy, without touching a pixel; `Painter` holds every image on the device at the few
sizes in use and combines them there. Sprites are aligned to the tokenizer's cells, mostly centred and at one size: so a
sprite is always cut into the same patches, and a model has one sequence of codes to learn for it instead of thousands.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

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
class SceneConfig:
    """Probabilities of what a scene shows. What they leave of 1 are single sprites on a plain colour."""

    photo: float = 0.04
    landscape: float = 0.05
    pair: float = 0.09
    white: float = 0.28  # backgrounds of sprites: these three, otherwise a plain colour
    gradient: float = 0.16
    scenery: float = 0.14
    small: float = 0.15  # of single sprites on a plain background; on scenery it is 0.5
    style_implied: float = 0.3  # of the default style's pictures
    flip: float = 0.0
    zoom: float = 1.4  # largest scale of photographs; varying crops keep the model from memorising them
    soft: float = 0.7  # of scenery behind a sprite: out of focus
    people_weight: float = 0.5
    portrait_weight: float = 0.4
    style_weights: dict[str, float] = field(default_factory=lambda: {DEFAULT_STYLE: 2.0, "fluent-3d-anim": 0.3})

    def __post_init__(self) -> None:
        for names in (("photo", "landscape", "pair"), ("white", "gradient", "scenery")):
            total = sum(getattr(self, name) for name in names)
            if total > 1:
                raise ConfigError(f"the probabilities of {', '.join(names)} sum to {total:.2f}; use at most 1.")


@dataclass(frozen=True, slots=True)
class SpriteSizes:
    """The sides in pixels that sprites have on a canvas, all multiples of a cell."""

    canvas: int
    main: int
    small: int
    pair: int
    cell: int = 8

    @classmethod
    def for_canvas(cls, canvas: int, cell: int = 8) -> SpriteSizes:
        """The sizes for a canvas; 160, 128 and 88 of 192 pixels."""
        if canvas % cell:
            raise ConfigError(f"a canvas of {canvas} px is not a multiple of the tokenizer's {cell} px per code.")
        main, small, pair = (int(canvas * share / cell) * cell for share in (5 / 6, 2 / 3, 0.47))
        return cls(canvas, main, small, pair, cell)

    def snap(self, position: float) -> int:
        """The multiple of a cell at or before a position."""
        return int(position // self.cell) * self.cell

    def pair_corners(self) -> tuple[int, int, int]:
        """x of the left and of the right sprite of a pair, and y of both."""
        left = self.snap((self.canvas / 2 - self.pair) / 2)
        return left, self.canvas - self.pair - left, self.snap((self.canvas - self.pair) / 2 + self.cell / 2)


@dataclass(frozen=True, slots=True)
class Scenes:
    """A batch of images to paint. Rows are rows of the pack, -1 for none."""

    top: np.ndarray  # (B,) colour at the top; equal to `bottom` on a plain background
    bottom: np.ndarray  # (B,)
    backdrop: np.ndarray  # (B,) row of a photograph behind everything
    backdrop_flip: np.ndarray  # (B,) bool
    backdrop_view: np.ndarray  # (B, 3) scale of the photograph, and position of the crop along x and y, from 0 to 1
    backdrop_soft: np.ndarray  # (B,) bool, out of focus
    rows: np.ndarray  # (B, 2) sprites; the second one only in pairs
    sizes: np.ndarray  # (B, 2) pixels
    x: np.ndarray  # (B, 2)
    y: np.ndarray  # (B, 2)
    flips: np.ndarray  # (B, 2) bool
    style_implied: np.ndarray  # (B,) bool, the caption does not name the style
    white_implied: np.ndarray  # (B,) bool, the caption does not name a white background

    def __len__(self) -> int:
        return len(self.top)

    def __getitem__(self, part: slice) -> Scenes:
        return Scenes(*(getattr(self, field.name)[part] for field in fields(self)))


_SOFT = 16  # patches per side that scenery out of focus is averaged over


class _WeightedRows:
    """Draws rows in proportion to their weights."""

    def __init__(self, rows: np.ndarray, weights: np.ndarray) -> None:
        self.rows = rows
        self._bounds = np.cumsum(weights) / weights.sum() if len(rows) else weights

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        return self.rows[np.searchsorted(self._bounds, rng.random(count), side="right").clip(max=len(self.rows) - 1)]


class Composer:
    """Draws random scenes from one split of a pack, and their captions."""

    def __init__(self, pack: Pack, split: Split = "train", config: SceneConfig | None = None, cell: int = 8) -> None:
        self.pack = pack
        self.config = config or SceneConfig()
        self.sizes = SpriteSizes.for_canvas(pack.px, cell)
        self._photos = pack.indices(split, "photo")
        self._landscapes = pack.indices(split, "landscape")
        # A held-out split may have no landscape; its sprites still need scenery.
        self._scenery = self._landscapes if len(self._landscapes) else pack.indices("all", "landscape")
        sprites = np.concatenate([pack.indices(split, "sprite"), pack.indices(split, "portrait")])
        if not len(sprites):
            raise ConfigError(f"the {split} split of {pack.path} has no sprites; use a larger pack.")
        self._sprites = _WeightedRows(sprites, np.array([self._weight(row) for row in sprites]))
        self._by_style: dict[str, np.ndarray] = {}
        for row in pack.indices(split, "sprite"):
            style = pack.pictures[row].style
            self._by_style[style] = np.append(self._by_style.get(style, np.empty(0, np.int64)), row)
        paired = np.array([row for rows in self._by_style.values() if len(rows) > 1 for row in rows], dtype=np.int64)
        self._paired = _WeightedRows(paired, np.array([self._weight(row) for row in paired]))
        self._styles = np.array([picture.style for picture in pack.pictures])
        self._is_portrait = np.array([picture.kind == "portrait" for picture in pack.pictures])
        self._flippable = np.array([picture.flippable for picture in pack.pictures])

    def _weight(self, row: int) -> float:
        picture, config = self.pack.pictures[row], self.config
        weight = config.style_weights.get(picture.style, 1.0)
        if picture.kind == "portrait":
            return weight * config.portrait_weight
        return weight * (config.people_weight if picture.group == "people" else 1.0)

    def draw(self, count: int, rng: np.random.Generator) -> Scenes:
        """Random scenes."""
        config = self.config
        content = rng.random(count)
        is_photo = (content < config.photo) & (len(self._photos) > 0)
        is_landscape = ~is_photo & (content < config.photo + config.landscape) & (len(self._landscapes) > 0)
        has_no_sprite = is_photo | is_landscape
        is_pair = ~has_no_sprite & (content > 1 - config.pair) & (len(self._paired.rows) > 1)

        rows = np.full((count, 2), -1)
        paired = self._paired.draw(count, rng) if is_pair.any() else rows[:, 0]
        rows[:, 0] = np.where(is_pair, paired, self._sprites.draw(count, rng))
        rows[is_pair, 1] = self._partners(rows[is_pair, 0], rng)
        rows[has_no_sprite] = -1

        background = rng.random(count)
        is_white = background < config.white
        is_gradient = ~is_white & (background < config.white + config.gradient)
        is_scenery = (background > 1 - config.scenery) & (len(self._scenery) > 0)
        top = np.where(is_white, WHITE, rng.integers(1, len(COLOURS), count))
        bottom = np.where(is_gradient, (top + rng.integers(1, len(COLOURS), count)) % len(COLOURS), top)
        backdrop = np.full(count, -1)
        for mask, choices in (
            (is_scenery, self._scenery),
            (is_photo, self._photos),
            (is_landscape, self._landscapes),
        ):
            if mask.any():
                backdrop[mask] = rng.choice(choices, mask.sum())

        sizes, x, y = self._place_sprites(rows, backdrop >= 0, rng)
        flips = (rng.random((count, 2)) < config.flip) & self._flippable[rows] & (rows >= 0)
        return Scenes(
            top=top,
            bottom=bottom,
            backdrop=backdrop,
            backdrop_flip=rng.random(count) < config.flip,
            backdrop_view=np.stack([rng.uniform(1, config.zoom, count), *rng.random((2, count))], axis=1),
            backdrop_soft=~has_no_sprite & (rng.random(count) < config.soft),
            rows=rows,
            sizes=sizes,
            x=x,
            y=y,
            flips=flips,
            style_implied=(rng.random(count) < config.style_implied)
            & (self._styles[rows[:, 0]] == DEFAULT_STYLE)
            & ~is_pair,
            white_implied=rng.random(count) < 0.5,
        )

    def _partners(self, first: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """For every row another one of the same style."""
        partners = first.copy()
        for style in np.unique(self._styles[first]):
            mask = self._styles[first] == style
            choices = self._by_style[str(style)]
            index = np.searchsorted(choices, first[mask])
            partners[mask] = choices[(index + rng.integers(1, len(choices), mask.sum())) % len(choices)]
        return partners

    def _place_sprites(
        self, rows: np.ndarray, has_backdrop: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, ...]:
        """Sides, x and y of the top-left corners of all sprites."""  # three arrays (B, 2)
        s, count = self.sizes, len(rows)
        is_portrait = self._is_portrait[rows[:, 0]]
        is_pair = rows[:, 1] >= 0
        is_small = rng.random(count) < np.where(has_backdrop, 0.5, self.config.small)
        size = np.where(is_pair, s.pair, np.where(is_portrait, s.canvas, np.where(is_small, s.small, s.main)))
        x = (s.canvas - size) // 2 // s.cell * s.cell
        y = x.copy()
        # Half of the small sprites are shifted along x; in front of scenery they are at the bottom, on the ground.
        is_small = is_small & ~is_pair & ~is_portrait
        is_shifted = is_small & (rng.random(count) < 0.5)
        margin = s.canvas - s.small
        x = np.where(is_shifted, rng.integers(0, margin // s.cell + 1, count) * s.cell, x)
        y = np.where(is_small & has_backdrop, s.snap(margin * 0.9), y)
        left, right, pair_y = s.pair_corners()
        x = np.stack([np.where(is_pair, left, x), np.full(count, right)], 1)
        y = np.stack([np.where(is_pair, pair_y, y)] * 2, 1)
        return np.stack([size, np.full(count, s.pair)], 1), x, y

    def captions(self, scenes: Scenes) -> list[str]:
        """The captions of a batch."""
        return [self._caption(scenes, index) for index in range(len(scenes))]

    def _caption(self, scenes: Scenes, index: int) -> str:
        pictures = self.pack.pictures
        first, second = scenes.rows[index].tolist()
        backdrop, top, bottom = int(scenes.backdrop[index]), int(scenes.top[index]), int(scenes.bottom[index])
        if first < 0:
            return caption(pictures[backdrop])
        if backdrop >= 0:
            background = f"in front of {pictures[backdrop].phrase}"
        elif top != bottom:
            background = gradient_phrase(COLOURS[top], COLOURS[bottom])
        elif top == WHITE and second < 0 and scenes.white_implied[index]:
            background = ""
        else:
            background = plain_phrase(COLOURS[top])
        if second >= 0:
            return pair_caption(pictures[first], pictures[second], background)
        return caption(pictures[first], background, style="implied" if scenes.style_implied[index] else "named")


class Painter:
    """Paints scenes on a device, which holds all images at all sizes as 8-bit RGBA with premultiplied alpha."""

    def __init__(self, pack: Pack, device: torch.device | str, rows: np.ndarray | None = None, cell: int = 8) -> None:
        self.device = torch.device(device)
        self.sizes = SpriteSizes.for_canvas(pack.px, cell)
        palette = torch.tensor([PALETTE[name] for name in COLOURS], device=self.device)
        self._palette = palette.float() / 255  # (colours, 3)
        rows = pack.indices("all") if rows is None else rows
        pixels = pack.pixels(rows)  # (N, px, px, 4) uint8
        sprite = np.array([pack.pictures[row].kind == "sprite" for row in rows], dtype=bool)
        masks = {self.sizes.canvas: ~sprite}  # portraits and photographs fill the canvas
        for size in (self.sizes.main, self.sizes.small, self.sizes.pair):
            masks[size] = sprite
        self._banks: dict[int, Tensor] = {}  # size -> (n, size, size, 4) uint8
        self._indices: dict[int, np.ndarray] = {}  # size -> (rows of the pack,) index in the bank
        for size, mask in masks.items():
            self._indices[size] = np.full(len(pack), -1)
            self._indices[size][rows[mask]] = np.arange(mask.sum())
            self._banks[size] = self._resize(pixels[mask], size)

    def _resize(self, pixels: np.ndarray, size: int) -> Tensor:
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
        """Pixels (B, 3, px, px) of a batch in [-1, 1], channels last in memory."""
        px = self.sizes.canvas
        top, bottom = (self._palette[self._to(colours)][:, None, None] for colours in (scenes.top, scenes.bottom))
        ramp = torch.linspace(0, 1, px, device=self.device)[:, None, None]
        canvas = (top + (bottom - top) * ramp).expand(-1, px, px, 3).contiguous()  # (B, px, px, 3)
        self._paint_backdrops(canvas, scenes)
        for slot in (0, 1):
            for size in np.unique(scenes.sizes[scenes.rows[:, slot] >= 0, slot]):
                which = np.flatnonzero((scenes.rows[:, slot] >= 0) & (scenes.sizes[:, slot] == size))
                corner = scenes.x[which, slot], scenes.y[which, slot]
                self._paste(canvas, which, scenes.rows[:, slot], scenes.flips[:, slot], int(size), corner)
        return canvas.mul_(2).sub_(1).movedim(-1, 1)

    def _paint_backdrops(self, canvas: Tensor, scenes: Scenes) -> None:
        """Cover whole canvases with crops of photographs, flipped or not, in focus or not."""
        which = np.flatnonzero(scenes.backdrop >= 0)
        if not len(which):
            return
        px = self.sizes.canvas
        pictures = self._banks[px][self._to(self._bank_indices(px, scenes.backdrop[which]))][..., :3] / 255.0
        scale, left, top = self._to(scenes.backdrop_view[which].astype(np.float32)).T
        flip = torch.where(self._to(scenes.backdrop_flip[which]), -1.0, 1.0)
        zero = torch.zeros_like(scale)
        cropped = 1 - 1 / scale  # share of the photograph outside the crop, both sides together
        x = torch.stack([flip / scale, zero, cropped * (2 * left - 1)], dim=1)
        y = torch.stack([zero, 1 / scale, cropped * (2 * top - 1)], dim=1)
        grid = F.affine_grid(torch.stack([x, y], dim=1), [len(which), 3, px, px], align_corners=False)
        crops = F.grid_sample(pictures.movedim(-1, 1), grid, padding_mode="border", align_corners=False)
        soft = F.interpolate(F.avg_pool2d(crops, px // _SOFT), size=(px, px), mode="bilinear")
        crops = torch.where(self._to(scenes.backdrop_soft[which])[:, None, None, None], soft, crops)
        canvas[self._to(which)] = crops.movedim(1, -1)

    def _bank_indices(self, size: int, rows: np.ndarray) -> np.ndarray:
        """Indices of rows of the pack in the bank of a size."""
        indices = self._indices[size][rows]
        if (indices < 0).any():
            missing = int(rows[indices < 0][0])
            raise ConfigError(f"row {missing} of the pack is not on the device at {size} px; pass it to the painter.")
        return indices

    def _paste(
        self,
        canvas: Tensor,
        which: np.ndarray,
        rows: np.ndarray,
        flips: np.ndarray,
        size: int,
        corner: tuple[np.ndarray, np.ndarray],
    ) -> None:
        """Paste images of one size on the canvases `which`, with their top-left corners at x, y."""
        if not len(which):
            return
        px = self.sizes.canvas
        indices = self._bank_indices(size, rows[which])
        pixel = torch.arange(px, device=self.device)
        x, y = (pixel - self._to(position)[:, None] for position in corner)  # (n, px) in the sprite
        is_inside = ((y >= 0) & (y < size))[:, :, None] & ((x >= 0) & (x < size))[:, None]  # (n, px, px)
        x = torch.where(self._to(flips[which])[:, None], size - 1 - x, x).clamp(0, size - 1)
        y = y.clamp(0, size - 1)
        picture = self._banks[size][self._to(indices)[:, None, None], y[:, :, None], x[:, None]]
        picture = picture * (is_inside[..., None] / 255.0)  # (n, px, px, 4)
        index = self._to(which)
        canvas[index] = canvas[index] * (1 - picture[..., 3:]) + picture[..., :3]

    def _to(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)
