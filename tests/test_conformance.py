"""The stand-in and the tutorial speak the published API: names, parameter order and defaults are
compared with the sources of Transformer Engine 2.20.2, which need no GPU to be read."""
import ast
import importlib.util
import os
import pathlib
import subprocess
import sys
import types
import zipfile

import pytest
import torch

VERSION = "2.20.2"
HERE = pathlib.Path(__file__).resolve().parent
SCRIPT = HERE.parent / "te_tutorial.py"
STANDIN = HERE / "standin" / "te" / "transformer_engine"


class Package:
    """Source of one transformer_engine package, read with ast. Objects are found by their dotted name,
    through the imports that lead to where they are defined."""

    def __init__(self, root):
        self.root, self.trees = pathlib.Path(root), {}

    def file(self, module):
        path = self.root.joinpath(*module)
        return next((f for f in (path / "__init__.py", path.with_suffix(".py")) if f.is_file()), None)

    def tree(self, module):
        if module not in self.trees:
            self.trees[module] = ast.parse(self.file(module).read_text())
        return self.trees[module]

    def imported_from(self, module, node):
        """The module a 'from x import y' in this module reads from, or None if it is outside."""
        if node.level:
            package = module if self.file(module).name == "__init__.py" else module[:-1]
            package = package[:len(package) - (node.level - 1)]
            return package + tuple(node.module.split(".") if node.module else ())
        if node.module and node.module.split(".")[0] == "transformer_engine":
            return tuple(node.module.split(".")[1:])

    def find(self, module, name):
        """(module, node) of a class or function, (module, None) of a submodule, None if unknown."""
        if self.file((*module, name)):
            submodule = ((*module, name), None)
        else:
            submodule = None
        if not self.file(module):
            return None
        for node in self.tree(module).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
                return module, node
            if isinstance(node, ast.ImportFrom):
                source = self.imported_from(module, node)
                for alias in node.names:
                    itself = (source, alias.name) == (module, name)  # from package import submodule
                    if source is not None and (alias.asname or alias.name) == name and not itself:
                        return self.find(source, alias.name)
                    if source is not None and alias.name == "*" and self.find(source, name):
                        return self.find(source, name)
        return submodule

    def loaded_submodules(self, module):
        names = set()
        for node in self.tree(module).body:
            if isinstance(node, ast.ImportFrom):
                source = self.imported_from(module, node) or ()
                names |= {alias.name for alias in node.names} | set(source[len(module):len(module) + 1])
        return names

    def signature(self, module, node):
        """{parameter: default}, in order; 'required' where there is none."""
        if isinstance(node, ast.ClassDef):
            init = method(node, "__init__")
            if init is None:
                return {field.target.id: evaluate(field.value) for field in node.body
                        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                        and field.value is not None}
            parameters = arguments(init)
            if init.args.kwarg and node.bases and isinstance(node.bases[0], ast.Name):
                base = self.find(module, node.bases[0].id)
                for name, default in (self.signature(*base) if base else {}).items():
                    parameters.setdefault(name, default)
            return parameters
        return arguments(node)


def method(node, name):
    return next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == name), None)


def evaluate(node):
    names = {"os": os, "torch": torch, "MMParams": lambda **values: values,
             "Format": types.SimpleNamespace(**{n: n for n in ("E2M1", "E4M3", "E5M2", "HYBRID")})}
    return eval(ast.unparse(node), {"__builtins__": {}, **names})


def arguments(function):
    a = function.args
    names = [arg.arg for arg in a.posonlyargs + a.args]
    defaults = ["required"] * (len(names) - len(a.defaults)) + [evaluate(d) for d in a.defaults]
    parameters = dict(zip(names, defaults))
    for arg, default in zip(a.kwonlyargs, a.kw_defaults):
        parameters[arg.arg] = evaluate(default) if default is not None else "required"
    return {name: default for name, default in parameters.items() if name not in ("self", "cls")}


@pytest.fixture(scope="session")
def published(tmp_path_factory):
    spec = importlib.util.find_spec("transformer_engine")
    if spec and spec.origin and (pathlib.Path(spec.origin).parent / "pytorch/module/linear.py").exists():
        return Package(pathlib.Path(spec.origin).parent)
    folder = tmp_path_factory.mktemp("te")
    pip = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder,
                          f"transformer_engine=={VERSION}"], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or not wheels:
        complaint = f"cannot download transformer_engine {VERSION}: {pip.stderr.strip()[-300:]}"
        pytest.fail(complaint) if os.environ.get("CI") else pytest.skip(complaint)
    zipfile.ZipFile(wheels[0]).extractall(folder)
    return Package(folder / "transformer_engine")


@pytest.fixture(scope="session")
def standin():
    return Package(STANDIN)


CLASSES = ("Linear", "LayerNorm", "RMSNorm", "LayerNormLinear", "LayerNormMLP", "DotProductAttention",
           "MultiheadAttention", "TransformerLayer", "autocast")
RECIPES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling",
           "NVFP4BlockScaling", "MMParams")
FUNCTIONS = ("quantized_model_init", "fp8_autocast", "fp8_model_init", "is_fp8_available",
             "is_mxfp8_available", "is_fp8_block_scaling_available", "is_nvfp4_available",
             "is_bf16_available", "get_default_recipe", "get_cudnn_version",
             "get_device_compute_capability")
OBJECTS = [*((("pytorch",), n) for n in CLASSES + FUNCTIONS), (("pytorch", "optimizers"), "FusedAdam"),
           *((("common", "recipe"), n) for n in RECIPES)]


def beginning(real, ours):
    """The first parameters of the real signature, as many as ours has."""
    return list(real.items())[:len(ours)]


@pytest.mark.parametrize("module, name", OBJECTS, ids=[n for _, n in OBJECTS])
def test_standin_has_the_published_parameters(published, standin, module, name):
    real, ours = published.find(module, name), standin.find(module, name)
    ours_parameters = standin.signature(*ours)
    assert list(ours_parameters.items()) == (
        beginning(published.signature(*real), ours_parameters)
        if name not in RECIPES + ("LayerNorm", "RMSNorm") else
        [(n, d) for n, d in published.signature(*real).items() if n in ours_parameters])
    forward = method(ours[1], "forward") if isinstance(ours[1], ast.ClassDef) else None
    if forward is not None and method(real[1], "forward") is not None:
        ours_parameters = arguments(forward)
        assert list(ours_parameters.items()) == beginning(arguments(method(real[1], "forward")),
                                                          ours_parameters)


def test_standin_has_no_public_name_of_its_own(published, standin):
    for node in standin.tree(("pytorch",)).body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            for alias in node.names:
                assert published.find(("pytorch",), alias.name), alias.name


def test_formats_hold_the_published_maxima(published, standin):
    def members(package):
        _, node = package.find(("common", "recipe"), "Format")
        names = {}
        for assignment in node.body:
            if isinstance(assignment, ast.Assign):
                helper = types.SimpleNamespace(**{k: types.SimpleNamespace(max_fwd=v[0], max_bwd=v[1])
                                                  for k, v in names.items()})
                values = eval(ast.unparse(assignment.value),
                              {"_FormatHelper": lambda max_fwd, max_bwd: (max_fwd, max_bwd),
                               **vars(helper)})
                names[assignment.targets[0].id] = values
        return names

    assert members(standin) == members(published)


# ---- The tutorial's own calls -------------------------------------------------------------------------

ROOTS = {"te": ("pytorch",), "recipe": ("common", "recipe"), "kit": ("pytorch",)}


def dotted(node):
    names = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else []


def unpublished_uses(source, package):
    """What a script uses of te, recipe and kit that 2.20.2 does not have: one line of text each."""
    problems = []

    def look_up(names):
        module = ROOTS[names[0]]
        for i, name in enumerate(names[1:], 1):
            found = package.find(module, name)
            if found is None or found[1] is not None:
                return found
            if name not in package.loaded_submodules(module):  # a file there, but nobody imports it
                return None
            module = found[0]
        return module, None

    tree = ast.parse(source)
    for node in ast.walk(tree):
        names = dotted(node) if isinstance(node, ast.Attribute) else []
        if len(names) > 1 and names[0] in ("te", "recipe") and look_up(names) is None:
            problems.append(f"line {node.lineno}: {'.'.join(names)} does not exist")
        if not isinstance(node, ast.Call):
            continue
        names = dotted(node.func)
        if len(names) < 2 or names[0] not in ROOTS or names[0] == "kit" and not names[1][0].isupper():
            continue
        found = look_up(names)
        if found is None or found[1] is None:  # reported above, or the kit's own
            continue
        parameters = package.signature(*found)
        for keyword in node.keywords:
            if keyword.arg and keyword.arg not in parameters:
                problems.append(f"line {node.lineno}: {'.'.join(names)} has no parameter {keyword.arg}")
        if len(node.args) > len(parameters):
            problems.append(f"line {node.lineno}: {'.'.join(names)} got too many positional arguments")
    return problems


def test_the_check_of_scripts_finds_mistakes(published):
    good = """
te.Linear(8, 8, bias=False, params_dtype=None)
te.LayerNorm(8, eps=1e-5, dtype=None)
te.optimizers.FusedAdam([], lr=1e-3, master_weights=True)
with te.autocast(enabled=True, recipe=recipe.DelayedScaling(amax_history_len=16, fp8_format=recipe.Format.HYBRID)):
    kit.LayerNormLinear(8, 24, eps=1e-5)
"""
    assert unpublished_uses(good, published) == []
    bad = """
te.Linear(8, 8, biased=False)
te.fp8.check_fp8_support()
recipe.DelayedScaling(amax_history_length=16)
kit.LayerNormMLP(8, 32, activation="gelu", hidden_dropout=0.0)
te.Lineal(8, 8)
te.autocast(fp8_recipe=None)
te.is_fp8_available(True, 1)
te.__version__
"""
    found = sorted({problem.split(":")[0] for problem in unpublished_uses(bad, published)})
    assert found == [f"line {n}" for n in range(2, 10)]


def test_the_tutorial_uses_the_published_api(published):
    if not SCRIPT.exists():
        pytest.skip("no te_tutorial.py yet")
    assert unpublished_uses(SCRIPT.read_text(), published) == []
