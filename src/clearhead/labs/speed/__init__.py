"""How fast a model is on this machine, versus other installed programs and versus what the machine allows.

jobs        what is timed: first token, decoding, reading, a training step; and the least that it can take
peers       the same jobs in clearhead, transformers, sentence-transformers, CTranslate2 and llama.cpp
compare     all programs, alternating, as one report
"""
