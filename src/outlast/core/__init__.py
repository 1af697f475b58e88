"""The pure core: messages, the journal and its fold, gates, and the decision what comes next.

No I/O, no clock, no async, no randomness, no logging: instants come in as arguments, and what is to be done goes out as values.
"""
