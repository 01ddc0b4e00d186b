"""The benchmark's arithmetic and words, on invented times. No time measured here is ever judged.

Only the named definitions of the script are run, in this process, with a clock and a trainer that we control.
"""
import ast
import itertools
import math
import re
import types

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from conftest import SCRIPT

TEXT = SCRIPT.read_text(encoding="utf-8")
BODY = ast.parse(TEXT).body
FUNCTIONS = {node.name: node for node in BODY if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
CONSTANTS = {node.targets[0].id: node for node in BODY if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)}


def script_names(*wanted, **given):
    """The wanted functions, classes and constants of the script, with its imports and the functions and classes that they use, but ours where `given`."""
    kept, queue = [node for node in BODY if isinstance(node, (ast.Import, ast.ImportFrom))], list(wanted)
    while queue:
        name = queue.pop()
        node = None if name in given else FUNCTIONS.get(name) or (CONSTANTS[name] if name in wanted else None)
        if node and node not in kept:
            kept.append(node)
            queue += [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
    names = {"__name__": "script", **given}
    exec(compile(ast.Module(sorted(kept, key=BODY.index), []), "script", "exec"), names)
    names.update(given)  # ours also before its imports
    return types.SimpleNamespace(**names)


# --------------------------------------------------------------------------- the work in a step

@pytest.mark.parametrize("sizes", [dict(vocab=96, d_model=64, n_heads=4, n_layers=2, d_ff=256, seq=32),
                                   dict(vocab=50, d_model=32, n_heads=1, n_layers=3, d_ff=48, seq=24)])
def test_flops_are_those_that_pytorch_counts(sizes):
    names = script_names("MiniGPT", "TORCH_KIT", "flops_per_step")
    s, rows = types.SimpleNamespace(**sizes), 3
    model = names.MiniGPT(names.TORCH_KIT, s, torch.float32)
    tokens = torch.randint(s.vocab, (rows, s.seq))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # this backend multiplies matrices, in batches
        model.loss(tokens, tokens).backward()
    counted = {str(operation): flops for operation, flops in counter.get_flop_counts()["Global"].items()}
    attention = sum(flops for operation, flops in counted.items() if "bmm" in operation)
    ours_of_attention = 6 * s.n_layers * rows * s.seq**2 * s.d_model
    assert 2 * ours_of_attention == attention  # we count the causal half, PyTorch the full square
    assert names.flops_per_step(s, rows) == sum(counted.values()) - attention + ours_of_attention


# --------------------------------------------------------------------------- a ladder on an invented clock

class Bench:
    """The script's ladder on a clock that only our trainer moves. `ms` says how long a step takes: {(kit, graph): ms, or a list to cycle through}."""

    def __init__(self, ms, **given):
        self.now, self.ran, self.built, self.skipped, self.precisions = 0.0, [], [], [], {}
        self.ms = {key: itertools.cycle(value if isinstance(value, list) else [value]) for key, value in ms.items()}
        bench = self

        class Trainer:
            capture_fails, build_fails, turn_fails = "", {}, {}  # {kit: exception}, and {(kit, graph): exception} after ten steps

            def __init__(self, kit, precision, rows, **how):
                if kit.name in self.build_fails:
                    raise self.build_fails[kit.name]
                self.kit, self.graph = kit.name, None
                bench.built.append(kit.name)

            def capture(self):
                if not self.capture_fails:
                    self.graph = "captured"
                return self.capture_fails

            def run(self, *batch):
                bench.ran.append((self.kit, bool(self.graph)))
                if bench.ran[-1] in self.turn_fails and bench.ran.count(bench.ran[-1]) > 10:
                    raise self.turn_fails[bench.ran[-1]]
                bench.now += next(bench.ms[bench.ran[-1]]) / 1e3
                return torch.zeros(())

        self.Trainer = Trainer
        settings = types.SimpleNamespace(bench_batch=4, seq=250, bench_warmup=2, bench_steps=30, seed=0)
        self.names = script_names(
            "Row", "run_ladder", DEVICE="cpu", Trainer=Trainer, SETTINGS=settings, CEILING={"BF16": 10.0, "FP8": 20.0}, Precision=object,
            time=types.SimpleNamespace(perf_counter=lambda: bench.now), batches=lambda *a: itertools.repeat((torch.zeros(1), torch.zeros(1))),
            flops_per_step=lambda s, rows: 80e9, progress_bar=lambda *a: types.SimpleNamespace(update=lambda: None, close=lambda: None), skip=lambda *line: self.skipped.append(line), **given)

    def row(self, name, kit, graph=False, precision="BF16", **more):
        made = types.SimpleNamespace(name=precision, recipe="a recipe" if "FP8" in precision else None)
        return self.names.Row(name, types.SimpleNamespace(name=kit), self.precisions.setdefault(precision, made), graph=graph, **more)


def test_rows_take_turns():
    bench = Bench({("A", False): 1.0, ("A", True): 0.5, ("B", False): 1.0, ("B", True): 0.25})
    done = bench.names.run_ladder([bench.row("a", "A"), bench.row("a + graph", "A", True), bench.row("b + graph", "B", True)])
    turns = [key for key, _ in itertools.groupby(bench.ran)]
    assert turns[-15:] == [("A", False), ("A", True), ("B", True)] * 5
    assert [(r["row"], round(r["ms_median"], 6)) for r in done] == [("a", 1.0), ("a + graph", 0.5), ("b + graph", 0.25)]
    assert [r["first_loss"] for r in done] == [0.0, None, 0.0]  # of the row that makes the model
    assert bench.built == ["A", "B"]  # rows that differ only in how they are launched share one model


def test_a_row_keeps_its_turn_short():
    bench = Bench({("A", False): 500.0})
    bench.names.run_ladder([bench.row("a", "A")])
    assert len(bench.ran) <= 1 + 2 * 6  # the first loss; then one step that does not count and one that does, in the warm-up and in 5 rounds


def test_a_row_that_cannot_run_takes_out_itself_alone():
    bench = Bench({("A", False): 1.0, ("A", True): 0.5})
    bench.Trainer.capture_fails = "no graph"
    bench.Trainer.build_fails = {"B": torch.OutOfMemoryError(), "C": AttributeError("not in this TE\nmore")}
    done = bench.names.run_ladder([bench.row("a + graph", "A", True), bench.row("b", "B"), bench.row("c", "C"), bench.row("a", "A")])
    assert [r["row"] for r in done] == ["a"]
    assert bench.skipped == [("benchmark row a + graph", "no graph"), ("benchmark row b", "not enough GPU memory"),
                             ("benchmark row c", "AttributeError: not in this TE")]
    assert bench.built == ["A", "A"]  # the first did not keep its memory while others were tried


def test_a_trainer_that_others_use_stays():
    bench = Bench({("A", False): 1.0})
    bench.Trainer.capture_fails = "no graph"
    done = bench.names.run_ladder([bench.row("a", "A"), bench.row("a + graph", "A", True)])
    assert [r["row"] for r in done] == ["a"] and bench.built == ["A"]


def test_a_row_that_runs_out_of_memory_later_takes_out_itself_alone():
    bench = Bench({("A", False): 1.0, ("B", False): 1.0})
    bench.Trainer.turn_fails = {("A", False): torch.OutOfMemoryError()}
    done = bench.names.run_ladder([bench.row("a", "A"), bench.row("b", "B")])
    assert [r["row"] for r in done] == ["b"] and bench.skipped == [("benchmark row a", "not enough GPU memory")]


def test_a_row_that_fails_leaves_the_graph_and_tf32_as_they_were():
    """It shares its trainer with a row that runs by graph, and the switch for TF32 with everybody."""
    bench = Bench({("A", False): 1.0, ("A", True): 0.5})
    bench.Trainer.turn_fails = {("A", False): torch.OutOfMemoryError()}
    before = torch.backends.cuda.matmul.allow_tf32
    done = bench.names.run_ladder([bench.row("a", "A", tf32=True), bench.row("a + graph", "A", True)])
    assert torch.backends.cuda.matmul.allow_tf32 is before is False
    assert [r["row"] for r in done] == ["a + graph"] and done[0]["ms_median"] == pytest.approx(0.5)
    failed = len(bench.ran) - 1 - bench.ran[::-1].index(("A", False))
    assert len(bench.ran[failed + 1:]) > 5 and set(bench.ran[failed + 1:]) == {("A", True)}


def test_figures_of_a_row():
    bench = Bench({})
    row = bench.row("r", "TE", precision="FP8 delayed", launch=[3.0, 1.0, 2.0], times=[7.0, 8.0, 9.0, 8.0, 7.0, 9.0, 8.0], peak_gb=1.5)
    found = row.figures()
    assert (found["ms_median"], found["ms_iqr"], found["cpu_launch_ms"], found["peak_memory_gb"]) == (8.0, 2.0, 2.0, 1.5)
    assert found["tokens_per_s"] == 4 * 250 / 8e-3
    assert found["tflops"] == 80e9 / 8e-3 / 1e12
    assert found["share_of_gemm"] == 10 / 20  # FP8 against the card's FP8 rate,
    assert bench.row("r", "TE", launch=[1.0], times=[8.0]).figures()["share_of_gemm"] == 10 / 10  # BF16 against its BF16 rate,
    assert bench.row("r", "TE", precision="FP32", launch=[1.0], times=[8.0]).figures()["share_of_gemm"] is None  # and nothing where no rate is known
    assert bench.row("r", "TE", tf32=True, launch=[1.0], times=[8.0]).figures()["share_of_gemm"] is None


def test_figures_of_a_single_time():
    found = Bench({}).row("r", "TE", launch=[1.0], times=[8.0]).figures()
    assert (found["ms_median"], found["ms_iqr"]) == (8.0, 0.0)


# --------------------------------------------------------------------------- words that follow the numbers

WORDS = script_names("compare", "compare_memory", "fastest", "unsure", "findings", "pays_from", "answer", "print_ladder", DEVICE="cuda")


def row(name, kit, ms, precision="BF16", graph=False, changes="", iqr=0.1, launch=0.5, peak=2.0):
    return {"row": name, "changes": changes, "kit": kit, "precision": precision, "graph": graph, "ms_median": ms, "ms_iqr": iqr, "steps": 36, "cpu_launch_ms": launch, "tokens_per_s": 8e6 / ms,
            "tflops": 40 / ms, "share_of_gemm": 0.4 if kit == "TE" else None, "peak_memory_gb": peak if kit == "TE" else None}


@pytest.mark.parametrize("new, old, spread, words", [
    (2.0, 3.0, 0.1, "1.50x faster than"), (3.0, 2.0, 0.1, "1.50x slower than"), (2.0, 2.0, 0.0, "as fast as"),
    (2.0, 2.1, 0.2, "as fast as"), (2.1, 2.0, 0.2, "as fast as"), (2.0, 2.5, 0.2, "1.25x faster than"),
])
def test_time_in_words(new, old, spread, words):
    assert WORDS.compare(new, old, spread) == words


@pytest.mark.parametrize("new, old, words", [(2.0, 3.0, "33% less memory than"), (3.0, 2.0, "50% more memory than"), (2.0, 2.05, "as much memory as")])
def test_memory_in_words(new, old, words):
    assert WORDS.compare_memory(new, old, 0.1) == words


def test_how_far_a_median_can_be_trusted():
    """1.9 IQR / sqrt(n): 95% of the medians of 30 normal times lie that near to the true one."""
    torch.manual_seed(0)
    times = 10 + torch.randn(4000, 30)
    q1, median, q3 = torch.quantile(times, torch.tensor([0.25, 0.5, 0.75]), dim=1)
    margins = torch.tensor([WORDS.unsure({"ms_iqr": iqr, "steps": 30}) for iqr in (q3 - q1).tolist()])
    assert 0.92 < ((median - 10).abs() < margins).float().mean() < 0.98
    assert WORDS.unsure({"ms_iqr": 1.0, "steps": 30}, {"ms_iqr": 2.0, "steps": 30}) == 2 * WORDS.unsure({"ms_iqr": 1.0, "steps": 30})


def test_fastest_row():
    rows = [row("a", "PyTorch", 3.0), row("b", "TE", 2.0), row("c", "TE", 1.0, graph=True), row("d", "TE", 1.5, "FP8 delayed", True)]
    assert WORDS.fastest(rows, "TE")["row"] == "c" and WORDS.fastest(rows, "PyTorch")["row"] == "a"
    assert WORDS.fastest(rows, "TE", "FP8 delayed")["row"] == "d" and WORDS.fastest(rows, "PyTorch", "FP8 delayed") is None and WORDS.fastest([], "TE") is None


def test_table_of_the_ladder(capsys):
    WORDS.print_ladder([row("PyTorch BF16", "PyTorch", 8.0), row("PyTorch BF16 + compile", "PyTorch", 4.0, changes="PyTorch BF16"),
                        row("TE BF16", "TE", 5.0, changes="PyTorch BF16"), row("TE FP8", "TE", 2.0, iqr=0.25, changes="a row that is not there")])
    head, _, *lines = [[cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()]
    column = {title: [line[i] for line in lines] for i, title in enumerate(head)}
    assert column["row"][0] == "PyTorch BF16" and column["ms (IQR)"][3] == "2.00 (0.25)" and column["tokens/s"][0] == "1,000,000"
    assert column["gain"] == ["-", "2.00x", "1.60x", "-"]
    assert column["best PyTorch"] == ["0.50x", "1.00x", "0.80x", "2.00x"]
    assert column["share"] == ["-", "-", "40%", "40%"] and column["peak GB"] == ["-", "-", "2.00", "2.00"]


def full_ladder(**ms):
    """A whole ladder; `ms` replaces times."""
    times = dict(eager=6.0, compiled=4.0, bf16=8.0, bf16_graph=3.0, fp8=9.0, fp8_graph=2.0, declared=2.5, **{}) | ms
    return [row("PyTorch BF16", "PyTorch", times["eager"]), row("PyTorch BF16 + compile + graph", "PyTorch", times["compiled"], graph=True),
            row("TE BF16", "TE", times["bf16"]), row("TE BF16 + graph", "TE", times["bf16_graph"], graph=True),
            row("TE FP8 delayed", "TE", times["fp8"], "FP8 delayed", launch=times.get("launch", 1.0)),
            row("TE FP8 delayed + graph", "TE", times["fp8_graph"], "FP8 delayed", True),
            row("TE FP8 delayed + graph, QKV declared", "TE", times["declared"], "FP8 delayed", True, "TE FP8 delayed + graph", peak=times.get("peak", 2.0))]


def said(rows, about, fp8="FP8 delayed"):
    """The one sentence of the findings that holds these words."""
    sentences = [s for s in WORDS.findings(rows, "BF16", fp8) if about in s]
    assert len(sentences) == 1, sentences
    return sentences[0]


@pytest.mark.parametrize("about, ms, words", [
    ("Launched from Python", dict(fp8=9.0), "FP8 delayed is 1.12x slower than BF16"),
    ("Launched from Python", dict(fp8=4.0), "FP8 delayed is 2.00x faster than BF16"),
    ("Launched from Python", dict(fp8=8.02), "FP8 delayed is as fast as BF16"),
    ("As a CUDA graph", dict(fp8_graph=2.0), "1.50x faster than BF16"),
    ("As a CUDA graph", dict(fp8_graph=4.5, declared=6.0), "1.50x slower than BF16"),
    ("As a CUDA graph", dict(fp8_graph=2.0, declared=1.0), "1.50x faster than BF16"),  # a variation does not stand for the row
    ("fastest plain PyTorch", dict(fp8_graph=2.0), "The fastest FP8 delayed row, TE FP8 delayed + graph, is 2.00x faster than the fastest plain PyTorch row, PyTorch BF16 + compile + graph"),
    ("fastest plain PyTorch", dict(declared=1.0), "TE FP8 delayed + graph, QKV declared, is 4.00x faster than"),
    ("fastest plain PyTorch", dict(fp8_graph=8.0, declared=8.0), "2.00x slower than the fastest plain PyTorch row"),
    ("fastest plain PyTorch", dict(eager=1.0), "2.00x slower than the fastest plain PyTorch row, PyTorch BF16."),
    ("PyTorch alone gains", dict(eager=6.0), "PyTorch BF16 + compile + graph is 1.50x faster than PyTorch BF16"),
    ("With QKV declared", dict(declared=2.5), "a step is 1.25x slower than without, and takes as much memory as without."),
    ("With QKV declared", dict(declared=1.0, peak=1.0), "2.00x faster than without, and takes 50% less memory than without."),
    ("With QKV declared", dict(declared=2.0, peak=3.0), "as fast as without, and takes 50% more memory than without."),
    ("With QKV declared", dict(declared=2.5, peak=None), "1.25x slower than without."),
])
def test_sentences_follow_the_times(about, ms, words):
    assert words in said(full_ladder(**ms), about)


def test_a_gpu_that_waits_for_python_is_named_only_where_it_does():
    assert "the GPU waits" in said(full_ladder(fp8=9.0, launch=8.5), "Launched from Python")
    assert "waits" not in said(full_ladder(fp8=9.0, launch=2.0), "Launched from Python")


def test_no_sentence_about_rows_that_are_not_there():
    plain = [row("PyTorch FP32", "PyTorch", 5.0, "FP32")]
    assert WORDS.findings([], "FP32", None) == [] and WORDS.findings(plain, "FP32", None) == []
    assert not [s for s in WORDS.findings(plain, "FP32", None) if "FP8" in s]
    a100 = [r for r in full_ladder() if "FP8" not in r["row"]]
    assert a100 and not [s for s in WORDS.findings(a100, "BF16", None) if "FP8" in s or "QKV" in s]


# --------------------------------------------------------------------------- the width from which FP8 pays

@pytest.mark.parametrize("points, found", [
    ([(256, 0.8), (512, 0.9), (1024, 1.1), (2048, 1.5)], (512, 768, 1024)),  # half way between 0.9 and 1.1
    ([(2048, 1.5), (256, 0.8), (1024, 1.1), (512, 0.9)], (512, 768, 1024)),  # in any order
    ([(256, 1.2), (512, 0.9), (1024, 1.1)], (512, 768, 1024)),  # a lucky narrow width does not count
    ([(256, 1.1), (512, 1.3)], (None, 256, 256)), ([(256, 0.8), (512, 0.9)], None), ([(256, 1.3), (512, 1.0)], None), ([(512, 1.5)], (None, 512, 512)), ([(512, 0.5)], None),
])
def test_width_from_which_fp8_pays(points, found):
    assert WORDS.pays_from(points) == (found and pytest.approx(found))


@pytest.mark.parametrize("points, words", [
    ([(256, 0.8), (512, 0.9), (1024, 1.1)], "here: FP8 pays from a width between 512 and 1024 (about 768)"), ([(256, 1.1), (512, 1.3)], "here: FP8 pays from width 256 at the latest"),
    ([(256, 1.1), (512, 0.9)], "here: FP8 does not pay at any width up to 512"),
])
def test_answer_in_words(points, words):
    assert WORDS.answer("here", points) == words


def test_predicted_break_even():
    """The prediction is the one that the text above it states. Here with 100 TFLOP/s in 16 bits, 200 in FP8, and 1 TB/s."""
    operations, moved = map(int, re.search(r"(\d+) W\^2 \(1 / rate16 - 1 / rate8\)  >  (\d+) W / bandwidth", TEXT).groups())
    base, fp8 = (types.SimpleNamespace(name=name, recipe=None) for name in ("BF16", "FP8 delayed"))

    class Trainer:
        def __init__(self, kit, precision, *more):
            self.precision, self.graph = precision, None

        def capture(self):
            self.graph = True

        def run(self, *batch):
            return self

    def time_ms(run, repeats):
        trainer = run()
        return {("BF16", None): 9.0, ("BF16", True): 5.0, ("FP8 delayed", None): 8.0, ("FP8 delayed", True): 4.0}[trainer.precision.name, trainer.graph]

    Settings = script_names("Settings").Settings
    names = script_names("cross", Trainer=Trainer, time_ms=time_ms, BASE=base, FP8=fp8, SETTINGS=Settings(seq=64), TE_KIT=None, DEVICE="cpu", BANDWIDTH=1e12, TRANSPOSED=True, Stop=Exception,
                         batches=lambda *a: iter([(torch.zeros(1), torch.zeros(1))]), gemm_rate=lambda kind, *a: {"BF16": 100, "FP8": 200}[kind])
    for width in (256, 12800, 25600):
        found = names.cross(width, 4)
        per_token = operations * width**2 / 2e14 - moved * width / 1e12  # seconds won by FP8, per layer
        assert math.isclose(found["predicted"], 5.0 - 2 * 4 * 64 * per_token * 1e3, rel_tol=1e-9)
        assert (found["width"], found["tokens"], found["BF16", "eager"], found["FP8 delayed", "graph"]) == (width, 256, 9.0, 4.0)

    class Stop(Exception):
        pass

    names.cross.__globals__.update(Stop=Stop, gemm_rate=lambda kind, *a: None)  # a multiplication that does not run alone
    with pytest.raises(Stop, match="does not run alone"):
        names.cross(256, 4)

    names.cross.__globals__.update(TRANSPOSED=False)  # Blackwell: the bytes that the prediction counts are not moved there
    assert "predicted" not in names.cross(256, 4)
