"""What a run needs and costs, before a machine is rented: python -m bertjax.tools.plan --help

config, place    -> planner.py: its stages; for --search those of each candidate (candidates.py)
stage            -> compilation.py: a process of its own (worker.py) that builds the real
                    training step (stages.py) and has it compiled for the chips (chips.py)
compiled step    -> hlo.py: what the program says of cycles, loops and collectives
                 -> cost.py: bytes a chip, seconds a step, days of the recipe
                 -> page.py: the text of it
"""
