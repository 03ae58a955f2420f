"""The pages: their links, commands, files and numbers hold, and their lines are short."""

import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MANUAL = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
PAGES = [*MANUAL, *sorted((DOCS / "lab").glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)]*))?\)")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_resolve(page):
    broken = []
    for path, anchor in LINK.findall(page.read_text()):
        target = (page.parent / path).resolve() if path else page
        if "://" in path:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{path}#{anchor}" if anchor else path)
    assert broken == []


@pytest.mark.parametrize("page", MANUAL, ids=name_of)
def test_commands_and_files_that_a_page_names_exist(page):
    text = page.read_text()
    found = re.findall(r"\b(?:run|ogdm_core|examples|tests|patches)/[\w./-]+\.(?:sh|py(?:\.patch)?|yaml|csv)\b", text)
    files = {file for file in found if not re.search(r"\bNAME\b|\bX\b|tableN", file)}
    modules = {name.replace(".", "/") for name in re.findall(r"-m ((?:ogdm_core|run)[\w.]*\w)", text)}
    missing = [file for file in sorted(files) if not (ROOT / file).exists()]
    for module in sorted(modules):
        if not any((ROOT / f"{module}{end}").is_file() for end in (".py", "/__main__.py")):
            missing.append(f"python -m {module}")
    assert missing == []


def test_pages_that_the_code_names_exist():
    files = [f for top in ("run", "ogdm_core") for f in (ROOT / top).rglob("*") if f.suffix in {".py", ".sh", ".yaml"}]
    named = {(name_of(f), page) for f in files for page in re.findall(r"\bdocs/[\w/-]+\.md\b", f.read_text())}
    assert sorted(entry for entry in named if not (ROOT / entry[1]).is_file()) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_line_is_long(page):
    text = page.read_text()
    if page == DOCS / "results.md":  # run.tables.results writes what stands between these marks
        text = re.sub(r"<!-- table.*?<!-- end -->", "", text, flags=re.S)
    assert [line for line in text.splitlines() if len(line) > 120] == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_adms_model_flags_are_the_presets():
    """Weights of other heads load without an error and sample wrongly, so the page must not differ."""
    dry = [sys.executable, "-m", "run.train", "cifar10-adm-baseline", "--data", "DATA", "--dry-run"]
    printed = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    of_training = {"--data_dir", "--schedule_sampler", "--lr", "--ema_rate", "--batch_size", "--lr_anneal_steps"}
    (shown,) = re.findall(r'MODEL_FLAGS="([^"]*)"', (DOCS / "adm.md").read_text())
    preset, page = (dict(re.findall(r"(--\w+) (\S+)", text.split("image_train.py")[-1])) for text in (printed, shown))
    assert page == {flag: value for flag, value in preset.items() if flag not in of_training}


def test_tonights_trainings_are_taken_by_upstream(tmp_path, patched):
    image = pytest.importorskip("PIL.Image")
    third_party = patched("edm").parent
    image.new("RGB", (32, 32)).save(tmp_path / "0.png")
    (tmp_path / "w.pkl").touch()
    small = {"data/cifar10-32x32.zip": str(tmp_path), "$W": str(tmp_path / "w.pkl"), "8": "1"}
    lines = re.findall(r"^run/train.sh (.*)$", (DOCS / "tonight.md").read_text(), re.M)
    assert len(lines) == 2
    for line in lines:
        ours, _, native = line.partition(" -- ")
        words = [small.get(word, word) for word in ours.split()] + ["--third-party", str(third_party), "--"]
        command = [sys.executable, "-m", "run.train", *words, *native.split(), "--dry-run"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and "Dry run; exiting." in done.stdout, done.stdout + done.stderr


def test_the_quickstarts_numbers_are_those_of_its_results():
    pytest.importorskip("matplotlib")
    from run.quickstart import report

    results = json.loads((DOCS / "results/quickstart.json").read_text())
    assert report.markdown(results) in (DOCS / "start.md").read_text()
    names = {"euler": "Euler (DDIM)", "s-pndm": "S-PNDM", "dpmpp-2m": "DPM-Solver++(2M)", "unipc": "UniPC"}
    rows = re.findall(r"^\| (\S.*), (\d+) \| ([\d.]+) \| ([\d.]+) \|$", (ROOT / "README.md").read_text(), re.M)
    cells = {(names.get(c["sampler"]), c["nfe"]): (f"{c['control_fid']:.2f}", f"{c['ogdm_fid']:.2f}")
             for c in report.cells(results)}  # fmt: skip
    assert len(rows) == 5
    assert [cells[name, int(nfe)] for name, nfe, _, _ in rows] == [(without, given) for _, _, without, given in rows]


def test_the_guides_numbers_are_those_of_their_results():
    rows = json.loads((DOCS / "lab/results/guidance.json").read_text())["rows"]
    cells: dict[tuple, list[dict]] = {}
    for row in rows:
        cells.setdefault((row["sampler"], row["nfe"], row["method"], row["cost"]), []).append(row)
    want: dict[tuple, list[str]] = {}
    for (*model, cost), group in sorted(cells.items()):
        spread = [f"{fmean(v):.3f} ± {stdev(v):.3f}" for v in ([r[n] for r in group] for n in ("fid", "recall"))]
        want.setdefault(tuple(model), []).extend([str(cost), *spread])
    shown = re.findall(r"^\|[^|]*\| (control|OGDM) \|(.* ± .*)\|$", (DOCS / "lab/guidance.md").read_text(), re.M)
    shown = [(method.lower(), [c.strip() for c in line.split("|") if c.strip()]) for method, line in shown]
    assert len(shown) == 10 and shown == [(model[-1], values) for model, values in want.items()]


@pytest.mark.parametrize("picture", sorted((DOCS / "figures").glob("*.png")), ids=name_of)
def test_a_picture_is_small_and_says_how_it_was_made(picture):
    """Pictures of the lab's pages may name a script of their time."""
    image = pytest.importorskip("PIL.Image")
    script = image.open(picture).text["Command"].split()[0]
    assert picture.stat().st_size < 300_000 and script.startswith("run/")
    assert (ROOT / script).exists() or picture.name.startswith("beyond_")
