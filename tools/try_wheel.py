"""Install the wheel of a folder into a fresh environment, and use it there as a stranger would.

    python tools/try_wheel.py dist

The environment holds the wheel and nothing else of this repository. The libraries that the wheel asks for are
those of the interpreter that runs this, after a look whether each of them satisfies what the wheel says.
"""

import base64
import gzip
import os
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
import zipfile
from email import message_from_string
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
WHERE = "import clearhead; print(clearhead.__file__)"


def check_contents(wheel: Path) -> None:
    """Check the version of the wheel, its data files, and that its requirements are met here."""
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        text = next(file.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    metadata = message_from_string(text)
    assert metadata["Version"] == stated, f"the wheel is {metadata['Version']}, the project {stated}"
    recipe, example = "learn/recipes/char-gpt.toml", "app/explorer/static/example.json"
    for wanted in ("py.typed", "__init__.pyi", recipe, example):
        assert f"clearhead/{wanted}" in names, f"{wheel.name} lacks {wanted}"
    for line in metadata.get_all("Requires-Dist"):
        needed = Requirement(line)
        if needed.marker is None:
            assert needed.specifier.contains(version(needed.name), prereleases=True), line


def main(folder: Path) -> None:
    """Install the wheel, then run the demo and save a page, from an empty folder."""
    (wheel,) = folder.resolve().glob("*.whl")
    (_,) = folder.resolve().glob("*.tar.gz")
    check_contents(wheel)
    with tempfile.TemporaryDirectory() as name:
        home, empty = Path(name).resolve() / "home", Path(name).resolve() / "empty"
        empty.mkdir()
        venv.create(home, with_pip=False)
        own = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
        (own / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
        clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        bin = home / "bin"

        def run(*words: str | Path) -> str:
            print("running", *(Path(word).name for word in words), flush=True)
            done = subprocess.run(words, cwd=empty, env=clean, check=True, stdout=subprocess.PIPE, text=True)
            return done.stdout

        pip = (sys.executable, "-m", "pip", "--python", bin / "python")
        run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel)
        assert run(bin / "python", "-c", WHERE).startswith(str(own)), "another clearhead was imported"
        run(bin / "clearhead", "demo", "--steps", "4", "--out", "models")
        run(bin / "clearhead", "explore", "models/reader", "--text", "3 May 2011", "--export", "page.html")
        packed = (empty / "page.html").read_text().split('id="record">')[1].split("<")[0]
    assert b"blocks.0.cross.pattern" in gzip.decompress(base64.b64decode(packed))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
