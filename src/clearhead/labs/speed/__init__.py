"""How fast a model is on this machine: beside what else is installed, and beside what the machine allows.

machine     bytes read and operations computed in a second, measured
jobs        what is timed: first token, decoding, reading, a training step; and the least it can take
peers       the same jobs in clearhead, transformers, sentence-transformers, CTranslate2 and llama.cpp
compare     all of it in turn, as one report
"""
