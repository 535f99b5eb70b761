"""Model directories of the Hugging Face Hub, fetched on request."""

from pathlib import Path

from clearhead.errors import CheckpointError, MissingExtraError


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
