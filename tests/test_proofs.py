"""Every check of the tutorial can fail: we break what it guards, in a copy of the script, and see that it notices.

A row of the table is one run. Its breaks are independent of each other; each names the checks that must fail because of it. Those, and no
others, may fail among the checks that pass in the unbroken run.
"""
import fnmatch

import pytest

from conftest import TINY

GPU = [*TINY, "--benchmark", "off"]  # an H200 that is not there, with FP8; too short to learn
CPU = ["--vocab", "64", "--d-model", "64", "--n-heads", "4", "--n-layers", "1", "--d-ff", "128", "--seq", "16", "--batch", "64", "--steps", "300",
       "--lr", "1e-2", "--margin", "0.3", "--prompt", "4", "--gen", "4", "--gemm-size", "256", "--bench-steps", "5"]  # learns in seconds

# Not looked at in the short run: what chance decides without learning, and a tolerance about as large as what these breaks do.
BY_CHANCE = ["all * prompts*", "padded generation*", "* comes near the floor", "causal, rows independent (FP8 current)"]
TOUR_BLOCK = ["Block (ours): TE in BF16*", "Block (ours) in FP8 *"]
PROMPTS, PADDED = ["all 384 prompts*"], ["padded generation*"]
STALE = '; [m.fp8_meta["scaling_fwd"].scale.mul_(64) for m in module.modules() if hasattr(getattr(m, "fp8_meta", {}).get("scaling_fwd"), "scale")]'

MUTANTS = {  # name: (flags, [(old, new, checks that notice)])
    "one of each": (GPU, [
        ("FP8_MAX[layout] / x.abs().max().item())) for layout", "2 * FP8_MAX[layout] / x.abs().max().item())) for layout", ["a scaled cast*"]),
        ("* 2e-4", "* 2e-1", ["without a scale*"]),  # gradients that are not small
        ("x[0, 0] = w[0, 0] = 1.75", "x[0, 0] = w[0, 0] = 2.1", ["what FP8 can represent*"]),  # a number that FP8 does not have
        ("for delayed in (True, False))", "for delayed in (False, True))", ["delayed scaling pays*"]),
        ("= train(FP8, SETTINGS.seed, ", "= train(FP8, SETTINGS.seed, steps=10, ", ["FP8 learns as well"]),
        ("trainer.run(tokens[:, :-1], tokens[:, 1:])", "trainer.run(tokens[:, :-1], tokens[:, :-1])", ["random tokens*"]),
        ('"AdamW": 8 *', '"AdamW": 4 *', ["the memory ledger*"]),  # one moment forgotten
        ("i * (3 if", "i * (2 if", ["every tensor was seen"]),  # the column of an output
        ("state.amax_history.copy_(history)", "pass", ["generation leaves no trace"]),
    ]),
    "scales": (GPU, [
        ("recipe.DelayedScaling(", "recipe.DelayedScaling(margin=1, ", ["TE's scale*", "every scale*"]),
        ("y.backward(dy.to(y.dtype))", "y.backward(dy.to(y.dtype))" + STALE, ["* in FP8 delayed: only cast noise"]),
        ("state.amax_history[-1:]", "state.amax_history[:1]", ["every tensor was seen"]),  # the staging row
        ("model.train(training)", "pass", ["generation leaves no trace"]),
        ("trainer.optimizer.set_lr(min", "trainer.optimizer.set_lr(0 * min", ["weights moved"]),
    ]),
    "batch and time swapped, other weights each time": (GPU, [
        ("def first_losses(precision, steps=10):", "def first_losses(precision, steps=10):\n    SETTINGS.seed += 1", ["same seed*"]),
        ('qkv_format="bshd"', 'qkv_format="sbhd"', [*TOUR_BLOCK, "TE and PyTorch models agree", "causal*"]),
    ]),
    "the layer's default layout, K and V swapped in backward": (GPU, [
        (', attn_input_format="bshd"', "", ["TransformerLayer: TE in BF16*", "TransformerLayer in FP8*"]),
        ("torch.stack((dq, dk, dv)", "torch.stack((dq, dv, dk)", [*TOUR_BLOCK, "TE and PyTorch models agree"]),
        ("448.0) if direction", "240.0) if direction", ["every scale*"]),
    ]),
    "no mask in TE": (GPU, [
        ('attn_mask_type="causal")', 'attn_mask_type="no_mask")', [*TOUR_BLOCK, "TE and PyTorch models agree", "causal*"]),
    ]),
    "everything copied is 1.5 times too large": (GPU, [
        ("p.data.copy_(weights[name])", "p.data.copy_(1.5 * weights[name])",
         ["*: TE in BF16*", "*: only cast noise", "TE and PyTorch models agree", "weights survive*"]),
    ]),
    "wrong weights": (GPU, [
        ("weights_of(model))\n    exact", "{n: w.roll(1, 0) for n, w in weights_of(model).items()})\n    exact",
         ["TE and PyTorch models agree", "weights survive*"]),
        ('self.fc1_bias), approximate="tanh")', 'self.fc1_bias))', ["TE's gelu*"]),
    ]),
    "16-bit master weights": (GPU, [
        (".to(DEVICE), s.seed)", ".to(DEVICE).bfloat16(), s.seed)", ["master weights*", "weights moved", "the memory ledger*"]),
    ]),
    "a weight that is not copied, gradients that vanish": (GPU, [
        ("p.data.copy_(weights[name])", 'p.data.copy_(weights[name] if name != "blocks.0.proj.weight" else p.data)',
         ["TE and PyTorch models agree", "weights survive*"]),
        ("self.optimizer.step(self.scaler)", "[p.grad.zero_() for p in self.model.parameters()]; self.optimizer.step(self.scaler)", ["weights moved"]),
    ]),
    "no mask in PyTorch": (CPU, [("(q, k, v, is_causal=True)", "(q, k, v)", ["our block*", "causal*", "random tokens*", *PROMPTS, *PADDED])]),
    "reading the wrong position, unseeded weights": (CPU, [
        ("model.trunk(piece)[:, t - 1]", "model.trunk(piece)[:, t - 2]", [*PROMPTS, *PADDED]),
        ("torch.Generator(p.device).manual_seed(seed)", "None", ["same seed*"]),
        ("self.times += between(marks)", "self.times += [-ms for ms in between(marks)]", ["the benchmark measured*"]),
    ]),
    "a rate too low, work counted thousandfold": (CPU, [
        ("trainer.optimizer.set_lr(min", "trainer.optimizer.set_lr(.03 * min", ["* comes near the floor", *PROMPTS]),
        ("return 6 * matrices", "return 6000 * matrices", ["no row beats the ceiling"]),
    ]),
    "the rows of the padding": (CPU, [("done.append(piece[:rows])", "done.append(piece[-rows:])", PADDED)]),
}

BASELINES = {}  # flags: {check: passed} of the unbroken script, run once


def verdicts(tutorial, flags, replace=None):
    on_gpu = flags is GPU
    done = tutorial(*flags, gpu="9.0" if on_gpu else None, te=on_gpu, replace=replace)
    assert "stopped" not in done.results, done.err
    return {check: passed for check, passed in done.verdicts.items() if not (on_gpu and any(fnmatch.fnmatch(check, p) for p in BY_CHANCE))}


@pytest.fixture
def unbroken(tutorial):
    def run(flags):
        if id(flags) not in BASELINES:
            BASELINES[id(flags)] = verdicts(tutorial, flags)
        return BASELINES[id(flags)]
    return run


@pytest.mark.parametrize("name", MUTANTS)
def test_the_checks_notice(name, tutorial, unbroken):
    flags, breaks = MUTANTS[name]
    passing = [check for check, passed in unbroken(flags).items() if passed]
    expected = set()
    for old, _, patterns in breaks:
        for pattern in patterns:
            guards = set(fnmatch.filter(passing, pattern))
            assert guards, f"no check {pattern!r} passes in the unbroken run"
            expected |= guards
    now = verdicts(tutorial, flags, {old: new for old, new, _ in breaks})
    assert {check for check in passing if not now[check]} == expected


def test_every_check_was_broken_once(unbroken):
    """The table reaches all checks that pass in the unbroken runs."""
    patterns = [pattern for _, breaks in MUTANTS.values() for _, _, patterns in breaks for pattern in patterns]
    for flags in (GPU, CPU):
        assert not [check for check in unbroken(flags) if not any(fnmatch.fnmatch(check, p) for p in patterns)]


def test_rows_that_train_other_models_are_noticed(tutorial):
    done = tutorial(*TINY, gpu="9.0", te=True, replace={"            trainers[key] = Trainer(self.kit": "            SETTINGS.seed += 1\n            trainers[key] = Trainer(self.kit"})
    assert done.verdicts["every row starts from the same loss"] is False and done.verdicts["the benchmark measured every row"]


VARIATIONS = {'", fast accumulation", TE_KIT, FAST, ends, True': '", fast accumulation", TE_KIT, FAST, ends, False',
              '", FP8 weights", TE_KIT, FP8, ends, True': '", FP8 weights", TE_KIT, FP8, ends, False'}  # without graphs they run here too


def test_variations_of_the_fp8_row(tutorial):
    done = tutorial(*TINY, gpu="9.0", te=True, replace=VARIATIONS)
    rows = {r["row"]: r for r in done.results["benchmark"]}
    assert {"TE FP8 delayed + graph, fast accumulation", "TE FP8 delayed + graph, FP8 weights"} <= rows.keys()
    assert done.verdicts["every row starts from the same loss"] and done.verdicts["fast accumulation keeps the gradients"]


def test_an_accumulation_that_costs_accuracy_is_noticed(tutorial):
    coarse = {"    made.fp8_gemm_dgrad =": "    made.margin = 14\n    made.fp8_gemm_dgrad ="}
    done = tutorial(*TINY, gpu="9.0", te=True, replace={**VARIATIONS, **coarse})
    assert done.verdicts["fast accumulation keeps the gradients"] is False


def test_a_poisoned_loss_stops_the_run(tutorial):
    done = tutorial(*GPU, gpu="9.0", te=True, replace={"= trainer.run(*next(source))": "= trainer.run(*next(source)) * (math.nan if step == 7 else 1)"})
    assert done.code == 1 and "the loss was nan at step 8" in done.results["stopped"]
    assert "the loss was nan at step 8" in done.err and "Traceback" not in done.err
