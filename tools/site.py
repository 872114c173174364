"""Build the site: the course as pages with search, and the reference of the library.

    python tools/site.py OUT             build it into the folder OUT
    python tools/site.py OUT --cache DIR keep what Sphinx has read in DIR, so that only what
                                         changed is built again

Needs the packages of the extra `docs` (settings.ini) and no network; nothing is run, the pages show
the outputs that the notebooks store. The order is the map of index.ipynb. Exit status 1, with a
sentence for each problem, when a link leads nowhere or a page would load something from elsewhere.

- The library's own cells (`#| export`), cells that draw and the cell that fetches the library are
  folded. `#| fig-alt: words` describes a picture; without it the titles and axes that a cell names.
- A cell that shows a widget with a module in grpo_nb/widgets/js has it below, alive without Python.
- The picture of the learner becomes the learner; learn.html holds it alone, in one file.
- A link to a file that is no page leads to the file on GitHub.
- docs/site holds the style sheet and what the pages run.
"""

import argparse
import ast
import html
import json
import os
import posixpath
import re
import shutil
import sys
import tempfile
from configparser import ConfigParser
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import api
import course
import learner
from readme import directives

ROOT = Path(__file__).resolve().parent.parent

TEXTS = ["docs/*.md", "CHANGELOG.md", "CONTRIBUTING.md"]  # pages beside the notebooks, and INSIDE
MAP = re.compile(r"\[!\[([^\]]+)\]\((docs/diagrams/course_map\.svg)\)\]\(\2\)")
DRAWN_MAP = r'<object type="image/svg+xml" data="_static/course_map.svg" aria-label="\1"></object>'
LEARNER = re.compile(r"\[!\[[^\]]+\]\(\S*docs/images/learner\.png\)\]\(\S+learn\.html\)")
FENCE = re.compile(r"(^ *```.*?^ *```)", re.S | re.M)
LINK = re.compile(  # or a piece of code, which is passed over
    r"`[^`\n]+`|(!?)\[((?:`[^`\n]+`|[^\[\]`]|\[[^\]]*\])*)\]\(([^()\s]+)\)"
)


# What there is


def project(root):
    "The settings of settings.ini."
    parser = ConfigParser(delimiters=["="])
    parser.read(root / "settings.ini", encoding="utf-8")
    return parser["DEFAULT"]


def branches(root):
    "[(caption, its pages)] in the order of the map; nbs/inside.md opens what it lists."
    parts = [(caption, paths) for _, caption, paths in course.sections(root)]
    at = [index for index, _, _ in course.sections(root)].index(course.INSIDE)
    return [*parts[:at], ("Inside the library", [course.INSIDE]), *parts[at:]]


# Markdown


def slug(anchor):
    "The id that a heading has on the site, from the one that it has in Jupyter."
    return re.sub(r"[^\w\- ]", "", unquote(anchor).lower()).replace(" ", "-")


def relinked(text, page, pages, root, source_url, problems):
    "Markdown of `page` whose links fit the site; one that leads nowhere is added to `problems`."

    def link(found):
        picture, label, target = found.groups()
        if not target or re.match(r"[a-z]+:", target):
            return found[0]
        path, _, anchor = target.partition("#")
        to = posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(path)))
        if not path:
            return f"[{label}](#{slug(anchor)})"
        if not (root / to).exists() and to not in pages:
            problems.append(f"{page} links to {target}, which does not exist")
        elif to not in pages and not picture:
            kind = "tree" if (root / to).is_dir() else "blob"
            return f"[{label}]({source_url.replace('/blob/', f'/{kind}/')}/{to})"
        return f"{picture}[{label}]({path}{'#' + slug(anchor) if anchor else ''})"

    parts = FENCE.split(text)
    return "".join(part if i % 2 else LINK.sub(link, part) for i, part in enumerate(parts))


def bar(path, settings):
    "The line under a title: where the notebook can be run, and where its source is."
    files = f"{settings['user']}/{settings['repo']}/blob/{settings['branch']}/{path}"
    return (
        '<p class="run-it"><a href="https://colab.research.google.com/github/'
        f'{files}">Open in Colab</a> <a href="https://github.com/{files}">View source</a></p>'
    )


def start(block):
    "Of the first page's block of links: where to begin. The others have their neighbours' links."
    words = next((part for part in block.split("\n\n") if part.startswith("Begin with")), "")
    return words and f'<div class="begin">\n\n{words}\n\n</div>'


# Code


def parsed(source):
    "The statements of a cell, its magics left out; none where it is no Python."
    try:
        return ast.parse(re.sub(r"^\s*[%!].*$", "", source, flags=re.M)).body
    except SyntaxError:
        return []


def names_of(source):
    "What a cell defines, in its order, private names left out unless there are no others."
    body = parsed(source)
    names = [node.name for node in body if hasattr(node, "name")]
    for node in body:
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if isinstance(target, ast.Name):
                names.append(target.id)
    return [name for name in names if not name.startswith("_")] or names


def all_imports(source):
    body = parsed(source)
    return bool(body) and all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in body)


def folded_as(options, source, has_picture):
    "The words on the fold of a cell, or nothing for one that stays open."
    count = source.count("\n") + 1
    lines = f"{count} lines" if count > 1 else "1 line"
    if "export" in options or "exporti" in options:
        names = names_of(source)
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        return f"In the library: {shown or 'imports'} ({lines})"
    if "find_spec(" in source and options.get("eval") == "false":
        return "Set-up: fetches the library where it is missing"
    if title := re.match(r"# @title (.+)", source):
        return f"{title[1]} ({lines})"
    if all_imports(source):
        return f"Imports ({lines})"
    if options.get("echo") == "false" or (has_picture and count > 4):
        return f"The code of this figure ({lines})"
    return ""


def words_of_figure(source):
    "The titles and axes that the code of a figure names."
    found = []
    for node in (part for statement in parsed(source) for part in ast.walk(statement)):
        if not isinstance(node, ast.Call):
            continue
        called = getattr(node.func, "attr", "")
        named = [k.value for k in node.keywords if k.arg in ("title", "xlabel", "ylabel")]
        if called in ("set_title", "title", "suptitle", "set_xlabel", "set_ylabel"):
            named += node.args[:1]
        for value in named:
            for part in ast.walk(value):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    found.append(" ".join(part.value.split()))
    return list(dict.fromkeys(word for word in found if len(word) > 2))


def described(options, source, before):
    "Words for those who cannot see a cell's picture."
    if "fig-alt" in options:
        return options["fig-alt"]
    words = words_of_figure(source)
    if words:
        return "Figure: " + "; ".join(words[:8])
    last = re.sub(r"[*`$\[\]]|\(\S*\)", "", before.strip().split("\n\n")[-1]).strip()
    return f"Figure for: {last}" if last else "The figure that the cell above draws"


def has_picture(cell):
    return any(
        kind.startswith("image/") for output in cell["outputs"] for kind in output.get("data", {})
    )


def literals(pairs):
    "name -> value, for the pairs of a name and a node that is a plain value."
    found = {}
    for name, node in pairs:
        try:
            found[name] = ast.literal_eval(node)
        except ValueError:
            pass
    return found


def widget_of(source):
    """(name, values) of the widget that a cell ends with, `NAME_widget(...)` or a variable that it
    put one in and set attributes of; (None, {}) for another cell."""
    body = parsed(source)
    last = body[-1].value if body and isinstance(body[-1], ast.Expr) else None
    sets = [(n.targets[0], n.value) for n in body if isinstance(n, ast.Assign)]
    values = {}
    if isinstance(last, ast.Name):
        attributes = [(t, v) for t, v in sets if isinstance(t, ast.Attribute)]
        values = literals((t.attr, v) for t, v in attributes if ast.unparse(t.value) == last.id)
        last = next((v for t, v in sets if getattr(t, "id", "") == last.id), None)
    name = getattr(getattr(last, "func", None), "id", "")
    if not name.endswith("_widget"):
        return None, {}
    given = literals((k.arg, k.value) for k in last.keywords)
    return name.removesuffix("_widget"), given | values


def mounted(source, path, live, outputs=()):
    """The place of a widget that a cell shows, as widgets/js/mount.js looks for it, or nothing.
    `live`: the widgets that have a module. A stored output may hold the place and its values."""
    name, values = widget_of(source)
    if name not in live:
        return None
    pages = ["".join(output.get("data", {}).get("text/html", "")) for output in outputs]
    if any(f'data-widget="{name}"' in page for page in pages):
        return mounter(path)
    return place_of(name, path, values)


def mounter(path):
    "The script that shows the widgets of a page."
    folder = posixpath.relpath("_static/widgets", posixpath.dirname(path) or ".")
    return f'<script type="module" src="{folder}/mount.js"></script>'


def place_of(name, path, values=None):
    "The place of a widget on a page, and the script that shows it."
    given = f" data-values='{html.escape(json.dumps(values))}'" if values else ""
    return (
        f'<div class="widget" data-widget="{name}"{given}><p>A drawing to move, where a browser '
        f"runs scripts.</p></div>\n{mounter(path)}"
    )


def code_cell(cell, before):
    "A code cell as the site shows it, or None for one with nothing to show."
    options, source = directives(cell["source"])
    hidden = "hide" in options and "find_spec(" not in source
    if hidden or not source and not cell["outputs"]:
        return None
    flags = {name.split()[0]: value for name, value in options.items()}
    fold = folded_as(flags, source, has_picture(cell))
    metadata = {}
    if fold:
        prompts = {"code_prompt_show": fold, "code_prompt_hide": fold}
        metadata = {"tags": ["hide-input"], "mystnb": prompts}
    if has_picture(cell):
        alt = described(options, source, before)
        metadata.setdefault("mystnb", {})["image"] = {"alt": alt}
    return {**cell, "source": source, "metadata": metadata}


# Pages


def markdown(name, source):
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": source}


def page_of(notebook, path, context):
    "A notebook as the site shows it."
    cells, before = [], ""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            line = bar(path, context["settings"])
            text = course.BLOCK.sub(lambda m: f"\n\n{line}\n\n{start(m[0])}\n\n", cell["source"])
            text = MAP.sub(DRAWN_MAP, text)
            text = LEARNER.sub(place_of("learner", path), text)
            before = relinked(text, path, **context["links"])
            cells.append({**cell, "metadata": {}, "source": before})
        elif cell["cell_type"] == "code":
            made = code_cell(cell, before)
            cells += [made] if made else []
            if place := mounted(cell["source"], path, context["live"], cell["outputs"]):
                cells.append(markdown(f"{cell['id']}-shown", place))
    return course.dump({**notebook, "cells": cells})


def contents(parts):
    "The tables of contents: what the theme makes its list and the links to neighbours of."
    tables = [
        ["```{toctree}", ":hidden:", f":caption: {caption}", "", *paths, "```"]
        for caption, paths in parts
    ]
    return "\n\n".join("\n".join(table) for table in tables)


def write(path, content):
    "Write a file unless it has this content: Sphinx reads again what is newer."
    content = content.encode() if isinstance(content, str) else content
    if not path.exists() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def sources(root, problems):
    "file name -> content of all that Sphinx is given, from a checkout."
    settings = project(root)
    source_url = f"{settings['git_url']}/blob/{settings['branch']}"
    index = course.load(root / "index.ipynb")
    parts = branches(root)
    texts = sorted({p.relative_to(root).as_posix() for glob in TEXTS for p in root.glob(glob)})
    reference = {f"api/{name}": text for name, text in api.pages(root, source_url).items()}
    order = ["index.ipynb", *(path for _, paths in parts for path in paths)]
    links = {
        "pages": {*order, *texts, *reference},
        "root": root,
        "source_url": source_url,
        "problems": problems,
    }
    scripts = sorted((root / "grpo_nb/widgets/js").glob("*"))
    live = {p.stem for p in scripts if p.suffix == ".js"}
    context = {"settings": settings, "links": links, "live": live}
    parts += [("Library", list(reference)), ("Project", texts)]
    texts = [*texts, course.INSIDE]
    notebooks = {path: course.load(root / path) for path in order if path != course.INSIDE}
    notebooks["index.ipynb"] = index
    index["cells"].append(markdown("contents", contents(parts)))
    made = {path: page_of(notebook, path, context) for path, notebook in notebooks.items()}
    for path in texts:
        made[path] = relinked((root / path).read_text(encoding="utf-8"), path, **links)
    for path, text in reference.items():
        made[path] = relinked(text, path, **links)
    for path in (p for name in ("images", "diagrams") for p in (root / "docs" / name).iterdir()):
        made[path.relative_to(root).as_posix()] = path.read_bytes()
    for path in (root / "docs/site").iterdir():
        made[f"_static/{path.name}"] = path.read_bytes()
    made |= {f"_static/widgets/{path.name}": path.read_bytes() for path in scripts}
    made["_static/course_map.svg"] = linked_map(root, source_url)
    made["_static/mathjax.js"] = mathjax()
    return made


def linked_map(root, source_url):
    "The map, as large as its place, with links to the pages of the site."
    drawing = (root / "docs/diagrams/course_map.svg").read_text(encoding="utf-8")
    drawing = re.sub(r' width="\d+" height="\d+" role="img"', "", drawing, count=1)
    return re.sub(
        rf'href="{re.escape(source_url)}/([^"]+)\.(?:ipynb|md)"',
        r'href="../\1.html" target="_top"',
        drawing,
    )


def mathjax():
    "MathJax in one file, with every extension, from the package that carries it."
    package = Path(find_spec("sphinx-mathjax-offline").origin).parent
    return (package / "static/mathjax/tex-svg-full.js").read_bytes()


def options(settings):
    "The settings of Sphinx, its theme and the reader of notebooks."
    return {
        "project": settings["title"],
        "author": settings["author"],
        "copyright": settings["copyright"],
        "version": settings["version"],
        "language": "en",
        "extensions": ["myst_nb", "sphinx_copybutton", "sphinx.ext.mathjax"],
        "exclude_patterns": ["**.ipynb_checkpoints"],
        "myst_enable_extensions": ["dollarmath", "amsmath"],
        "myst_heading_anchors": 4,
        "myst_links_external_new_tab": False,
        "suppress_warnings": ["myst.header", "mystnb.unknown_mime_type"],
        "nb_execution_mode": "off",
        "nb_merge_streams": True,
        "nb_ipywidgets_js": {},
        "mathjax_path": "mathjax.js",
        "html_theme": "sphinx_book_theme",
        "html_title": settings["title"],
        "html_favicon": "_static/icon.svg",
        "html_context": {"default_mode": "auto"},
        "html_static_path": ["_static"],
        "html_css_files": ["site.css"],
        "html_js_files": ["site.js"],
        "html_search_scorer": str(ROOT / "docs/site/scorer.js"),
        "html_copy_source": False,
        "html_show_sphinx": False,
        "html_baseurl": f"https://{settings['user']}.github.io/{settings['repo']}/",
        "copybutton_selector": "div.cell_input div.highlight pre, div.highlight-sh pre",
        "html_theme_options": {
            "repository_url": settings["git_url"],
            "use_repository_button": True,
            "use_download_button": False,
            "use_fullscreen_button": False,
            "home_page_in_toc": True,
            "navbar_persistent": [],  # the search stands above the list of pages
            "show_navbar_depth": 1,
            "show_toc_level": 2,
        },
    }


# Links of what was built


class Page(HTMLParser):
    "The ids of a page, where it leads, and what it loads."

    LOADS = dict.fromkeys(("script", "img", "iframe", "source", "video"), "src") | {
        "object": "data"
    }

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.loads = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids |= {given.get("id"), given.get("name")} - {None}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in self.LOADS and given.get(self.LOADS[tag]):
            self.loads.append(given[self.LOADS[tag]])
        if tag == "link" and given.get("rel") in ("stylesheet", "preload", "icon"):
            self.loads.append(given["href"])


def is_elsewhere(address):
    return bool(urlsplit(address).scheme or urlsplit(address).netloc)


def broken_links(out):
    "A sentence for each link or picture of a built site that leads nowhere, or to another host."
    static = out / "_static"  # has templates of the theme among its files
    pages = sorted(path for path in out.rglob("*.html") if static not in path.parents)
    read = {path: Page(path.read_text(encoding="utf-8")) for path in pages}
    problems = []
    for path, page in read.items():
        name = path.relative_to(out).as_posix()
        for address in page.loads:
            if is_elsewhere(address) and not address.startswith("data:"):
                problems.append(f"{name} loads {address}: nothing may come from another host")
        for address in {a for a in (*page.links, *page.loads) if not is_elsewhere(a)}:
            parts = urlsplit(address)
            to = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not to.is_file():
                problems.append(f"{name} leads to {address}, which is not there")
            elif parts.fragment and to in read and unquote(parts.fragment) not in read[to].ids:
                problems.append(f"{name} leads to {address}, and that page has no such heading")
    return problems


# The build


UNMENDED = {  # names for screen readers that are other than what one sees
    '<summary aria-label="Toggle hidden content">': "<summary>",
    'search-button-field search-button__button pst-js-only" title="Search" aria-label="Search"': (
        'search-button-field search-button__button pst-js-only"'
    ),
    ' title="Light"': "",
    ' title="Dark"': "",
    ' title="System Settings"': "",
}


# what a page does without: a script of 2,000 icons, and the search's index but for its own page
UNNEEDED = re.compile(
    r'\s*<script [^>]*src="[^"]*(?:fontawesome|searchtools|language_data|searchindex)\.js[^"]*">'
    r"</script>"
)
FORMULAS = re.compile(r'<script defer="defer" src="([^"]*/mathjax\.js[^"]*)"></script>')
LATER = """<script>addEventListener("load", async () => {{
  const widgets = document.querySelector("script[src$='widgets/mount.js']");
  // formulas are drawn when the widgets stand
  if (widgets) await import(widgets.src).catch(() => {{}});
  const script = Object.assign(document.createElement("script"), {{ src: "{}" }});
  script.onload = () => MathJax.startup.promise.then(() => dispatchEvent(new Event("resize")));
  document.head.append(script);
}});</script>"""
STYLES = "_static/styles/pydata-sphinx-theme.css"
RULE = re.compile(r"([^{}@;]+)\{[^{}]*\}")
PICTURE = re.compile(r'<img (?![^>]*\b(?:width|loading)=)([^>]*?src="([^":]+\.(?:png|svg))")')
DRAWN = re.compile(rb'<svg [^>]*?\bwidth="([\d.]+)pt" height="([\d.]+)pt"')  # by matplotlib


def mend(out):
    "Write the pages again without what UNMENDED has, and without what none of them needs."
    classes = set()
    for path in out.rglob("*.html"):
        text = before = path.read_text(encoding="utf-8")
        for wrong, right in UNMENDED.items():
            text = text.replace(wrong, right)
        text = FORMULAS.sub(lambda found: LATER.format(found[1]), text)
        text = PICTURE.sub(lambda found: sized(found, path.parent), text)
        if path.name != "search.html":
            text = UNNEEDED.sub("", text)
        if text != before:
            path.write_text(text, encoding="utf-8")
        classes |= {
            name for words in re.findall(r'class="([^"]*)"', text) for name in words.split()
        }
    for path in out.glob("_static/**/*.js"):
        if path.name not in ("fontawesome.js", "mathjax.js"):
            classes |= set(re.findall(r"[\w-]+", path.read_text(encoding="utf-8")))
    for style in out.glob(STYLES):
        style.write_text(pruned(style.read_text(encoding="utf-8"), classes), encoding="utf-8")


def sized(found, folder):
    "A picture that is fetched when it comes near, and has its room before."
    content = (folder / unquote(found[2])).read_bytes()
    if found[2].endswith(".png"):
        width, height = (int.from_bytes(content[i : i + 4], "big") for i in (16, 20))
    elif drawn := DRAWN.match(content):
        width, height = (round(float(points) * 4 / 3) for points in drawn.groups())
    else:
        return found[0]
    return f'<img loading="lazy" width="{width}" height="{height}" {found[1]}'


def pruned(style, classes):
    "A style sheet without the rules for classes that no page has, and without fonts of icons."

    def kept(rule):
        selectors = rule[1]
        if "(" in selectors or "\\" in selectors:
            return rule[0]
        names = (re.findall(r"\.([\w-]+)", one) for one in selectors.split(","))
        return rule[0] if any(classes.issuperset(each) for each in names) else ""

    return RULE.sub(kept, re.sub(r"@font-face\{[^}]*Awesome[^}]*\}", "", style))


FORWARD = """<!doctype html>
<meta charset="utf-8"><title>{title}</title><link rel="canonical" href="{to}">
<meta http-equiv="refresh" content="0; url={to}"><a href="{to}">{title}</a>
"""


def forwards(root):
    "old page -> a page that leads to where it is now, for each line of docs/moved.txt."
    lines = (root / "docs/moved.txt").read_text(encoding="utf-8").splitlines()
    moved = dict(line.split() for line in lines if line and line[0] != "#")
    pages = {}
    for old, new in moved.items():
        to = os.path.relpath(new, Path(old).parent).replace(".ipynb", ".html")
        title = course.heading(course.load(root / new))[0]
        pages[old.replace(".ipynb", ".html")] = FORWARD.format(to=to, title=title)
    return pages


def build(root, out, cache):
    "Build the site; what is wrong with it, a sentence each."
    from sphinx.application import Sphinx

    problems, stage = [], cache / "source"
    wanted = sources(root, problems)
    for path in [p for p in stage.rglob("*") if p.is_file()]:
        if path.relative_to(stage).as_posix() not in wanted:
            path.unlink()
    for name, content in wanted.items():
        write(stage / name, content)
    app = Sphinx(
        srcdir=stage,
        confdir=None,
        outdir=out,
        doctreedir=cache / "doctrees",
        buildername="html",
        confoverrides=options(project(root)),
        warningiserror=False,
        status=None,
        parallel=os.cpu_count() or 1,
    )
    app.build()
    if app._warncount:
        problems.append(f"Sphinx warned {app._warncount} times, see above")
    # Sphinx copies these only where it has written a page
    shutil.copytree(stage / "_static", out / "_static", dirs_exist_ok=True)
    mend(out)
    for name, text in forwards(root).items():
        write(out / name, text)
    write(out / learner.PAGE, learner.page(root))
    (out / ".nojekyll").touch()
    return problems + broken_links(out.resolve())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--cache", type=Path, help="a folder to keep (default: one for this call)")
    args = parser.parse_args()
    cache = args.cache or Path(tempfile.mkdtemp())
    try:
        problems = build(ROOT, args.out, cache.resolve())
    finally:
        if not args.cache:
            shutil.rmtree(cache, ignore_errors=True)
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
