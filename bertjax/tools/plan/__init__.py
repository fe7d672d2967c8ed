"""What a run needs and costs, before a machine is rented.

    python -m bertjax.tools.plan --config=configs/large.py --topology=v5e:4x4 [--search]

The way of a plan:

    config, place    -> planner.py: its stages; for --search those of each candidate (candidates.py)
    stage            -> compilation.py: a process of its own (worker.py) that builds the real
                        training step (stages.py) and has it compiled for the chips (chips.py)
    compiled step    -> hlo.py: what the program says of cycles, loops and collectives
                     -> cost.py: bytes a chip, seconds a step, days of the recipe
                     -> page.py: the text of it

With a TPU topology everything runs on a machine without a TPU: libtpu brings the TPU compiler.
"""
