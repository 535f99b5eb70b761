"""Text to token ids: tokenizers trained from the user's files, and their stages seen one by one."""
