"""Composes training images: which sprite, where, how large, in which colour and on which background, and the caption.

`Composer` draws random scenes in numpy, without touching a pixel; `Painter` paints them on a device. What a caption has
a word for ("small", "on the left", "facing right", "purple") is said most of the time; what it does not say is free, so
that seeds give different images. Sprites have few sizes and angles, and they and photographs are shifted by whole cells
of the image tokenizer only: so a sprite is always cut into the same patches, and a model has a few sequences of codes
to learn for it instead of thousands.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np

from recipes.tiny.data import DEFAULT_STYLE, Pack, Split, caption, pair_caption
from recipes.tiny.facing import faces_left
from recipes.tiny.palette import COLOURS, SPRITE_COLOURS, WHITE, describe, gradient_phrase, plain_phrase
from underdraw.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SceneConfig:
    """Probabilities of what a scene shows. What they leave of 1 are single sprites on a plain colour."""

    photo: float = 0.06
    landscape: float = 0.10
    pair: float = 0.10
    white: float = 0.20  # backgrounds of sprites: these three, otherwise a plain colour
    gradient: float = 0.16
    scenery: float = 0.16
    portrait_scenery: float = 0.2  # instead of `scenery`, behind portraits
    large: float = 0.10  # of single sprites on a plain background
    medium: float = 0.24
    small: float = 0.12
    recolour: float = 0.18  # of the single sprites that can be; half as often in pairs
    turn: float = 0.08  # of single sprites
    flip: float = 0.5  # of photographs, and of sprites that may be mirrored; portraits never are
    words: float = 0.85  # how often size and position are said; otherwise they are free
    facing_words: float = 0.5
    style_unnamed: float = 0.1
    default_style_unnamed: float = 0.3
    background_unnamed: float = 0.18  # of single sprites on a plain colour
    soft: float = 0.85  # of scenery behind a sprite: out of focus
    people_weight: float = 0.5
    portrait_weight: float = 0.8
    style_weights: dict[str, float] = field(default_factory=lambda: {DEFAULT_STYLE: 2.0})

    def __post_init__(self) -> None:
        sets = (("photo", "landscape", "pair"), ("white", "gradient", "scenery"), ("large", "medium", "small"))
        for names in (*sets, ("white", "gradient", "portrait_scenery")):
            total = sum(getattr(self, name) for name in names)
            if total > 1:
                raise ConfigError(f"the probabilities of {', '.join(names)} sum to {total:.2f}; use at most 1.")


TURNS = (-10.0, 10.0)  # degrees
ZOOM, CROPS = 9 / 8, 2  # scale of photographs, and positions of a crop along each side
FAR = 3  # cells from the middle at which a sprite is 'on the left'


@dataclass(frozen=True, slots=True)
class SpriteSizes:
    """The sides in pixels that sprites have on a canvas, all multiples of a cell. Small ones are those of pairs."""

    canvas: int
    large: int
    main: int
    medium: int
    small: int
    cell: int = 8

    @classmethod
    def for_canvas(cls, canvas: int, cell: int = 8) -> SpriteSizes:
        """The sizes for a canvas; 176, 160, 128 and 88 of 192 pixels."""
        if canvas % cell:
            raise ConfigError(f"a canvas of {canvas} px is not a multiple of the tokenizer's {cell} px per code.")
        large, main, medium, small = (int(canvas * share / cell) * cell for share in (11 / 12, 5 / 6, 2 / 3, 0.47))
        return cls(canvas, large, main, medium, small, cell)

    def snap(self, position: float) -> int:
        """The multiple of a cell at or before a position."""
        return int(position // self.cell) * self.cell

    def pair_corners(self) -> tuple[int, int, int]:
        """x of the left and of the right sprite of a pair, and y of both."""
        left = self.snap((self.canvas / 2 - self.small) / 2)
        return left, self.canvas - self.small - left, self.snap((self.canvas - self.small) / 2 + self.cell / 2)


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
    turns: np.ndarray  # (B, 2) degrees
    colours: np.ndarray  # (B, 2) sprite colour, -1 for the one that the sprite has
    says_size: np.ndarray  # (B,) bool, the caption may say 'small' or 'large'
    says_position: np.ndarray  # (B,) bool
    says_facing: np.ndarray  # (B,) bool
    style_unnamed: np.ndarray  # (B,) bool
    background_unnamed: np.ndarray  # (B,) bool

    def __len__(self) -> int:
        return len(self.top)

    def __getitem__(self, part: slice) -> Scenes:
        return Scenes(*(getattr(self, field.name)[part] for field in fields(self)))


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
        pictures = pack.pictures
        self._styles = np.array([picture.style for picture in pictures])
        self._is_portrait = np.array([picture.kind == "portrait" for picture in pictures])
        self._flippable = np.array([picture.flippable for picture in pictures])
        self._recolourable = np.array([picture.region is not None for picture in pictures])
        self._faces_left = np.array([faces_left(picture) for picture in pictures])

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
        scenery = np.where(self._is_portrait[rows[:, 0]] & ~is_pair, config.portrait_scenery, config.scenery)
        is_scenery = (background > 1 - scenery) & (len(self._scenery) > 0)
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
        flips, turns, colours = self._vary_sprites(rows, rng)
        is_default = self._styles[rows[:, 0]] == DEFAULT_STYLE
        style_unnamed = np.where(is_default, config.default_style_unnamed, config.style_unnamed)
        return Scenes(
            top=top,
            bottom=bottom,
            backdrop=backdrop,
            backdrop_flip=rng.random(count) < config.flip,
            backdrop_view=self._views(count, rng),
            backdrop_soft=~has_no_sprite & (rng.random(count) < config.soft),
            rows=rows,
            sizes=sizes,
            x=x,
            y=y,
            flips=flips,
            turns=turns,
            colours=colours,
            says_size=rng.random(count) < config.words,
            says_position=rng.random(count) < config.words,
            says_facing=(rng.random(count) < config.facing_words) & self._faces_left[rows[:, 0]] & ~is_pair,
            style_unnamed=(rng.random(count) < style_unnamed) & ~is_pair & ~self._is_portrait[rows[:, 0]],
            background_unnamed=(rng.random(count) < config.background_unnamed) & ~is_pair,
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

    def _views(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Scales of photographs and positions of crops, an eighth of the canvas apart."""  # (B, 3)
        steps = rng.integers(CROPS, size=(count, 2)) / (CROPS - 1)
        return np.concatenate([np.full((count, 1), ZOOM), steps], axis=1)

    def _vary_sprites(self, rows: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Mirrored or not, angles and colours of all sprites."""  # three arrays (B, 2)
        config, shape = self.config, rows.shape
        is_pair = (rows[:, 1] >= 0)[:, None]
        may_flip = self._flippable[rows] & ~self._is_portrait[rows] & (rows >= 0)
        flips = (rng.random(shape) < config.flip) & may_flip
        is_turned = (rng.random(shape) < config.turn) & ~is_pair & ~self._is_portrait[rows] & (rows >= 0)
        turns = np.where(is_turned, rng.choice(TURNS, shape), 0.0)
        share = np.where(is_pair, config.recolour / 2, config.recolour)
        is_recoloured = (rng.random(shape) < share) & self._recolourable[rows] & (rows >= 0)
        return flips, turns, np.where(is_recoloured, rng.integers(len(SPRITE_COLOURS), size=shape), -1)

    def _place_sprites(
        self, rows: np.ndarray, has_backdrop: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sides, x and y of the top-left corners of all sprites."""  # three arrays (B, 2)
        s, config, count = self.sizes, self.config, len(rows)
        is_portrait, is_pair = self._is_portrait[rows[:, 0]], rows[:, 1] >= 0
        bounds = np.where(
            has_backdrop[:, None], (0.0, 0.5, 0.7), np.cumsum([config.large, config.medium, config.small])
        )  # (B, 3)
        which = (rng.random(count)[:, None] >= bounds).sum(1)
        size = np.array([s.large, s.medium, s.small, s.main])[which]
        size = np.where(is_pair, s.small, np.where(is_portrait, s.canvas, size))
        # A corner anywhere, in cells; two of three medium sprites stay near the middle.
        cells = (s.canvas - size) // s.cell
        free = (rng.random((count, 2)) * (cells + 1)[:, None]).astype(np.int64)
        near = cells[:, None] // 2 + rng.integers(-2, 3, (count, 2))
        is_near = (size == s.medium) & (rng.random(count) < 2 / 3)
        x, y = np.where(is_near[:, None], near.clip(0, cells[:, None]), free).T * s.cell
        # In front of scenery sprites stand on the ground.
        ground = (s.canvas - size) - rng.integers(0, 3, count) * s.cell
        y = np.where(has_backdrop, ground.clip(min=0), y)
        left, right, middle = s.pair_corners()
        pair_y = np.where(has_backdrop, y, middle + rng.integers(-3, 4, count) * s.cell).clip(0, s.canvas - s.small)
        x = np.stack([np.where(is_pair, left, x), np.full(count, right)], 1)
        y = np.stack([np.where(is_pair, pair_y, y)] * 2, 1)
        return np.stack([size, np.full(count, s.small)], 1), x, y

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
        elif scenes.background_unnamed[index]:
            background = ""
        else:
            background = plain_phrase(COLOURS[top])
        colours = [[SPRITE_COLOURS[colour]] if colour >= 0 else [] for colour in scenes.colours[index].tolist()]
        if second >= 0:
            phrases = [
                describe(pictures[row].phrase, words) for row, words in zip((first, second), colours, strict=True)
            ]
            return pair_caption(phrases[0], phrases[1], pictures[first].style, background)
        phrase = describe(pictures[first].phrase, self._size_words(scenes, index) + colours[0])
        if scenes.says_facing[index]:
            phrase += " facing right" if scenes.flips[index, 0] else " facing left"
        phrase += self._position_words(scenes, index)
        style = "" if scenes.style_unnamed[index] else pictures[first].style
        return caption(pictures[first], background, phrase=phrase, style=style)

    def _size_words(self, scenes: Scenes, index: int) -> list[str]:
        words = {self.sizes.small: ["small"], self.sizes.large: ["large"]}
        return words.get(int(scenes.sizes[index, 0]), []) if scenes.says_size[index] else []

    def _position_words(self, scenes: Scenes, index: int) -> str:
        """' on the left', ' at the top right' and so on, or nothing near the middle; on scenery only left and right."""
        if not scenes.says_position[index]:
            return ""
        s, size = self.sizes, int(scenes.sizes[index, 0])
        x, y = ((int(corner[index, 0]) + size / 2 - s.canvas / 2) / s.cell for corner in (scenes.x, scenes.y))
        side = "left" if x <= -FAR else "right" if x >= FAR else ""
        if scenes.backdrop[index] >= 0 or abs(y) < FAR:
            return f" on the {side}" if side else ""
        return f" at the {'top' if y < 0 else 'bottom'}{' ' + side if side else ''}"
