"""What a run needs and costs, before a machine is rented.

    python -m bertjax.tools.plan --config=configs/large.py --topology=v5e:4x4 [--search]

The way of a plan:

    config, topology -> step.py: the real training step, compiled for the topology's chips
                     -> hlo.py: what the compiled program says of cycles, loops and collectives
                     -> cost.py: bytes a chip, seconds a step, days of the recipe
                     -> page.py: the text of it

chips.py knows the chips and the names of slices; search.py orders the candidates of --search. With
a TPU topology everything runs on a machine without a TPU: libtpu brings the TPU compiler.
"""
