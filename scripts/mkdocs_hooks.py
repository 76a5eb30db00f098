"""Hooks of the documentation site: a reference page per module, and links to files of the repository.

Pages link files as they lie in the repository (`../megatron3d/linear/matmul.py`), which works wherever the repository
is browsed.  On the site such a link leads to the module's reference page, or to a page with the file's text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megatron3d"
# Folders of the site: reference pages, and files outside docs/ that are linked.
REFERENCE, REPOSITORY = "reference", "repository"
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference pages, also to the navigation, and a page for each linked file of the repository."""
    modules = [path.relative_to(ROOT) for path in sorted((ROOT / PACKAGE).rglob("*.py"))]
    packages: dict[str, list[str]] = {}
    for path in modules:
        page = site_path(path)
        name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        title = name.removeprefix(f"{PACKAGE}.")
        files.append(File.generated(config, page, content=f"# {title}\n\n`{path}`\n\n::: {name}\n"))
        packages.setdefault(title.split(".")[0], []).append(page)
    assert config.nav is not None, "mkdocs.yml has no nav"
    config.nav.append({"API reference": [{package: pages} for package, pages in packages.items()]})
    pages = [ROOT / "docs" / file.src_uri for file in files.documentation_pages() if not file.generated_by]
    linked = sorted({path for page in pages for path in linked_files(page)})
    outside = {site_path(path): path for path in linked if site_path(path).startswith(f"{REPOSITORY}/")}
    for page, path in outside.items():
        files.append(File.generated(config, page, content=text_page(path)))
    config.nav.append({"Files": [{str(path): page} for page, path in outside.items()]})
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files of the repository to their pages on the site."""
    here = page.file.src_uri
    source = Path(here.removeprefix(f"{REPOSITORY}/")) if here.startswith(f"{REPOSITORY}/") else Path("docs", here)

    def to_site(match: re.Match[str]) -> str:
        target = in_repository(source, match[1])
        return match[1] if target is None else os.path.relpath(site_path(target), Path(here).parent)

    return markdown if here.startswith(f"{REFERENCE}/") else LINK.sub(to_site, markdown)


def in_repository(source: Path, link: str) -> Path | None:
    """Return the file that a link of the file `source` leads to, from the root; None where there is none."""
    target = (ROOT / source.parent / link).resolve()
    return target.relative_to(ROOT) if target.is_file() and target.is_relative_to(ROOT) else None


def linked_files(page: Path) -> list[Path]:
    """Return the files that a page links, from the root of the repository."""
    links = LINK.findall(page.read_text(encoding="utf-8"))
    return [path for link in links if (path := in_repository(page.relative_to(ROOT), link))]


def site_path(path: Path) -> str:
    """Return where a file of the repository is on the site."""
    if path.parts[0] == "docs":
        return path.relative_to("docs").as_posix()
    if path.parts[0] == PACKAGE and path.suffix == ".py":
        inner = path.relative_to(PACKAGE)
        name = "index.md" if path.name == "__init__.py" else f"{path.stem}.md"
        return Path(REFERENCE, inner.with_name(name)).as_posix()
    return f"{REPOSITORY}/{path if path.suffix == '.md' else f'{path}.md'}"


def text_page(path: Path) -> str:
    """Return a file as a page: Markdown as it is, anything else as a block of code."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return text if path.suffix == ".md" else f"# {path.name}\n\n`{path}`\n\n````{path.suffix[1:]}\n{text}````\n"
