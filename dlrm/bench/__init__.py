"""`dlrm bench`: this system and its peers, measured side by side in one run.

Everything that is compared runs in turns, several times, each time in fresh processes with the same
threads and the same environment; what counts are the ratios within one turn.
"""
