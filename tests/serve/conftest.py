"""What the tests of serving share."""

from tests.generate.conftest import byte_tokenizer

__all__ = ["byte_tokenizer"]
