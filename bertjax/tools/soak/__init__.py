"""A small training run that is killed again and again (accidents.py) and goes on (child.py)."""
