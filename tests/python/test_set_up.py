"""The set-up of a checkout: the virtual environment, when it is made again, and runs beside each other."""

from __future__ import annotations

import hashlib
import io
import os
import pwd
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from support import processes, servers

SUPPORT = servers.REPOSITORY / "tests" / "support"

# Python as Debian has it without python3-venv: no ensurepip, and no pip or virtualenv either.
BARE_PYTHON = """#!/bin/sh
case "$*" in
  "-m venv --without-pip "*) ;;
  "-m venv "* | "-m virtualenv "* | "-m pip "*) exit 1 ;;
esac
exec {python} "$@"
"""
# Makes a virtual environment of scripts, slowly, and tells of it.
SLOW_PYTHON = """#!/bin/sh
if [ "$1 $2" != "-m venv" ]; then exit 0; fi
echo "$3" >> {log}
mkdir -p "$3/bin"
sleep 0.3
echo 'echo pip' | tee "$3/bin/pip" > "$3/bin/python"
chmod +x "$3/bin/pip" "$3/bin/python"
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can change, where programs may run."""
    with processes.own_folder(0o777) as path:
        yield path


@pytest.fixture
def bin_(folder: Path) -> Path:
    """The first folder of PATH in these tests."""
    path = folder / "bin"
    path.mkdir()
    script(path / "uv", "exit 1")
    return path


def script(path: Path, text: str) -> None:
    path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def ordinary() -> dict[str, Any]:
    """How subprocess starts what must not be root."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


@pytest.fixture
def python(ordinary: dict[str, Any]) -> Path:
    """A Python that such a user can run."""
    for path in (Path(sys.base_prefix, "bin", "python3"), Path("/usr/bin/python3")):
        try:
            check: list[str] = [str(path), "-c", "import sys, venv; sys.exit(sys.version_info < (3, 10))"]
            if subprocess.run(check, check=False, cwd="/", **ordinary).returncode == 0:
                return path
        except OSError:
            continue
    pytest.skip("no Python that an ordinary user can run")


class Index(ThreadingHTTPServer):
    """A package index with the pip of these tests' own Python, and what may not be taken."""

    def __init__(self) -> None:
        pip = distribution("pip")
        name = f"pip-{pip.version}-py3-none-any.whl"
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as wheel:
            record = []
            for file in pip.files or []:
                ours = ".." in file.parts or file.suffix == ".pyc"  # what the installation added
                if not ours and file.name not in ("RECORD", "INSTALLER", "REQUESTED"):
                    wheel.write(str(file.locate()), str(file))
                    record.append(f"{file},,\n")
            wheel.writestr(f"pip-{pip.version}.dist-info/RECORD", "".join(record))
        self.wheel = content.getvalue()
        self.sha256 = hashlib.sha256(self.wheel).hexdigest()
        self.name = name
        super().__init__(("127.0.0.1", 0), Page)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/simple"

    @property
    def page(self) -> str:
        return (
            '<a href="/x/pip-0.1-py3-none-any.whl">old</a> <a href="/x/pip-999.0.tar.gz">no wheel</a>'
            '<a href="/x/pip-998.0-py3-none-any.whl" data-requires-python="&gt;=3.99">for a later Python</a>'
            '<a href="/x/pip-997.0-py3-none-any.whl" data-yanked="">withdrawn</a>'
            f'<a data-requires-python="&gt;=3.7" href="../../x/{self.name}#sha256={self.sha256}">pip</a>'
        )


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Index)
        found = {"/simple/pip/": self.server.page.encode(), f"/x/{self.server.name}": self.server.wheel}
        content = found.get(self.path)
        self.send_response(404 if content is None else 200)
        self.end_headers()
        self.wfile.write(content or b"")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def index() -> Iterator[Index]:
    with Index() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def make_venv(folder: Path, bin_: Path, index: Index, ordinary: dict[str, Any]) -> Any:
    """make_venv(DIR): the outcome of venv.sh, run as an ordinary user with the test's own index."""
    for name in ("venv.sh", "get_pip.py"):
        shutil.copy(SUPPORT / name, folder)

    def do(where: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [folder / "venv.sh", where, "python3"],
            env={"PATH": f"{bin_}:/usr/bin:/bin", "HOME": str(folder), "PIP_INDEX_URL": index.url},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            **ordinary,
        )

    return do


def pip_of(venv: Path) -> str:
    command: list[str] = [str(venv / "bin" / "pip"), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.slow  # makes an environment without pip
def test_pip_is_fetched_where_python_came_without_it(
    make_venv: Any, folder: Path, bin_: Path, python: Path, index: Index
) -> None:
    script(bin_ / "python3", BARE_PYTHON.format(python=python))
    done = make_venv(folder / "venv")
    assert done.returncode == 0, done.stdout + done.stderr
    assert pip_of(folder / "venv").startswith(f"pip {index.name.split('-')[1]} ")
    index.sha256 = "no more"
    assert make_venv(folder / "venv").returncode == 0, "nothing was to be done"


@pytest.mark.parametrize("root", [False, True])
def test_if_no_venv_can_be_made_the_error_names_what_to_install(
    make_venv: Any, folder: Path, bin_: Path, python: Path, index: Index, root: bool
) -> None:
    index.sha256 = "0" * 64
    script(bin_ / "python3", BARE_PYTHON.format(python=python))
    script(bin_ / "id", f"echo {0 if root else 1000}")
    script(bin_ / "apt-get", "echo no mirror >&2; exit 100")
    done = make_venv(folder / "venv")
    assert done.returncode == 1
    assert "sudo apt install python3-venv" in done.stderr
    assert ("no mirror" in done.stderr) == root
    assert not (folder / "venv" / "bin").exists()


@pytest.mark.slow
def test_in_a_copy_the_virtual_environment_is_made_again(
    make_venv: Any, folder: Path, bin_: Path, python: Path
) -> None:
    (bin_ / "python3").symlink_to(python)
    here, copy = folder / "here", folder / "copy"
    assert make_venv(here).returncode == 0
    (here / "spark").mkdir()
    subprocess.run(["cp", "-a", here, copy], check=True)
    assert str(here) in pip_of(copy)
    for venv in (here, copy):
        done = make_venv(venv)
        assert done.returncode == 0, done.stdout + done.stderr
        assert str(venv) in pip_of(venv)
    assert (copy / "spark").is_dir()


@pytest.mark.skipif(shutil.which("flock") is None, reason="no flock")
def test_two_runs_at_once_make_one_virtual_environment_and_keep_what_lies_beside_it(
    folder: Path, bin_: Path
) -> None:
    script(bin_ / "python3", SLOW_PYTHON.format(log=folder / "log"))
    (folder / "venv" / "spark").mkdir(parents=True)
    command: list[str] = [str(SUPPORT / "venv.sh"), str(folder / "venv"), "python3"]
    runs = [subprocess.Popen(command, env={"PATH": f"{bin_}:/usr/bin:/bin"}) for _ in range(3)]
    assert [run.wait(30) for run in runs] == [0, 0, 0]
    assert (folder / "log").read_text().splitlines() == [str(folder / "venv")]
    assert (folder / "venv" / "spark").is_dir()


class Checkout:
    """The Makefile in a folder of its own, with a venv.sh that only tells that it was called."""

    def __init__(self, path: Path, log: Path) -> None:
        self.path = path
        self._log = log

    def calls(self) -> int:
        """Return how often make .venv/.lint calls venv.sh."""
        self._log.write_text("")
        done = subprocess.run(
            ["make", "--no-print-directory", ".venv/.lint"],
            cwd=self.path,
            env={"PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return len(self._log.read_text().splitlines())


@pytest.fixture
def checkout(folder: Path) -> Checkout:
    path = folder / "checkout"
    (path / "tests" / "support").mkdir(parents=True)
    (path / "python").mkdir()
    (path / "python" / "pyproject.toml").touch()
    shutil.copy(servers.REPOSITORY / "Makefile", path)
    for name in (
        "requirements.txt",
        "requirements-old.txt",
        "requirements-django.txt",
        "requirements-compared.txt",
        "requirements-lint.txt",
    ):
        (path / "tests" / "support" / name).touch()
    script(folder / "python3.98", PYTHON)
    script(
        path / "tests" / "support" / "venv.sh",
        f'echo "$*" >> {folder / "log"}; mkdir -p .venv/bin\n'
        f"[ -e .venv/bin/python ] || ln -sfn {folder}/python3.98 .venv/bin/python",
    )
    return Checkout(path, folder / "log")


# A Python that installs nothing.
PYTHON = f"""#!/bin/sh
if [ "$1 $2" = "-m pip" ]; then exit 0; fi
exec {sys.executable} "$@"
"""


def test_make_sets_up_once(checkout: Checkout) -> None:
    assert checkout.calls() > 0
    assert checkout.calls() == 0


def test_make_sets_up_again_after_a_copy_or_a_move(checkout: Checkout, folder: Path) -> None:
    every = checkout.calls()
    for how, name in ((["cp", "-a"], "copy"), (["mv"], "moved")):
        subprocess.run([*how, checkout.path, folder / name], check=True)
        there = Checkout(folder / name, folder / "log")
        assert there.calls() == every
        assert there.calls() == 0


def test_make_sets_up_again_when_python_is_gone_or_another(checkout: Checkout, folder: Path) -> None:
    every = checkout.calls()
    python = checkout.path / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to(folder / "gone")
    assert checkout.calls() == every
    assert checkout.calls() == 0
    python.unlink()
    script(folder / "python3.99", PYTHON)
    python.symlink_to(folder / "python3.99")
    assert checkout.calls() == every
    assert checkout.calls() == 0


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="no /proc")
@pytest.mark.parametrize(("name", "ended"), [("dockerd", True), ("another", False)])
def test_the_end_of_the_container_engine_ends_no_other_process(folder: Path, name: str, ended: bool) -> None:
    shutil.copy(SUPPORT / "cache.sh", folder)
    text = (SUPPORT / "docker.sh").read_text().replace("/run/pgque-docker", str(folder / "engine"))
    script(folder / "docker.sh", text)
    code = (
        "import sys, time; open('/proc/self/comm', 'w').write(sys.argv[1]); print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, name], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        threading.Thread(target=process.wait).start()  # as init does
        (folder / "engine.pid").write_text(f"{process.pid}\n")
        environment = {"PATH": os.environ["PATH"], "PGQUE_CACHE": str(folder)}
        subprocess.run([folder / "docker.sh", "down"], env=environment, check=True)
        assert (process.poll() is not None) == ended
        assert not (folder / "engine.pid").exists()
        process.kill()
