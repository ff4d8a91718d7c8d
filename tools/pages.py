"""What `make site` adds to MkDocs: links out of `docs/` work in the site as they do in the repository.

A link such as `../examples/moe.py` or `../benchmarks/README.md` leads to a copy of that file in the site's folder
`repository`: a page where it is Markdown, else the file. The table of error codes becomes a page with a heading
for each code, and a line that links two whole scripts becomes tabs with both. MkDocs calls the functions.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from textwrap import indent

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

_OUT = re.compile(r"(?<=\]\()\.\./(?P<path>[^)#\s]+)")
"""the address of a link from a page of `docs/` to a file outside of it"""
_SCRIPTS = re.compile(r"^The whole script \[before\]\(\.\./(\S+)\) and \[now\]\(\.\./(\S+)\)\.$", flags=re.MULTILINE)
_CODES = "zeroweave/error_codes.md"
_IN = re.compile(r"(?<=\]\()(?!\w+:|#)(?P<path>[^)#\s]+)")
"""any relative address"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what the pages of `docs/` link to outside of it."""
    root = Path(config.docs_dir).parent
    pages = [file for file in files.documentation_pages() if file.abs_src_path is not None]
    linked = {found["path"] for page in pages for found in _OUT.finditer(page.content_string)}
    for path in sorted(linked):
        text = (root / path).read_text()
        if path == _CODES:
            text = error_codes(text)
        elif path.endswith(".md"):
            text = _IN.sub(lambda found, path=path: _from_copy(root, path, found["path"]), text)
        files.append(File.generated(config, f"repository/{path}", content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links out of `docs/` to the copies."""
    if page.file.generated_by is not None:
        return markdown
    root = Path(config.docs_dir).parent
    markdown = _SCRIPTS.sub(lambda found: tabs(root, Before=found[1], Now=found[2]), markdown)
    return _OUT.sub(lambda found: f"repository/{found['path']}", markdown)


def tabs(root: Path, **scripts: str) -> str:
    """Each script in a tab of that name."""
    parts = []
    for name, path in scripts.items():
        code = f"```python\n{(root / path).read_text()}```\n"
        parts.append(f'=== "{name}"\n\n{indent(code, "    ")}')
    return "\n".join(parts)


def error_codes(table: str) -> str:
    """The page of error codes."""
    lines = ["# Error codes", "", "`zeroweave explain CODE` prints the same in a terminal."]
    for row in table.splitlines()[2:]:
        code, cause, example, mend = row.removeprefix("| ").removesuffix(" |").split(" | ")
        lines += ["", f"## {code}", "", cause, "", f"*Example:* {example}", "", f"*What to do:* {mend}"]
    return "\n".join(lines) + "\n"


def _from_copy(root: Path, document: str, address: str) -> str:
    """A link of a copied document to a page of `docs/`, as the copy has to write it."""
    return os.path.relpath((root / document).parent / address, (root / "docs" / "repository" / document).parent)
