"""What is installed with the app and with the library: all that they import, and little else."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.wheel import closure, make_environment

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "fedpsa_strategy"
APP = ["fedpsa_strategy", "server_app", "client_app", "task", "simulation"]
TRACKERS = ["tensorboard", "mlflow", "wandb", "prometheus"]
EXTRAS = [*TRACKERS, "dp"]
OURS = {*APP, "benchmarks", "jobs", "support"}
DISTRIBUTIONS = importlib.metadata.packages_distributions()


def project(folder):
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def names(requirements):
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def declared(folder, *extras):
    table = project(folder)
    found = names(table["dependencies"])
    for extra in extras:
        found |= names(table["optional-dependencies"][extra])
    return found


def pins(path):
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    found = dict(line.split("==") for line in lines)
    assert len(found) == len(lines), "a package is named twice"
    return {canonicalize_name(name): version for name, version in found.items()}


def imports(folder, leave_out=()):
    """Return the packages of others that the modules in a folder import, and where."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        if path.name in leave_out:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module]
            else:
                continue
            for module in modules:
                top = module.split(".")[0]
                if top not in OURS | sys.stdlib_module_names:
                    found.setdefault(top, f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def undeclared(found, allowed):
    return {
        module: place
        for module, place in found.items()
        if not {canonicalize_name(name) for name in DISTRIBUTIONS.get(module, [module])} & allowed
    }


# --- Everything imported is declared -----------------------------------------------------------


@pytest.mark.parametrize("package", APP)
def test_the_app_declares_what_it_imports(package):
    found = imports(ROOT / package)
    assert found
    assert not undeclared(found, declared(ROOT, *EXTRAS))


def test_benchmarks_and_tests_declare_what_they_import():
    allowed = declared(ROOT, "dev")
    # A program for FLGo's own environment.
    assert not undeclared(imports(ROOT / "benchmarks", ["flgo_run.py"]), allowed)
    assert not undeclared(imports(ROOT / "tests"), allowed)


def test_the_site_declares_what_its_hooks_import():
    found = imports(ROOT / "docs" / "site")
    assert found
    extras = project(ROOT)["optional-dependencies"]
    for extra in ("docs", "dev"):
        assert not undeclared(found, names(extras[extra])), extra


@pytest.mark.parametrize("example", ["lora", "scikit_learn"])
def test_examples_declare_what_they_import(example):
    folder = ROOT / "docs" / "examples" / example
    own = {path.stem for path in folder.glob("*.py")}
    found = {module: place for module, place in imports(folder).items() if module not in own}
    assert not undeclared(found, declared(folder))


def test_the_image_has_what_its_jobs_import():
    assert not undeclared(
        imports(ROOT / "docker"), pins(ROOT / "docker" / "requirements.txt").keys()
    )


def test_the_library_declares_what_it_imports():
    """The core by itself; what torch, the live page and trackers need as extras."""
    rooms = {"probe": ["torch"], "client": ["torch"], "server": ["dp"]}
    rooms["watch"] = ["torch", "watch", *TRACKERS]
    rooms["cli"] = ["torch", "watch"]
    for path in LIBRARY.iterdir():
        if path.is_dir() and path.name != "__pycache__":
            found = imports(path)
            assert not undeclared(found, declared(LIBRARY, *rooms.get(path.name, []))), path
    assert declared(LIBRARY) == {"click", "flwr", "numpy", "protobuf"}
    assert not undeclared(imports(LIBRARY), declared(LIBRARY, "torch", "watch", *EXTRAS))


def test_the_library_pins_nothing_and_the_app_has_all_that_the_library_needs():
    table = project(LIBRARY)
    extras = table["optional-dependencies"]
    texts = [*table["dependencies"], *(text for extra in extras.values() for text in extra)]
    texts += project(ROOT)["dependencies"]
    for text in texts:
        operators = {specifier.operator for specifier in Requirement(text).specifier}
        assert operators <= {">="}, text
    app = declared(ROOT, *EXTRAS)
    assert names(texts) <= app


# --- What the repository tests with is exact ---------------------------------------------------


def test_the_constraints_are_exact_whole_and_within_the_ranges():
    table, exact = project(ROOT), pins(ROOT / "constraints.txt")
    extras = table["optional-dependencies"]
    texts = [*table["dependencies"], *(text for extra in extras.values() for text in extra)]
    for text in texts:
        requirement = Requirement(text)
        assert requirement.specifier.contains(exact[canonicalize_name(requirement.name)]), text
    for text in project(LIBRARY)["dependencies"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(exact[canonicalize_name(requirement.name)]), text
    # And all that these need in turn.
    assert closure(texts) <= exact.keys() | {"fedpsa"}


def test_the_image_has_the_versions_that_the_repository_tests_with():
    exact = pins(ROOT / "constraints.txt")
    image = pins(ROOT / "docker" / "requirements.txt")
    assert image == {name: exact.get(name) for name in image}
    without_ray = [text for text in project(ROOT)["dependencies"] if not text.startswith("ray")]
    assert closure(text.replace("[simulation]", "") for text in without_ray) <= image.keys()


def test_make_installs_by_the_constraints():
    text = (ROOT / "Makefile").read_text()
    installs = re.findall(r"\$\(PIP_INSTALL\) (?:.*\\\n)*.*", text)
    assert len(installs) >= 3
    assert text.count("pip install") == 1
    for install in installs:  # another Flower, on top of the pinned packages, is exact too
        exact = re.fullmatch(r"\$\(PIP_INSTALL\) (--no-deps )?'flwr(\[\w+\])?==[\d.]+'", install)
        assert exact or "--constraint constraints.txt" in install, install


# --- The wheel ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def beside_flower(wheel, tmp_path_factory):
    """Return the Python of an environment with Flower, what Flower needs, and the wheel."""
    return make_environment(tmp_path_factory.mktemp("environment"), wheel, ["flwr"])


def test_the_wheel_is_the_library_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        (metadata,) = [name for name in held if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
        # What stands before Flower's program of this name: pip keeps who may execute it.
        front = archive.getinfo("fedpsa_strategy/node/bin/flwr-clientapp")
        assert (front.external_attr >> 16) & 0o111 == 0o111
    version = project(ROOT)["version"]
    info = f"fedpsa_strategy-{version}.dist-info"
    assert {name.split("/")[0] for name in held} == {"fedpsa_strategy", info}
    assert f"{info}/licenses/LICENSE" in held
    files = {
        path.relative_to(LIBRARY).as_posix()
        for path in LIBRARY.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    files -= {"pyproject.toml", "README.md", "LICENSE"}
    assert "py.typed" in files
    assert {name for name in held if not name.startswith(info)} == {
        f"fedpsa_strategy/{name}" for name in files
    }
    # The first line that a person sees of the distribution says what to import.
    assert "\nSummary: `import fedpsa_strategy`" in text
    assert "`import fedpsa_strategy`" in text.split("\n\n", 1)[1].splitlines()[0]


FEDBUFF = """
import sys
from importlib.util import find_spec

from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

import fedpsa_strategy

assert "site-packages" in fedpsa_strategy.__file__, fedpsa_strategy.__file__
import fedpsa_strategy.watch.event_log
import fedpsa_strategy.watch.status_line

sys.path.append(sys.argv[1])
from support.grids import ScriptedGrid, model_arrays, update

grid = ScriptedGrid(4, lambda message: update([1.0, 2.0]), delay=lambda message: 0.0)
strategy = fedpsa_strategy.FedBuff(buffer_size=2, max_in_flight=1)
result = strategy.start(grid, model_arrays(), num_rounds=3)
print(result.arrays["w"].numpy().tolist())
for name in ("torch", "matplotlib", "tensorboard", "scipy"):
    assert find_spec(name) is None, name
try:
    fedpsa_strategy.Probe
except ModuleNotFoundError as error:
    assert error.name == "torch", error
else:
    raise AssertionError("torch is there")
"""


def test_the_library_runs_fedbuff_beside_flower_alone(beside_flower):
    command = [beside_flower, "-I", "-c", FEDBUFF, ROOT / "tests"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # One at a time, nothing is stale: each version is a step of (1, 2).
    assert done.stdout.splitlines()[-1] == "[3.0, 6.0]"


SCIKIT_LEARN = """
import sys
from importlib.util import find_spec

from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
sys.path += sys.argv[1:4]

import client
import server
from flwr.app import Context, RecordDict

from support.grids import ScriptedGrid

for strategy, versions in (("FedBuff", 8), ("CA2FL", 8), ("FedAsync", 30), ("FedFa", 30)):
    config = {"strategy": strategy, "num-server-rounds": versions, "lr": 0.01}

    def behaviour(message):
        number = grid.partition(message)
        context = Context(1, number, {"partition-id": number}, RecordDict(), config)
        reply = client.app(message, context)
        assert not reply.has_error(), reply.error
        return reply.content

    grid = ScriptedGrid(10, behaviour, delay=lambda message: 0.0)
    print(strategy, end=" ")
    server.app(grid, Context(1, 1, {}, RecordDict(), config))
assert "site-packages" in sys.modules["fedpsa_strategy"].__file__
assert find_spec("torch") is None
"""


def test_the_example_with_scikit_learn_needs_no_torch(beside_flower, tmp_path):
    for name in closure(["scikit-learn"]):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if name != "numpy" and not (tmp_path / top).exists():
                (tmp_path / top).symlink_to(distribution.locate_file(top))
    places = [tmp_path, ROOT / "docs" / "examples" / "scikit_learn", ROOT / "tests"]
    command = [beside_flower, "-I", "-c", SCIKIT_LEARN, *places]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if "accuracy:" in line]
    found = {name: float(accuracy) for name, _, accuracy in lines}
    assert found.keys() == {"FedBuff", "CA2FL", "FedAsync", "FedFa"}
    assert min(found.values()) > 0.5, found


def test_a_bundle_of_the_app_has_one_pyproject(tmp_path):
    from flwr.cli.build import build_fab_from_disk

    from simulation.engines.flower.staging import staged_app

    with staged_app(ROOT, tmp_path) as app:
        (tmp_path / "app.fab").write_bytes(build_fab_from_disk(app))
    with zipfile.ZipFile(tmp_path / "app.fab") as bundle:
        held = bundle.namelist()
        content = tomllib.loads(bundle.read("pyproject.toml").decode())
    assert [name for name in held if name.endswith(".toml")] == ["pyproject.toml"]
    assert "fedpsa_strategy/__init__.py" in held
    assert content["project"]["name"] == "fedpsa"


# --- Around the repository ---------------------------------------------------------------------


def test_the_workflow_runs_make_test_on_every_python_that_the_project_takes():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    (job,) = workflow["jobs"].values()
    versions = job["strategy"]["matrix"]["python"]
    assert versions == ["3.11", "3.12", "3.13"]
    lowest = project(ROOT)["requires-python"]
    assert lowest == project(LIBRARY)["requires-python"] == f">={versions[0]}"
    assert "make test" in [step.get("run") for step in job["steps"]]


def test_pre_commit_has_the_ruff_of_the_tests():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (ruff,) = hooks["repos"]
    assert ruff["rev"] == "v" + pins(ROOT / "constraints.txt")["ruff"]
    assert {hook["id"] for hook in ruff["hooks"]} == {"ruff-check", "ruff-format"}


def test_the_citation_has_what_the_format_requires():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["license"] == project(ROOT / "fedpsa_strategy")["license"]
    # The version is in one place.
    assert "version" not in citation
