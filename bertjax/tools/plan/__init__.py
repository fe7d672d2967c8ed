"""What a run needs and costs, before a machine is rented: python -m bertjax.tools.plan --help

config, place    -> plans.py: its stages; for --search those of each candidate; the text of both
stage            -> compilation.py: a process of its own that builds the real training step
                    (tools/stages.py) and has it compiled for the chips
compiled step    -> hlo.py: what the program says of cycles, loops and collectives
                 -> estimate.py: bytes per chip, seconds per step, days of the run
"""
