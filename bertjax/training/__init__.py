"""Objective + optimizer + mesh + batches -> the next state: the compiled step and what it is made of."""
