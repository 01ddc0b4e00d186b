"""The script as a notebook: jupytext converts it, a real kernel runs it to the end on a CPU. A notebook has no flags, so its settings cell is edited."""
import json
import re

import jupytext
import nbclient
import pytest

from conftest import SCRIPT, TINY

EDITS = {**dict(zip((flag.lstrip("-").replace("-", "_") for flag in TINY[::2]), TINY[1::2])), "preset": '"full"'}
LONGEST = 80  # lines of a code cell; a class cannot be divided


@pytest.fixture(scope="module")
def notebook():
    return jupytext.read(SCRIPT)


def test_runs_to_the_end_in_a_kernel(notebook, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = next(cell for cell in notebook.cells if "class Settings:" in cell.source)
    for name, value in EDITS.items():
        settings.source, edited = re.subn(rf"^(    {name}: \w+ = )\S+", rf"\g<1>{value}", settings.source, flags=re.MULTILINE)
        assert edited == 1, f"{edited} fields {name}"
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()  # raises where a cell does
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    said = "".join(output.get("text", "") for output in outputs if output.output_type == "stream" and output.name == "stdout")
    assert re.search(r"\d+ of \d+ checks passed", said.splitlines()[-1])
    assert any("image/png" in output.get("data", {}) for output in outputs)  # the figure is shown in place
    results = json.loads((tmp_path / "te_tutorial_out" / "results.json").read_text())
    assert results["settings"]["d_model"] == 32 and results["settings"]["steps"] == 20 and results["checks"]


def test_sections_0_to_11_follow_each_other(notebook):
    headings = [(i, int(number)) for i, cell in enumerate(notebook.cells) if cell.cell_type == "markdown" for number in re.findall(r"^## (\d+)\. ", cell.source, re.MULTILINE)]
    assert [number for _, number in headings] == list(range(12))
    ends = [i for i, _ in headings[1:]] + [len(notebook.cells)]
    for (begin, number), end in zip(headings, ends):
        assert any(cell.cell_type == "code" for cell in notebook.cells[begin:end]), f"section {number} has no code"


def test_every_cell_can_be_read_at_once(notebook):
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith("# ")
    for cell in notebook.cells:
        assert cell.source.strip(), "an empty cell"
        if cell.cell_type == "code":
            lines = cell.source.splitlines()
            assert len(lines) <= LONGEST, f"{len(lines)} lines: {lines[0]} ..."
