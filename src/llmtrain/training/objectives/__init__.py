"""What a run minimizes: `trainer.objective`.

Start with base.py: what the trainer needs from an objective. next_token.py is the default. preference.py is the base of
dpo.py, ipo.py, orpo.py and simpo.py, each of which is its formula; references.py computes and keeps the
log-probabilities of the model at step 0, which dpo and ipo compare with.
"""
