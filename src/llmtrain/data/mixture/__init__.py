"""Mixtures: several sources in exact proportions.

Start with schedule.py: which source a sample comes from, as a function of its position. sample_sets.py is what a source
must offer, for windows of text and for examples. prepare.py opens the store of each source, mixed_batches.py makes
batches.
"""
