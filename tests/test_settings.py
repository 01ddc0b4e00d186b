"""Section 0: which settings a run gets, and which it refuses before any work.

Most tests run the cells of section 0 alone, in this process, because a run of the script costs seconds for `import torch`.
"""
import contextlib
import dataclasses
import io
import itertools
import re
import sys
import types

import pytest
import torch

from conftest import SCRIPT, TINY

SECTION_0 = SCRIPT.read_text(encoding="utf-8").split("# %% [markdown]\n# ## 1. ")[0]
BEFORE_THE_RUN, READS_ARGV, _ = SECTION_0.partition("\n# %%\nGIVEN = {}")


def names_of(code, has_file=True):
    names = {"__name__": "section_0", **({"__file__": str(SCRIPT)} if has_file else {})}
    exec(compile(code, "section 0", "exec"), names)
    return types.SimpleNamespace(**names)


@pytest.fixture(scope="module")
def cells():
    """What section 0 defines, without the cell that reads the arguments of this process."""
    assert READS_ARGV
    return names_of(BEFORE_THE_RUN.rpartition("\n# %%\n")[0])


@pytest.fixture(scope="module")
def read(cells):
    """The settings that a command line gives, or the one line that refuses it."""

    def read(line, has_gpu=False):
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                settings, _ = cells.choose_settings(cells.parse_arguments(line.split()), has_gpu)
                cells.check_settings(settings)
            return settings
        except SystemExit as end:
            assert end.code == 2
            message = said.getvalue()
            assert message.count("\n") == 1 and message.startswith("te_tutorial.py: "), message
            return message

    return read


def proposals(message):
    """The alternatives that a refusal proposes: "...; try --a 1 --b 2 or --a 3" -> ["--a 1 --b 2", "--a 3"]."""
    return message.partition("; try ")[2].strip().split(" or ") if "; try " in message else []


# --------------------------------------------------------------------------- refusals

@pytest.mark.parametrize("line, words", [
    ("--n-heads 5", "--n-heads 5 must divide --d-model 64"),
    ("--n-heads 16", "heads of a multiple of 8"),
    ("--d-model 200", "d_model is 200, but FP8 training needs a multiple of 16"),
    ("--d-model 8", "multiple of 16"),
    ("--d-ff 100", "d_ff is 100, but FP8 training needs a multiple of 16"),
    ("--batch 3 --seq 40", "batch x seq is 120, but FP8 training needs a multiple of 16"),
    ("--batch 1 --seq 24 --gen 8", "batch x seq is 24"),
    ("--bench-batch 5 --seq 40", "bench-batch x seq is 200, but FP8 training needs a multiple of 16"),
    ("--prompt 40", "--seq 32"),
    ("--prompt 32", "--seq 32"),
    ("--prompt 20", "--prompt 20 plus --gen 24 must fit in --seq 32"),
    ("--seq 16", "--prompt 8 plus --gen 24 must fit in --seq 16"),
    ("--prompt 8 --gen 25", "--prompt 8 plus --gen 25 must fit in --seq 32"),
    ("--seq 8 --prompt 2 --gen 2", "--seq 8 is too short"),
])
def test_an_impossible_size_is_refused_with_sizes_that_work(read, line, words):
    message = read(line)
    assert words in message
    assert proposals(message)
    for proposal in proposals(message):
        assert not isinstance(read(f"{line} {proposal}"), str), f"{line} {proposal}: {read(f'{line} {proposal}')}"


def test_24_rows_have_two_neighbours(read):
    assert proposals(read("--batch 3 --seq 40")) == ["--batch 2", "--batch 4"]


def test_every_width_and_number_of_heads_is_accepted_or_gets_a_proposal_that_is(read):
    for width, heads in itertools.product(range(16, 1040, 16), (1, 3, 7, 12, 64)):
        answer = read(f"--d-model {width} --n-heads {heads}")
        if isinstance(answer, str):
            assert proposals(answer), answer
            assert not isinstance(read(f"--d-model {width} {proposals(answer)[0]}"), str), answer


def numbers(cells, kinds):
    return [field.name.replace("_", "-") for field in dataclasses.fields(cells.Settings) if type(field.default) in kinds and field.name != "seed"]


def test_zero_and_negative_numbers_are_refused_by_name(cells, read):
    for flag, value in itertools.product(numbers(cells, (int, float)), ("0", "-1")):
        assert f"--{flag} must be" in read(f"--{flag} {value}") and "above zero" in read(f"--{flag} {value}")


def test_infinite_numbers_are_refused_by_name(cells, read):
    flags = numbers(cells, (float,))
    assert {"lr", "margin"} <= set(flags)
    for flag, value in itertools.product(flags, ("inf", "-inf", "nan")):
        assert f"--{flag} must be" in read(f"--{flag}={value}") and "finite" in read(f"--{flag}={value}")


@pytest.mark.parametrize("line, words", [
    ("--vocab 7", "--vocab 7 is too small"),
    ("--prompt 1", "--prompt 1 hides the stride"),
    ("--amax-history 1", "--amax-history 1 leaves no history"),
    ("--seed 99999999999999999999", "--seed"),
    ("--stepz 5", "--stepz"),
    ("5", "5"),
    ("--steps many", "--steps: invalid int value: many"),
    ("--steps 1.5", "--steps: invalid int value: 1.5"),
    ("--steps", "--steps: expected one argument"),
    ("--recipe fp8", "delayed, current, block, mxfp8, nvfp4"),
    ("--preset large", "auto, full, small"),
    ("--install please", "auto, never"),
    ("--benchmark on", "quick, full, off"),
])
def test_other_refusals(read, line, words):
    message = read(line)
    assert isinstance(message, str) and words in message.replace("'", "")  # quoted by some versions of Python only


def test_the_limits_themselves_are_accepted(read):
    for line in ("--vocab 8", "--seq 16 --prompt 2 --gen 14", "--prompt 30 --gen 2", "--seed 0", "--batch 1 --bench-batch 1", "--n-heads 8"):
        assert not isinstance(read(line), str), read(line)


@pytest.mark.parametrize("line", ["--n-heads 5", "--stepz 5"])
def test_a_refused_run_says_one_line_and_leaves_nothing(tutorial, line):
    run = tutorial(*line.split())
    assert run.code == 2 and run.out == "" and len(run.err.splitlines()) == 1
    assert not run.folder.exists()


def test_the_smallest_legal_run_reaches_the_last_line(tutorial):
    run = tutorial(*TINY, *"--vocab 8 --seq 16 --prompt 2 --gen 14 --batch 1 --bench-batch 1 --steps 1 --bench-steps 1 --amax-history 2".split())
    assert "checks passed" in run.out[-1000:].rpartition("Written:")[2], run.out[-500:] + run.err[-3000:]


# --------------------------------------------------------------------------- presets and what follows from the width

def test_only_a_machine_without_a_gpu_gets_the_small_preset(cells, read):
    assert read("", has_gpu=True) == cells.Settings()
    assert read("", has_gpu=False) == cells.Settings(**cells.SMALL) != cells.Settings()
    assert "--preset full" in cells.choose_settings({}, False)[1] and cells.choose_settings({}, True)[1] == ""


@pytest.mark.parametrize("has_gpu", [True, False])
def test_preset_overrides_the_machine(cells, read, has_gpu):
    assert read("--preset small", has_gpu) == cells.Settings(**cells.SMALL, preset="small")
    assert read("--preset full", has_gpu) == cells.Settings(preset="full")


def test_given_flags_beat_the_preset(cells, read):
    assert all(read(f"--{name.replace('_', '-')} {value}") == dataclasses.replace(cells.Settings(**cells.SMALL), **{name: value})
               for name, value in {"steps": 7, "lr": 0.5, "batch": 32, "n_layers": 1, "gemm_size": 256}.items())


@pytest.mark.parametrize("line, heads, d_ff", [
    ("--d-model 2048", 16, 8192), ("--d-model 4096", 32, 16384), ("--d-model 1024", 16, 4096), ("--d-model 512", 8, 2048), ("--d-model 32", 1, 128),
    ("--d-model 2048 --n-heads 32", 32, 8192), ("--d-model 2048 --d-ff 4096", 16, 4096),
])
@pytest.mark.parametrize("has_gpu", [True, False])
def test_heads_and_mlp_follow_the_width(read, line, heads, d_ff, has_gpu):
    assert (read(line, has_gpu).n_heads, read(line, has_gpu).d_ff) == (heads, d_ff)


def test_every_width_in_multiples_of_16_finds_its_heads(read):
    for width in range(16, 4097, 16):
        assert not isinstance(read(f"--d-model {width}"), str), read(f"--d-model {width}")


def test_help_shows_every_flag_and_its_default(cells, capsys):
    with pytest.raises(SystemExit) as end:
        cells.parse_arguments(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert not end.value.code
    for field in dataclasses.fields(cells.Settings):
        assert f"--{field.name.replace('_', '-')} " in said and f"default: {field.default}" in said


# --------------------------------------------------------------------------- notebooks

@pytest.fixture(params=[False, True], ids=["Jupyter", "a notebook that sets __file__"])
def kernel(monkeypatch, tmp_path, request):
    """Run section 0 as a notebook would: with another program's argv."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "/somewhere/kernel.json", "--steps", "3"])
    return lambda code=SECTION_0: names_of(code, request.param)


def test_the_argv_of_a_kernel_is_ignored(cells, kernel):
    hook = sys.excepthook
    assert dataclasses.asdict(kernel().SETTINGS) == dataclasses.asdict(cells.choose_settings({}, torch.cuda.is_available())[0])
    assert sys.excepthook is hook  # the notebook shows its own tracebacks


def test_a_notebook_edits_the_cell(kernel):
    """With preset "full" in the cell, its sizes are taken on every machine."""
    code = SECTION_0
    for old, new in {"d_model: int = 768": "d_model: int = 128", "n_heads: int = 12": "n_heads: int = 4", 'preset: str = "auto"': 'preset: str = "full"'}.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    assert (kernel(code).SETTINGS.d_model, kernel(code).SETTINGS.n_heads) == (128, 4)


def test_a_notebook_with_impossible_settings_stops(kernel, capsys):
    with pytest.raises(SystemExit):
        kernel(re.sub(r"vocab: int = \d+", "vocab: int = 3", SECTION_0))
    assert "--vocab 3 is too small" in capsys.readouterr().err
