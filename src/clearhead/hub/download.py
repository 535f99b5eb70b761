"""Model directories of the Hugging Face Hub, fetched on request."""

from pathlib import Path

from clearhead.errors import CheckpointError, MissingExtraError, no_model
from clearhead.hub.files import refuse
from clearhead.hub.gguf import is_gguf
from clearhead.hub.registry import tower_path


def download(name: str) -> Path:
    """Return the directory that holds a model of the Hub, fetched where it is not there yet."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MissingExtraError("downloading needs huggingface_hub: pip install 'clearhead[hub]'") from None
    patterns = ["*.json", "*.safetensors", "*.model", "*.spm", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:
        raise CheckpointError(f"{name} could not be downloaded: {str(error).splitlines()[0]}") from None


def here_or_fetched(name: str | Path, allow_download: bool) -> Path:
    """Return a directory or GGUF file that is here; any other name is fetched, where that is allowed."""
    path = Path(name)
    if path.is_dir() or is_gguf(path) or tower_path(path) is not None:
        return path
    refuse(path.is_file(), no_model(path))
    refuse(not allow_download, f"{no_model(path)}, or in Python by load with allow_download=True")
    return download(str(name))
