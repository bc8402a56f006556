"""mkdocs hooks: make the README the first page, and take files outside docs/ that pages link to into the site.

On disk every link is relative to its file, so it also works in a clone and in a code viewer. In the site README.md is
index.md, docs/X is X, and any other file X of the repository is repository/X.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
SOURCE = re.compile(r'(?P<before><img [^>]*src=")(?P<path>[^"]+)(?=")')
CODE = re.compile(r"(```.*?```)", re.S)  # fenced blocks hold no links


def site_path(path: str) -> str:
    """Where a file of the repository is in the site."""
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def repository_path(uri: str) -> str:
    """The inverse of `site_path`."""
    if uri == "index.md":
        return "README.md"
    return uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"


def resolve(link: str, page: str) -> str:
    """The file of the repository that a relative link on a page leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def linked_files(page: str) -> Iterator[str]:
    """The files of the repository that a Markdown page links to or shows."""
    text = CODE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    for match in [*LINK.finditer(text), *SOURCE.finditer(text)]:
        path = resolve(match["path"], page)
        if "://" not in match["path"] and (ROOT / path).is_file():
            yield path


def on_files(files: Files, config: Any) -> Files:
    """Add the README and, from page to page, every file outside docs/ that is linked to."""
    pages = ["README.md", *(repository_path(file.src_uri) for file in files.documentation_pages())]
    added = {"README.md"}
    for page in pages:  # grows while it is read
        for path in linked_files(page):
            if not path.startswith("docs/") and path not in added:
                added.add(path)
                if path.endswith(".md"):
                    pages.append(path)
    for path in sorted(added):
        files.append(File.generated(config, site_path(path), abs_src_path=os.fspath(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links from paths in the repository to paths in the site; a link to a folder becomes its text."""
    source = repository_path(page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri)

    def site_link(path: str) -> str:
        return posixpath.relpath(site_path(resolve(path, source)), folder or ".")

    def rewrite_link(match: re.Match[str]) -> str:
        if "://" in match["path"]:
            return match[0]
        if (ROOT / resolve(match["path"], source)).is_dir():
            return match["text"]
        return f"{match['image']}[{match['text']}]({site_link(match['path'])}{match['anchor'] or ''})"

    def rewrite(text: str) -> str:
        return SOURCE.sub(lambda match: match["before"] + site_link(match["path"]), LINK.sub(rewrite_link, text))

    return "".join(part if part.startswith("```") else rewrite(part) for part in CODE.split(markdown))
