"""data ← embeddings ← dlrm, never back; and importing does nothing but define."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.commands import finish, start_python

CHECKOUT = Path(__file__).parents[2]
PACKAGES = ("data", "embeddings", "dlrm")
# Imports a peer that is installed for comparisons only, when it is compared with.
PEER = "side_torchrec.py"


def modules(package: str) -> list[Path]:
    found = sorted((CHECKOUT / package).rglob("*.py"))
    assert found
    return found


def imports(path: Path) -> set[str]:
    """The absolute names of all modules that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            assert node.module is not None
            # `from data import batch` names a module too.
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def ours(path: Path) -> set[str]:
    return {name for name in imports(path) if name.split(".")[0] in (*PACKAGES, "conf", "tests")}


def test_data_knows_nothing_of_the_others() -> None:
    for path in modules("data"):
        other = {name for name in ours(path) if name.split(".")[0] != "data"}
        assert not other, f"{path.name} imports {other}"


def test_embeddings_know_only_batches() -> None:
    for path in modules("embeddings"):
        other = {name for name in ours(path) if name.split(".")[0] != "embeddings"}
        allowed = ("data.batch", "data.errors")
        other = {name for name in other if not name.startswith(allowed)}
        assert not other, f"{path.name} imports {other}"


def test_only_the_command_knows_hydra() -> None:
    """Below the configuration there are plain dataclasses (and below dlrm no configuration)."""
    for path in (*modules("data"), *modules("embeddings")):
        assert not {n for n in imports(path) if n.split(".")[0] in ("hydra", "omegaconf")}, path
    users = {p.name for p in modules("dlrm") if any(n.startswith("hydra") for n in imports(p))}
    known = {"__main__.py", "config.py", "config_errors.py", "hydra_jobs.py", "overrides.py"}
    assert users == known


def test_only_one_module_knows_fbgemm() -> None:
    for package in PACKAGES:
        for path in modules(package):
            if path.name == PEER:  # TorchRec is set up with fbgemm's own names.
                continue
            assert not {n for n in imports(path) if n.startswith("fbgemm")}, path


def test_each_module_says_what_it_is_for() -> None:
    for package in PACKAGES:
        for path in modules(package):
            source = path.read_text()
            if path.name != "__init__.py":
                assert ast.get_docstring(ast.parse(source)), f"{path} has no docstring"
                assert path.name not in ("utils.py", "helpers.py", "misc.py", "common.py")


_IMPORT_ALL = """
import builtins, importlib, sys
from pathlib import Path

import numpy, pyarrow.parquet, tensorboardX, torch  # What they do at import is not ours.
import torch.distributed as dist
import matplotlib

opened = []
original = builtins.open


def watched(file, mode="r", *arguments, **options):
    if set(mode) & set("wax+"):
        opened.append(str(file))
    return original(file, mode, *arguments, **options)


threads, num_threads = torch.get_num_threads(), __import__("threading").active_count()
random_state = torch.random.get_rng_state()
builtins.open = watched
for package in ("data", "embeddings", "dlrm", "conf"):
    for path in sorted((Path(sys.argv[1]) / package).rglob("*.py")):
        if path.name != "side_torchrec.py":
            importlib.import_module(".".join(path.relative_to(sys.argv[1]).with_suffix("").parts))
assert not opened, opened
assert not dist.is_initialized()
assert "fbgemm_gpu" not in sys.modules
assert "matplotlib.pyplot" not in sys.modules, "pyplot keeps figures in a global"
assert torch.get_num_threads() == threads
assert __import__("threading").active_count() == num_threads
assert torch.equal(torch.random.get_rng_state(), random_state)
print("nothing done")
"""


def test_importing_every_module_does_nothing(tmp_path: Path) -> None:
    """No file written, no process group, thread, seed or kernel library; without fbgemm too."""
    stub = tmp_path / "stub" / "fbgemm_gpu"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text("raise ImportError('not here')\n")
    start = tmp_path / "start"
    start.mkdir()
    paths = f"{tmp_path / 'stub'}:{CHECKOUT}"
    process = start_python(
        "-W", "error", "-B", "-c", _IMPORT_ALL, CHECKOUT, cwd=start, PYTHONPATH=paths
    )
    status, out, err = finish(process)
    assert status == 0, err
    assert out == "nothing done\n"
    assert not list(start.iterdir())


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_no_subpackages(package: str) -> None:
    """The import name is the folder's name."""
    assert (CHECKOUT / package / "__init__.py").is_file()
