"""A hook for MkDocs: pages outside docs/, and links that leave docs/.

The pages link to each other as files of the repository, so that they read well there too. Here each such link is
resolved: to a page of the site, to a copy of the file under `source/`, or, for a folder, to nothing but its name.
A link to what is not there fails the build, and so does a page that loads something from elsewhere.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

OUTSIDE = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "readme.md",
    "STYLE.md": "style.md",
    "data/README.md": "data.md",
    "shared/isthmus_shared/demo_model/README.md": "demo-model.md",
}
"""File outside docs/ → its page in the site."""
LINK = re.compile(r"(?<!\\)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<to>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
REMOTE = re.compile(
    r"""<(?:script|img|iframe)[^>]* src=["']?https?:[^>]*>|<link[^>]* rel=["']?stylesheet[^>]*https?:[^>]*>"""
)
SCHEME = re.compile(r"^[a-z]+:")


def on_files(files: Files, config: Any) -> Files:
    for name, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(_root(config) / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    source = _source_of(page.file.src_uri)

    def resolve(link: re.Match[str]) -> str:
        to = link["to"]
        if SCHEME.match(to):
            return link[0]
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), to))
        if not (_root(config) / wanted).exists():
            raise PluginError(f"{source} links to {wanted}, which is not there")
        found = _in_site(wanted, config, files)
        if found is None:
            return link["text"]
        relative = posixpath.relpath(found, posixpath.dirname(page.file.src_uri) or ".")
        return f"[{link['text']}]({relative}{link['anchor'] or ''})"

    return LINK.sub(resolve, markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """The site loads nothing from elsewhere."""
    if found := REMOTE.search(output):
        raise PluginError(f"{page.file.src_uri} loads something from elsewhere: {found[0]}")
    return output


def _root(config: Any) -> Path:
    return Path(config["config_file_path"]).resolve().parent


def _source_of(page: str) -> str:
    """The file in the repository that a page was made from."""
    return next((name for name, known in OUTSIDE.items() if known == page), f"docs/{page}")


def _in_site(wanted: str, config: Any, files: Files) -> str | None:
    if wanted in OUTSIDE:
        return OUTSIDE[wanted]
    if wanted.startswith("docs/"):
        return wanted.removeprefix("docs/")
    path = _root(config) / wanted
    if path.is_dir():
        return None
    if path.suffix == ".md":
        raise PluginError(f"{wanted} is a page outside docs/: name it in tools/docs_hook.py and in mkdocs.yml")
    copy = f"source/{wanted}"
    if files.get_file_from_path(copy) is None:
        added = File.generated(config, copy, abs_src_path=os.fspath(path))
        files.append(added)
        added.copy_file()
    return copy
