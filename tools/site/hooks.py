"""Adapts the documents, which are written for GitHub, to MkDocs."""

import os
import posixpath
import re
import warnings

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "../.."))
SOURCES = "https://github.com/vipgate/vipgate/tree/" + os.environ.get("VERSION", "main") + "/"
RECORDS = "docs/adr/"
LINK = re.compile(r"\]\(([^()\s#:]+)(#[^()\s]*)?\)")

warnings.simplefilter("ignore", DeprecationWarning)  # of Jinja's source


def on_config(config):
    """Takes the navigation from the list of documents in README.md."""
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as readme:
        listed = readme.read().split("\n## Documents\n")[1]
    nav = ["README.md"]
    for title, text in re.findall(r"^- (\w+): (.*?)(?=\n- |\n\n|\Z)", listed, re.M | re.S):
        pages = re.findall(r"\]\(([^)]+\.md)\)", text)
        if RECORDS + "README.md" in pages:
            records = sorted(f for f in os.listdir(os.path.join(ROOT, RECORDS)) if f[0].isdigit())
            index = pages.index(RECORDS + "README.md")
            pages[index] = {"Decisions": [pages[index]] + [RECORDS + f for f in records]}
        nav.append({title: pages})
    config["nav"] = nav
    return config


def on_files(files, config):
    """Replaces the files below docs/ by all documents, at their paths in the repository."""
    paths = [f for f in os.listdir(ROOT) if f.endswith(".md")]
    for top in "docs", "deployments":
        for folder, _, names in os.walk(os.path.join(ROOT, top)):
            names = [n for n in names if top == "docs" or n.endswith(".md")]
            paths += [os.path.relpath(os.path.join(folder, n), ROOT) for n in names]
    static = [File("wide.css", os.path.dirname(__file__), config["site_dir"], False)]
    theme = [f for f in files if not f.abs_src_path.startswith(ROOT + "/docs/")]
    site, as_folders = config["site_dir"], config["use_directory_urls"]
    return Files(static + theme + [File(p, ROOT, site, as_folders) for p in sorted(paths)])


def on_nav(nav, config, files):
    missing = [f.src_path for f in files.documentation_pages() if f.page is None or f.page not in nav.pages]
    if missing:
        raise PluginError("README.md does not list under Documents: " + ", ".join(missing))


def on_page_markdown(markdown, page, config, files):
    # Info strings such as "sh run-by-test" are for tests.
    markdown = re.sub(r"^( *```\w+) .*$", r"\1", markdown, flags=re.M)
    # Python-Markdown wants the content of a list item indented by four.
    markdown = re.sub(r"^   ```.*?^   ```$", lambda m: re.sub("^", " ", m[0], flags=re.M), markdown, flags=re.M | re.S)
    folder = posixpath.dirname(page.file.src_path)

    def link(match):
        path, anchor = match[1], match[2] or ""
        target = posixpath.normpath(posixpath.join(folder, path))
        if files.get_file_from_path(target):
            return match[0]
        if files.get_file_from_path(target + "/README.md"):
            return f"]({path}/README.md{anchor})"
        if os.path.exists(os.path.join(ROOT, target)):
            return f"]({SOURCES}{target}{anchor})"
        return match[0]  # MkDocs reports it

    return LINK.sub(link, markdown)
